"""Suffix: what is found, how it becomes a tree, and what is kept of it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.fast import drafting
from tests.fast.scheduled_trees import pruning_plan
from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.config import parse_spec_config
from vllm_treespec.proposers import Suffix
from vllm_treespec.proposers.suffix import (
    MAX_LEAVES,
    DraftNode,
    grow_tree,
)
from vllm_treespec.schedule.plan import PLAIN_PLAN, StepPlan
from vllm_treespec.scorers import RULES
from vllm_treespec.sources.continuations import next_tokens
from vllm_treespec.sources.suffix_index import (
    END,
    MAX_OCCURRENCES,
    OutputCache,
    SuffixIndex,
)
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import TreeBatch

SENTENCE = [1, 2, 3, 4, 5, 6, 7, 8]


class Trees:
    """A proposer with its index, for requests by name."""

    def __init__(
        self,
        num_drafts: int,
        depth: int,
        max_match: int,
        max_cached_tokens: int,
        min_probability: float | None = 0.0,
    ) -> None:
        self.proposer = Suffix(num_drafts, depth, min_probability)
        max_depth = self.proposer.sizes.max_depth
        self.index = SuffixIndex(max_depth, max_match, max_cached_tokens)
        self.slots = RequestSlots()

    @property
    def cache(self) -> OutputCache:
        return self.index.cache

    def forget(self, names: Iterable[str]) -> None:
        self.index.finish_requests(self.slots.release(names))


def propose(
    trees: Trees,
    texts: Sequence[list[int]],
    names: Sequence[str] | None = None,
    plan: StepPlan = PLAIN_PLAN,
) -> TreeBatch:
    """Trees of requests with these tokens so far."""
    names = names or [f"unnamed {row}" for row in range(len(texts))]
    for name in sorted({*names} - {*trees.slots.names()}):
        trees.slots.add(name, True, None)
    root_token_ids = torch.tensor([text[-1] for text in texts])
    known = [np.array(text) for text in texts]
    trees.index.note_texts(trees.slots.lookup(names), known)
    return drafting.propose(
        trees.proposer,
        num_reqs=len(texts),
        root_token_ids=root_token_ids,
        continuations=[trees.index.look_up(known)],
        plan=plan,
    )


def paths(tree: TreeBatch, row: int = 0) -> list[drafting.Path]:
    """Drafts on the way to every draft node, in the order of the nodes."""
    return drafting.token_paths(tree, row)[1:]


def drafts(trees: Trees, text: list[int]) -> list[tuple[int, ...]]:
    return paths(propose(trees, [text]))


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
    trees = Trees(num_drafts=10, depth=4, max_match=8, max_cached_tokens=0)
    expected = [tuple(SENTENCE[5:8]), (*SENTENCE[5:8], 0)]
    assert drafts(trees, [*SENTENCE, 0, 0, *SENTENCE[2:5]])[2:] == expected


def test_likeliest_come_first() -> None:
    """Red when the order of siblings, or what falls off at the limit, changes."""
    text = [1, 2, 3, 0, 2, 4, 5, 2, 4, 6, 2, 5, 7, 1, 2]
    trees = Trees(num_drafts=6, depth=3, max_match=8, max_cached_tokens=0)
    # Two tokens match before 3; one matches before 4 (twice) and 5 (once).
    found = drafts(trees, text)
    assert found == [(3,), (4,), (5,), (3, 0), (4, 6), (3, 0, 2)]
    small = Trees(num_drafts=4, depth=3, max_match=8, max_cached_tokens=0)
    assert drafts(small, text) == [(3,), (4,), (3, 0), (3, 0, 2)]


def test_unlikely_drafts_are_left_out() -> None:
    """Red when a single token in common is reason enough to draft a lot."""
    text = [*SENTENCE, 0, 3]
    sure = Trees(10, 8, 8, 0, min_probability=0.15)
    assert drafts(sure, text) == [(4,)]
    hopeful = Trees(10, 8, 8, 0, min_probability=0.02)
    assert drafts(hopeful, text) == [(4,), (4, 5), (4, 5, 6)]


@pytest.mark.parametrize(
    ("min_probability", "row_cost", "count"),
    [
        (None, None, 1),
        (None, 0.02, 3),
        (None, 0.15, 1),
        (0.15, 0.02, 1),
        (0.0, None, 7),
    ],
)
def test_costs_alone_say_which_drafts_are_worth_it(
    min_probability: float | None, row_cost: float | None, count: int
) -> None:
    """Red when cheap rows are not used, or trees of no cost hold all that was found."""
    trees = Trees(10, 8, 8, 0, min_probability)
    plan = PLAIN_PLAN if row_cost is None else pruning_plan(row_cost=row_cost)
    tree = propose(trees, [[*SENTENCE, 0, 3]], plan=plan)
    assert len(paths(tree)) == count


def alone(length: int) -> float:
    """How likely a text goes on as after a single match of so many tokens."""
    return 0.95 * (1 - 0.8**length)


def test_probability_of_a_long_match() -> None:
    """Red when tokens that match leave another doubt than 0.8 to their number."""
    (found,) = next_tokens([(5, [7, 8])], depth=0).values()
    assert found == (pytest.approx(alone(5)), [(5, [7, 8])])
    assert next_tokens([(5, [7, 8])], depth=1)[8][0] == pytest.approx(alone(6))
    assert next_tokens([(5, [7, 8])], depth=2) == {}


def test_a_long_copy_is_not_followed_forever() -> None:
    """Red when long matches are sure, so that their copies fill trees to the end."""
    ((share, _),) = next_tokens([(100, [7])], depth=0).values()
    assert share == pytest.approx(0.95)
    ((share, _),) = next_tokens([(100, [7]), (100, [7])], depth=0).values()
    assert share == pytest.approx(0.95), "nor because it was copied before"
    assert len(grow_tree([(16, list(range(40)))], 32, 16, 0.5)) == 10


def test_probabilities_of_several_matches() -> None:
    """Red when longer matches do not come first, or shares do not add up."""
    continuations = [(4, [1]), (2, [1]), (2, [2]), (2, [3, 9]), (1, [4])]
    found = next_tokens(continuations, depth=0)
    left = 1 - alone(4)
    assert found[1][1] == continuations[:2]
    assert found[1][0] == pytest.approx(alone(4) + left * alone(2) / 3)
    assert found[2][0] == found[3][0] == pytest.approx(left * alone(2) / 3)
    left *= 1 - alone(2)
    assert found[4][0] == pytest.approx(left * alone(1))
    unknown = left * (1 - alone(1))
    assert sum(share for share, _ in found.values()) == pytest.approx(1 - unknown)


@pytest.mark.parametrize("text", [[1], SENTENCE])
def test_unknown_context_gives_the_root_alone(text: list[int]) -> None:
    """Red when drafts come from nowhere, or an empty tree is malformed."""
    tree = propose(Trees(5, 3, 8, 100), [text], ["a"])
    assert tree.num_nodes.tolist() == [1]
    assert tree.token_ids.tolist() == [[text[-1], 0, 0, 0, 0, 0]]
    assert tree.parents.tolist() == [[-1] * 6]
    assert tree.draws is None


def test_trees_are_well_formed_and_within_their_limits() -> None:
    """Red when nodes leave level order, siblings repeat, or a limit is passed."""
    trees = Trees(num_drafts=9, depth=4, max_match=6, max_cached_tokens=200)
    assert (trees.proposer.sizes.max_nodes, trees.proposer.sizes.max_depth) == (10, 4)
    assert (trees.proposer.sizes.max_width, trees.proposer.sizes.max_leaves) == (9, 9)
    assert Suffix(3, 8, 0.0).sizes.max_depth == 3
    texts = random_texts(200)
    tree = propose(trees, texts)
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
            known = (text[-1], *path)
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
                expected.append((length, text[end : end + 3]))
        expected.sort(key=lambda pair: -pair[0])
        index = SuffixIndex(depth=3, max_match=5, max_cached_tokens=0)
        assert index.continuations(np.array(text)) == expected[:MAX_OCCURRENCES]


def test_tree_does_not_depend_on_the_batch() -> None:
    """Red when company, order or padding in a batch changes a request's tree."""
    texts = random_texts(8)
    together = propose(Trees(9, 4, 6, 0), texts)
    for row, text in enumerate(texts):
        assert drafts(Trees(9, 4, 6, 0), text) == paths(together, row)
    assert propose(Trees(9, 4, 6, 0), texts).token_ids.equal(together.token_ids)


