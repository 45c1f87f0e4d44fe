"""Suffix: what is found, how it becomes a tree, and what is kept of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.fast.independent_draws import grid, in_eighths
from tests.fast.languages import plain_sampling
from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.core.sampling import SamplingTensors
from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.core.tree_builders import from_parents
from vllm_treespec.proposers import ProposerInputs, Suffix
from vllm_treespec.proposers.suffix import END, MAX_OCCURRENCES, grow_tree, occurrences
from vllm_treespec.scorers import RULES, target_draw

SENTENCE = [1, 2, 3, 4, 5, 6, 7, 8]


def propose(
    proposer: Suffix, texts: Sequence[list[int]], req_ids: Sequence[str] | None = None
) -> TreeBatch:
    """Trees of requests with these tokens so far."""
    num_tokens = torch.tensor([len(text) for text in texts])
    token_ids = torch.full((len(texts), int(num_tokens.max()) + 3), 99)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = torch.tensor(text)
    return proposer.propose(
        ProposerInputs(
            root_token_ids=torch.tensor([text[-1] for text in texts]),
            sampling=SamplingTensors(torch.zeros(len(texts)), all_greedy=True),
            uniforms=torch.zeros(len(texts), 0, dtype=torch.float64),
            token_ids=token_ids,
            num_tokens=num_tokens,
            req_ids=req_ids,
        )
    )


def paths(tree: TreeBatch, row: int = 0) -> list[tuple[int, ...]]:
    """Drafts on the way to every draft node, in the order of the nodes."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.num_nodes[row])):
        above = found[int(tree.parents[row, node])]
        found.append((*above, int(tree.token_ids[row, node])))
    return found[1:]


def drafts(proposer: Suffix, text: list[int]) -> list[tuple[int, ...]]:
    return paths(propose(proposer, [text]))


def random_texts(count: int) -> list[list[int]]:
    """Texts of few tokens, so that much repeats."""
    source = random.Random(0)
    return [
        [source.randrange(3) for _ in range(source.randrange(1, 60))]
        for _ in range(count)
    ]


# Trees


def test_repeated_text_is_found() -> None:
    """Red when a passage that the request repeats is not drafted."""
    proposer = Suffix(num_drafts=10, depth=4, max_match=8, max_cached_tokens=0)
    expected = [tuple(SENTENCE[5 : 5 + n]) for n in (1, 2, 3)]
    assert drafts(proposer, [*SENTENCE, 0, 0, *SENTENCE[2:5]]) == expected


def test_longest_match_comes_first_then_the_most_frequent() -> None:
    """Red when the order of siblings, or what falls off at the limit, changes."""
    text = [1, 2, 3, 0, 2, 4, 5, 2, 4, 6, 2, 5, 7, 1, 2]
    proposer = Suffix(num_drafts=4, depth=3, max_match=8, max_cached_tokens=0)
    # Two tokens match before 3; one matches before 4 (twice) and 5 (once).
    assert drafts(proposer, text) == [(3,), (4,), (5,), (3, 0)]
    small = Suffix(num_drafts=3, depth=3, max_match=8, max_cached_tokens=0)
    assert drafts(small, text) == [(3,), (4,), (3, 0)]


def test_short_matches_are_followed_for_as_many_tokens() -> None:
    """Red when a match of one token drafts more than one."""
    text = [*SENTENCE, 0, 3]
    proposer = Suffix(num_drafts=10, depth=8, max_match=8, max_cached_tokens=0)
    assert drafts(proposer, text) == [(4,)]


@pytest.mark.parametrize("text", [[1], SENTENCE])
def test_unknown_context_gives_the_root_alone(text: list[int]) -> None:
    """Red when drafts come from nowhere, or an empty tree is malformed."""
    tree = propose(Suffix(5, 3, 8, 100), [text], ["a"])
    assert tree.num_nodes.tolist() == [1]
    assert tree.token_ids.tolist() == [[text[-1], 0, 0, 0, 0, 0]]
    assert tree.parents.tolist() == [[-1] * 6]
    assert tree.draws is None


