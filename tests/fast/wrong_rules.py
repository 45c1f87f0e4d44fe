"""Rules that are wrong on purpose: the exactness checks must refuse each of them.

A wrong rule is made from a right one, in any of its forms.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.fast.drafting import draws_of
from tests.fast.enumeration import Scorer
from tests.fast.rule_forms import numbers_of
from vllm_treespec.sampling.coupling import LIKELIEST
from vllm_treespec.sampling.draws import draw
from vllm_treespec.scorers import ScorerOutput, TargetLogits, coupled_draw, k_seq
from vllm_treespec.scorers.coupled_draw import COUPLED_DRAW
from vllm_treespec.scorers.independent_draws import Judge, walk_independent_draws
from vllm_treespec.scorers.k_seq import make_judge, optimal_division_factor
from vllm_treespec.trees.tree import Draws, TreeBatch, first_child, next_draw

Wrong = Callable[[Scorer], Scorer]

# The package exports the function under the name of its module.
REJECTION = importlib.import_module("vllm_treespec.scorers.recursive_rejection")


def with_step(name: str, replacement: Callable[..., Any]) -> Wrong:
    """One step of recursive rejection replaced."""

    def wrong(rule: Scorer) -> Scorer:
        def score(
            tree: TreeBatch, target: TargetLogits, uniforms: Tensor
        ) -> ScorerOutput:
            with patch.object(REJECTION, name, replacement):
                return rule(tree, target, uniforms)

        return score

    return wrong


def with_trees(change: Callable[[TreeBatch], TreeBatch]) -> Wrong:
    """The rule sees other trees."""
    return lambda rule: (
        lambda tree, target, uniforms: rule(change(tree), target, uniforms)
    )


def with_draws(change: Callable[[Draws], Draws]) -> Wrong:
    """The rule sees other draws."""
    return with_trees(lambda tree: replace(tree, draws=change(draws_of(tree))))


# Rejection


def as_independent(draws: Draws) -> Draws:
    """Treats draws without replacement as draws with replacement."""
    none = torch.zeros_like(draws.without_replacement)
    return replace(draws, without_replacement=none)


def accepts_inverse_ratio(rule: Scorer) -> Scorer:
    """Accepts first siblings with probability min(1, p / q)."""

    def score(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
        draws, uniforms = draws_of(tree), uniforms.clone()
        reqs = torch.arange(tree.num_reqs)
        for i in range(draws.nodes.shape[1]):
            node = draws.nodes[:, i]
            token = tree.token_ids[reqs, node]
            probs = target.probs(reqs, tree.parents[reqs, node].clamp(min=0))
            draft = draws.probs_of(reqs, draws.rows[:, i], probs.shape[1])
            ratio = probs[reqs, token].double() / draft[reqs, token].double()
            uniforms[:, 1 + i] *= ratio.nan_to_num(0, 0).square()
        return rule(tree, target, uniforms)

    return score


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


def bonus_from_draft(rule: Scorer) -> Scorer:
    """Draws the bonus token from a draft distribution."""

    def score(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
        given = target.logits, target.root_rows, target.sampling
        return rule(tree, DraftAtLeaves(*given, tree=tree), uniforms)

    return score


def recovers_from_target(rule: Scorer) -> Scorer:
    """Draws the recovered token from the target in place of the residual."""

    def score(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
        output = rule(tree, target, uniforms)
        probs = target.probs(torch.arange(tree.num_reqs), output.last_node())
        return replace(output, next_token_ids=draw(probs, uniforms[:, 0]))

    return score


TARGET_KEPT: dict[str, Wrong] = {
    "residual is the target": with_step("subtract", lambda q, p: q),
    "recovered from target": recovers_from_target,
}
WRONG_REJECTION: dict[str, Wrong] = {
    **TARGET_KEPT,
    "residual not normalised": with_step("subtract", lambda q, p: (q - p).clamp(min=0)),
    "draft not normalised": with_step(
        "drop", lambda p, t: p.scatter(1, t[:, None], 0.0)
    ),
    "rejected token kept": with_draws(as_independent),
    "inverse ratio": accepts_inverse_ratio,
    "bonus from draft": bonus_from_draft,
}


# Independent draws


def without_repeats(tree: TreeBatch) -> TreeBatch:
    """The tree without the draws that hit a node again."""
    draws = draws_of(tree)
    equal = draws.nodes[:, :, None] == draws.nodes[:, None]
    repeat = equal.int().argmax(2) < torch.arange(draws.nodes.shape[1])
    order = repeat.int().argsort(dim=1, stable=True)
    draws = replace(
        draws,
        nodes=draws.nodes.masked_fill(repeat, 0).gather(1, order),
        rows=draws.rows.gather(1, order),
        without_replacement=draws.without_replacement.gather(1, order),
    )
    return replace(tree, draws=draws)


def independent_as_rest(tree: TreeBatch) -> TreeBatch:
    """Treats draws with replacement as draws without replacement."""
    following, reqs = next_draw(tree), torch.arange(tree.num_reqs)[:, None]
    rest = torch.zeros_like(draws_of(tree).without_replacement)
    rest = torch.nn.functional.pad(rest, (0, 1))
    rest[reqs, following] = True
    draws = replace(draws_of(tree), without_replacement=rest[:, :-1])
    return replace(tree, draws=draws)


def first_model_for_all(draws: Draws) -> Draws:
    """Judges the draws of both models by the first model's distribution."""
    return replace(draws, rows=draws.rows % (draws.probs.shape[1] // 2))


def rows_swapped(draws: Draws) -> Draws:
    """Judges each model's draws by the other model's distribution."""
    return replace(draws, rows=draws.probs.shape[1] - 1 - draws.rows)


WRONG_MULTI_ROUND: dict[str, Wrong] = {
    **TARGET_KEPT,
    "repeats dropped": with_trees(without_repeats),
    "independent as rest": with_trees(independent_as_rest),
    "first model for all": with_draws(first_model_for_all),
    "rows swapped": with_draws(rows_swapped),
}


def divided_by(factor: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Wrong:
    """K-SEQ with another division factor."""
    return lambda _: partial(k_seq, division_factor=factor)


def judged(judge: Judge) -> Wrong:
    """The walk over independent draws with another judge."""
    return lambda _: partial(walk_independent_draws, judge=judge)


def rest_is_target(judge: Judge) -> Judge:
    """Recovers from the target."""
    return lambda draft, target, *drawn: (judge(draft, target, *drawn)[0], target)


def rest_of_one_draw(judge: Judge) -> Judge:
    """Recovers as after one draw."""

    def wrong(
        draft: Tensor, target: Tensor, tokens: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        rest = judge(draft, target, tokens[:, :1], torch.ones_like(counts))[1]
        return judge(draft, target, tokens, counts)[0], rest

    return wrong


def in_reverse(judge: Judge) -> Judge:
    """Judges the draws as if they had come the other way round."""
    return lambda draft, target, tokens, counts: judge(
        draft, target, tokens.flip(1), counts
    )


K_SEQ_JUDGE = make_judge(optimal_division_factor)
WRONG_K_SEQ: dict[str, Wrong] = {
    "division factor 1": divided_by(lambda p, q, m: torch.ones_like(p[:, 0])),
    "division factor too small": divided_by(
        lambda p, q, m: (0.9 * optimal_division_factor(p, q, m)).clamp(min=1)
    ),
    "recovered from target": judged(rest_is_target(K_SEQ_JUDGE)),
    "residual of one draw": judged(rest_of_one_draw(K_SEQ_JUDGE)),
    "repeats dropped": with_trees(without_repeats),
}


# Coupled draw


def one_uniform_for_all(rule: Scorer) -> Scorer:
    """Draws the token after every node with the same number."""
    return lambda tree, target, uniforms: rule(
        tree, target, uniforms[:, :1].expand_as(uniforms)
    )


def bonus_is_greedy(rule: Scorer) -> Scorer:
    """Emits the likeliest token where the tree ends."""

    def score(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
        output = rule(tree, target, uniforms)
        reqs, last = torch.arange(tree.num_reqs), output.last_node()
        leaf = first_child(tree)[reqs, last] < 0
        tokens = torch.where(leaf, target.argmax(reqs, last), output.next_token_ids)
        return replace(output, next_token_ids=tokens)

    return score


def draws_again(rule: Scorer) -> Scorer:
    """Draws again, three times at most, while no child of the root has the token."""

    def score(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
        output = rule(tree, target, uniforms)
        for turn in (0.25, 0.5, 0.75):
            other = rule(tree, target, (uniforms + turn) % 1)
            missed = output.num_accepted == 0
            output = ScorerOutput(
                torch.where(missed[:, None], other.path, output.path),
                torch.where(missed, other.num_accepted, output.num_accepted),
                torch.where(missed, other.next_token_ids, output.next_token_ids),
            )
        return output

    return score


def only_likeliest(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Coupled draw that forgets the tokens whose noise it does not look at."""
    kept = target.logits.topk(min(LIKELIEST, target.logits.shape[1]), dim=1).indices
    likely = torch.zeros_like(target.logits).scatter(1, kept, 1.0)
    numbers = numbers_of(COUPLED_DRAW, uniforms)
    return coupled_draw(tree, replace(target, logits=target.logits * likely), numbers)


WRONG_COUPLED_DRAW: dict[str, Wrong] = {
    "one uniform for all nodes": one_uniform_for_all,
    "greedy bonus token": bonus_is_greedy,
    "draws again": draws_again,
}
WRONG: dict[str, dict[str, Wrong]] = {
    "recursive_rejection": WRONG_REJECTION,
    "multi_round": WRONG_MULTI_ROUND,
    "k_seq": WRONG_K_SEQ,
    "coupled_draw": WRONG_COUPLED_DRAW,
}


# A part of the vocabulary


def columns_as_tokens(tree: TreeBatch) -> TreeBatch:
    """Reads the draft's columns as the target's first tokens."""
    draws = draws_of(tree)
    assert draws.vocabulary is not None
    spare = 1 + int(draws.vocabulary.max()) - draws.probs.shape[2]
    probs = torch.nn.functional.pad(draws.probs, (0, spare))
    return replace(tree, draws=replace(draws, probs=probs, vocabulary=None))


def next_columns(draws: Draws) -> Draws:
    """Scatters every column to the token of the next one."""
    assert draws.vocabulary is not None
    return replace(draws, vocabulary=draws.vocabulary.roll(1))


WRONG_VOCABULARY: dict[str, Wrong] = {
    "columns as tokens": with_trees(columns_as_tokens),
    "draft not normalised over its tokens": with_draws(
        lambda draws: replace(draws, probs=draws.probs * 0.8)
    ),
    "columns moved": with_draws(next_columns),
}
