"""SpecTr: the law of its paths, their tree, and what both rules emit from it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import at_temperature, propose, same_trees
from tests.fast.enumeration import all_trees, rand
from tests.fast.languages import (
    Language,
    LanguageDraft,
    plain_sampling,
    random_tables,
)
from vllm_treespec.config import parse_spec_config
from vllm_treespec.proposers import SpecTr
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import RULES, k_seq
from vllm_treespec.trees.tree import draw_parents, num_draws

SHAPES = [(3, 1, 3), (4, 3, 1), (3, 2, 2), (2, 3, 2), (2, 2, 3)]


@pytest.mark.parametrize(("vocab_size", "num_paths", "depth"), SHAPES)
def test_equal_prefixes_are_one_node_and_every_path_a_draw(
    vocab_size: int, num_paths: int, depth: int
) -> None:
    """Red when merging loses a path or keeps a prefix twice."""
    draft, _ = random_tables("random", vocab_size, depth)
    tree = all_trees(SpecTr(num_paths, depth), [draft]).tree
    draws, prefixes = tree.draws, draft.prefixes(tree)
    assert draws is not None
    assert not bool(draws.without_replacement.any())
    assert bool((draws.nodes > 0).all())
    hits = torch.zeros_like(tree.parents)
    hits.scatter_add_(1, draws.nodes, torch.ones_like(draws.nodes))
    inner = tree.is_node() & (tree.depths < depth)
    hits[:, 0] = num_paths
    assert num_draws(tree)[inner].equal(hits[inner])
    for row, size in zip(prefixes.tolist(), tree.num_nodes.tolist(), strict=True):
        assert len(set(row[:size])) == size
    # Whatever was drawn below a node was drawn from the draft's law after it.
    above = prefixes.gather(1, draw_parents(tree))
    reqs = torch.arange(tree.num_reqs)[:, None]
    assert draws.probs[reqs, draws.rows].equal(draft.table[above])


class PlaceDraft(LanguageDraft):
    """A draft model that after any level gives place ``i`` of it token ``i``."""

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        probs = super().extend(token_ids, parents)
        return torch.eye(*probs.shape[1:], dtype=probs.dtype).expand_as(probs)


def test_equal_prefixes_share_one_distribution() -> None:
    """Red when rounding in a forward gives the draws of one node several laws."""
    draft, target = random_tables("random", 3, 3)
    uniforms, sampling = rand(50, 9), plain_sampling(50)
    tree = propose(SpecTr(3, 3), PlaceDraft(draft, 50), uniforms, sampling)
    draws, parents = tree.draws, draw_parents(tree)
    assert draws is not None
    together = parents[:, 1:] == parents[:, :-1]
    assert bool(together[:, 3:].any())
    assert draws.rows[:, 1:][together].equal(draws.rows[:, :-1][together])
    probs = draws.probs[torch.arange(50)[:, None], draws.rows]
    tokens = tree.token_ids.gather(1, draws.nodes)
    assert bool((probs.gather(2, tokens[..., None]) > 0).all())
    k_seq(tree, target.target_logits(tree, sampling), uniforms.repeat(1, 2))


# Greedy


def bigrams(size: int) -> Language:
    """Logits of a language in which only the last token matters, two tokens deep."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn((size + 1, size), generator=generator)
    last = torch.cat([torch.zeros(1), 1 + torch.arange(size + size**2) % size])
    return Language(table[last.long()])


def test_greedy_paths_start_with_the_likeliest_tokens() -> None:
    """Red when temperature 0 draws one chain, or anything but greedy paths."""
    draft = bigrams(9)
    tree = propose(SpecTr(3, 3), draft, sampling=at_temperature(0.0))
    assert tree.draws is None
    assert tree.num_nodes.tolist() == [10]
    first = draft.table[0].topk(3).indices
    second = draft.table[1 + first].argmax(1)
    third = draft.table[1 + second].argmax(1)
    assert tree.token_ids[0, 1:].tolist() == [*first, *second, *third]
    assert tree.parents[0].tolist() == [-1, 0, 0, 0, 1, 2, 3, 4, 5, 6]


def test_greedy_paths_of_a_one_token_distribution_are_one_chain() -> None:
    """Red when top-k below the number of paths drafts tokens without mass."""
    sampling = SamplingTensors(
        torch.zeros(2), top_k=torch.tensor([1, 2]), all_greedy=True
    )
    tree = propose(SpecTr(3, 2), bigrams(9), sampling=sampling, num_reqs=2)
    assert tree.num_nodes.tolist() == [3, 5]


def test_mixed_batch_equals_its_parts() -> None:
    """Red when greedy and sampled requests disturb each other."""
    draft, proposer = bigrams(9), SpecTr(3, 3)
    uniforms = rand(4, 9, seed=2)
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.5])
    mixed = propose(proposer, [draft], uniforms, SamplingTensors(temperature))
    assert mixed.draws is not None
    for greedy in (True, False):
        rows = ((temperature == 0) == greedy).nonzero()[:, 0]
        part = SamplingTensors(
            temperature[rows], all_greedy=greedy, all_random=not greedy
        )
        alone = propose(proposer, [draft], uniforms[rows], part)
        assert same_trees(alone, mixed.select(rows))


# Spec-config


def test_spec_config() -> None:
    """Red when a key does not reach the proposer, or the default rule changes."""
    spec = {"method": "spectr", "model": "draft", "num_paths": 4, "depth": 5}
    config = parse_spec_config(spec)
    assert (config.models, config.rule) == (("draft",), RULES["k_seq"])
    proposer = config.proposer()
    assert isinstance(proposer, SpecTr)
    assert (proposer.num_paths, proposer.sizes.max_depth) == (4, 5)
    other = parse_spec_config({**spec, "scorer": "multi_round"})
    assert other.rule is RULES["multi_round"]
