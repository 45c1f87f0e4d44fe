"""Chains of logits, what they leave over, and two trees that become one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fast.drafting import check_unused, token_paths
from tests.fast.no_waiting import NoWaiting, on_meta
from tests.fast.random_trees import random_trees
from tests.fast.test_lyanna_head import ready
from tests.fast.tiny_training import PlainAttention
from tests.fast.toy_chains import ToyChain
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.heads.chain_source import ChainSource
from vllm_treespec.sources.base import Roots
from vllm_treespec.sources.chain import ChainDraft, ChainMemory, Resample
from vllm_treespec.trees.builders import from_parents, merge_drafts
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.source import Source
from vllm_treespec.trees.tree import TreeBatch

VOCAB_SIZE, DEPTH = 6, 3

# Logits


def test_a_level_is_its_row_and_what_the_tokens_say() -> None:
    """Red when logits hang on a parent's place, on siblings, or on another level."""
    chain = ToyChain.random(VOCAB_SIZE, DEPTH)
    draft = chain.draft(2)
    assert torch.equal(draft.root_logits()[0], chain.levels[0] + chain.table[2])
    tokens = torch.tensor([[3, 1, 3, 0]])
    for level in (1, 2):
        parents = (
            torch.tensor([[0, 0, 1, 1]]) if level == 1 else torch.tensor([[3] * 4])
        )
        found = draft.extend(tokens, parents)
        assert torch.equal(found[0], chain.levels[level] + chain.table[tokens[0]])


def test_levels_that_are_used_up_are_skipped() -> None:
    """Red when requests share a level, or a tree reads past the last one."""
    logits = torch.arange(12.0).view(3, 4, 1)
    first = torch.tensor([0, 2, 3])
    roots = torch.zeros(3, dtype=torch.int64)
    draft = ChainDraft(logits, lambda t: torch.zeros(*t.shape, 1), roots, first=first)
    assert draft.levels_left is not None
    assert draft.levels_left.tolist() == [4, 2, 1]
    assert draft.root_logits().flatten().tolist() == [0.0, 6.0, 11.0]
    level = torch.zeros((3, 2), dtype=torch.int64)
    assert draft.extend(level, level)[:, :, 0].tolist() == [[1, 1], [7, 7], [11, 11]]


def test_one_pass_is_step_by_step() -> None:
    """Red when all levels at once have other logits than one after the other.

    Or when a chain without context sees another one.
    """
    head = ready(context=False, num_hot_tokens=20)
    source = ChainSource(ChainMemory("off", 1), StepStats())
    source.head = head
    hidden = torch.randn(2, 64, dtype=torch.float64)
    roots = torch.tensor([3, 11])
    positions = np.array([5, 9])
    draft = source.begin(
        Roots(
            slots=np.arange(2),
            positions=positions,
            root_token_ids=roots,
            accepted=np.full(2, -1),
            depth=DEPTH,
            hidden=hidden,
        )
    )
    tokens = torch.tensor([[3, 9], [4, 4]])
    found = [draft.root_logits()[:, None].expand(-1, 2, -1)]
    found += [draft.extend(tokens, tokens) for _ in range(DEPTH - 1)]
    for req in range(2):
        state, attend = hidden[req : req + 1], PlainAttention()
        root: Tensor | None = roots[req : req + 1]
        for level in range(DEPTH):
            at = torch.tensor([positions[req] - 1 + level])
            state = head.read(state, root, at, attend)
            above = tokens[req] if level else roots[req].expand(2)
            expected = head.logits(state) + head.info_logits(above)
            torch.testing.assert_close(found[level][req], expected)
            root = None


# What is left


class Steps:
    """Steps of one batch of requests, whose fresh chains name request and step."""

    def __init__(self, resample: Resample, min_levels: int = 1) -> None:
        self.memory = ChainMemory(resample, min_levels)
        self.step = 0
        self.fresh: list[int] = []

    def begin(
        self, slots: list[int], accepted: list[int], depth: int = DEPTH
    ) -> ChainDraft:
        """Begin a step; its logits are 100 slot + 10 step + level."""
        self.step += 1
        self.fresh = []

        def run(fresh: np.ndarray) -> Tensor:
            self.fresh = [slots[i] for i in fresh]
            first = torch.tensor(self.fresh)[:, None] * 100 + 10 * self.step
            return (first + torch.arange(depth))[..., None].double()

        unread = self.memory.drafts_unread(np.array(slots), np.array(accepted))
        draft = self.memory.begin(
            Roots(
                slots=np.array(slots),
                positions=np.zeros(len(slots), dtype=np.int64),
                root_token_ids=torch.zeros(len(slots), dtype=torch.int64),
                accepted=np.array(accepted),
                depth=depth,
            ),
            run,
            lambda t: torch.zeros((*t.shape, 1), dtype=torch.float64),
            None,
        )
        assert self.fresh == [s for s, u in zip(slots, unread, strict=True) if not u]
        return draft


