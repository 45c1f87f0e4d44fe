"""Drafts from a part of the target's vocabulary: mapping, law, and wrong versions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import draws_of, propose
from tests.fast.enumeration import rand
from tests.fast.languages import (
    Language,
    LanguageDraft,
    part_of,
    plain_sampling,
    random_tables,
)
from tests.fast.random_trees import random_trees
from tests.reference.proposers import gumbel, rsd_s_reference
from tests.reference.scorers import recursive_rejection_reference
from vllm_treespec.proposers import Proposer, RsdC, RsdS, SpecInfer
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import (
    TargetLogits,
    recursive_rejection,
)
from vllm_treespec.trees.tree import TreeBatch

# Wrong on purpose


# The fast path


@pytest.mark.parametrize(("vocab_size", "draft_size"), [(77, 40), (1001, 100)])
def test_walk_equals_reference(vocab_size: int, draft_size: int) -> None:
    """Red when batching changes a walk over a part of the vocabulary."""
    generator = torch.Generator().manual_seed(vocab_size)
    num_reqs, max_nodes = 40, 24
    tree = random_trees(num_reqs, max_nodes, draft_size, generator)
    vocabulary = torch.randperm(vocab_size, generator=generator)[:draft_size]
    vocabulary = vocabulary.sort().values
    draws = replace(draws_of(tree), vocabulary=vocabulary)
    noise = torch.randn(
        (num_reqs, max_nodes, vocab_size), generator=generator, dtype=torch.float64
    )
    # Half of the target's mass is on tokens that the draft does not have.
    logits = noise - math.log(vocab_size - draft_size)
    logits[..., vocabulary] = draws.probs.log() + noise[..., vocabulary]
    tree = replace(tree, token_ids=vocabulary[tree.token_ids], draws=draws)
    target = TargetLogits(
        logits.flatten(0, 1).softmax(1),
        torch.arange(num_reqs) * max_nodes,
        plain_sampling(num_reqs),
    )
    uniforms = rand(num_reqs, max_nodes + 1, seed=1)
    found = recursive_rejection(tree, target, uniforms)
    expected = recursive_rejection_reference(tree, target, uniforms)
    assert found.emitted(tree).equal(expected.emitted(tree))
    assert int(found.num_accepted.max()) > 1
    undraftable = torch.ones(vocab_size, dtype=torch.bool)
    undraftable[vocabulary] = False
    assert bool(undraftable[found.next_token_ids].any())
    # The rows that a request's selection keeps are its own.
    rows = torch.tensor([7, 3])
    part = recursive_rejection(
        tree.select(rows),
        replace(target, root_rows=target.root_rows[rows]),
        uniforms[rows],
    )
    assert part.next_token_ids.equal(found.next_token_ids[rows])


@pytest.mark.parametrize(
    "proposer",
    [RsdC((3, 2)), RsdS(3, 2), SpecInfer([(2, 2)])],
    ids=lambda p: type(p).__name__,
)
def test_whole_vocabulary_changes_nothing(proposer: Proposer) -> None:
    """Red when naming all tokens differs from naming none."""
    draft, target = random_tables("random", 5, 2)
    uniforms = rand(200, proposer.sizes.num_uniforms)
    sampling = plain_sampling(200)
    plain = propose(proposer, draft, uniforms, sampling)
    named = propose(proposer, draft, uniforms, sampling, torch.arange(5))
    assert named.token_ids.equal(plain.token_ids)
    assert named.parents.equal(plain.parents)
    scores = rand(200, plain.max_nodes + 1, seed=1)
    logits = target.target_logits(plain, sampling)
    found = recursive_rejection(named, logits, scores)
    expected = recursive_rejection(plain, logits, scores)
    assert found.emitted(named).equal(expected.emitted(plain))


def test_top_k_and_top_p_act_on_the_drafts_tokens() -> None:
    """Red when a request's restriction is taken over tokens the draft does not have."""
    draft, _, vocabulary = part_of("random", 5, [1, 2, 4])
    scores = Language(draft.table.log().float())
    sampling = SamplingTensors(
        torch.ones(50), torch.full((50,), 2), torch.full((50,), 0.99), all_random=True
    )
    uniforms = rand(50, RsdS(3, 1).sizes.num_uniforms)
    tree = propose(RsdS(3, 1), scores, uniforms, sampling, vocabulary)
    assert tree.num_nodes.tolist() == [3] * 50
    likeliest = draft.table[0].topk(2).indices.tolist()
    assert set(tree.token_ids[:, 1:3].flatten().tolist()) == set(likeliest)


def test_reference_proposer_maps_columns() -> None:
    """Red when the paper's beam search cannot be compared over a part any more."""
    draft, _, vocabulary = part_of("random", 4, [1, 3])
    noise = [gumbel(rand(20, width, 2, seed=width)) for width in (1, 2)]
    tree = rsd_s_reference(
        LanguageDraft(draft, 20, vocabulary),
        torch.zeros(20, dtype=torch.int64),
        plain_sampling(20),
        2,
        noise,
    )
    assert set(tree.token_ids[tree.depths > 0].tolist()) == {1, 3}
    assert draws_of(tree).vocabulary is vocabulary


def test_draft_models_of_one_tree_share_their_vocabulary() -> None:
    """Red when draws of different vocabularies are put into one table."""
    draft, _, vocabulary = part_of("random", 4, [1, 3])
    proposer = SpecInfer([(1, 1), (1,)])
    uniforms = rand(5, proposer.sizes.num_uniforms)

    def draw(*vocabularies: Tensor | None) -> TreeBatch:
        drafts = [LanguageDraft(draft, 5, own) for own in vocabularies]
        return propose(proposer, drafts, uniforms)

    tree = draw(vocabulary, vocabulary.clone())
    assert draws_of(tree).vocabulary is vocabulary
    for other in (None, torch.tensor([1, 2]), torch.tensor([1])):
        with pytest.raises(ValueError, match="same hot tokens"):
            draw(vocabulary, other)
        with pytest.raises(ValueError, match="same hot tokens"):
            draw(other, vocabulary)
