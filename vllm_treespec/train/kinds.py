"""The kinds of drafters that ``treespec train`` makes."""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from vllm_treespec.train.options import (
    BlockShape,
    DFlashOptions,
    DFlashShape,
    DistillOptions,
    DraftOptions,
    DraftRunOptions,
    DraftShape,
    EagleShape,
    HeadOptions,
    LyannaOptions,
    LyannaShape,
    PairOptions,
    ReDrafterShape,
    RunOptions,
    Shape,
)


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    Attributes:
        name: of the command; of a head, also its config's ``method``.
        noun: what is made, with its article.
        shape: its sizes.
        options: of its training.
        path: of its ``Drafter``, whose import takes seconds.
        checkpoints: folder in OUT, or in WORK.
        curves: picture in OUT, or in WORK.
        run: models, files and text.
    """

    name: str
    noun: str
    shape: type[Shape]
    options: type[DistillOptions]
    path: str
    checkpoints: str = "OUT/checkpoints"
    curves: str = "OUT/curves.png"
    run: type[RunOptions] = RunOptions

    @property
    def drafter(self) -> Any:
        """The class of ``path``."""
        return resolve_name(f"vllm_treespec.train.{self.path}")


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "draft",
            "a draft model",
            DraftShape,
            DraftOptions,
            "draft:DraftModel",
            checkpoints="WORK/draft",
            curves="WORK/curves.png",
            run=DraftRunOptions,
        ),
        Kind(
            "redrafter",
            "a ReDrafter head",
            ReDrafterShape,
            HeadOptions,
            "block_heads:ReDrafter",
            checkpoints="WORK/redrafter",
        ),
        Kind(
            "medusa",
            "Medusa heads",
            BlockShape,
            HeadOptions,
            "block_heads:Medusa",
            checkpoints="WORK/medusa",
        ),
        Kind("eagle", "an EAGLE head", EagleShape, PairOptions, "pair_heads:Eagle"),
        Kind(
            "lyanna", "a Lyanna head", LyannaShape, LyannaOptions, "pair_heads:Lyanna"
        ),
        Kind(
            "dflash",
            "a one-pass (DSpark) head",
            DFlashShape,
            DFlashOptions,
            "dflash:DFlash",
        ),
    )
}
