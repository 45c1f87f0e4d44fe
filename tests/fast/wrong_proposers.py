"""Proposers that are wrong on purpose: they choose or order nodes by their tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch import Tensor

from vllm_treespec.proposers.rsd_c import draw_children
from vllm_treespec.proposers.rsd_s import expand_beam, select_beam
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.builders import from_candidates
from vllm_treespec.trees.draft import Draft

MODULES = {
    name: importlib.import_module(f"vllm_treespec.proposers.{name}")
    for name in ("rsd_c", "rsd_s", "stochastic_tree")
}


def siblings_by_probability(
    probs: Tensor, count: int, uniforms: Tensor, sampling: SamplingTensors
) -> tuple[Tensor, Tensor]:
    """``draw_children`` that forgets the draw order: likely siblings come first."""
    tokens, exists = draw_children(probs, count, uniforms, sampling)
    order = probs.gather(-1, tokens).argsort(dim=-1, descending=True)
    return tokens.gather(-1, order), exists.gather(-1, order)


def select_likeliest(
    perturbed: Tensor, beam_width: int, columns: Tensor, log_probs: Tensor, sure: Tensor
) -> tuple[Tensor, ...]:
    """``select_beam`` by log probability: looks at the tokens it selects."""
    return select_beam(log_probs, beam_width, columns, log_probs, sure)


def ranked_by_probability() -> Any:
    """Candidates of a stochastic tree are kept by log probability instead of psi."""
    log_probs: list[Tensor] = []

    def expand(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        drawn = expand_beam(*arguments)
        log_probs.append(drawn[1].flatten(1))
        return drawn

    def keep(roots: Tensor, *levels: Any, **rest: Any) -> Draft:
        tokens, parents, _, *others = levels
        return from_candidates(roots, tokens, parents, log_probs, *others, **rest)

    return patch.multiple(
        MODULES["stochastic_tree"], expand_beam=expand, from_candidates=keep
    )


WRONG_PROPOSERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "rsd_c, siblings by probability": (
        "rsd_c 3",
        lambda: patch.object(
            MODULES["rsd_c"], "draw_children", siblings_by_probability
        ),
    ),
    "rsd_s, siblings by probability": (
        "rsd_s 2",
        lambda: patch.object(
            MODULES["rsd_s"], "draw_children", siblings_by_probability
        ),
    ),
    "rsd_s, beam by probability": (
        "rsd_s 2",
        lambda: patch.object(MODULES["rsd_s"], "select_beam", select_likeliest),
    ),
    "stochastic tree by probability": (
        "stochastic 2 of 4, best 4",
        ranked_by_probability,
    ),
}
