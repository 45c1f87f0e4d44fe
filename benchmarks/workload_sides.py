"""The sides of the workload table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.sides import NGRAM, named, tree_sides
from vllm_treespec.tools.sides import Cell, Side, plain_side, spec_side

SUFFIX, MEDUSA = "suffix_tree", "medusa_tree"
# The default tree of each method, by the kind of model that it needs.
SUFFIX_TREES: tuple[dict[str, Any], ...] = ({"method": SUFFIX},)
DRAFT_TREES: tuple[dict[str, Any], ...] = (
    {"method": "sd"},
    {"method": "rsd_c"},
    {"method": "rsd_s"},
)
HEAD_TREES: dict[str, dict[str, Any]] = {
    "redrafter": {"method": "redrafter"},
    "medusa": {"method": MEDUSA},
}


def workload_sides(
    specs: Sequence[dict[str, Any]],
    draft: str | None,
    heads: Mapping[str, str],
    stock_depth: int,
    eager: Sequence[bool],
) -> list[Side]:
    """Make plain twice, stock n-gram, and our methods that have their model.

    Args:
        specs: spec-configs instead of the usual ones; empty: the usual ones.
        draft: the draft model, if any.
        heads: folders by kind of head.
        stock_depth: draft tokens of stock n-gram.
        eager: values of enforce_eager.

    Raises:
        ValueError: when a spec-config cannot work or lacks its model.

    """
    usual = [
        *SUFFIX_TREES,
        *(DRAFT_TREES if draft is not None else ()),
        *(spec for kind, spec in HEAD_TREES.items() if kind in heads),
    ]
    ngram = {**NGRAM, "num_speculative_tokens": stock_depth}
    return [
        plain_side("plain-eager", eager=True),
        plain_side("plain-compiled", eager=False),
        *(named(spec_side(ngram, mode)) for mode in eager),
        *tree_sides([own_text(s) for s in specs or usual], draft, eager, heads),
    ]


def own_text(spec: dict[str, Any]) -> dict[str, Any]:
    """Keep suffix trees from the answers of earlier cells, whose prompts repeat."""
    return {**spec, "max_cached_tokens": 0} if spec.get("method") == SUFFIX else spec


def workload_cells(
    names: Sequence[str],
    batch_sizes: Sequence[int],
    temperatures: Sequence[float],
    num_prompts: int,
) -> list[Cell]:
    """Make all cells; batch 1 has ``num_prompts`` prompts, a larger one its size."""
    return [
        Cell(
            batch_size=batch_size,
            temperature=temperature,
            workload=name,
            num_prompts=num_prompts if batch_size == 1 else batch_size,
        )
        for name in names
        for batch_size in batch_sizes
        for temperature in temperatures
    ]