def test_any_number_of_best_nodes_is_a_tree() -> None:
    """Red when a node can rank before its parent."""
    continuations = [(3, [1, 2, 3]), (3, [1, 4]), (2, [1, 2]), (2, [5, 6]), (1, [7])]
    grown = [grow_tree(continuations, count, 9, 0.0) for count in range(9)]
    assert [len(tree) for tree in grown] == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    surer = [grow_tree(continuations, 8, 9, 1 - 0.1 * step) for step in range(11)]
    assert (len(surer[0]), len(surer[-1])) == (0, 7)
    for smaller, larger in [*pairwise(grown), *pairwise(surer)]:
        assert named(smaller) <= named(larger)


def test_a_tree_has_no_more_leaves_than_it_may() -> None:
    """Red when fork blocks are missing, or a likelier node below a leaf is left out."""
    continuations = [(3, [1, 2, 3]), (3, [1, 4]), (2, [1, 2]), (2, [5, 6]), (1, [7])]
    free = named(grow_tree(continuations, 8, 9, 0.0))
    assert named(grow_tree(continuations, 8, 4, 0.0)) == free
    assert named(grow_tree(continuations, 8, 3, 0.0)) == free - {(7,)}
    assert named(grow_tree(continuations, 8, 2, 0.0)) == free - {(7,), (5,), (5, 6)}
    assert named(grow_tree(continuations, 8, 1, 0.0)) == {(), (1,), (1, 2), (1, 2, 3)}


