"""Exact laws by enumeration: all draft draws, all accept branches, any rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tests.fast.drafting import all_drawn, at_temperature, propose
from tests.fast.languages import NUM_TOKENS, Language, naive_probs, plain_sampling
from vllm_treespec.proposers import Proposer, RsdC, RsdS, SpecInfer, StochasticTree
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import ScorerOutput, TargetLogits
from vllm_treespec.scorers.independent_draws import Judge
from vllm_treespec.trees.tree import (
    TreeBatch,
    first_draw,
    next_draw,
    num_draws,
)

Scorer = Callable[[TreeBatch, TargetLogits, Tensor], ScorerOutput]

EXACT, NOTICEABLE = 1e-12, 1e-3
# How closely thresholds are located: of right rules, and of wrong ones, which bisect.
CLOSE, ROUGH = 1e-13, 1e-5
# The error of a law whose logits are float32.
FLOAT32 = 4e-6
ALMOST_ONE = 1 - 2.0**-53


def num_models(proposer: Proposer) -> int:
    """Draft models that a proposer draws from."""
    if isinstance(proposer, SpecInfer):
        return len(proposer.branching_factors)
    return 1


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Uniform numbers, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


# Every tree


@dataclass(frozen=True)
class Weighted:
    """Trees with the probability that the proposer draws each of them."""

    tree: TreeBatch
    # float64 [num_reqs]
    weights: Tensor

    def cut(self, num_nodes: int | Tensor) -> Weighted:
        """Cut all trees to so many nodes, or each to its own number."""
        limits = torch.as_tensor(num_nodes).expand_as(self.tree.num_nodes)
        return Weighted(self.tree.cut(limits), self.weights)


def certain(tree: TreeBatch) -> Weighted:
    """A tree that is drafted for certain."""
    return Weighted(tree, torch.ones(1, dtype=torch.float64))


def draft_uniforms(
    model: Language, factors: Sequence[int], with_replacement: bool = False
) -> tuple[Tensor, Tensor]:
    """Uniforms that draw each tree of one draft model once: middles of intervals.

    Args:
        model: what is drawn from.
        factors: draws below each node, by level.
        with_replacement: whether the draws of a node are independent.

    Returns:
        uniforms float64 [num_trees, num_draws] and the trees' probabilities float64
        [num_trees].

    """
    uniforms = torch.zeros((1, 0), dtype=torch.float64)
    weights = torch.ones(1, dtype=torch.float64)
    # Prefixes; -1 where no token was left to draw.
    above = torch.zeros((1, 1), dtype=torch.int64)
    for count in factors:
        below = torch.zeros((len(weights), 0), dtype=torch.int64)
        left = torch.empty(0)
        for draw in range(above.shape[1] * count):
            prefix = above[:, draw // count]
            if with_replacement or draw % count == 0:
                left = model.table[prefix.clamp(min=0)] * (prefix >= 0)[:, None]
            nothing = (left.sum(1, keepdim=True) == 0).double()
            law = normalised(torch.cat([left, nothing], dim=1))
            tree, token = (law > 0).nonzero(as_tuple=True)
            middle = (law.cumsum(1) - law / 2).clamp(max=ALMOST_ONE)[tree, token]
            weights = weights[tree] * law[tree, token]
            child = prefix[tree] * model.vocab_size + 1 + token
            child = child.masked_fill(token == model.vocab_size, -1)
            uniforms = torch.cat([uniforms[tree], middle[:, None]], dim=1)
            below = torch.cat([below[tree], child[:, None]], dim=1)
            above, left = above[tree], left[tree]
            spare = torch.nn.functional.pad(left, (0, 1))
            left = spare.scatter(1, token[:, None], 0.0)[:, :-1]
        above = below
    return uniforms, weights


def all_uniforms(
    proposer: Proposer, models: Sequence[Language], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Uniforms that make a proposer draw each of its trees once, and their mass.

    Of stochastic beams, which draw tokens and values, every draw of tokens under one
    choice ``seed`` of the uniforms of Gumbel values: nodes are kept by values that do
    not depend on their own tokens, so the law holds for each choice.
    """
    if isinstance(proposer, RsdC):
        return draft_uniforms(models[0], proposer.branching_factors)
    if isinstance(proposer, RsdS | StochasticTree):
        wide = proposer.beam_width if isinstance(proposer, RsdS) else proposer.top_k
        tokens, weights = draft_uniforms(models[0], (wide,) * proposer.depth)
        noise = rand(1, tokens.shape[1], seed=seed).expand_as(tokens)
        return torch.cat([tokens, noise], dim=1), weights
    assert isinstance(proposer, SpecInfer)
    uniforms = torch.zeros((1, 0), dtype=torch.float64)
    weights = torch.ones(1, dtype=torch.float64)
    for model, factors in zip(models, proposer.branching_factors, strict=False):
        own, mass = draft_uniforms(model, factors, with_replacement=True)
        repeated = uniforms.repeat_interleave(len(own), dim=0)
        uniforms = torch.cat([repeated, own.repeat(len(weights), 1)], dim=1)
        weights = torch.outer(weights, mass).flatten()
    return uniforms, weights


