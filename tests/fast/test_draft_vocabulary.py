"""Drafts from a part of the target's vocabulary: mapping, law, and wrong versions."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast import independent_draws
from tests.fast.beam_trees import all_rsd_s_trees, rand
from tests.fast.enumeration import Scorer, Weighted, all_trees, law_error, propose
from tests.fast.languages import (
    Language,
    LanguageDraft,
    plain_sampling,
    random_tables,
)
from tests.fast.random_trees import random_trees
from tests.fast.wrong_scorers import (
    K_SEQ_JUDGE,
    RSD_S,
    WRONG_SCORERS,
    draws_of,
)
from tests.reference.proposers import gumbel, rsd_s_reference
from tests.reference.scorers import recursive_rejection_reference
from vllm_treespec.proposers import Proposer, ProposerInputs, RsdC, RsdS, SpecInfer
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import (
    ScorerOutput,
    TargetLogits,
    k_seq,
    multi_round,
    recursive_rejection,
)
from vllm_treespec.trees.tree import TreeBatch

EXACT = 1e-12
NOTICEABLE = 1e-3
KINDS = ["random", "zeros", "equal", "disjoint", "top_k", "peaked"]
# vocabulary of the target, tokens of the draft, beam width
SIZES = [(3, [0, 2], 2), (4, [1, 3], 2), (4, [0, 2, 3], 2), (5, [1, 2, 4], 3)]


def restricted(draft: Language, tokens: list[int]) -> Language:
    """The draft that knows no other tokens; prefixes keep the target's numbers."""
    mass = torch.zeros_like(draft.table)
    mass[:, tokens] = draft.table[:, tokens]
    mass[mass.sum(1) == 0, tokens[0]] = 1
    return Language(mass / mass.sum(1, keepdim=True))


def hot_tables(
    kind: str, vocab_size: int, tokens: list[int]
) -> tuple[Language, Language, Tensor]:
    """A draft language of some tokens, a target of all, and the draft's vocabulary."""
    draft, target = random_tables(kind, vocab_size, 2)
    return restricted(draft, tokens), target, torch.tensor(tokens)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_law_of_stochastic_beams(kind: str, size: tuple[int, list[int], int]) -> None:
    """Red when tokens that the draft cannot draw lose or gain mass."""
    vocab_size, tokens, beam_width = size
    draft, target, vocabulary = hot_tables(kind, vocab_size, tokens)
    for seed in range(3):
        drawn = all_rsd_s_trees(draft, beam_width, seed, vocabulary)
        assert draws_of(drawn.tree).probs.shape[2] == len(tokens)
        assert law_error(recursive_rejection, drawn, target) < EXACT


@pytest.mark.parametrize("scorer", [recursive_rejection, recursive_rejection_reference])
@pytest.mark.parametrize("kind", KINDS)
def test_law_of_constant_trees(kind: str, scorer: Scorer) -> None:
    """Red when the walk or its readable reference mixes columns and tokens up."""
    draft, target, vocabulary = hot_tables(kind, 4, [1, 3])
    drawn = all_trees(draft, RsdC((2, 1)), vocabulary)
    assert law_error(scorer, drawn, target) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_law_of_independent_draws(kind: str) -> None:
    """Red when multi-round or K-SEQ mixes columns and tokens up."""
    draft, target, vocabulary = hot_tables(kind, 4, [0, 2, 3])
    proposer = SpecInfer([(2, 1)])
    drawn = independent_draws.all_trees(proposer, [draft], vocabulary)
    assert law_error(multi_round, drawn, target) < EXACT
    assert law_error(k_seq, drawn, target, K_SEQ_JUDGE) < EXACT


def test_law_of_cut_trees() -> None:
    """Red when the scheduler's cut loses the vocabulary."""
    draft, target, vocabulary = hot_tables("random", 4, [1, 3])
    drawn = all_rsd_s_trees(draft, 2, 0, vocabulary)
    tree = drawn.tree.cut(torch.full_like(drawn.tree.num_nodes, 4))
    assert law_error(recursive_rejection, Weighted(tree, drawn.weights), target) < EXACT


# Wrong on purpose


