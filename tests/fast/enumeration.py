"""Exact laws by enumeration: all draft draws, all accept branches, any scorer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from tests.fast.languages import (
    NUM_TOKENS,
    Language,
    LanguageDraft,
    plain_sampling,
)
from vllm_treespec.proposers import Proposer, ProposerInputs, RsdC
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import ScorerOutput, TargetLogits
from vllm_treespec.scorers.independent_draws import Judge
from vllm_treespec.trees.tree import TreeBatch, first_draw, next_draw, num_draws

Scorer = Callable[[TreeBatch, TargetLogits, Tensor], ScorerOutput]

ALMOST_ONE = 1 - 2.0**-53
STEPS = 6


@dataclass(frozen=True)
class Weighted:
    """Trees with the probability that the proposer draws each of them."""

    tree: TreeBatch
    # float64 [num_reqs]
    weights: Tensor


def ordered_draws(
    probs: tuple[float, ...], count: int
) -> Iterator[tuple[tuple[int, ...], tuple[float, ...], float]]:
    """Every outcome of drawing tokens one after another without replacement.

    Yields:
        tokens (-1 where no token is left), the middle of each draw's interval of
        uniforms under inversion, and the outcome's probability.

    """
    if count == 0:
        yield (), (), 1.0
        return
    total = sum(probs)
    if total == 0:
        yield (-1,) * count, (0.5,) * count, 1.0
        return
    below = 0.0
    for token, mass in enumerate(probs):
        if mass > 0:
            rest = (*probs[:token], 0.0, *probs[token + 1 :])
            middle = min((below + mass / 2) / total, ALMOST_ONE)
            for tokens, uniforms, weight in ordered_draws(rest, count - 1):
                yield (token, *tokens), (middle, *uniforms), mass / total * weight
        below += mass


def token_uniforms(
    draft: Language, branching_factors: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Uniforms that make an RSD-C proposer draw each of its trees once.

    Returns:
        uniforms float64 [num_trees, max_nodes - 1] and the trees' probabilities
        float64 [num_trees].

    """
    rows: list[tuple[tuple[float, ...], float]] = []

    def grow(prefixes: list[int], level: int, row: tuple[float, ...], w: float) -> None:
        if level == len(branching_factors):
            rows.append((row, w))
            return
        count = branching_factors[level]
        options = [
            list(ordered_draws(tuple(draft.table[max(i, 0)].tolist()), count))
            if i >= 0
            else [((-1,) * count, (0.5,) * count, 1.0)]
            for i in prefixes
        ]
        for choice in product(*options):
            below, extended, weight = [], row, w
            for prefix, (tokens, uniforms, mass) in zip(prefixes, choice, strict=True):
                below += [
                    prefix * draft.vocab_size + 1 + t if t >= 0 else -1 for t in tokens
                ]
                extended, weight = extended + uniforms, weight * mass
            grow(below, level + 1, extended, weight)

    grow([0], 0, (), 1.0)
    uniforms = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    return uniforms, torch.tensor([weight for _, weight in rows], dtype=torch.float64)


def propose(
    proposer: Proposer,
    model: Language,
    sampling: SamplingTensors,
    uniforms: Tensor,
    vocabulary: Tensor | None = None,
) -> TreeBatch:
    """Let a proposer draw one tree per row of ``uniforms``."""
    num_reqs = len(uniforms)
    return proposer.propose(
        ProposerInputs(
            root_token_ids=torch.zeros(num_reqs, dtype=torch.int64),
            sampling=sampling,
            uniforms=uniforms,
            draft_models=[LanguageDraft(model, num_reqs, vocabulary)],
        )
    )


def all_trees(
    draft: Language, proposer: RsdC, vocabulary: Tensor | None = None
) -> Weighted:
    """Every tree the proposer can draw, drawn by the proposer itself."""
    uniforms, weights = token_uniforms(draft, proposer.branching_factors)
    sampling = plain_sampling(len(uniforms))
    tree = propose(proposer, draft, sampling, uniforms, vocabulary)
    return Weighted(tree, weights)


