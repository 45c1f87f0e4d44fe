"""Chains of logits, and what they leave over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fast.no_waiting import NoWaiting
from tests.fast.test_lyanna_head import ready
from tests.fast.tiny_training import PlainAttention
from tests.fast.toy_chains import ToyChain
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.heads.chain_source import ChainSource
from vllm_treespec.sources.base import Roots
from vllm_treespec.sources.chain import ChainDraft, ChainMemory, Resample

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


def test_levels_after_the_new_root_are_left() -> None:
    """Red when the level of the new root is drafted again, or one is lost.

    ``a`` accepted drafts and the token after them stand at the levels 1 to a + 1.
    """
    for depth in (1, 2, 3, 5):
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