def all_trees(
    proposer: Proposer,
    models: Language | Sequence[Language],
    vocabulary: Tensor | None = None,
    seed: int = 0,
) -> Weighted:
    """Every tree the proposer can draw, drawn by the proposer itself."""
    models = [models] if isinstance(models, Language) else models
    if not proposer.sizes.num_uniforms:
        return certain(propose(proposer, models, vocabulary=vocabulary))
    uniforms, weights = all_uniforms(proposer, models, seed)
    return Weighted(propose(proposer, models, uniforms, None, vocabulary), weights)


def as_if_drawn(tree: TreeBatch, draft: Language) -> TreeBatch:
    """Call likeliest tokens draws without replacement, which they are not."""
    return all_drawn(tree, draft.table[draft.prefixes(tree)])


# Every branch of a rule


def bracketed(
    accepts: Callable[[Tensor, Tensor], Tensor], guess: Tensor, width: float | Tensor
) -> Tensor:
    """Where monotone tests turn from true to false on [0, 1), to ``width``.

    Args:
        accepts: from the numbers of some tests, int64 [m], and their uniforms [m] to
            bool [m]; true below a threshold, then false.
        guess: float64 [n], where the thresholds should be; one call confirms it.
            A wrong guess only costs time: those thresholds are found by bisection.
        width: half the width of the accepted bracket, of all or float64 [n].

    """
    guess = guess.clamp(0, 1)
    every = torch.arange(len(guess))
    sides = torch.cat([guess - width, guess + width]).clamp(0, ALMOST_ONE)
    low, high = accepts(every.repeat(2), sides).chunk(2)
    right = (low | (guess <= width)) & (~high | (guess >= 1 - width))
    rows = (~right).nonzero()[:, 0]
    bottom, top = torch.zeros_like(guess), torch.ones_like(guess)
    while len(rows):
        middle = (bottom[rows] + top[rows]) / 2
        below = accepts(rows, middle.clamp(max=ALMOST_ONE))
        bottom[rows[below]], top[rows[~below]] = middle[below], middle[~below]
        guess = guess.index_copy(0, rows, (bottom[rows] + top[rows]) / 2)
        rows = rows[((top - bottom) > width)[rows]]
    return guess


@dataclass(frozen=True)
class Branches:
    """Walks under way: their accept decisions so far are forced and have a mass."""

    # int64 [n], index of the tree
    trees: Tensor
    # float64 [n, 1 + max_draws]; 0 forces acceptance, almost 1 rejection
    uniforms: Tensor
    # float64 [n], probability of tree and decisions
    mass: Tensor
    # int64 [n], node where the walk stands, and the draw it tries next (-1: none)
    node: Tensor
    candidate: Tensor
    # float64 [n, vocab_size]: what a right walk would hold here; only to guess from
    residual: Tensor
    draft: Tensor

    def select(self, rows: Tensor) -> Branches:
        return Branches(*(value[rows] for value in vars(self).values()))

    def joined(self, other: Branches) -> Branches:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Branches(*(torch.cat(pair) for pair in pairs))