def test_large_trees_are_within_their_limits() -> None:
    """Red when a tree has leaves, or siblings, that the engine has no room for."""
    trees = Trees(num_drafts=40, depth=4, max_match=6, max_cached_tokens=4000)
    tree = propose(trees, random_texts(200))
    drafting.check_bounds(trees.proposer.sizes, tree, [])
    inner = [len({path[:-1] for path in paths(tree, row)}) for row in range(200)]
    assert max(tree.num_nodes.numpy() - inner) == MAX_LEAVES


def named(tree: list[DraftNode]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent, depth, *_ in tree:
        found.append((*found[parent], token))
        assert len(found[-1]) == depth
    return set(found)


# Earlier requests


def serve(trees: Trees, name: str, prompt: list[int], output: list[int]) -> None:
    """Run a request token by token, and finish it."""
    for end in range(1, len(output) + 1):
        propose(trees, [[*prompt, *output[:end]]], [name])
    trees.forget([name])


def test_outputs_of_finished_requests_are_drafted_from() -> None:
    """Red when the cache loses outputs, or hands out prompts or running requests."""
    trees = Trees(num_drafts=10, depth=3, max_match=8, max_cached_tokens=100)
    prompt = [20, 21, 22, 23]
    propose(trees, [[*prompt, 1]], ["first"])
    propose(trees, [[*prompt, *SENTENCE]], ["first"])
    asks = [50, 2, 3, 4]
    assert paths(propose(trees, [asks], ["second"])) == []
    trees.forget({"first", "unknown"})
    expected = [(5,), (5, 6), (5, 6, 7)]
    assert paths(propose(trees, [asks], ["second"])) == expected
    assert paths(propose(trees, [[50, 20, 21, 22]], ["third"])) == []
    assert paths(propose(trees, [[50, 6, 7, 8]], ["third"])) == []


def test_outputs_do_not_run_into_each_other() -> None:
    """Red when a draft or a match crosses from one output into the next."""
    trees = Trees(num_drafts=10, depth=3, max_match=8, max_cached_tokens=100)
    serve(trees, "a", [30], [1, 2, 3])
    serve(trees, "b", [30], [4, 5, 6])
    assert trees.cache.text.tolist() == [1, 2, 3, END, 4, 5, 6, END]
    assert paths(propose(trees, [[0, 1, 2]], ["c"])) == [(3,)]
    assert paths(propose(trees, [[0, 3, 4, 5]], ["c"])) == [(6,)]


def test_own_text_comes_before_other_requests() -> None:
    """Red when another request's output outranks the request's own text."""
    trees = Trees(num_drafts=1, depth=3, max_match=2, max_cached_tokens=100)
    serve(trees, "a", [30], [1, 2, 9])
    assert paths(propose(trees, [[1, 2, 8, 1, 2]], ["b"])) == [(8,)]


def test_longer_match_in_an_earlier_output_comes_first() -> None:
    """Red when many short matches of its own keep a request from a long one."""
    trees = Trees(num_drafts=1, depth=3, max_match=8, max_cached_tokens=100)
    serve(trees, "a", [30], SENTENCE)
    asks = [*[3, 9] * MAX_OCCURRENCES, 1, 2, 3]
    assert paths(propose(trees, [asks], ["b"])) == [(4,)]


def check_places(cache: OutputCache) -> None:
    """Check that every token's places are those that a search finds."""
    for token in set(cache.text.tolist()):
        ends = 1 + np.flatnonzero(cache.text == token)
        assert cache.ends(token).tolist() == ends.tolist()
    assert sum(map(len, cache._places.values())) <= 2 * cache.max_tokens


def test_memory_is_bounded() -> None:
    """Red when finished requests pile up, or the latest outputs are dropped first."""
    trees = Trees(num_drafts=4, depth=3, max_match=4, max_cached_tokens=50)
    for request in range(40):
        serve(trees, str(request), [30], [request, *SENTENCE])
        assert len(trees.cache.text) <= 50
        check_places(trees.cache)
    assert not trees.cache.running
    assert trees.cache.text[-10:].tolist() == [39, *SENTENCE, END]
    nothing = Trees(num_drafts=4, depth=3, max_match=4, max_cached_tokens=0)
    serve(nothing, "a", [30], SENTENCE)
    assert len(nothing.cache.text) == 0


def test_order_of_finished_requests_does_not_matter() -> None:
    """Red when ranks whose sets list requests differently would draft differently."""
    caches = []
    for order in (["a", "b", "c"], ["c", "a", "b"]):
        trees = Trees(4, 3, 4, 100)
        propose(trees, [[1, 2], [1, 3], [1, 4]], ["a", "b", "c"])
        trees.forget(order)
        caches.append(trees.cache.text.tolist())
    assert caches[0] == caches[1] == [2, END, 3, END, 4, END]


# Spec-config


def test_spec_config() -> None:
    """Red when a key does not reach the proposer, or a draft model is asked for."""
    config = parse_spec_config({"method": "suffix_tree", "num_drafts": 24, "depth": 8})
    assert (config.models, config.rule) == ((), RULES["coupled_draw"])
    proposer, index = config.proposer(), config.text_source()
    assert isinstance(proposer, Suffix)
    assert (proposer.sizes.max_nodes, proposer.sizes.max_depth) == (25, 8)
    assert proposer.sizes.num_uniforms == 0
    assert isinstance(index, SuffixIndex)
    assert (index.depth, index.max_match, index.cache.max_tokens) == (8, 16, 65536)


def test_trees_of_a_schedule_share_an_index() -> None:
    """Red when a smaller tree of a schedule goes deeper than its own depth."""
    smaller = {"batch_size": 4, "num_drafts": 6, "depth": 2}
    schedule = [{"batch_size": 1}, smaller]
    spec = {"method": "suffix_tree", "num_drafts": 9, "depth": 4, "schedule": schedule}
    config = parse_spec_config({**spec, "max_match": 8})
    index, trees = config.text_source(), Trees(6, 2, 8, 0)
    assert isinstance(index, SuffixIndex)
    assert index.depth == 4
    trees.index = index
    text = [*SENTENCE, 0, 0, *SENTENCE[2:5]]
    assert drafts(trees, text) == [(6,), (6, 7)] == drafts(Trees(6, 2, 8, 0), text)
