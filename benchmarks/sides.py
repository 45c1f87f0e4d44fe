"""The sides of the benchmark: stock vLLM, and our methods with the paper's trees."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_treespec.config import METHODS
from vllm_treespec.config.base import DraftModelConfig
from vllm_treespec.config.heads import HeadMethodConfig
from vllm_treespec.tools.sides import Side, plain_side, spec_side, tree_side


@dataclass(frozen=True)
class BudgetTrees:
    """Trees of one target budget; the first of each list is the one of `--trees one`.

    rsd_c: branching factors. rsd_s: (beam width, depth).
    """

    rsd_c: tuple[tuple[int, ...], ...]
    rsd_s: tuple[tuple[int, int], ...]


# arXiv 2402.14160, appendix D.3.2: budget = draft tokens the target reads at once, and
# the depth of the chain (SD). Three vectors of RSD-C are printed there one level short
# of their budget (14: [2,1,1,1,1,1], 21: [3,1,1,1,1,1], 30: [5,1,1,1,1]); here they
# fill it, as all others do.
PAPER_TREES = {
    6: BudgetTrees(rsd_c=((2, 2), (2, 1, 1), (3, 1)), rsd_s=((2, 3), (3, 2))),
    10: BudgetTrees(rsd_c=((2, 2, 1), (2, 1, 1, 1, 1), (5, 1)), rsd_s=((2, 5), (5, 2))),
    14: BudgetTrees(
        rsd_c=((2, 2, 2), (2, 1, 1, 1, 1, 1, 1), (7, 1)), rsd_s=((2, 7), (7, 2))
    ),
    21: BudgetTrees(
        rsd_c=((3, 2, 2), (3, 1, 1, 1, 1, 1, 1), (7, 1, 1)), rsd_s=((3, 7), (7, 3))
    ),
    30: BudgetTrees(
        rsd_c=((2, 2, 2, 2), (5, 1, 1, 1, 1, 1), (6, 1, 1, 1, 1)),
        rsd_s=((5, 6), (6, 5)),
    ),
}


NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def stock_sides(
    draft: str | None, stock_depth: int, eager: Sequence[bool]
) -> list[Side]:
    """Make the sides of stock vLLM: plain three times, n-gram, draft model if any."""
    specs: list[dict[str, Any]] = [NGRAM]
    if draft is not None:
        specs.append({"method": "draft_model", "model": draft})
    return [
        plain_side("plain-eager", eager=True),
        plain_side("plain-compiled", eager=False),
        plain_side("plain-default", eager=False, one_process=False),
        *(
            named(spec_side({**spec, "num_speculative_tokens": stock_depth}, mode))
            for mode in eager
            for spec in specs
        ),
    ]


def named(side: Side) -> Side:
    """Mark a compiled speculative side by its name."""
    if side.engine["enforce_eager"]:
        return side
    return side.model_copy(update={"name": f"{side.name}-compiled"})


def tree_specs(budgets: Sequence[int], all_trees: bool) -> list[dict[str, Any]]:
    """List the paper's spec-configs for these budgets, without the draft model."""
    take = slice(None) if all_trees else slice(1)
    specs: list[dict[str, Any]] = []
    for budget in budgets:
        trees = PAPER_TREES[budget]
        specs.append({"method": "sd", "depth": budget})
        specs += [
            {"method": "rsd_c", "branching_factors": list(factors)}
            for factors in trees.rsd_c[take]
        ]
        specs += [
            {"method": "rsd_s", "beam_width": width, "depth": depth}
            for width, depth in trees.rsd_s[take]
        ]
    return specs


def tree_sides(
    specs: Sequence[dict[str, Any]],
    draft: str | None,
    eager: Sequence[bool],
    heads: Mapping[str, str] | None = None,
) -> list[Side]:
    """Make the sides of spec-configs; one named twice is kept once.

    Args:
        specs: without a model where the one below is meant.
        draft: draft model of the methods that take one; None: there is none.
        eager: values of enforce_eager.
        heads: folders by kind of head.

    Raises:
        ValueError: when a spec-config cannot work or lacks its model.

    """
    sides = [
        named(tree_side(with_model(spec, draft, heads or {}), mode))
        for mode in eager
        for spec in specs
    ]
    return list({side.name: side for side in sides}.values())


def with_model(
    spec: dict[str, Any], draft: str | None, heads: Mapping[str, str]
) -> dict[str, Any]:
    """Fill in the draft model or the head, for methods that take one.

    Raises:
        ValueError: when there is none, naming the option.

    """
    config = METHODS.get(str(spec.get("method")))
    if config is None or "model" in spec:
        return spec
    model, option = None, ""
    if issubclass(config, DraftModelConfig):
        model, option = draft, "--draft"
    elif issubclass(config, HeadMethodConfig):
        model, option = heads.get(config.HEAD), "--head"
    else:
        return spec
    if model is None:
        raise ValueError(f"{json.dumps(spec)} needs a model; name one with {option}")
    return {"model": model, **spec}


def choose(sides: Sequence[Side], names: Sequence[str]) -> list[Side]:
    """Keep the sides whose name or family is named, in the order of the list; all
    when nothing is named.

    Raises:
        ValueError: when a name fits no side.

    """
    for name in names:
        if not any(name in (side.name, side.family) for side in sides):
            known = ", ".join(dict.fromkeys(side.name for side in sides))
            raise ValueError(f"--sides: there is no side {name!r}; there are {known}")
    if not names:
        return list(sides)
    return [side for side in sides if side.name in names or side.family in names]


def estimated_seconds(
    side: Side, cells: Sequence[tuple[int, float, int]], max_tokens: int
) -> float:
    """Rough time of one run of a side on two cores with a 135M target.

    Args:
        side: the side.
        cells: batch size, temperature and number of prompts of each.
        max_tokens: of each answer.

    Origin of the numbers: an engine starts in about 15 s eager and 60 s compiled, 20 s
    more in several processes; a plain step takes
    15 ms; a drafted one 0.4 ms more per draft token and 2.5 ms more per level, and
    emits about two tokens; a batch of 8 runs about four times as fast.
    """
    eager = side.engine["enforce_eager"]
    seconds = (15.0 if eager else 60.0) + (0.0 if side.one_process else 20.0)
    step_ms = 15.0
    emitted = 1.0
    spec = side.engine.get("speculative_config", {})
    if side.budget:
        factors = spec.get("branching_factors", ())
        levels = spec.get("depth", len(factors) or side.budget)
        step_ms += 0.4 * side.budget + 2.5 * levels
        emitted = 2.0
    for batch_size, temperature, num_prompts in cells:
        if side.greedy_only and temperature > 0:
            continue
        faster = min(batch_size, num_prompts) ** 0.67
        tokens = num_prompts * max_tokens / emitted + 16 * batch_size
        seconds += tokens * step_ms / 1000 / faster
    return seconds
