"""Slots: small numbers that stay a request's own from its arrival to its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_treespec.batch.forbidden import Forbidden
from vllm_treespec.sampling.uniforms import numbered_key, seeded_key
from vllm_treespec.trees.tree import MAX_NODES


class RequestSlots:
    """Gives every request a slot and a key, and stores what drafting needs of it.

    A slot is free again when its request ends. All that is stored by slot must be
    dropped then (``TreeDecoder.finish_requests``): the next request may get the same
    slot.

    All random numbers of a request follow from its key (``uniforms.py``). The key is
    that of its seed; without one it follows from the engine's seed and the number of
    such requests before it, so that all ranks have the same.
    """

    def __init__(self, engine_seed: int = 0) -> None:
        """Begin without requests."""
        self._engine_seed = engine_seed
        # requests without a seed so far
        self.num_unseeded = 0
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._names: list[str] = []
        self._supported = np.zeros(0, dtype=bool)
        self._max_drafts = np.zeros(0, dtype=np.int64)
        self._keys = np.zeros(0, dtype=np.int64)
        self._forbidden: list[Forbidden | None] = []

    def add(
        self,
        req_id: str,
        supported: bool,
        seed: int | None,
        max_drafts: int = MAX_NODES - 1,
        forbidden: Forbidden | None = None,
    ) -> int:
        """Give a request that has none a slot.

        Args:
            req_id: the request.
            supported: whether trees can follow its sampling parameters; if not, the
                engine's own sampler draws its tokens.
            seed: of its random numbers, if any.
            max_drafts: draft tokens that a tree of it may have.
            forbidden: what it must not emit; None: it may emit everything.

        """
        slot = self._free.pop() if self._free else self._grow()
        self._slots[req_id] = slot
        self._names[slot] = req_id
        self._supported[slot] = supported
        self._max_drafts[slot] = max_drafts
        self._keys[slot] = self._unseeded_key() if seed is None else seeded_key(seed)
        self._forbidden[slot] = forbidden
        return slot

    def release(self, req_ids: Iterable[str]) -> np.ndarray:
        """Take back the slots of ended requests, int64 [n]; unknown ones are left out.

        The order is the same for any order of ``req_ids``, so that slots are the same
        on every rank.
        """
        with_slot = sorted(r for r in req_ids if r in self._slots)
        slots = [self._slots.pop(req_id) for req_id in with_slot]
        self._free += slots
        return np.array(slots, dtype=np.int64)

    def lookup(self, req_ids: Sequence[str]) -> np.ndarray:
        """Slots of known requests, int64 [len(req_ids)]."""
        return np.fromiter(
            map(self._slots.__getitem__, req_ids), np.int64, len(req_ids)
        )

    def names(self) -> list[str]:
        """All requests that have a slot."""
        return list(self._slots)

    def name(self, slot: int) -> str:
        """The request in a slot."""
        return self._names[slot]

    def supported(self, slots: np.ndarray) -> np.ndarray:
        """Of which requests trees can follow the parameters, bool, same shape."""
        return self._supported[slots]

    def may_draft(self, slots: np.ndarray) -> np.ndarray:
        """Which requests may have draft trees, bool, same shape."""
        return self._supported[slots] & (self._max_drafts[slots] > 0)

    def max_drafts(self, slots: np.ndarray) -> np.ndarray:
        """Draft tokens that the requests' trees may have, int64, same shape."""
        return self._max_drafts[slots]

    def keys(self, slots: np.ndarray) -> np.ndarray:
        """The requests' keys, int64, same shape."""
        return self._keys[slots]

    def forbidden(self, slots: np.ndarray) -> list[Forbidden | None]:
        """What the requests must not emit."""
        return [self._forbidden[slot] for slot in slots.tolist()]

    def _unseeded_key(self) -> int:
        """Key of the next request without a seed."""
        self.num_unseeded += 1
        return numbered_key(self._engine_seed, self.num_unseeded)

    def _grow(self) -> int:
        """Make one more slot."""
        self._names.append("")
        self._forbidden.append(None)
        self._supported = np.append(self._supported, False)
        self._max_drafts = np.append(self._max_drafts, 0)
        self._keys = np.append(self._keys, 0)
        return len(self._names) - 1
