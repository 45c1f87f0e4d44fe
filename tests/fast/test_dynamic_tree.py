"""The dynamic tree: EAGLE-2's expansion and re-ranking, its limits, and its law."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.fast.enumeration import propose
from tests.fast.languages import (
    Language,
    LanguageDraft,
    plain_sampling,
    random_tables,
)
from tests.fast.tiny_heads import (
    VOCAB_SIZE,
    drafted,
    greedy,
    step_inputs,
    tiny_head,
    token_paths,
)
from tests.fast.tree_bounds import CountingDraft, check_bounds
from tests.reference.proposers import LogLaw, Path, dynamic_tree_reference
from vllm_treespec.proposers import DynamicTree, ProposerInputs
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.tree import TreeBatch

NO_UNIFORMS = torch.zeros(1, 0)


def halves(vocab_size: int, num_prefixes: int, seed: int) -> Language:
    """Powers of 1/2 in any order: many nodes have the same joint probability."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.arange(1, vocab_size + 1).double()
    orders = [
        torch.randperm(vocab_size, generator=generator) for _ in range(num_prefixes)
    ]
    return Language(torch.stack([0.5 ** powers[order] for order in orders]))


def language_of(kind: str, vocab_size: int, depth: int, seed: int) -> Language:
    """A draft language for trees of this depth."""
    language = random_tables(kind if kind != "ties" else "random", vocab_size, depth)[0]
    if kind == "ties":
        return halves(vocab_size, len(language.table), seed)
    return random_tables(kind, vocab_size, depth, seed)[0]


def log_law(language: Language) -> LogLaw:
    """The log probabilities after a path, as lists."""
    table = language.table.double().log().tolist()

    def after(path: Path) -> list[float]:
        prefix = 0
        for token in path:
            prefix = prefix * language.vocab_size + 1 + token
        return table[prefix]

    return after


def tree_of(language: Language, proposer: DynamicTree) -> TreeBatch:
    """The one tree that is drafted from a language."""
    return propose(proposer, language)


@pytest.mark.parametrize("kind", ["random", "zeros", "ties"])
@pytest.mark.parametrize(
    ("vocab_size", "top_k", "depth"), [(7, 3, 3), (5, 1, 4), (4, 4, 3), (2, 5, 4)]
)
def test_tree_is_the_references(
    vocab_size: int, top_k: int, depth: int, kind: str
) -> None:
    """Red when expansion, re-ranking, or the order of nodes is not EAGLE-2's."""
    for seed in range(3):
        language = language_of(kind, vocab_size, depth, seed)
        law = log_law(language)
        for num_drafts in range(1, 21):
            tree = tree_of(language, DynamicTree(top_k, depth, num_drafts))
            expected = dynamic_tree_reference(law, top_k, depth, num_drafts)
            assert token_paths(tree, 0)[1:] == expected
            unused = ~tree.is_node()
            assert bool((tree.parents[unused] == -1).all())
            assert not bool(tree.token_ids[unused].any() | tree.depths[unused].any())
            assert tree.draws is None


@pytest.mark.parametrize("least", [0.02, 0.1, 0.4, 0.9])
def test_unlikely_nodes_are_left_out(least: float) -> None:
    """Red when a node's own probability decides, or another node falls out, too."""
    language = language_of("random", 7, 3, 0)
    law = log_law(language)
    paths = dynamic_tree_reference(law, 3, 3, 20)
    expected = [
        path
        for path in paths
        if sum(law(path[:n])[token] for n, token in enumerate(path)) >= math.log(least)
    ]
    tree = tree_of(language, DynamicTree(3, 3, 20, least))
    assert token_paths(tree, 0)[1:] == expected
    assert len(expected) < len(paths)