def columns_as_tokens(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Reads the draft's columns as the target's first tokens."""
    draws = draws_of(tree)
    spare = target.logits.shape[1] - draws.probs.shape[2]
    probs = torch.nn.functional.pad(draws.probs, (0, spare))
    tree = replace(tree, draws=replace(draws, probs=probs, vocabulary=None))
    return recursive_rejection(tree, target, uniforms)


def not_normalised(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Takes the shares of the drafted tokens among all tokens for the draft."""
    draws = draws_of(tree)
    tree = replace(tree, draws=replace(draws, probs=draws.probs * 0.8))
    return recursive_rejection(tree, target, uniforms)


def next_columns(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """Scatters every column to the token of the next one."""
    draws = draws_of(tree)
    assert draws.vocabulary is not None
    moved = replace(draws, vocabulary=draws.vocabulary.roll(1))
    return recursive_rejection(replace(tree, draws=moved), target, uniforms)


WRONG = {
    **WRONG_SCORERS,
    "columns as tokens": columns_as_tokens,
    "draft not normalised over its tokens": not_normalised,
    "columns moved": next_columns,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_scorers_are_noticed(name: str) -> None:
    """Red when a scorer could spoil a part of the vocabulary unseen."""
    draft, target, vocabulary = hot_tables("random", 4, [0, 2, 3])
    drawn = all_trees(draft, RsdC((2, 1)), vocabulary)
    assert law_error(WRONG[name], drawn, target) > NOTICEABLE


def test_unmapped_columns_are_noticed() -> None:
    """Red when a proposer that hands columns on as tokens would pass."""
    draft, target, vocabulary = hot_tables("random", 4, [0, 2, 3])
    with patch.object(RSD_S, "tokens_of", lambda columns, vocabulary: columns):
        drawn = all_rsd_s_trees(draft, 2, 0, vocabulary)
    assert law_error(recursive_rejection, drawn, target) > NOTICEABLE


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
    plain = propose(proposer, draft, sampling, uniforms)
    named = propose(proposer, draft, sampling, uniforms, torch.arange(5))
    assert named.token_ids.equal(plain.token_ids)
    assert named.parents.equal(plain.parents)
    scores = rand(200, plain.max_nodes + 1, seed=1)
    logits = target.target_logits(plain, sampling)
    found = recursive_rejection(named, logits, scores)
    expected = recursive_rejection(plain, logits, scores)
    assert found.emitted(named).equal(expected.emitted(plain))


def test_top_k_and_top_p_act_on_the_drafts_tokens() -> None:
    """Red when a request's restriction is taken over tokens the draft does not have."""
    draft, _, vocabulary = hot_tables("random", 5, [1, 2, 4])
    scores = Language(draft.table.log().float())
    sampling = SamplingTensors(
        torch.ones(50), torch.full((50,), 2), torch.full((50,), 0.99), all_random=True
    )
    uniforms = rand(50, RsdS(3, 1).sizes.num_uniforms)
    tree = propose(RsdS(3, 1), scores, sampling, uniforms, vocabulary)
    assert tree.num_nodes.tolist() == [3] * 50
    likeliest = draft.table[0].topk(2).indices.tolist()
    assert set(tree.token_ids[:, 1:3].flatten().tolist()) == set(likeliest)


def test_reference_proposer_maps_columns() -> None:
    """Red when the paper's beam search cannot be compared over a part any more."""
    draft, _, vocabulary = hot_tables("random", 4, [1, 3])
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
    draft, _, vocabulary = hot_tables("random", 4, [1, 3])
    proposer = SpecInfer([(1, 1), (1,)])

    def draw(*vocabularies: Tensor | None) -> TreeBatch:
        return proposer.propose(
            ProposerInputs(
                root_token_ids=torch.zeros(5, dtype=torch.int64),
                sampling=plain_sampling(5),
                uniforms=rand(5, proposer.sizes.num_uniforms),
                draft_models=[LanguageDraft(draft, 5, own) for own in vocabularies],
            )
        )

    tree = draw(vocabulary, vocabulary.clone())
    assert draws_of(tree).vocabulary is vocabulary
    for other in (None, torch.tensor([1, 2]), torch.tensor([1])):
        with pytest.raises(ValueError, match="same hot tokens"):
            draw(vocabulary, other)
        with pytest.raises(ValueError, match="same hot tokens"):
            draw(other, vocabulary)
