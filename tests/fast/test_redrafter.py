"""ReDrafter: prefix matching, the tree of beams, its limits, and its head."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import Path, at_temperature, check_unused, propose, token_paths
from tests.fast.languages import (
    Language,
    LanguageDraft,
    naive_probs,
    random_tables,
)
from tests.fast.tiny_heads import (
    VOCAB_SIZE,
    check_alone,
    check_hot,
    drafted,
    step_inputs,
    tiny_head,
)
from vllm_treespec.proposers import DynamicTree, Proposer, ReDrafter, RsdS
from vllm_treespec.proposers.redrafter import draft_of_beams, prefix_match
from vllm_treespec.sampling.laws import SamplingTensors

# Listing 1 of arXiv 2403.09919.
PAPER_BEAMS = [[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]]
PAPER_MATCH = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]]


def beams_with(log_probs: float, beams: list[list[int]]) -> tuple[Tensor, Tensor]:
    """One request's beams; every token has the same log probability."""
    tokens = torch.tensor([beams])
    steps = torch.full(tokens.shape, log_probs)
    return tokens, steps.cumsum(2)


def test_prefix_match_of_the_papers_example() -> None:
    """Red when a shared prefix is not traced to the first beam that has it."""
    beams = torch.tensor([PAPER_BEAMS, PAPER_BEAMS[::-1]])
    expected = [PAPER_MATCH, [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]]]
    assert prefix_match(beams).tolist() == expected
    # One later token alike is no shared prefix.
    apart = torch.tensor([[[1, 5], [2, 5], [1, 5]]])
    assert prefix_match(apart).tolist() == [[[0, 0], [1, 1], [0, 0]]]


def test_tree_of_the_papers_example() -> None:
    """Red when nodes leave level order, or siblings are torn apart.

    ::

        91 - 92 - 93 - 95
               |     `- 97
               `- 94 - 96
    """
    tree = draft_of_beams(torch.tensor([7]), *beams_with(-1.0, PAPER_BEAMS), 12).tree
    assert tree.num_nodes.tolist() == [8]
    assert tree.token_ids[0].tolist() == [7, 91, 92, 93, 94, 95, 97, 96] + [0] * 5
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 2, 3, 3, 4] + [-1] * 5
    assert tree.depths[0].tolist() == [0, 1, 2, 3, 3, 4, 4, 4] + [0] * 5
    assert tree.draws is None


def slow_tree(
    beams: list[list[int]], log_probs: list[list[float]], num_drafts: int
) -> list[Path]:
    """The tree's paths in its order, from a trie of dictionaries."""
    scores: dict[Path, float] = {}
    children: dict[Path, list[Path]] = {(): []}
    for beam, row in zip(beams, log_probs, strict=True):
        for depth in range(1, len(beam) + 1):
            path = tuple(beam[:depth])
            if path not in scores:
                scores[path] = row[depth - 1]
                children[path] = []
                children[path[:-1]].append(path)
    level_order: list[Path] = [()]
    for path in level_order:
        level_order += children[path]
    best = sorted(level_order[1:], key=lambda path: -scores[path])[:num_drafts]
    kept = {(), *(path for path in best if scores[path] > -math.inf)}
    assert all(path[:-1] in kept for path in kept)
    return [path for path in level_order if path in kept]


def beams_paths(beams: Tensor) -> list[Path]:
    """Every prefix of every beam, int64 [width, length]; equal ones come again."""
    return [
        tuple(beam[:depth])
        for beam in beams.tolist()
        for depth in range(1, len(beam) + 1)
    ]


@pytest.mark.parametrize(
    ("num_reqs", "width", "length", "vocab_size"),
    [(3, 1, 1, 2), (1, 6, 5, 3), (40, 6, 4, 3), (5, 9, 7, 2), (3, 15, 4, 50)],
)
def test_draft_of_beams_equals_a_trie(
    num_reqs: int, width: int, length: int, vocab_size: int
) -> None:
    """Red when merging, order, or the choice of the most probable nodes changes.

    So too when a node does not claim the probability of its prefix. Beams are in any
    order, some of them equal; many nodes have equal probabilities.
    """
    for num_drafts, impossible in product((1, 4, 9, 63), (0.0, 0.2)):
        generator = torch.Generator().manual_seed(width)
        shape = (num_reqs, width, length)
        beams = torch.randint(vocab_size, shape, generator=generator)
        steps = -torch.randint(3, (*shape[:1], length, vocab_size), generator=generator)
        # A prefix's log probability: the sum of its tokens', so that equal ones agree.
        scores = steps.float().masked_fill(
            torch.rand(steps.shape, generator=generator) < impossible, -torch.inf
        )
        log_probs = scores.gather(2, beams.transpose(1, 2)).transpose(1, 2).cumsum(2)
        roots = torch.arange(num_reqs)
        draft = draft_of_beams(roots, beams, log_probs, num_drafts)
        tree, claims = draft.tree, draft.claims
        assert claims is not None
        assert tree.token_ids.shape[1] == 1 + min(num_drafts, width * length)
        assert tree.token_ids[:, 0].equal(roots)
        for req in range(num_reqs):
            expected = slow_tree(
                beams[req].tolist(), log_probs[req].tolist(), num_drafts
            )
            assert token_paths(tree, req) == expected
            own = dict(
                zip(beams_paths(beams[req]), log_probs[req].flatten(), strict=True)
            )
            probabilities = [0.0] + [math.exp(own[path]) for path in expected[1:]]
            assert claims[req, : len(expected)].tolist() == pytest.approx(probabilities)
        assert not bool(claims[~tree.is_node()].any())
        check_unused(tree)


# Beam search


