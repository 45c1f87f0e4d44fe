"""Scorers that are wrong on purpose: the exactness checks must refuse each of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.fast.enumeration import Scorer
from vllm_treespec.proposers.rsd_c import draw_children
from vllm_treespec.sampling import SamplingTensors, draw
from vllm_treespec.scorers import ScorerOutput, TargetLogits, recursive_rejection
from vllm_treespec.tree import Draws, TreeBatch, first_child

# The package exports the function under the name of its module.
WALK = importlib.import_module("vllm_treespec.scorers.recursive_rejection")
RSD_C = importlib.import_module("vllm_treespec.proposers.rsd_c")
RSD_S = importlib.import_module("vllm_treespec.proposers.rsd_s")


def patched(name: str, replacement: Callable[..., Any]) -> Scorer:
    """The right walk with one of its steps replaced."""

    def score(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
        with patch.object(WALK, name, replacement):
            return recursive_rejection(tree, target, uniforms)

    return score


def draws_of(tree: TreeBatch) -> Draws:
    """The draws of a tree that was drawn."""
    assert tree.draws is not None
    return tree.draws


def keeps_rejected_token(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Treats draws without replacement as draws with replacement."""
    draws = draws_of(tree)
    independent = replace(draws, from_rest=torch.zeros_like(draws.from_rest))
    return recursive_rejection(replace(tree, draws=independent), target, uniforms)


def accepts_inverse_ratio(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Accepts first siblings with probability min(1, p / q)."""
    draws = draws_of(tree)
    reqs = torch.arange(tree.num_reqs)
    uniforms = uniforms.clone()
    for i in range(draws.nodes.shape[1]):
        node = draws.nodes[:, i]
        parent, token = (
            tree.parents[reqs, node].clamp(min=0),
            tree.token_ids[reqs, node],
        )
        draft = draws.probs[reqs, draws.rows[:, i], token].double()
        ratio = target.probs(reqs, parent)[reqs, token].double() / draft
        uniforms[:, 1 + i] *= ratio.nan_to_num(0, 0).square()
    return recursive_rejection(tree, target, uniforms)


@dataclass(frozen=True)
class DraftAtLeaves(TargetLogits):
    """Gives the draft distribution in the leaves' place of the target's."""

    tree: TreeBatch

    def probs(self, reqs: Tensor, nodes: Tensor) -> Tensor:
        draws = draws_of(self.tree)
        leaf = first_child(self.tree)[reqs, nodes] < 0
        own = (draws.nodes[reqs] == nodes[:, None]).int().argmax(1)
        draft = draws.probs[reqs, draws.rows[reqs, own]]
        return torch.where(leaf[:, None], draft, super().probs(reqs, nodes))


def bonus_from_draft(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Draws the bonus token from a draft distribution."""
    leaves = DraftAtLeaves(target.logits, target.first_row, target.sampling, tree)
    return recursive_rejection(tree, leaves, uniforms)


def recovers_from_target(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Draws the recovered token from the target in place of the residual."""
    output = recursive_rejection(tree, target, uniforms)
    probs = target.probs(torch.arange(tree.num_reqs), output.last_node())
    return replace(output, next_token_ids=draw(probs, uniforms[:, 0]))


WRONG_SCORERS: dict[str, Scorer] = {
    "residual not normalised": patched("subtract", lambda q, p: (q - p).clamp(min=0)),
    "residual is the target": patched("subtract", lambda q, p: q),
    "draft not normalised": patched("drop", lambda p, t: p.scatter(1, t[:, None], 0.0)),
    "rejected token kept": keeps_rejected_token,
    "inverse ratio": accepts_inverse_ratio,
    "bonus from draft": bonus_from_draft,
    "recovered from target": recovers_from_target,
}


def siblings_by_probability(
    probs: Tensor, count: int, uniforms: Tensor, sampling: SamplingTensors
) -> tuple[Tensor, Tensor]:
    """``draw_children`` that forgets the draw order: likely siblings come first."""
    tokens, exists = draw_children(probs, count, uniforms, sampling)
    order = probs.gather(-1, tokens).argsort(dim=-1, descending=True)
    return tokens.gather(-1, order), exists.gather(-1, order)
