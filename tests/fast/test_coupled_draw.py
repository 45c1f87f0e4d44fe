"""Coupled draw: drafts look at the noise by which the target draws; the law stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from tests.fast.chi_square import goodness_of_fit, p_value
from tests.fast.enumeration import propose
from tests.fast.languages import Language, LanguageDraft, random_tables
from tests.fast.random_trees import random_trees
from vllm_treespec.core.coupling import (
    LIKELIEST,
    coupled_chances,
    draw_coupled,
    noise_of,
)
from vllm_treespec.core.prices import Prices
from vllm_treespec.core.sampling import SamplingTensors
from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.proposers import DynamicTree, ProposerInputs
from vllm_treespec.scorers import coupled_draw
from vllm_treespec.scorers.coupled_draw import coupled_draw_batched

SURELY_WRONG, SUSPICIOUS = 1e-9, 1e-3
SAMPLED = 40_000


def uniforms(*shape: int, seed: int = 0) -> Tensor:
    """Keys of noise."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def sampled(num_reqs: int) -> SamplingTensors:
    """All requests at temperature 1."""
    return SamplingTensors(torch.ones(num_reqs), all_random=True)


def logits_of(language: Language) -> Language:
    """The same language as float32 logits."""
    return Language(language.table.log().float())


def pairs(vocab_size: int, depth: int) -> tuple[Language, Language]:
    """Logits of a draft and of a target."""
    draft, target = random_tables("random", vocab_size, depth)
    return logits_of(draft), logits_of(target)


def noisy_trees(draft: Language, keys: Tensor, num_drafts: int = 4) -> TreeBatch:
    """Trees of two levels that follow the noise of these keys."""
    return propose(DynamicTree(2, 2, num_drafts), draft, sampled(len(keys)), keys)


def law_of(target: Language, tree: TreeBatch, keys: Tensor, fresh: Tensor) -> float:
    """p-value of the first two emitted tokens; ``fresh`` keys draw what is missing."""
    sampling = sampled(len(keys))
    emitted = coupled_draw(tree, target.target_logits(tree, sampling), keys).emitted(
        tree
    )
    probs = target.table.softmax(1)
    second = draw_coupled(probs[1 + emitted[:, 0]], fresh)
    second = torch.where(emitted[:, 1] >= 0, emitted[:, 1], second)
    size = target.vocab_size
    counts = torch.bincount(emitted[:, 0] * size + second, minlength=size**2)
    return goodness_of_fit(counts, Language(probs.double()).true_law(2))


@pytest.mark.parametrize("fixed", ["key", "token"])
def test_noise_is_gumbel(fixed: str) -> None:
    """Red when the hash is no good source of noise over tokens, or over keys."""
    keys, tokens = uniforms(30_000), torch.arange(30_000)
    noise = (
        noise_of(keys, tokens[:1]) if fixed == "token" else noise_of(keys[:1], tokens)
    )
    assert kstest(noise.numpy(), "gumbel_r").pvalue > SUSPICIOUS
    lagged = torch.corrcoef(torch.stack([noise[1:], noise[:-1]]))[0, 1]
    assert abs(float(lagged)) < 0.02


@pytest.mark.parametrize("vocab_size", [4, LIKELIEST, LIKELIEST + 1, 500])
def test_law_of_one_draw(vocab_size: int) -> None:
    """Red when tokens beyond the likeliest ones are drawn too often, or never."""
    mass = uniforms(vocab_size, seed=1).float() ** 3
    probs = mass / mass.sum()
    keys = uniforms(SAMPLED, seed=2).split(4_000)
    tokens = torch.cat([draw_coupled(probs.expand(len(k), -1), k) for k in keys])
    assert p_value(tokens, probs) > SUSPICIOUS


def test_rows_without_mass_give_the_first_token() -> None:
    """Red when a row of zeros gives what vLLM's sampler would not."""
    probs = torch.zeros(2, 100)
    probs[1, 7] = 1
    assert draw_coupled(probs, uniforms(2)).tolist() == [0, 7]


@pytest.mark.parametrize("vocab_size", [3, 5])
def test_law_where_drafts_followed_the_noise(vocab_size: int) -> None:
    """Red when a tree that looked at the noise changes what is emitted."""
    draft, target = pairs(vocab_size, 2)
    keys = uniforms(SAMPLED, 3, seed=3)
    tree = noisy_trees(draft, keys)
    assert tree.keys is keys
    assert law_of(target, tree, keys, uniforms(SAMPLED, seed=4)) > SUSPICIOUS


def test_fresh_noise_for_trees_that_depend_on_theirs_is_lossy() -> None:
    """Red when the law test could no longer see drafts that are lost by their noise.

    Requests whose drafts are unlikely lose their trees here, and draw by other noise.
    """
    draft, target = pairs(3, 2)
    keys = uniforms(SAMPLED, 3, seed=3)
    tree = noisy_trees(draft, keys)
    lost = tree.token_ids[:, 1] == 0
    num_nodes = torch.where(lost, 1, tree.num_nodes)
    other = torch.where(lost[:, None], uniforms(SAMPLED, 3, seed=5), keys)
    fresh = uniforms(SAMPLED, seed=4)
    assert law_of(target, tree.cut(num_nodes), keys, fresh) > SUSPICIOUS
    assert law_of(target, tree.cut(num_nodes), other, fresh) < SURELY_WRONG