class LawMeter:
    """Measures the law of the first tokens that any scorer emits.

    The scorer is a black box from uniforms to emitted tokens. Each accept decision
    and each token boundary of the last draw is a threshold in one uniform, located to
    ``width`` by running the scorer on both sides of it. Guesses come from recursive
    rejection, or from ``judge``; a wrong guess only costs time.
    """

    def __init__(
        self,
        scorer: Scorer,
        drawn: Weighted,
        target: Language,
        sampling: Callable[[int], SamplingTensors] = plain_sampling,
        width: float = CLOSE,
        judge: Judge | None = None,
    ) -> None:
        assert drawn.tree.draws is not None
        self.scorer, self.drawn, self.sampling = scorer, drawn, sampling
        self.target, self.width, self.tree = target, width, drawn.tree
        self.draws, self.judge = drawn.tree.draws, judge
        self.first, self.following = first_draw(self.tree), next_draw(self.tree)
        self.counts = num_draws(self.tree)
        self.prefixes = target.prefixes(self.tree)
        self.target_probs = sampling(1).probs(target.table[None])[0].double()

    def law(self, num_tokens: int) -> Tensor:
        """Joint law, float64 [vocab_size ** num_tokens].

        Emissions of fewer tokens are continued by the target.
        """
        language = Language(self.target_probs)
        branches = self._start()
        ended = branches.select(branches.candidate < 0)
        while bool((undecided := branches.candidate >= 0).any()):
            branches = self._decide(branches.select(undecided))
            ended = ended.joined(branches.select(branches.candidate < 0))
        emitted, mass = self._emitted(ended)
        emitted = first_tokens(emitted, language.vocab_size, num_tokens)
        reached = language.no_mass().index_add(0, emitted.flatten(), mass.flatten())
        return language.joint_law(reached, num_tokens)

    def first_accepted(self) -> float:
        """Probability that a draw below the root is accepted."""
        branches, mass = self._start(), 0.0
        while len(branches.mass):
            branches = branches.select((branches.candidate >= 0) & (branches.node == 0))
            if len(branches.mass):
                branches = self._decide(branches)
                mass += float(branches.mass[branches.node > 0].sum())
        return mass

    def _run(self, trees: Tensor, uniforms: Tensor) -> ScorerOutput:
        tree = self.tree.select(trees)
        logits = self.target.target_logits(tree, self.sampling(len(trees)))
        return self.scorer(tree, logits, uniforms)

    def _start(self) -> Branches:
        trees = torch.arange(self.tree.num_reqs)
        columns = 1 + self.draws.nodes.shape[1]
        # Draws that were not decided yet stay rejected while one is looked at.
        uniforms = torch.full((len(trees), columns), ALMOST_ONE, dtype=torch.float64)
        root = torch.zeros_like(trees)
        return Branches(
            trees=trees,
            uniforms=uniforms,
            mass=self.drawn.weights,
            node=root,
            candidate=self.first[:, 0],
            residual=self.target_probs[self.prefixes[:, 0]],
            draft=self._draft(trees, self.first[:, 0]),
        )

    def _draft(self, trees: Tensor, draws: Tensor) -> Tensor:
        rows = self.draws.rows[trees, draws.clamp(min=0)]
        return self.draws.probs_of(trees, rows, self.target.vocab_size).double()

    def _decide(self, at: Branches) -> Branches:
        """Split walks into those that accept their candidate and those that reject."""
        trees, tried, column = at.trees, at.candidate, 1 + at.candidate[:, None]
        child = self.draws.nodes[trees, tried]
        token = self.tree.token_ids[trees, child][:, None]
        guess, residual = self._expected(at, token)

        def accepts(rows: Tensor, uniforms: Tensor) -> Tensor:
            forced = at.uniforms[rows].scatter(1, column[rows], uniforms[:, None])
            return (self._run(trees[rows], forced).path == child[rows, None]).any(1)

        width = self._width(at)
        threshold = bracketed(accepts, guess.nan_to_num(), width)
        won = Branches(
            trees=trees,
            uniforms=at.uniforms.scatter(1, column, 0.0),
            mass=at.mass * threshold,
            node=child,
            candidate=self.first[trees, child],
            residual=self.target_probs[self.prefixes[trees, child]],
            draft=self._draft(trees, self.first[trees, child]),
        )
        following = self.following[trees, tried]
        rest = self.draws.without_replacement[trees, following.clamp(min=0)][:, None]
        left = normalised(at.draft.scatter(1, token, 0.0))
        lost = replace(
            at,
            mass=at.mass * (1 - threshold),
            candidate=following,
            residual=residual,
            draft=torch.where(rest, left, self._draft(trees, following)),
        )
        accepted = won.select(threshold > width)
        return accepted.joined(lost.select(threshold < 1 - width))

    def _width(self, at: Branches) -> float | Tensor:
        """How closely the thresholds of these branches are located."""
        return self.width

    def _expected(self, at: Branches, token: Tensor) -> tuple[Tensor, Tensor]:
        """Chance of the tried draws and the residual without them; only to guess."""
        if self.judge is None:
            chance = at.residual.gather(1, token) / at.draft.gather(1, token)
            return chance[:, 0], normalised((at.residual - at.draft).clamp(min=0))
        first, count = self.first[at.trees, at.node], self.counts[at.trees, at.node]
        drawn = first[:, None] + torch.arange(int(count.max()))
        drawn = drawn.clamp(max=self.draws.nodes.shape[1] - 1)
        children = self.draws.nodes[at.trees[:, None], drawn]
        tokens = self.tree.token_ids[at.trees[:, None], children]
        probs = self.target_probs[self.prefixes[at.trees, at.node]]
        chances, rest = self.judge(at.draft, probs, tokens, count)
        return chances.gather(1, (at.candidate - first)[:, None])[:, 0], rest

    def _emitted(self, ended: Branches) -> tuple[Tensor, Tensor]:
        """Prefixes that ended walks emit, and their mass: [n, vocab_size] each."""
        size = self.target.vocab_size
        guess = normalised(ended.residual).cumsum(1)

        def at_most(rows: Tensor, uniforms: Tensor) -> Tensor:
            walks, tokens = rows // size, rows % size
            drawn = ended.uniforms[walks]
            drawn[:, 0] = uniforms
            return self._run(ended.trees[walks], drawn).next_token_ids <= tokens

        width = torch.as_tensor(self._width(ended)).expand_as(ended.mass)
        above = bracketed(at_most, guess.flatten(), width.repeat_interleave(size))
        law = above.view_as(guess).diff(dim=1, prepend=torch.zeros(len(guess), 1))
        prefix = self.prefixes[ended.trees, ended.node]
        emitted = prefix[:, None] * size + 1 + torch.arange(size)
        return emitted, ended.mass[:, None] * law


