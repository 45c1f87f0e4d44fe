"""The dynamic tree: EAGLE-2's expansion and re-ranking, its limits, and its law."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import check_unused, draft_of, propose, token_paths
from tests.fast.languages import Language, LanguageDraft, random_tables
from tests.fast.tiny_heads import drafted, step_inputs, tiny_head
from tests.reference.proposers import LogLaw, Path, dynamic_tree_reference
from vllm_treespec.proposers import DynamicTree


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


@pytest.mark.parametrize("kind", ["random", "zeros", "ties"])
def test_tree_is_the_references(kind: str) -> None:
    """Red when expansion, re-ranking, or the order of nodes is not EAGLE-2's."""
    for vocab_size, top_k, depth in ((7, 3, 3), (5, 1, 4), (4, 4, 3), (2, 5, 4)):
        for seed in range(3):
            language = language_of(kind, vocab_size, depth, seed)
            law = log_law(language)
            for num_drafts in range(1, 21):
                tree = propose(DynamicTree(top_k, depth, num_drafts), language)
                expected = dynamic_tree_reference(law, top_k, depth, num_drafts)
                assert token_paths(tree, 0)[1:] == expected
                check_unused(tree)
                assert tree.draws is None


def test_unlikely_nodes_are_left_out() -> None:
    """Red when a node's own probability decides, or another node falls out, too."""
    for least in (0.02, 0.1, 0.4, 0.9):
        language = language_of("random", 7, 3, 0)
        law = log_law(language)
        paths = dynamic_tree_reference(law, 3, 3, 20)
        expected = [
            path
            for path in paths
            if sum(law(path[:n])[token] for n, token in enumerate(path))
            >= math.log(least)
        ]
        tree = propose(DynamicTree(3, 3, 20, least), language)
        assert token_paths(tree, 0)[1:] == expected
        assert len(expected) < len(paths)


def test_claims_are_joint_probabilities() -> None:
    """Red when a node claims anything but the probability of its path."""
    for num_drafts in (1, 7, 20):
        language = language_of("random", 7, 3, 0)
        law = log_law(language)
        draft = draft_of(DynamicTree(3, 3, num_drafts), language)
        assert draft.claims is not None
        assert draft.levels == min(num_drafts, 3)
        expected = [0.0] + [
            math.exp(sum(law(path[:n])[token] for n, token in enumerate(path)))
            for path in dynamic_tree_reference(law, 3, 3, num_drafts)
        ]
        assert draft.claims[0].tolist() == pytest.approx(expected)


def test_equal_tokens_make_a_tree() -> None:
    """Red when tokens of equal probability tear a tree apart."""
    for num_drafts in (1, 4, 9, 20):
        language = Language(torch.full((400, 7), 1 / 7))
        paths = token_paths(propose(DynamicTree(3, 3, num_drafts), language))
        assert len(set(paths)) == 1 + num_drafts
        assert all(path[:-1] in paths for path in paths[1:])


def test_more_drafts_add_nodes() -> None:
    """Red when a smaller budget changes more than how many nodes are kept."""
    head = tiny_head("redrafter")
    hidden, roots = step_inputs(4)
    above: list[set[Path]] = [set()] * 4
    for num_drafts in range(1, 21):
        proposer = DynamicTree(3, 4, num_drafts)
        tree = drafted(proposer, head, hidden, roots)
        paths = [set(token_paths(tree, req)) for req in range(4)]
        assert all(one < other for one, other in zip(above, paths, strict=True))
        above = paths


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
    tree = propose(DynamicTree(3, 3, 30), draft)
    nodes = set(language.prefixes(tree)[0].tolist())
    assert [len(level) for level in read] == [3, 3]
    assert all(level <= nodes for level in read)