@pytest.mark.parametrize("num_drafts", [1, 7, 20])
def test_claims_are_joint_probabilities(num_drafts: int) -> None:
    """Red when a node claims anything but the probability of its path."""
    language = language_of("random", 7, 3, 0)
    law = log_law(language)
    inputs = ProposerInputs(
        torch.zeros(1, dtype=torch.int64),
        plain_sampling(1),
        NO_UNIFORMS,
        [LanguageDraft(language, 1)],
    )
    draft = DynamicTree(3, 3, num_drafts).propose(inputs)
    assert draft.claims is not None
    assert draft.levels == min(num_drafts, 3)
    expected = [0.0] + [
        math.exp(sum(law(path[:n])[token] for n, token in enumerate(path)))
        for path in dynamic_tree_reference(law, 3, 3, num_drafts)
    ]
    assert draft.claims[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("num_drafts", [1, 4, 9, 20])
def test_equal_tokens_make_a_tree(num_drafts: int) -> None:
    """Red when tokens of equal probability tear a tree apart."""
    language = Language(torch.full((400, 7), 1 / 7))
    paths = token_paths(tree_of(language, DynamicTree(3, 3, num_drafts)), 0)
    assert len(set(paths)) == 1 + num_drafts
    assert all(path[:-1] in paths for path in paths[1:])


@pytest.mark.parametrize("hot", [True, False])
def test_tree_follows_the_sampling_parameters(hot: bool) -> None:
    """Red when a request's tree depends on others, or forgets its own parameters."""
    head = tiny_head("redrafter", hot)
    hidden, roots = step_inputs(6)
    sampling = SamplingTensors(
        torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 1.0]),
        torch.tensor([VOCAB_SIZE, 2, VOCAB_SIZE, 3, 1, VOCAB_SIZE]),
        torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0, 0.9]),
    )
    proposer = DynamicTree(4, 4, 14)
    together = drafted(proposer, head, hidden, roots, sampling)
    assert int(together.num_nodes[4]) == 1 + 4  # top-k 1: a chain
    for req in range(6):
        row = torch.tensor([req])
        alone = drafted(proposer, head, hidden[row], roots[row], sampling.select(row))
        assert token_paths(alone, 0) == token_paths(together, req)
    if head.hot_token_ids is not None:
        drafts = together.token_ids[together.depths > 0]
        assert bool(torch.isin(drafts, head.hot_token_ids).all())


def test_more_drafts_add_nodes() -> None:
    """Red when a smaller budget changes more than how many nodes are kept."""
    head = tiny_head("redrafter")
    hidden, roots = step_inputs(4)
    above: list[set[Path]] = [set()] * 4
    for num_drafts in range(1, 21):
        proposer = DynamicTree(3, 4, num_drafts)
        tree = drafted(proposer, head, hidden, roots, greedy(4))
        paths = [set(token_paths(tree, req)) for req in range(4)]
        assert all(one < other for one, other in zip(above, paths, strict=True))
        above = paths


@pytest.mark.parametrize("kind", ["random", "peaked", "equal", "one_token"])
def test_sizes_bound_the_trees(kind: str) -> None:
    """Red when a tree, or a level that is read, outgrows what is announced."""
    for top_k, depth, kept in product((1, 2, 3, 6), (1, 2, 3, 5), (1, 2, 5, 11, 40)):
        proposer = DynamicTree(top_k, depth, kept)
        for seed in range(2):
            language = language_of(kind, 4, depth, seed)
            draft = CountingDraft(LanguageDraft(language, 1))
            root, sampling = torch.zeros(1, dtype=torch.int64), plain_sampling(1)
            inputs = ProposerInputs(root, sampling, NO_UNIFORMS, [draft])
            check_bounds(proposer.sizes, proposer.propose(inputs).tree, draft.widths)


def test_sizes_are_reached() -> None:
    """Red when the engine makes room for more than a tree can take."""
    sizes = DynamicTree(4, 3, 8).sizes
    assert (sizes.max_nodes, sizes.max_depth) == (9, 3)
    assert (sizes.draft_width, sizes.draft_nodes) == (4, 8)
    assert (sizes.max_leaves, sizes.max_siblings, sizes.max_parents) == (7, 4, 8)
    assert sizes.num_uniforms == 0
    assert DynamicTree(2, 2, 63).sizes.max_nodes == 1 + 2 + 4
    assert DynamicTree(9, 9, 2).sizes.draft_nodes == 2


# The law


def test_a_node_is_read_after_its_own_path() -> None:
    """Red when a frontier's parents are mixed up on the way to the draft model."""

    class Checked(LanguageDraft):
        def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
            super().extend(token_ids, parents)
            read.append(set(self.prefixes[0].tolist()))
            return self._columns(self.language.table[self.prefixes])

    language = language_of("random", 4, 3, 5)
    read: list[set[int]] = []
    draft = Checked(language, 1)
    root, sampling = torch.zeros(1, dtype=torch.int64), plain_sampling(1)
    inputs = ProposerInputs(root, sampling, NO_UNIFORMS, [draft])
    tree = DynamicTree(3, 3, 30).propose(inputs).tree
    nodes = set(language.prefixes(tree)[0].tolist())
    assert [len(level) for level in read] == [3, 3]
    assert all(level <= nodes for level in read)
