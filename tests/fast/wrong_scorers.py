"""Scorers that are wrong on purpose: the exactness checks must refuse each of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.fast.enumeration import Scorer
from tests.fast.position_noise import by_position, numbers_of
from vllm_treespec.proposers.rsd_c import draw_children
from vllm_treespec.sampling.coupling import LIKELIEST
from vllm_treespec.sampling.draws import draw
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import (
    ScorerOutput,
    TargetLogits,
    coupled_draw,
    k_seq,
    multi_round,
    recursive_rejection,
)
from vllm_treespec.scorers.coupled_draw import COUPLED_DRAW
from vllm_treespec.scorers.independent_draws import Judge, walk_independent_draws
from vllm_treespec.scorers.k_seq import make_judge, optimal_division_factor
from vllm_treespec.trees.tree import Draws, TreeBatch, first_child, next_draw

# The package exports the function under the name of its module.
RECURSIVE_REJECTION = importlib.import_module(
    "vllm_treespec.scorers.recursive_rejection"
)
RSD_C = importlib.import_module("vllm_treespec.proposers.rsd_c")
RSD_S = importlib.import_module("vllm_treespec.proposers.rsd_s")


def patched(name: str, replacement: Callable[..., Any]) -> Scorer:
    """The right walk with one of its steps replaced."""

    def score(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
        with patch.object(RECURSIVE_REJECTION, name, replacement):
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
    independent = replace(
        draws, without_replacement=torch.zeros_like(draws.without_replacement)
    )
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
        probs = target.probs(reqs, parent)
        draft = draws.probs_of(reqs, draws.rows[:, i], probs.shape[1])
        ratio = probs[reqs, token].double() / draft[reqs, token].double()
        uniforms[:, 1 + i] *= ratio.nan_to_num(0, 0).square()
    return recursive_rejection(tree, target, uniforms)


@dataclass(frozen=True, kw_only=True)
class DraftAtLeaves(TargetLogits):
    """Gives the draft distribution in the leaves' place of the target's."""

    tree: TreeBatch

    def probs(self, reqs: Tensor, nodes: Tensor) -> Tensor:
        draws = draws_of(self.tree)
        leaf = first_child(self.tree)[reqs, nodes] < 0
        own = (draws.nodes[reqs] == nodes[:, None]).int().argmax(1)
        probs = super().probs(reqs, nodes)
        draft = draws.probs_of(reqs, draws.rows[reqs, own], probs.shape[1])
        return torch.where(leaf[:, None], draft, probs)


def bonus_from_draft(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Draws the bonus token from a draft distribution."""
    leaves = DraftAtLeaves(target.logits, target.root_rows, target.sampling, tree=tree)
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


