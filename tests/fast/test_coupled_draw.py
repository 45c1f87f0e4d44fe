"""Coupled draw: drafts look at the noise of positions; what is emitted stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from tests.fast.chi_square import goodness_of_fit, p_value
from tests.fast.drafting import at_temperature, propose
from tests.fast.enumeration import EXACT, NOTICEABLE, all_trees
from tests.fast.languages import Language, plain_sampling, random_tables
from tests.fast.random_trees import random_trees
from tests.fast.rule_forms import STEPS, by_position, grid_target, random_keys
from tests.tiers import cases, grid
from vllm_treespec.proposers import DynamicTree, SpecTr
from vllm_treespec.sampling.coupling import (
    LIKELIEST,
    coupled_chances,
    draw_coupled,
    noise_of,
)
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import coupled_draw
from vllm_treespec.scorers.coupled_draw import coupled_draw_batched
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import TreeBatch

SURELY_WRONG, SUSPICIOUS = 1e-9, 1e-3
SAMPLED = 40_000
# No tree here is deeper.
SIZES = DynamicTree(4, 8, 8).sizes


def logits_of(language: Language) -> Language:
    """The same language as float32 logits."""
    return Language(language.table.log().float())


def pairs(vocab_size: int, depth: int) -> tuple[Language, Language]:
    """Logits of a draft and of a target."""
    draft, target = random_tables("random", vocab_size, depth)
    return logits_of(draft), logits_of(target)


def noisy_trees(draft: Language, keys: Tensor | None, num_drafts: int) -> TreeBatch:
    """Trees of two levels that follow the noise of these keys."""
    num_reqs = SAMPLED if keys is None else len(keys)
    return propose(
        DynamicTree(2, 2, num_drafts),
        draft,
        sampling=at_temperature(1.0, num_reqs),
        num_reqs=num_reqs,
        noise_keys=keys,
    )


# The rule, by enumeration of the noise of positions


def displaced(noise: tuple[float, ...]) -> TreeBatch:
    """A tree with room for two drafts: deep noise decides over the second one."""
    deep = from_parents([[0, 0, 1]], [[-1, 0, 1]])
    wide = from_parents([[0, 0, 1]], [[-1, 0, 0]])
    return deep if noise[1] < 0.5 else wide


def lost(noise: tuple[float, ...]) -> TreeBatch:
    """No draft where the noise makes the first one unlikely."""
    if noise[0] < 0.3:
        return from_parents([[0, 0, 1]], [[-1, 0, 0]])
    return from_parents([[0]], [[-1]])


FollowingNoise = Callable[[tuple[float, ...]], TreeBatch]


def steps_law_error(tree_of: FollowingNoise, anew: bool) -> float:
    """Largest error of the first two tokens' law, over as many steps as they take.

    Args:
        tree_of: the first step's tree by the noise of two positions.
        anew: whether a step that follows draws its own noise, which is wrong.

    """
    target = grid_target()
    reached = target.no_mass()
    middles = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    fresh = torch.cartesian_prod(middles, middles)
    count = len(fresh)
    weights = torch.full((count,), STEPS**-4, dtype=torch.float64)
    for first, second in product(middles.tolist(), repeat=2):
        one = tree_of((first, second))
        tree = one.select(torch.zeros(count, dtype=torch.int64))
        noise = torch.tensor([[first, second, 0.5]], dtype=torch.float64)
        noise = noise.repeat(count, 1)
        if anew and int(one.num_nodes) == 1:
            noise[:, 0] = fresh[:, 0]
        logits = target.target_logits(tree, plain_sampling(count))
        emitted = by_position(tree, logits, noise).emitted(tree)
        prefix, token = 1 + emitted[:, 0], emitted[:, 1]
        numbers = fresh[:, 1] if anew else noise[:, 1]
        drawn = (numbers[:, None] >= target.table[prefix].cumsum(1) - 1e-9).sum(1)
        token = torch.where(token < 0, drawn, token)
        place = prefix * target.vocab_size + 1 + token
        reached.index_add_(0, place, weights)
    return float((target.joint_law(reached, 2) - target.true_law(2)).abs().max())


@pytest.mark.parametrize("tree_of", [displaced, lost])
def test_law_of_trees_that_drop_nodes_for_their_noise(tree_of: FollowingNoise) -> None:
    """Red when noise that lost its node is drawn anew: then the law is bent."""
    assert steps_law_error(tree_of, anew=False) < EXACT
    assert steps_law_error(tree_of, anew=True) > NOTICEABLE


def test_it_needs_one_key_a_depth() -> None:
    """Red when the rule asks for more numbers than a step hands out."""
    tree = from_parents([[0, 1, 0]], [[-1, 0, 1]])
    target = Language(torch.eye(3).double()[[1, 0, 2, 2, 2] + [0] * 8])
    logits = target.target_logits(tree, plain_sampling(1))
    output = coupled_draw(tree, logits, random_keys(1, 3))
    assert output.path.tolist() == [[1, -1]]
    assert output.next_token_ids.tolist() == [2]


def test_draws_are_not_looked_at() -> None:
    """Red when sampled drafts are judged differently from the same fixed tree."""
    draft, target = random_tables("random", 3, 2)
    tree = all_trees(SpecTr(2, 2), draft).tree
    keys = random_keys(tree.num_reqs, 3)
    logits = target.target_logits(tree, plain_sampling(tree.num_reqs))
    output = coupled_draw(tree, logits, keys)
    bare = coupled_draw(replace(tree, draws=None), logits, keys)
    assert output.emitted(tree).equal(bare.emitted(tree))
    assert int(output.num_accepted.max()) == 2


# The noise


@pytest.mark.parametrize("fixed", ["key", "token"])
def test_noise_is_exponential(fixed: str) -> None:
    """Red when the hash is no good source of noise over tokens, or over keys."""
    keys, tokens = random_keys(30_000), torch.arange(30_000)
    noise = (
        noise_of(keys, tokens[:1]) if fixed == "token" else noise_of(keys[:1], tokens)
    )
    assert kstest(noise.numpy(), "expon").pvalue > SUSPICIOUS
    lagged = torch.corrcoef(torch.stack([noise[1:], noise[:-1]]))[0, 1]
    assert abs(float(lagged)) < 0.02


@pytest.mark.parametrize("can_sync", [False, True])
@pytest.mark.parametrize(
    "vocab_size",
    cases([4, LIKELIEST, LIKELIEST + 1, 500], quick=[4, LIKELIEST + 1]),
)
def test_law_of_one_draw(vocab_size: int, can_sync: bool) -> None:
    """Red when tokens beyond the likeliest ones are drawn too often, or never."""
    mass = torch.rand(vocab_size, generator=torch.Generator().manual_seed(1)) ** 3
    probs = mass / mass.sum()
    parts = random_keys(SAMPLED, seed=2).split(4_000)
    tokens = torch.cat(
        [draw_coupled(probs.expand(len(k), -1), k, can_sync) for k in parts]
    )
    assert p_value(tokens, probs) > SUSPICIOUS


def test_waiting_changes_no_draw() -> None:
    """Red when the host's shortcut leaves out a token that would have been drawn."""
    generator = torch.Generator().manual_seed(3)
    for spread in (0.5, 3.0, 6.0):
        logits = spread * torch.randn(2_000, 300, generator=generator)
        probs, keys = logits.softmax(1), random_keys(2_000, seed=4)
        assert draw_coupled(probs, keys).equal(draw_coupled(probs, keys, True))