def left_of(draft: ChainDraft | None, row: int = 0) -> list[int]:
    """Numbers of the levels that are left for a request."""
    if draft is None:
        return []
    numbers = draft.logits[row, :, 0].int().tolist()
    if draft.levels_left is None:
        return numbers
    return numbers[len(numbers) - int(draft.levels_left[row]) :]


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_levels_after_the_new_root_are_left(depth: int) -> None:
    """Red when the level of the new root is drafted again, or one is lost.

    ``a`` accepted drafts and the token after them stand at the levels 1 to a + 1.
    """
    for accepted in range(depth + 1):
        expected = [710 + level for level in range(accepted + 1, depth)]
        merging = Steps("merge")
        assert left_of(merging.begin([7], [-1], depth)) == [
            710 + i for i in range(depth)
        ]
        draft = merging.begin([7], [accepted], depth)
        assert left_of(draft.leftover) == expected
        assert left_of(draft) == [720 + i for i in range(depth)]
        replacing = Steps("replace")
        replacing.begin([7], [-1], depth)
        draft = replacing.begin([7], [accepted], depth)
        assert left_of(draft) == (expected or [720 + i for i in range(depth)])
        off = Steps("off")
        off.begin([7], [-1], depth)
        draft = off.begin([7], [accepted], depth)
        assert draft.leftover is draft.reused is draft.levels_left is None
        assert off.memory.last is None, "what is off keeps no memory"


def test_a_leftover_of_a_leftover_goes_on() -> None:
    """Red when levels that an earlier step used up come back."""
    steps = Steps("replace")
    steps.begin([0], [-1], 5)
    assert left_of(steps.begin([0], [0], 5)) == [11, 12, 13, 14]
    assert left_of(steps.begin([0], [1], 5)) == [13, 14]
    assert left_of(steps.begin([0], [0], 5)) == [14]
    assert left_of(steps.begin([0], [0], 5)) == [50, 51, 52, 53, 54]


def test_few_levels_are_dropped() -> None:
    """Red when ``resample_min_levels`` is off by one."""
    for accepted, expected in ((0, [11, 12]), (1, [20, 21, 22])):
        steps = Steps("replace", min_levels=2)
        steps.begin([0], [-1])
        assert left_of(steps.begin([0], [accepted])) == expected


@pytest.mark.parametrize("resample", ["replace", "merge"])
def test_a_lost_proposal_leaves_nothing(resample: Resample) -> None:
    """Red when a request gets a chain that is not the one of its last tree."""
    steps = Steps(resample)
    steps.begin([4, 2, 9], [-1] * 3)
    # 2 was preempted, 9 does not draft, and 5 is new
    draft = steps.begin([5, 2, 4], [-1, -1, 0])
    leftover = draft if resample == "replace" else draft.leftover
    own = [] if resample == "merge" else [520, 521, 522]
    assert left_of(leftover, 0) == own
    assert left_of(leftover, 1) == [n - 300 for n in own]
    assert left_of(leftover, 2) == [411, 412]
    if resample == "replace":
        assert draft.reused is not None
        assert draft.reused.tolist() == [False, False, True]
    # Only the last step counts: 9's chain is gone.
    last = steps.begin([9], [0])
    assert last.leftover is None
    assert left_of(last) == [930, 931, 932]


def test_trees_of_other_depths() -> None:
    """Red when chains of two lengths, in one step, are not put side by side rightly."""
    steps = Steps("replace")
    steps.begin([0, 1, 2], [-1] * 3, 4)
    draft = steps.begin([0, 1, 2], [0, 3, 1], 2)
    assert [left_of(draft, i) for i in range(3)] == [
        [11, 12, 13],
        [120, 121],
        [212, 213],
    ]
    draft = steps.begin([0, 1, 2], [1, 0, 1], 6)
    rows = [[13], [121], [230 + i for i in range(6)]]
    assert [left_of(draft, i) for i in range(3)] == rows


@pytest.mark.parametrize("resample", ["off", "replace", "merge"])
def test_the_host_never_waits(resample: Resample) -> None:
    """Red when a chain is begun, or read, only after the device has answered."""
    memory = ChainMemory(resample, 1)
    roots = torch.zeros(2, dtype=torch.int64, device="meta")

    def run(fresh: np.ndarray) -> Tensor:
        return torch.zeros((len(fresh), DEPTH, VOCAB_SIZE), device="meta")

    def info(token_ids: Tensor) -> Tensor:
        return torch.zeros((*token_ids.shape, VOCAB_SIZE), device="meta")

    slots = np.arange(2)
    for accepted in ([-1, -1], [0, 2], [0, 0]):
        step = Roots(slots, slots, roots, np.array(accepted), DEPTH)
        draft = memory.begin(step, run, info, None)
        level = torch.zeros((2, 3), dtype=torch.int64, device="meta")
        for chain in filter(None, (draft, draft.leftover)):
            with NoWaiting():
                chain.root_logits()
                chain.extend(level, level)


