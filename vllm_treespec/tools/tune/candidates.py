"""What is tried: methods that have their model, each with several trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_treespec.config import HEAD_METHODS, METHODS
from vllm_treespec.config.hybrid import HEAD_KINDS
from vllm_treespec.heads import DFlashHeadConfig, read_head_config
from vllm_treespec.tools.sides import PLAIN, Side, plain_side, side_of_trees


def _trees(method: str, *sizes: tuple[float, ...]) -> list[dict[str, float]]:
    """Trees from the sizes that the method's keys of a tree stand for, in order."""
    keys = METHODS[method].SHAPE
    return [dict(zip(keys, own, strict=False)) for own in sizes]


# Of one level for larger batches, up to more draft tokens than pay on a CPU.
GROWN = ((4, 1, 4), (4, 2, 5), (4, 3, 8), (8, 4, 16))
TREES: dict[str, list[dict[str, float]]] = {
    "suffix_tree": _trees("suffix_tree", (8, 6), (16, 12), (16, 12, 0.4), (32, 28)),
    "sd": _trees("sd", (2,), (3,), (5, 0.05)),
    "rsd_s": _trees("rsd_s", (2, 2), (2, 4, 0.05), (4, 4)),
    "medusa_tree": _trees("medusa_tree", (3,), (5,), (8,), (16,)),
    "redrafter": _trees("redrafter", (4, 1, 4), (5, 2, 5), (8, 3, 8), (16, 4, 16)),
    "eagle_tree": _trees("eagle_tree", *GROWN),
    "dflash_tree": _trees("dflash_tree", (4, 1, 4), (8, 3, 8), (8, 5, 12), (8, 7, 16)),
    "lyanna": _trees("lyanna", *GROWN),
    "hybrid": _trees(
        "hybrid",
        (8, 6, 0.1, 4, 2),
        (16, 12, 0.1, 4, 3),
        (16, 12, 0.4, 4, 2),
        (32, 28, 0.1, 4, 6),
    ),
}
DRAFT_METHODS = ("sd", "rsd_s")
# Prompts come again in later cells: an answer is not to be drafted from an earlier one.
OWN_TEXT: dict[str, Any] = {"max_cached_tokens": 0}


def candidates(
    drafts: Sequence[str], heads: Sequence[str], eager: bool
) -> tuple[list[Side], dict[str, dict[str, Any]]]:
    """Make a side for each method and model; plain comes first.

    Returns:
        the sides, and by their names the spec-configs without trees.

    Raises:
        ValueError: a folder holds no head, or a spec-config cannot work.

    """
    specs: dict[str, dict[str, Any]] = {
        "suffix_tree": {"method": "suffix_tree", **OWN_TEXT}
    }
    models = [*heads, *drafts]
    # by side, levels of a one-pass head
    most: dict[str, int] = {}
    for head in heads:
        config = read_head_config(head)
        kind = config.method
        method = HEAD_METHODS[kind]
        names = [_name(method, head, heads)]
        specs[names[0]] = {"method": method, "model": head}
        if kind in HEAD_KINDS:
            names.append(_name("hybrid", head, models))
            specs[names[1]] = _hybrid(head, kind)
        if isinstance(config, DFlashHeadConfig):
            most |= dict.fromkeys(names, config.num_levels)
    for draft in drafts:
        for method in DRAFT_METHODS:
            specs[_name(method, draft, drafts)] = {"method": method, "model": draft}
        specs[_name("hybrid", draft, models)] = _hybrid(draft, "draft_model")
    sides = [plain_side(PLAIN, eager)]
    for name, spec in specs.items():
        trees = TREES[spec["method"]]
        if name in most:
            key = "model_depth" if spec["method"] == "hybrid" else "depth"
            trees = [tree for tree in trees if tree[key] <= most[name]]
            default = METHODS[spec["method"]].model_fields[key].default
            spec[key] = min(default, most[name])
        sides.append(side_of_trees(name, spec, trees, enforce_eager=eager))
    return sides, specs


def _hybrid(model: str, drafter: str) -> dict[str, Any]:
    """The index, from own text alone, and a draft model or a head in one tree."""
    return {"method": "hybrid", "model": model, "drafter": drafter, **OWN_TEXT}


def _name(method: str, model: str, models: Sequence[str]) -> str:
    """Name a side; with the model's name where there are several."""
    return method if len(models) == 1 else f"{method} {Path(model).name}"