@pytest.mark.parametrize("can_sync", [False, True])
def test_rows_without_mass_give_the_first_token(can_sync: bool) -> None:
    """Red when a row of zeros gives what vLLM's sampler would not."""
    probs = torch.zeros(2, 100)
    probs[1, 7] = 1
    assert draw_coupled(probs, random_keys(2), can_sync).tolist() == [0, 7]


# Both together


def law_of(target: Language, tree: TreeBatch, keys: Tensor, after: Tensor) -> float:
    """p-value of the first two tokens; ``after`` are keys of the step that follows."""
    logits = target.target_logits(tree, at_temperature(1.0, len(keys)))
    emitted = coupled_draw_batched(tree, logits, keys, SIZES).emitted(tree)
    probs = target.table.softmax(1)
    second = draw_coupled(probs[1 + emitted[:, 0]], after)
    second = torch.where(emitted[:, 1] >= 0, emitted[:, 1], second)
    size = target.vocab_size
    counts = torch.bincount(emitted[:, 0] * size + second, minlength=size**2)
    return goodness_of_fit(counts, Language(probs.double()).true_law(2))


@pytest.mark.parametrize(
    ("vocab_size", "num_drafts"),
    grid([2, 5], [1, 2, 6], quick=lambda *case: case in ((2, 2), (5, 6))),
)
def test_law_where_drafts_followed_the_noise(vocab_size: int, num_drafts: int) -> None:
    """Red when a tree that looked at the noise changes what is emitted.

    With room for two drafts, which a shallow and a deep node may take, noise that is
    drawn anew bends the law.
    """
    draft, target = pairs(vocab_size, 2)
    keys = random_keys(SAMPLED, 3, seed=3)
    tree = noisy_trees(draft, keys, num_drafts)
    assert law_of(target, tree, keys, keys[:, 1]) > SUSPICIOUS
    if (vocab_size, num_drafts) == (2, 2):
        anew = random_keys(SAMPLED, seed=4)
        assert law_of(target, tree, keys, anew) < SURELY_WRONG


