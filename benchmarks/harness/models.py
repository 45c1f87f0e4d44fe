"""The models and prompts of an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from safetensors import safe_open

from benchmarks.harness.options import console
from benchmarks.harness.provenance import model, sha256
from vllm_treespec.heads import read_head_config
from vllm_treespec.tools.assets import (
    DFLASH,
    EAGLE,
    LYANNA,
    MEDUSA,
    REDRAFTER,
    drafters,
    ensure_target,
    shipped_drafter,
)
from vllm_treespec.tools.prompts import load_prompts, spread

SHIPPED_HEADS = {
    "redrafter": REDRAFTER,
    "medusa": MEDUSA,
    "eagle": EAGLE,
    "lyanna": LYANNA,
    "dflash": DFLASH,
}


@dataclass(frozen=True)
class Models:
    """Folders of the target and of what drafts for it."""

    target: str
    # None: no draft model
    draft: str | None = None
    # by kind of head
    heads: dict[str, str] = field(default_factory=dict)

    def named(self) -> dict[str, dict[str, str]]:
        """Names and SHA-256 of the weights."""
        folders = {"target": self.target, "draft": self.draft, **self.heads}
        return {key: model(folder) for key, folder in folders.items() if folder}


def find_models(
    target: str = "",
    draft: str = "",
    heads: Sequence[str] = (),
    shipped_heads: Sequence[str] = (),
) -> Models:
    """Find the models; the shipped ones serve the demo's target only.

    Args:
        target: folder; empty: the demo's target, which is fetched if it is missing.
        draft: folder, or ``none``; empty: the shipped draft model.
        heads: folders.
        shipped_heads: kinds of which the shipped head is taken if none is named.

    """
    named: dict[str, str] = {
        read_head_config(Path(folder)).method: folder for folder in heads
    }
    if target and not draft:
        raise ValueError(
            f"--draft: the shipped draft model is not for {target}; name one that is, "
            "or write --draft none"
        )
    if not target:
        target = str(ensure_target())
        draft = draft or shipped_drafter()
        shipped = {kind: SHIPPED_HEADS[kind] for kind in shipped_heads}
        named = {kind: shipped_drafter(name) for kind, name in shipped.items()} | named
    return Models(target, None if draft == "none" else draft, named)


def models_of(target: str, draft: str, named: Mapping[str, tuple[str, str]]) -> Models:
    """Find the models; a head that is neither named nor shipped is left out.

    Args:
        target: see :func:`find_models`.
        draft: see :func:`find_models`.
        named: option that names a head, and what it says, by kind of head.

    Raises:
        ValueError: when a folder holds a head of another kind.

    """
    shipped = [kind for kind in named if SHIPPED_HEADS.get(kind) in drafters()]
    folders = [folder for _, folder in named.values() if folder]
    models = find_models(target, draft, folders, shipped)
    for kind, (option, folder) in named.items():
        if folder and models.heads.get(kind) != folder:
            raise ValueError(f"{option}: {folder} holds no {kind} head")
        if kind not in models.heads:
            console.print(
                f"without {kind} sides: no such head is shipped here; name one with "
                f"{option}"
            )
    return models


def take_prompts(file: Path, count: int) -> tuple[list[str], str]:
    """Take prompts of a file at even distances; returns them and what they are."""
    prompts = spread(load_prompts(file), count)
    return prompts, f"{len(prompts)} of {file.name} ({sha256(file)})"


def num_parameters(folder: str) -> int:
    """Count a model's parameters in its safetensors files, integers left out.

    Raises:
        ValueError: when the folder holds none.

    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors; name a model's folder")
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                tensor = weights.get_slice(name)
                if tensor.get_dtype()[0] not in ("I", "U"):
                    total += prod(tensor.get_shape())
    return total
