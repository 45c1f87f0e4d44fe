"""Drafts from a part of the target's vocabulary: mapping, law, and wrong versions."""

from __future__ import annotations

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
from vllm_treespec.proposers import Proposer, RsdC, RsdS, SpecInfer
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import (
    recursive_rejection,
)
from vllm_treespec.trees.tree import TreeBatch


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