def test_what_is_emitted_does_not_depend_on_the_tree() -> None:
    """Red when a tree decides tokens, and not only how many one step emits."""
    generator = torch.Generator().manual_seed(0)
    target = pairs(4, 6)[1]
    trees = [random_trees(400, 7, 4, generator) for _ in range(2)]
    keys, sampling = uniforms(400, 8, seed=6), sampled(400)
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
    keys, sampling = uniforms(SAMPLED, 3, seed=7), sampled(SAMPLED)
    accepted = []
    for tree in (
        noisy_trees(draft, keys, 1),
        noisy_trees(draft, uniforms(SAMPLED, 3, seed=8), 1),
        noisy_trees(draft, keys[:, :0], 1),
    ):
        scored = coupled_draw(tree, target.target_logits(tree, sampling), keys)
        accepted.append(float((scored.num_accepted > 0).double().mean()))
    p, q = draft.table[0].softmax(0), target.table[0].softmax(0)
    distance = float((p - q).abs().sum() / 2)
    # Theorem of arXiv 2408.07978.
    assert accepted[0] > (1 - distance) / (1 + distance) - 0.01
    assert accepted[0] > max(accepted[1:]) + 0.05


def test_chances_are_the_share_of_noise_in_which_a_token_wins() -> None:
    """Red when what a draft promises is no probability."""
    probs = uniforms(1, 6, seed=9).float().softmax(1)
    tokens = torch.arange(6).expand(1000, 1, -1)
    chances = coupled_chances(uniforms(1000), tokens, probs.expand(1000, 1, -1))
    assert float((chances.sum(-1) - 1).abs().max()) < 1e-6
    few = coupled_chances(
        uniforms(1000), tokens[..., :2], probs[:, None, :2].expand(1000, 1, -1)
    )
    assert float(few.sum(-1).max()) < 1


@pytest.mark.parametrize("follows", [True, False])
def test_a_sampled_request_always_has_a_draft(follows: bool) -> None:
    """Red when a price leaves out what the noise made unlikely: that is lossy."""
    draft = logits_of(random_tables("equal", 5, 2)[0])
    num_reqs = 50
    tree = propose_dear(draft, uniforms(num_reqs, 3 if follows else 0))
    assert set(tree.num_nodes.tolist()) == ({2} if follows else {1})


def propose_dear(draft: Language, keys: Tensor) -> TreeBatch:
    """Trees where no draft is worth its price."""
    num_reqs = len(keys)
    return DynamicTree(2, 2, 4).propose(
        ProposerInputs(
            torch.zeros(num_reqs, dtype=torch.int64),
            sampled(num_reqs),
            keys,
            [LanguageDraft(draft, num_reqs)],
            prices=Prices(1.5, 0.0, [1.0] * num_reqs),
        )
    )


def test_greedy_requests_beside_sampled_ones_ignore_the_noise() -> None:
    """Red when a greedy request's tree depends on its batch."""
    draft = pairs(5, 2)[0]
    keys = uniforms(2, 3, seed=1)
    mixed = SamplingTensors(torch.tensor([0.0, 1.0]))
    greedy = SamplingTensors(torch.zeros(2), all_greedy=True)
    proposer = DynamicTree(2, 2, 4)
    tree = propose(proposer, draft, mixed, keys)
    alone = propose(proposer, draft, greedy, keys)
    assert tree.token_ids[0].equal(alone.token_ids[0])
    assert alone.keys is None


def test_batched_form() -> None:
    """Red when the form without waiting emits something else than the walk."""
    generator = torch.Generator().manual_seed(2)
    tree = replace(random_trees(30, 9, 4, generator), draws=None)
    target = pairs(4, 8)[1].target_logits(tree, sampled(30))
    keys = uniforms(30, 10, seed=3)
    sizes = DynamicTree(4, 8, 8).sizes
    walked = coupled_draw(tree, target, keys)
    batched = coupled_draw_batched(tree, target, keys, sizes)
    assert walked.emitted(tree).equal(
        batched.emitted(tree)[:, : walked.path.shape[1] + 1]
    )


def test_keys_travel_with_the_trees() -> None:
    """Red when a tree that is cut, or picked, is verified by another one's noise."""
    draft = pairs(3, 2)[0]
    keys = uniforms(3, 3)
    tree = noisy_trees(draft, keys).select(torch.tensor([2, 0]))
    assert tree.keys is not None
    assert tree.keys.equal(keys[[2, 0]])
    cut = tree.cut(torch.tensor([1, 2]))
    assert cut.keys is tree.keys