def bracketed(
    accepts: Callable[[Tensor, Tensor], Tensor], guess: Tensor, width: float | Tensor
) -> Tensor:
    """Where monotone tests turn from true to false on [0, 1), to ``width``.

    Args:
        accepts: from the numbers of some tests, int64 [m], and their uniforms [m] to
            bool [m]; true below a threshold, then false.
        guess: float64 [n], where the thresholds should be; two calls confirm it.
            A wrong guess only costs time: those thresholds are found by bisection.
        width: half the width of the accepted bracket, of all or float64 [n].

    """
    guess = guess.clamp(0, 1)
    every = torch.arange(len(guess))
    low = accepts(every, (guess - width).clamp(min=0)) | (guess <= width)
    high = accepts(every, (guess + width).clamp(max=ALMOST_ONE))
    rows = (~(low & (~high | (guess >= 1 - width)))).nonzero()[:, 0]
    if not len(rows):
        return guess
    bottom, top = torch.zeros_like(guess[rows]), torch.ones_like(guess[rows])
    limit = torch.as_tensor(width).expand_as(guess)[rows]
    while bool((top - bottom > limit).any()):
        middle = (bottom + top) / 2
        below = accepts(rows, middle.clamp(max=ALMOST_ONE))
        bottom, top = (
            torch.where(below, middle, bottom),
            torch.where(below, top, middle),
        )
    return guess.index_copy(0, rows, (bottom + top) / 2)


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
    ``width`` by running the scorer on both sides of it.
    """

    def __init__(
        self,
        scorer: Scorer,
        drawn: Weighted,
        target: Language,
        sampling: Callable[[int], SamplingTensors] = plain_sampling,
        width: float = 1e-13,
    ) -> None:
        assert drawn.tree.draws is not None
        self.scorer, self.drawn, self.sampling = scorer, drawn, sampling
        self.target, self.width, self.tree = target, width, drawn.tree
        self.draws = drawn.tree.draws
        self.first, self.following = first_draw(self.tree), next_draw(self.tree)
        self.prefixes = target.prefixes(self.tree)
        self.target_probs = sampling(1).probs(target.table[None])[0].double()

    def law(self, num_tokens: int) -> Tensor:
        """Joint law, float64 [vocab_size ** num_tokens].

        Emissions of fewer tokens are continued by the target.
        """
        language = Language(self.target_probs)
        reached = language.no_mass()
        branches = self._start()
        while bool((undecided := branches.candidate >= 0).any()):
            self._add_emitted(branches.select(~undecided), reached, num_tokens)
            branches = self._decide(branches.select(undecided))
        self._add_emitted(branches, reached, num_tokens)
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
        chance = at.residual.gather(1, token) / at.draft.gather(1, token)
        return chance[:, 0], normalised((at.residual - at.draft).clamp(min=0))

    def _add_emitted(self, ended: Branches, reached: Tensor, num_tokens: int) -> None:
        """Add what ended walks emit to ``reached``, cut to ``num_tokens`` tokens."""
        if not len(ended.mass):
            return
        vocab_size = self.target.vocab_size
        cumulative = normalised(ended.residual).cumsum(1)
        prefix = self.prefixes[ended.trees, ended.node]
        below = torch.zeros_like(ended.mass)
        for token in range(vocab_size):

            def at_most(rows: Tensor, uniforms: Tensor, token: int = token) -> Tensor:
                drawn = ended.uniforms[rows]
                drawn[:, 0] = uniforms
                return self._run(ended.trees[rows], drawn).next_token_ids <= token

            above = bracketed(at_most, cumulative[:, token], self._width(ended))
            emitted = prefix * vocab_size + 1 + token
            emitted = first_tokens(emitted, vocab_size, num_tokens)
            reached.index_add_(0, emitted, ended.mass * (above - below))
            below = above


class JudgeMeter(LawMeter):
    """Guesses from a rule for independent draws; a wrong guess only costs time.

    Without a rule it guesses like LawMeter.
    """

    def __init__(
        self, scorer: Scorer, drawn: Weighted, target: Language, judge: Judge | None
    ) -> None:
        super().__init__(scorer, drawn, target)
        self.judge, self.counts = judge, num_draws(drawn.tree)

    def _expected(self, at: Branches, token: Tensor) -> tuple[Tensor, Tensor]:
        if self.judge is None:
            return super()._expected(at, token)
        first, count = self.first[at.trees, at.node], self.counts[at.trees, at.node]
        drawn = first[:, None] + torch.arange(int(count.max()))
        drawn = drawn.clamp(max=self.draws.nodes.shape[1] - 1)
        children = self.draws.nodes[at.trees[:, None], drawn]
        tokens = self.tree.token_ids[at.trees[:, None], children]
        probs = self.target_probs[self.prefixes[at.trees, at.node]]
        chances, rest = self.judge(at.draft, probs, tokens, count)
        return chances.gather(1, (at.candidate - first)[:, None])[:, 0], rest


def law_error(
    scorer: Scorer, drawn: Weighted, target: Language, judge: Judge | None = None
) -> float:
    """Largest error of the first tokens' joint law; ``judge`` as in JudgeMeter."""
    law = JudgeMeter(scorer, drawn, target, judge).law(NUM_TOKENS)
    return float((law - target.true_law(NUM_TOKENS)).abs().max())


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


def grid_target(vocab_size: int = 3) -> Language:
    """A language whose probabilities are multiples of 1 / STEPS."""
    generator = torch.Generator().manual_seed(0)
    num_prefixes = sum(vocab_size**depth for depth in range(NUM_TOKENS))
    balls = torch.randint(vocab_size, (num_prefixes, STEPS), generator=generator)
    counts = torch.nn.functional.one_hot(balls, vocab_size).sum(1)
    return Language(counts.double() / STEPS)


def grid_law_error(scorer: Scorer, drawn: Weighted, target: Language) -> float:
    """Largest error of the law under a rule with one uniform a position.

    Args:
        scorer: uses column d of its uniforms at nodes of depth d.
        drawn: trees of at most two levels.
        target: its probabilities are multiples of 1 / STEPS, so that the middles of
            STEPS equal intervals draw its tokens exactly as often as they should.

    """
    tree, num_trees = drawn.tree, drawn.tree.num_reqs
    middles = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    reached = target.no_mass()
    logits = target.target_logits(tree, plain_sampling(num_trees))
    prefixes = target.prefixes(tree)
    for by_depth in torch.cartesian_prod(*[middles] * NUM_TOKENS):
        output = scorer(tree, logits, by_depth.expand(num_trees, -1))
        above = prefixes.gather(1, output.last_node()[:, None])[:, 0]
        emitted = above * target.vocab_size + 1 + output.next_token_ids
        reached.index_add_(0, emitted, drawn.weights / STEPS**NUM_TOKENS)
    law = target.joint_law(reached, NUM_TOKENS)
    return float((law - target.true_law(NUM_TOKENS)).abs().max())