# Merged trees


def merged_paths(
    one: list[tuple[int, ...]], other: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Level by level, children of a node side by side, those of ``one`` first."""
    both = list(dict.fromkeys([*one, *other]))
    paths: list[tuple[int, ...]] = [()]
    for above in paths:
        paths += [p for p in both if len(p) == len(above) + 1 and p[:-1] == above]
    return paths


BOTH = Source.INDEX, Source.MODEL


def with_claims(tree: TreeBatch, first: float) -> Draft:
    """Trees whose nodes claim ``first``, ``first`` + 1, and so on, row after row."""
    numbers = torch.arange(tree.parents.numel(), dtype=torch.float64)
    claims = numbers.view_as(tree.parents) + first
    return Draft(tree, claims.masked_fill(tree.depths == 0, 0.0))


def claims_by_path(draft: Draft, req: int) -> dict[tuple[int, ...], float]:
    """What each node claims; the root, and unused entries, nothing."""
    assert draft.claims is not None
    paths, claims = token_paths(draft.tree, req), draft.claims[req].tolist()
    assert not any(claims[len(paths) :])
    return dict(zip(paths, claims, strict=False))


def check_merged(one: TreeBatch, other: TreeBatch) -> None:
    """Compare merged trees with plain lists."""
    first, second = with_claims(one, 1.0), with_claims(other, 1000.0)
    draft = merge_drafts(first, second, BOTH, int(other.depths.max()))
    tree, sources = draft.tree, draft.sources
    assert tree.draws is None
    assert sources is not None
    assert tree.max_nodes == one.max_nodes + other.max_nodes - 1
    for req in range(one.num_reqs):
        own, others = token_paths(one, req), token_paths(other, req)
        found = token_paths(tree, req)
        assert found == merged_paths(own, others)
        assert int(tree.num_nodes[req]) == len(found)
        assert sources[req, : len(found)].tolist() == [
            Source.INDEX * (path in own) + Source.MODEL * (path in others)
            if path
            else 0
            for path in found
        ]
        assert not sources[req, len(found) :].any()
        claims = claims_by_path(second, req) | claims_by_path(first, req)
        assert claims_by_path(draft, req) == claims
    check_unused(tree)


def test_merged_trees() -> None:
    """Red when equal prefixes stay two, or the order of nodes is not a tree's.

    So too when a node does not have its sources, or the first one's claim.
    """
    one = from_parents([[9, 1, 2, 3, 4]], [[-1, 0, 0, 1, 2]])
    other = from_parents([[9, 2, 5, 4, 6, 7]], [[-1, 0, 0, 1, 1, 2]])
    tree = merge_drafts(Draft(one), Draft(other), BOTH, 2).tree
    assert tree.token_ids[0, :8].tolist() == [9, 1, 2, 5, 3, 4, 6, 7]
    assert tree.parents[0, :8].tolist() == [-1, 0, 0, 0, 1, 2, 2, 3]
    assert tree.num_nodes.tolist() == [8]
    check_merged(one, other)
    check_merged(other, one)


def some_trees(seed: int, max_nodes: int) -> TreeBatch:
    """Random trees of few tokens, without draws."""
    generator = torch.Generator().manual_seed(seed)
    return replace(random_trees(8, max_nodes, 4, generator), draws=None)


@pytest.mark.parametrize("seed", range(4))
def test_random_merged_trees(seed: int) -> None:
    """Red when trees of other sizes, or without any draft, are merged wrongly."""
    one, other = some_trees(seed, 9), some_trees(seed + 100, 14)
    check_merged(one, other)
    check_merged(other, one.cut(torch.full_like(one.num_nodes, 3)))
    root = one.cut(torch.ones_like(one.num_nodes))
    check_merged(root, other)
    check_merged(one, root)
    check_merged(one, one)


def test_merged_trees_are_as_wide_as_they_are_told() -> None:
    """Red when a bound on both trees together loses a node, or leaves the width."""
    one = Draft(from_parents([[9, 1, 2]], [[-1, 0, 0]]))
    other = Draft(from_parents([[9, 2, 4]], [[-1, 0, 1]]))
    whole, bounded = (
        merge_drafts(one, other, BOTH, 2, max_nodes).tree for max_nodes in (None, 4)
    )
    assert (whole.max_nodes, bounded.max_nodes) == (5, 4)
    assert token_paths(bounded, 0) == token_paths(whole, 0)


def test_merging_never_waits() -> None:
    """Red when the host must wait to know how many nodes a level has."""
    one, other = on_meta(some_trees(1, 9)), on_meta(some_trees(2, 5))
    claims = torch.zeros((8, 9), dtype=torch.float64, device="meta")
    first, second = Draft(one, claims), Draft(other, claims[:, :5])
    with NoWaiting():
        assert merge_drafts(first, second, BOTH, 3).tree.token_ids.is_meta