def drops_repeats(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Tries every token once, however often it was drawn."""
    return multi_round(without_repeats(tree), target, uniforms)


def without_repeats(tree: TreeBatch) -> TreeBatch:
    """The tree without the draws that hit a node again."""
    draws = draws_of(tree)
    equal = draws.nodes[:, :, None] == draws.nodes[:, None]
    repeat = equal.int().argmax(2) < torch.arange(draws.nodes.shape[1])
    order = repeat.int().argsort(dim=1, stable=True)
    return replace(
        tree,
        draws=replace(
            draws,
            nodes=draws.nodes.masked_fill(repeat, 0).gather(1, order),
            rows=draws.rows.gather(1, order),
            without_replacement=draws.without_replacement.gather(1, order),
        ),
    )


def independent_as_rest(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Treats draws with replacement as draws without replacement."""
    draws, following = draws_of(tree), next_draw(tree)
    reqs = torch.arange(tree.num_reqs)[:, None]
    without_replacement = torch.zeros_like(draws.without_replacement)
    without_replacement = torch.nn.functional.pad(without_replacement, (0, 1))
    without_replacement[reqs, following] = True
    draws = replace(draws, without_replacement=without_replacement[:, :-1])
    return multi_round(replace(tree, draws=draws), target, uniforms)


def first_model_for_all(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Judges the draws of every model by the first model's distribution."""
    draws = draws_of(tree)
    rows = draws.rows % (draws.probs.shape[1] // 2)
    draws = replace(draws, rows=rows)
    return multi_round(replace(tree, draws=draws), target, uniforms)


WRONG_MULTI_ROUND: dict[str, Scorer] = {
    "repeats dropped": drops_repeats,
    "independent as rest": independent_as_rest,
    "first model for all": first_model_for_all,
    "recovered from target": recovers_from_target,
    "residual is the target": patched("subtract", lambda q, p: q),
}


def divided_by(factor: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Scorer:
    """K-SEQ with another division factor."""
    return partial(k_seq, division_factor=factor)


def judged(wrong: Callable[[Judge], Judge], judge: Judge) -> Scorer:
    """The walk over independent draws with a spoilt judge."""

    def score(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
        return walk_independent_draws(tree, target, uniforms, wrong(judge))

    return score


def rest_is_target(judge: Judge) -> Judge:
    """Recovers from the target."""

    def wrong(
        draft: Tensor, target: Tensor, tokens: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        return judge(draft, target, tokens, counts)[0], target

    return wrong


def rest_of_one_draw(judge: Judge) -> Judge:
    """Recovers as after one draw."""

    def wrong(
        draft: Tensor, target: Tensor, tokens: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        rest = judge(draft, target, tokens[:, :1], torch.ones_like(counts))[1]
        return judge(draft, target, tokens, counts)[0], rest

    return wrong


K_SEQ_JUDGE = make_judge(optimal_division_factor)
WRONG_K_SEQ: dict[str, Scorer] = {
    "division factor 1": divided_by(lambda p, q, m: torch.ones_like(p[:, 0])),
    "division factor too small": divided_by(
        lambda p, q, m: (0.9 * optimal_division_factor(p, q, m)).clamp(min=1)
    ),
    "recovered from target": judged(rest_is_target, K_SEQ_JUDGE),
    "residual of one draw": judged(rest_of_one_draw, K_SEQ_JUDGE),
    "repeats dropped": lambda tree, target, uniforms: k_seq(
        without_repeats(tree), target, uniforms
    ),
}


def one_uniform_for_all(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Draws the token after every node with the same number."""
    return by_position(tree, target, uniforms[:, :1].expand_as(uniforms))


def bonus_is_greedy(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Emits the likeliest token where the tree ends."""
    output = by_position(tree, target, uniforms)
    reqs, last = torch.arange(tree.num_reqs), output.last_node()
    leaf = first_child(tree)[reqs, last] < 0
    tokens = torch.where(leaf, target.argmax(reqs, last), output.next_token_ids)
    return replace(output, next_token_ids=tokens)


def draws_again(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Draws again, three times at most, while no child of the root has the token."""
    output = by_position(tree, target, uniforms)
    for turn in (0.25, 0.5, 0.75):
        other = by_position(tree, target, (uniforms + turn) % 1)
        missed = output.num_accepted == 0
        output = ScorerOutput(
            torch.where(missed[:, None], other.path, output.path),
            torch.where(missed, other.num_accepted, output.num_accepted),
            torch.where(missed, other.next_token_ids, output.next_token_ids),
        )
    return output


def only_likeliest(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Coupled draw that forgets the tokens whose noise it does not look at."""
    kept = target.logits.topk(min(LIKELIEST, target.logits.shape[1]), dim=1).indices
    likely = torch.zeros_like(target.logits).scatter(1, kept, 1.0)
    numbers = numbers_of(COUPLED_DRAW, uniforms)
    return coupled_draw(tree, replace(target, logits=target.logits * likely), numbers)


WRONG_COUPLED_DRAW: dict[str, Scorer] = {
    "one uniform for all nodes": one_uniform_for_all,
    "greedy bonus token": bonus_is_greedy,
    "draws again": draws_again,
}