def test_trees_are_well_formed_and_within_their_limits() -> None:
    """Red when nodes leave level order, siblings repeat, or a limit is passed."""
    proposer = Suffix(num_drafts=9, depth=4, max_match=6, max_cached_tokens=200)
    assert (proposer.sizes.max_nodes, proposer.sizes.max_depth) == (10, 4)
    assert (proposer.sizes.max_width, proposer.sizes.max_leaves) == (9, 9)
    assert Suffix(3, 8, 16, 0).sizes.max_depth == 3
    assert Suffix(9, 8, 3, 0).sizes.max_depth == 3
    texts = random_texts(200)
    tree = propose(proposer, texts)
    assert tree.token_ids.shape == (200, 10)
    sizes = tree.num_nodes.tolist()
    tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
    checked = from_parents(
        [row[:n] for row, n in zip(tokens, sizes, strict=True)],
        [row[:n] for row, n in zip(parents, sizes, strict=True)],
    )
    assert checked.parents.equal(tree.parents)
    assert checked.depths.equal(tree.depths)
    assert max(sizes) == 10
    assert int(tree.depths.max()) == 4
    for row, text in enumerate(texts):
        found = paths(tree, row)
        assert len(set(found)) == len(found)
        for path in found:
            known = tuple(text[-len(path) :]) + path
            assert known in zip(*(text[i:] for i in range(len(known))), strict=False)


def test_occurrences_equal_naive_search() -> None:
    """Red when a faster search finds other places, or in another order."""
    for text in random_texts(100):
        expected = []
        for end in range(len(text) - 1, 0, -1):
            length = 0
            while length < min(5, end) and text[end - 1 - length] == text[-1 - length]:
                length += 1
            if length:
                expected.append((length, text[end : end + min(length, 3)]))
        expected.sort(key=lambda pair: -pair[0])
        array = np.array(text)
        assert occurrences(array, array, 5, 3) == expected[:MAX_OCCURRENCES]


def test_tree_does_not_depend_on_the_batch() -> None:
    """Red when company, order or padding in a batch changes a request's tree."""
    texts = random_texts(8)
    together = propose(Suffix(9, 4, 6, 0), texts)
    for row, text in enumerate(texts):
        assert drafts(Suffix(9, 4, 6, 0), text) == paths(together, row)
    assert propose(Suffix(9, 4, 6, 0), texts).token_ids.equal(together.token_ids)


def test_any_number_of_best_nodes_is_a_tree() -> None:
    """Red when a node can rank before its parent."""
    continuations = [(3, [1, 2, 3]), (3, [1, 4]), (2, [1, 2]), (2, [5, 6]), (1, [7])]
    trees = [grow_tree(continuations, count) for count in range(9)]
    assert [len(tree) for tree in trees] == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    for smaller, larger in pairwise(trees):
        assert named(smaller) <= named(larger)