def slow_beams(
    draft: Language, beam_width: int, length: int, vocabulary: list[int]
) -> tuple[list[list[int]], list[list[float]]]:
    """Beam search over a language of probabilities with Python's sort."""
    beams: list[tuple[float, Path, list[float], int]] = [(0.0, (), [], 0)]
    for _ in range(length):
        grown = [
            (
                score + math.log(float(draft.table[prefix, token])),
                (*path, token),
                prefix * draft.vocab_size + 1 + token,
                history,
            )
            for score, path, history, prefix in beams
            for token in vocabulary
            if draft.table[prefix, token] > 0
        ]
        grown.sort(key=lambda beam: -beam[0])
        beams = [(s, p, [*h, s], prefix) for s, p, prefix, h in grown[:beam_width]]
    return [list(beam[1]) for beam in beams], [beam[2] for beam in beams]


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (2, None), (None, 0.6)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("hot", [None, [1, 2, 4]])
def test_proposer_equals_slow_beam_search(
    hot: list[int] | None, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """Red when the beams are not the most probable sequences of the restricted draft.

    With top-k 2 there are fewer sequences than beams in the first two levels.
    """
    language = Language(random_tables("random", 5, 3)[0].table.log().float())
    columns = hot or list(range(5))
    rows = language.table[:, columns] / (temperature or 1.0)
    restricted = torch.zeros(language.table.shape, dtype=torch.float64)
    restricted[:, columns] = naive_probs(rows, top_k, top_p)
    sampling = at_temperature(temperature, 2, top_k, top_p)
    vocabulary = None if hot is None else torch.tensor(hot)
    for beam_width, length, num_drafts in [(5, 3, 15), (7, 3, 9), (1, 4, 4)]:
        proposer = ReDrafter(beam_width, length, num_drafts)
        tree = propose(proposer, language, None, sampling, vocabulary, 2)
        beams, log_probs = slow_beams(
            Language(restricted), min(beam_width, len(columns)), length, columns
        )
        expected = slow_tree(beams, log_probs, num_drafts)
        for req in range(2):
            found = token_paths(tree, req)
            # The order of beams whose probabilities differ by rounding may differ.
            assert sorted(found) == sorted(expected)


def with_last_level(paths: list[Path]) -> set[Path]:
    """Paths that lead to a node of the last level."""
    last = max(map(len, paths))
    ends = [path for path in paths if len(path) == last]
    return {end[:depth] for end in ends for depth in range(last + 1)}


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize(("beam_width", "length"), [(1, 4), (4, 3), (6, 5)])
def test_tree_is_greedy_rsd_s_without_dead_ends(
    beam_width: int, length: int, hot: bool
) -> None:
    """Red when both beam searches over one head part at temperature 0."""
    head = tiny_head("redrafter", hot)
    hidden, roots = step_inputs(5)
    proposer = ReDrafter(beam_width, length, beam_width * length)
    tree = drafted(proposer, head, hidden, roots)
    full = drafted(RsdS(beam_width, length), head, hidden, roots)
    for req in range(5):
        expected = with_last_level(token_paths(full, req))
        assert set(token_paths(tree, req)) == expected
    check_hot(tree, head)


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize("proposer", [ReDrafter(5, 4, 12), DynamicTree(4, 4, 14)])
def test_batch_does_not_change_a_tree(proposer: Proposer, hot: bool) -> None:
    """Red when a tree depends on other requests, or forgets its own parameters."""
    head = tiny_head("redrafter", hot)
    sampling = SamplingTensors(
        torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 1.0]),
        torch.tensor([VOCAB_SIZE, 2, VOCAB_SIZE, 3, 1, VOCAB_SIZE]),
        torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0, 0.9]),
    )
    together = check_alone(proposer, head, sampling, 6)
    sizes = together.num_nodes.tolist()
    assert len(set(sizes)) > 1
    assert sizes[4] == 1 + 4  # top-k 1: a chain
    check_hot(together, head)


def test_head_reads_the_parents_states() -> None:
    """Red when a node's logits are not those after its own path's tokens."""
    head = tiny_head("redrafter")
    hidden, roots = step_inputs(3)
    draft = head.draft(hidden, roots)
    generator = torch.Generator().manual_seed(1)
    paths = roots[:, None, None]
    assert torch.allclose(draft.root_logits(), last_logits(hidden, paths)[:, 0])
    for width in (4, 5, 2):
        above = paths.shape[1] if paths.shape[2] > 1 else 1
        parents = torch.randint(above, (3, width), generator=generator)
        tokens = torch.randint(VOCAB_SIZE, (3, width), generator=generator)
        index = parents[..., None].expand(-1, -1, paths.shape[2])
        paths = torch.cat([paths.gather(1, index), tokens[..., None]], dim=2)
        found = draft.extend(tokens, parents)
        assert torch.allclose(found, last_logits(hidden, paths), atol=1e-5)


def last_logits(hidden: Tensor, paths: Tensor) -> Tensor:
    """What training's forward gives after whole paths [num_reqs, width, depth]."""
    head = tiny_head("redrafter")
    width = paths.shape[1]
    rows = hidden.repeat_interleave(width, dim=0)
    tokens = paths.flatten(0, 1)
    wanted = torch.zeros_like(tokens, dtype=torch.bool)
    wanted[:, -1] = True
    return head.logits(head(rows, tokens, wanted)).unflatten(0, (-1, width))


def test_narrow_vocabulary_narrows_the_beam() -> None:
    """Red when a draft with fewer tokens than beams breaks the search."""
    draft = LanguageDraft(random_tables("random", 3, 2)[0], 1)
    assert draft.root_logits().shape == (1, 3)
    tree = propose(ReDrafter(8, 2, 16), draft.language)
    assert tree.depths[0].bincount()[1:].max() <= 3
