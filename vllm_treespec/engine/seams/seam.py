"""One row of the seam table, and how the table is written."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from packaging.version import Version


class Kind(StrEnum):
    """How we use a part of vLLM."""

    # we put a function of ours in its place, which calls it
    WRAPS = "wraps"
    # a class of ours extends it
    EXTENDS = "extends"
    # a class of ours has a method of the same name
    OVERRIDES = "overrides"
    CALLS = "calls"
    # vLLM calls it, and it uses one of our classes, which we gave vLLM by name
    RELIES = "relies on"
    READS = "reads"
    WRITES = "writes"


@dataclass(frozen=True)
class Seam:
    """One function, class or attribute of vLLM and what we use it for."""

    kind: Kind
    module: str
    # with the names of its classes
    attribute: str
    purpose: str
    # None: on every device; "ray": with Ray, which is not looked at elsewhere
    device: str | None = None
    # None: in every supported vLLM; "0.32": in that release, others have another
    release: str | None = None

    @property
    def replaced(self) -> bool:
        """Whether code of ours runs in its place, so that its source matters."""
        return self.kind in (Kind.WRAPS, Kind.OVERRIDES)

    @property
    def on_instances(self) -> bool:
        """Whether it may be an attribute of instances, which no class has."""
        return self.kind in (Kind.READS, Kind.WRITES)

    @property
    def name(self) -> str:
        """The full name."""
        return f"{self.module}.{self.attribute}"

    def needed_on(self, device: str) -> bool:
        """Whether draft trees need it on ``"cpu"`` or ``"cuda"``."""
        return self.device in (None, device)

    def needed_in(self, version: str) -> bool:
        """Whether draft trees need it in a vLLM of this version."""
        own = Version(self.release or version).release[:2]
        return own == Version(version).release[:2]

    def exists(self) -> bool:
        """Whether the running vLLM has it; not for attributes of instances."""
        try:
            place: object = importlib.import_module(self.module)
        except ImportError:
            return False
        for name in self.attribute.split("."):
            if not hasattr(place, name):
                return False
            place = getattr(place, name)
        return True


@dataclass(frozen=True)
class Owner:
    """A module or class of vLLM, of which rows of the table are made."""

    # "vllm.some.module" or "vllm.some.module:SomeClass"
    place: str
    device: str | None = None
    release: str | None = None

    def on(self, device: str) -> Owner:
        """The same place, needed on one device only."""
        return replace(self, device=device)

    def of(self, release: str) -> Owner:
        """The same place, needed in one release of vLLM only."""
        return replace(self, release=release)

    def _rows(self, kind: Kind, purpose: str, names: str) -> Iterator[Seam]:
        module, _, owner = self.place.partition(":")
        for name in names.split():
            attribute = f"{owner}.{name}" if owner else name
            yield Seam(kind, module, attribute, purpose, self.device, self.release)

    def extended(self, purpose: str) -> Iterator[Seam]:
        """A class of ours extends this class."""
        module, _, owner = self.place.partition(":")
        yield Seam(Kind.EXTENDS, module, owner, purpose, self.device, self.release)

    def wraps(self, name: str, purpose: str) -> Iterator[Seam]:
        """We wrap a function."""
        return self._rows(Kind.WRAPS, purpose, name)

    def overrides(self, name: str, purpose: str) -> Iterator[Seam]:
        """A method of ours takes the place of one of this class."""
        return self._rows(Kind.OVERRIDES, purpose, name)

    def calls(self, names: str, purpose: str) -> Iterator[Seam]:
        """We call functions, or make objects of classes; names separated by spaces."""
        return self._rows(Kind.CALLS, purpose, names)

    def relies(self, names: str, purpose: str) -> Iterator[Seam]:
        """We rely on what functions do that vLLM calls."""
        return self._rows(Kind.RELIES, purpose, names)

    def reads(self, names: str, purpose: str) -> Iterator[Seam]:
        """We read attributes; names separated by spaces."""
        return self._rows(Kind.READS, purpose, names)

    def writes(self, names: str, purpose: str) -> Iterator[Seam]:
        """We assign attributes, and may read them too; names separated by spaces."""
        return self._rows(Kind.WRITES, purpose, names)