def test_what_is_emitted_does_not_depend_on_the_tree() -> None:
    """Red when a tree decides tokens, and not only how many one step emits."""
    generator = torch.Generator().manual_seed(0)
    target = pairs(4, 6)[1]
    trees = [random_trees(400, 7, 4, generator) for _ in range(2)]
    keys, sampling = random_keys(400, 8, seed=6), at_temperature(1.0, 400)
    one, other = (
        coupled_draw(tree, target.target_logits(tree, sampling), keys).emitted(tree)
        for tree in trees
    )
    width = min(one.shape[1], other.shape[1])
    one, other = one[:, :width], other[:, :width]
    both = (one >= 0) & (other >= 0)
    assert int(both[:, 1].sum()) > 30
    assert one[both].equal(other[both])


def test_drafts_that_follow_the_noise_are_accepted_more_often() -> None:
    """Red when draft and target no longer look at the same noise."""
    draft, target = pairs(5, 2)
    keys, sampling = random_keys(SAMPLED, 3, seed=7), at_temperature(1.0, SAMPLED)
    accepted = []
    for followed in (keys, random_keys(SAMPLED, 3, seed=8), None):
        tree = noisy_trees(draft, followed, 1)
        logits = target.target_logits(tree, sampling)
        scored = coupled_draw_batched(tree, logits, keys, SIZES)
        accepted.append(float((scored.num_accepted > 0).double().mean()))
    p, q = draft.table[0].softmax(0), target.table[0].softmax(0)
    distance = float((p - q).abs().sum() / 2)
    # Theorem of arXiv 2408.07978.
    assert accepted[0] > (1 - distance) / (1 + distance) - 0.01
    assert accepted[0] > max(accepted[1:]) + 0.05


def test_chances_sum_to_one() -> None:
    """Red when what a draft promises is no probability."""
    generator = torch.Generator().manual_seed(9)
    probs = torch.rand(1, 6, generator=generator).softmax(1)
    tokens = torch.arange(6).expand(1000, 1, -1)
    keys = random_keys(1000)
    noise = noise_of(keys[:, None, None], tokens)
    chances = coupled_chances(noise, probs.expand(1000, 1, -1))
    assert float((chances.sum(-1) - 1).abs().max()) < 1e-6
    few = coupled_chances(noise[..., :2], probs[:, None, :2].expand(1000, 1, -1))
    assert float(few.sum(-1).max()) < 1


def test_greedy_requests_beside_sampled_ones_ignore_the_noise() -> None:
    """Red when a greedy request's tree depends on its batch."""
    draft = pairs(5, 2)[0]
    proposer, keys = DynamicTree(2, 2, 4), random_keys(2, 3)
    mixed = SamplingTensors(torch.tensor([0.0, 1.0]))
    tree, alone = (
        propose(proposer, draft, None, sampling, num_reqs=2, noise_keys=keys)
        for sampling in (mixed, at_temperature(0.0, 2))
    )
    assert tree.token_ids[0].equal(alone.token_ids[0])
    assert not tree.token_ids[1].equal(alone.token_ids[1])