def named(tree: list[tuple[int, int, int]]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent, depth in tree:
        found.append((*found[parent], token))
        assert len(found[-1]) == depth
    return set(found)


# Earlier requests


def serve(proposer: Suffix, req_id: str, prompt: list[int], output: list[int]) -> None:
    """Run a request token by token, and finish it."""
    for end in range(1, len(output) + 1):
        propose(proposer, [[*prompt, *output[:end]]], [req_id])
    proposer.forget([req_id])


def test_outputs_of_finished_requests_are_drafted_from() -> None:
    """Red when the cache loses outputs, or hands out prompts or running requests."""
    proposer = Suffix(num_drafts=10, depth=3, max_match=8, max_cached_tokens=100)
    prompt = [20, 21, 22, 23]
    propose(proposer, [[*prompt, 1]], ["first"])
    propose(proposer, [[*prompt, *SENTENCE]], ["first"])
    asks = [50, 2, 3, 4]
    assert paths(propose(proposer, [asks], ["second"])) == []
    proposer.forget({"first", "unknown"})
    expected = [(5,), (5, 6), (5, 6, 7)]
    assert paths(propose(proposer, [asks], ["second"])) == expected
    assert paths(propose(proposer, [[50, 20, 21, 22]], ["third"])) == []
    assert paths(propose(proposer, [[50, 6, 7, 8]], ["third"])) == []


def test_outputs_do_not_run_into_each_other() -> None:
    """Red when a draft or a match crosses from one output into the next."""
    proposer = Suffix(num_drafts=10, depth=3, max_match=8, max_cached_tokens=100)
    serve(proposer, "a", [30], [1, 2, 3])
    serve(proposer, "b", [30], [4, 5, 6])
    assert proposer.cache.text.tolist() == [1, 2, 3, END, 4, 5, 6, END]
    assert paths(propose(proposer, [[0, 1, 2]], ["c"])) == [(3,)]
    assert paths(propose(proposer, [[0, 3, 4, 5]], ["c"])) == [(6,)]


def test_own_text_comes_before_other_requests() -> None:
    """Red when another request's output outranks the request's own text."""
    proposer = Suffix(num_drafts=1, depth=3, max_match=2, max_cached_tokens=100)
    serve(proposer, "a", [30], [1, 2, 9])
    assert paths(propose(proposer, [[1, 2, 8, 1, 2]], ["b"])) == [(8,)]


def test_longer_match_in_an_earlier_output_comes_first() -> None:
    """Red when many short matches of its own keep a request from a long one."""
    proposer = Suffix(num_drafts=1, depth=3, max_match=8, max_cached_tokens=100)
    serve(proposer, "a", [30], SENTENCE)
    asks = [*[3, 9] * MAX_OCCURRENCES, 1, 2, 3]
    assert paths(propose(proposer, [asks], ["b"])) == [(4,)]


def test_memory_is_bounded() -> None:
    """Red when finished requests pile up, or the latest outputs are dropped first."""
    proposer = Suffix(num_drafts=4, depth=3, max_match=4, max_cached_tokens=50)
    for request in range(40):
        serve(proposer, str(request), [30], [request, *SENTENCE])
        assert len(proposer.cache.text) <= 50
    assert not proposer.cache.running
    assert proposer.cache.text[-10:].tolist() == [39, *SENTENCE, END]
    nothing = Suffix(num_drafts=4, depth=3, max_match=4, max_cached_tokens=0)
    serve(nothing, "a", [30], SENTENCE)
    assert len(nothing.cache.text) == 0


def test_order_of_finished_requests_does_not_matter() -> None:
    """Red when ranks whose sets list requests differently would draft differently."""
    caches = []
    for order in (["a", "b", "c"], ["c", "a", "b"]):
        proposer = Suffix(4, 3, 4, 100)
        propose(proposer, [[1, 2], [1, 3], [1, 4]], ["a", "b", "c"])
        proposer.forget(order)
        caches.append(proposer.cache.text.tolist())
    assert caches[0] == caches[1] == [2, END, 3, END, 4, END]


# Law


def test_emitted_law_is_the_targets() -> None:
    """Red when drafts without draws are verified by a rule that needs their law.

    Every number of the grid has the same weight, so that the law is a count.
    """
    target = in_eighths(3, 2, seed=7)
    tree = propose(Suffix(3, 2, 4, 0), [[0, 1, 2, 2, 0, 1, 0, 1]])
    assert paths(tree) == [(0,), (2,), (0, 1)]
    uniforms = grid(4)
    trees = tree.select(torch.zeros(len(uniforms), dtype=torch.int64))
    logits = target.target_logits(trees, plain_sampling(len(uniforms)))
    emitted = target_draw(trees, logits, uniforms).emitted(trees)
    reached = target.no_mass()
    prefix = torch.zeros(len(emitted), dtype=torch.int64)
    for token in emitted.T:
        prefix = torch.where(token >= 0, prefix * 3 + 1 + token, prefix)
    reached.index_add_(0, prefix, torch.full_like(prefix, 1).double() / len(prefix))
    expected = target.true_law(3)
    assert target.joint_law(reached, 3).allclose(expected, atol=1e-12, rtol=0)


# Spec-config


def test_spec_config() -> None:
    """Red when a key does not reach the proposer, or a draft model is asked for."""
    config = parse_spec_config({"method": "suffix_tree", "num_drafts": 24, "depth": 8})
    assert (config.models, config.rule) == ((), "target_draw")
    assert config.rule in RULES
    proposer = config.proposer()
    assert isinstance(proposer, Suffix)
    assert (proposer.sizes.max_nodes, proposer.sizes.max_depth) == (25, 8)
    assert (proposer.num_draft_models, proposer.sizes.num_uniforms) == (0, 0)
    assert proposer.needs_token_ids
    assert (proposer.max_match, proposer.cache.max_tokens) == (16, 65536)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"num_drafts": 0}, "'num_drafts' is 0"),
        ({"num_drafts": 64, "depth": 2}, "'num_drafts' is 64"),
        ({"num_drafts": 9, "depth": 2, "model": "d"}, "'model' is not a key"),
        ({"num_drafts": 9, "depth": 2, "max_match": 0}, "'max_match' is 0"),
        (
            {"num_drafts": 9, "depth": 2, "max_cached_tokens": -1},
            "'max_cached_tokens' is -1",
        ),
    ],
)
def test_refusals_name_key_and_remedy(keys: dict, says: str) -> None:
    """Red when bad input is accepted, or refused without naming the key."""
    with pytest.raises(SpecConfigError) as error:
        parse_spec_config({"method": "suffix_tree", **keys})
    assert says in str(error.value)