def law_error(
    scorer: Scorer,
    drawn: Weighted,
    target: Language,
    judge: Judge | None = None,
    width: float = CLOSE,
) -> float:
    """Largest error of the first tokens' joint law; ``judge`` as in LawMeter."""
    meter = LawMeter(scorer, drawn, target, width=width, judge=judge)
    law = meter.law(NUM_TOKENS)
    return float((law - target.true_law(NUM_TOKENS)).abs().max())


def float32_law_error(
    scorer: Scorer,
    draft: Tensor,
    language: Language,
    root: int = 0,
    factors: tuple[int, ...] = (2, 2),
    top_k: int | None = None,
    top_p: float | None = None,
) -> float:
    """How far emitted tokens are from the law of a table of logits, at temperature 0.7.

    Args:
        scorer: the rule.
        draft: float32 [num_prefixes, vocab_size], logits that drafts are drawn from.
        language: whose ``table`` has the logits that tokens should follow.
        root: the token of the roots.
        factors: of the trees, children of each node of a level.
        top_k: of all requests.
        top_p: of all requests.

    """
    sampling = partial(at_temperature, 0.7, top_k=top_k, top_p=top_p)

    def law_of(logits: Tensor) -> Language:
        return Language(naive_probs(logits.double() / 0.7, top_k, top_p))

    uniforms, weights = draft_uniforms(law_of(draft), factors)
    tree = propose(RsdC(factors), Language(draft), uniforms, sampling(len(weights)))
    tree.token_ids[:, 0] = root
    meter = LawMeter(scorer, Weighted(tree, weights), language, sampling, FLOAT32 / 4)
    true_law = law_of(language.table).true_law(NUM_TOKENS)
    return float((meter.law(NUM_TOKENS) - true_law).abs().max())


def normalised(mass: Tensor) -> Tensor:
    return mass / mass.sum(1, keepdim=True).clamp(min=1e-300)


def first_tokens(prefixes: Tensor, vocab_size: int, num_tokens: int) -> Tensor:
    """Cut prefixes to their first ``num_tokens`` tokens."""
    limit = sum(vocab_size**depth for depth in range(num_tokens + 1))
    while bool((prefixes >= limit).any()):
        prefixes = torch.where(
            prefixes >= limit, (prefixes - 1) // vocab_size, prefixes
        )
    return prefixes
