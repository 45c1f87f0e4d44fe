"""The parts of a step, each on its own: matching, slots, room, rows, reading."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.fast.no_waiting import NoWaiting
from vllm_treespec.batch.matching import (
    NO_SLOT,
    PADDING_TOKEN_ID,
    Proposal,
    RunningTrees,
    match,
    running_trees,
)
from vllm_treespec.batch.reading import plan_reading
from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.batch.views import (
    BlockTables,
    EmittedBatch,
    HiddenStates,
    SamplingView,
    ScheduledBatch,
    ragged_rows,
    scheduler_room,
)
from vllm_treespec.host_copies import HostCopy, on_host
from vllm_treespec.sampling.texts import TextView
from vllm_treespec.sampling.uniforms import numbered_key, seeded_key
from vllm_treespec.schedule.clock import claims_of
from vllm_treespec.scorers import ScorerOutput
from vllm_treespec.step.committed import committed_rows
from vllm_treespec.testing.fake_views import ints
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.draft import NO_TOKEN, Draft
from vllm_treespec.trees.host_trees import draft_of
from vllm_treespec.trees.source import Source

CPU = torch.device("cpu")
STEP = 7
# Trees of slots 4, 0 and 2: two children and a grandchild; a chain; the root alone.
TREES = from_parents([[9, 5, 6, 7], [9, 8, 8], [9]], [[-1, 0, 0, 2], [-1, 0, 1], [-1]])


def proposal() -> Proposal:
    """Trees that were drawn one step ago."""
    return Proposal.from_draft(
        Draft(TREES), 1, STEP - 1, slots=ints([4, 0, 2]), reqs=ints([0, 1, 3])
    )


def scheduled(
    slots: list[int], drafts: list[list[int]], room: int = 64
) -> ScheduledBatch:
    """A batch of requests with a root and drafts each."""
    counts = ints(map(len, drafts))
    return ScheduledBatch(
        slots=ints(slots),
        num_computed=10 * (1 + np.arange(len(slots))),
        num_scheduled=1 + counts,
        num_drafts=counts,
        draft_token_ids=ints(token for row in drafts for token in row),
        room=np.full(len(slots), room),
        num_rows=1 + counts,
    )


def test_proposal_on_the_host() -> None:
    """Red when the host's drafts are not the device's."""
    assert proposal().drafts() == [[5, 6, 7], [8, 8], []]
    assert proposal().draft_parents() == [[0, 0, 2], [0, 1], []]


def test_match_finds_trees_in_another_order() -> None:
    """Red when a tree goes to another request, or requests without drafts have one."""
    batch = scheduled([2, 0, 1, 4], [[], [8, 8], [], [5, 6, 7]])
    matched = match(proposal(), batch, STEP)
    assert matched.reqs.tolist() == [1, 3]
    assert matched.proposal_rows.tolist() == [1, 0]
    assert matched.node_limits.tolist() == [4, 4]
    assert not len(matched.differing_slots)
    trees = running_trees(proposal(), matched, batch, CPU)
    assert trees is not None
    assert trees.tree.token_ids.tolist() == [[9, 8, 8, 0], [9, 5, 6, 7]]
    assert trees.tree_index == 1
    assert trees.host_reqs.tolist() == trees.reqs.tolist() == [1, 3]
    assert trees.root_rows.tolist() == [1, 5]
    assert trees.query_starts.tolist() == [1, 5]
    assert trees.num_nodes.tolist() == trees.tree.num_nodes.tolist() == [3, 4]
    assert trees.root_positions.tolist() == [20, 40]
    assert trees.slots.tolist() == [0, 4]


def test_match_cuts_trees() -> None:
    """Red when a tree keeps nodes that were not scheduled, or room it did not have."""
    batch = scheduled([4, 0], [[5, 6], [8, 8]], room=3)
    matched = match(proposal(), batch, STEP)
    assert matched.node_limits.tolist() == [3, 3]
    trees = running_trees(proposal(), matched, batch, CPU)
    assert trees is not None
    assert trees.num_nodes.tolist() == trees.tree.num_nodes.tolist() == [3, 3]
    assert trees.tree.token_ids[0].tolist() == [9, 5, 6, 0]


def test_no_tree_comes_back_where_room_is_not_known() -> None:
    """Red when it depends on a tree's size, so on its draws, whether it counts."""
    batch = scheduled([4, 0], [[5, 6], [8, 8]], room=0)
    assert not len(match(proposal(), batch, STEP).reqs)


def test_limits_of_requests_cut_trees() -> None:
    """Red when a tree has more nodes than its request allows, or is cut twice.

    The second tree is as large as its limit: its draws are limited all the same.
    """
    limited = Proposal.from_draft(
        Draft(TREES),
        1,
        STEP - 1,
        slots=ints([4, 0, 2]),
        reqs=ints([0, 1, 3]),
        node_limits=ints([3, 3, 1]),
    )
    assert limited.drafts() == [[5, 6], [8, 8], []]
    assert limited.draft_parents() == [[0, 0], [0, 1], []]
    batch = scheduled([4, 0], [[5, 6], [8, 8]])
    matched = match(limited, batch, STEP)
    assert matched.node_limits.tolist() == [3, 3]
    assert not len(matched.differing_slots)
    trees = running_trees(limited, matched, batch, CPU)
    assert trees is not None
    assert trees.num_nodes.tolist() == trees.tree.num_nodes.tolist() == [3, 3]
    less = match(limited, scheduled([4, 0], [[5], [8, 8]], room=3), STEP)
    assert less.node_limits.tolist() == [2, 3]
    more = match(limited, scheduled([4], [[5, 6, 7]]), STEP)
    assert more.differing_slots.tolist() == [4]


def test_claims_of_proposed_nodes_add_up() -> None:
    """Red when nodes that a request does not allow claim something, or others do not.

    So too when a node of two sources counts for one of them alone.
    """
    claims = torch.tensor([[0, 0.5, 0.25, 0.125], [0, 0.75, 0.5, 0], [0, 0, 0, 0]])
    both = Source.INDEX | Source.MODEL
    sources = torch.tensor([[0, both, 2, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    draft = Draft(TREES, claims.double(), levels=2, sources=sources)
    slots, reqs, rows = ints([4, 0, 2]), ints([0, 1, 3]), ints([1, 2, 0])
    whole = Proposal.from_draft(draft, 1, STEP - 1, slots, reqs)
    limited = Proposal.from_draft(draft, 1, STEP - 1, slots, reqs, ints([3, 2, 1]))
    assert whole.num_levels == 2
    for found, source, expected in (
        (whole, None, [1.25, 0.0, 0.875]),
        (limited, None, [0.75, 0.0, 0.75]),
        (whole, Source.INDEX, [1.25, 0.0, 0.625]),
        (limited, Source.INDEX, [0.75, 0.0, 0.5]),
        (whole, Source.MODEL, [0.0, 0.0, 0.75]),
        (proposal(), None, [0.0, 0.0, 0.0]),
    ):
        assert claims_of(found, rows, source).tolist() == expected


def test_the_deepest_tree() -> None:
    """Red when models read fewer tokens of a step than it may have committed."""
    places = 1, STEP - 1, ints([0, 1]), ints([0, 1])
    trees = from_parents([[9, 1], [9, 1, 2, 3]], [[-1, 0], [-1, 0, 1, 2]])
    assert Proposal.from_draft(Draft(trees), *places).max_depth == 3
    roots = draft_of([[], []], torch.zeros(2).long(), 1)
    assert Proposal.from_draft(roots, *places).max_depth == 1


def test_shadow_drafts_come_to_the_host() -> None:
    """Red when the token of a tree without drafts is lost between proposer and step."""
    shadow = ints([NO_TOKEN, NO_TOKEN, 3]), np.array([0, 0, 0.5])
    draft = draft_of([[]] * 3, torch.zeros(3).long(), 1, shadow=shadow)
    slots, reqs = ints([4, 0, 2]), ints([0, 1, 3])
    made = Proposal.from_draft(draft, 1, STEP - 1, slots, reqs)
    assert made.shadow_token_ids is not None
    assert made.shadow_claims is not None
    assert made.shadow_token_ids.tolist() == [NO_TOKEN, NO_TOKEN, 3]
    assert made.shadow_claims.tolist() == [0.0, 0.0, 0.5]


def test_match_counts_prompts_before_a_tree() -> None:
    """Red when rows of the query and of the logits are confused."""
    batch = scheduled([1, 4], [[], [5]])
    batch = replace(batch, num_scheduled=ints([6, 2]))
    trees = running_trees(proposal(), match(proposal(), batch, STEP), batch, CPU)
    assert trees is not None
    assert (trees.root_rows.tolist(), trees.query_starts.tolist()) == ([1], [6])


@pytest.mark.parametrize(
    ("drafts", "differs"),
    [
        ([5, 6, 1], True),
        ([5, 6, 7, 7], True),
        ([PADDING_TOKEN_ID] * 3, False),
        ([5, 6, PADDING_TOKEN_ID], False),
        ([], False),
    ],
)
def test_other_drafts_do_not_match(drafts: list[int], differs: bool) -> None:
    """Red when other drafts pass for a tree, or padding for another rank's drafts."""
    batch = scheduled([4, 0], [drafts, [8]])
    matched = match(proposal(), batch, STEP)
    assert matched.reqs.tolist() == [1]
    assert matched.differing_slots.tolist() == ([4] if differs else [])


def test_drafts_of_another_step_or_slot_do_not_match() -> None:
    """Red when a late tree, a lost one, or another request's is found.

    Or when what pads a small tree passes for its nodes.
    """
    batch = scheduled([4, 3], [[5, 6, 7], [8, 8]])
    assert not len(match(proposal(), batch, STEP + 1).reqs)
    assert not len(match(proposal(), batch, STEP + 1).differing_slots)
    assert match(proposal(), batch, STEP).reqs.tolist() == [0]
    lost = proposal().without(ints([4, 9]))
    assert lost.slots.tolist() == [NO_SLOT, 0, 2]
    matched = match(lost, batch, STEP)
    assert not len(matched.reqs)
    assert not len(matched.differing_slots)
    assert running_trees(lost, matched, batch, CPU) is None
    assert not len(match(proposal().without(ints([0, 2, 4])), batch, STEP).reqs)
    assert not len(match(proposal(), scheduled([0], [[8, 8, 0]]), STEP).reqs)


def test_slots_are_reused_in_one_order() -> None:
    """Red when ranks that hear of ended requests in another order differ."""
    for ended in (["c", "a", "never seen"], ["never seen", "a", "c"]):
        slots = RequestSlots()
        assert [slots.add(name, True, None) for name in "abc"] == [0, 1, 2]
        assert slots.release(ended).tolist() == [0, 2]
        assert slots.add("d", supported=False, seed=5) == 2
        assert slots.add("e", supported=True, seed=None) == 0
        assert slots.lookup(["e", "b", "d"]).tolist() == [0, 1, 2]
        assert slots.may_draft(ints([2, 1, 0])).tolist() == [False, True, True]
        assert slots.keys(ints([0, 2])).tolist() == [numbered_key(0, 4), seeded_key(5)]
        assert slots.max_drafts(ints([0, 2])).tolist() == [63, 63]
        assert slots.name(2) == "d"


def test_many_slots() -> None:
    """Red when slots or what is kept by them get lost as their number grows."""
    slots = RequestSlots()
    names = [str(i) for i in range(50)]
    for i, name in enumerate(names):
        slots.add(name, i % 2 == 0, i)
    assert slots.lookup(names).tolist() == list(range(50))
    assert slots.keys(np.arange(50)).tolist() == list(map(seeded_key, range(50)))
    assert slots.may_draft(np.arange(50)).tolist() == [i % 2 == 0 for i in range(50)]


def test_scheduler_room() -> None:
    """Red when room is not what the requests before left, up to the longest length."""
    room = scheduler_room(ints([5, 1, 9]), ints([0, 95, 40]), 16, max_model_len=100)
    assert room.tolist() == [16, 4, 10]


def test_ragged_rows() -> None:
    """Red when a row gets another one's entries."""
    rows = ragged_rows(ints([7, 8, 9]), ints([2, 0, 1]), 3)
    assert rows.tolist() == [[7, 8, -1], [-1, -1, -1], [9, -1, -1]]
    assert ragged_rows(ints([]), ints([0, 0]), 0).shape == (2, 0)


def after_step(
    num_computed: list[int], num_scheduled: list[int], num_emitted: list[int]
) -> EmittedBatch:
    """A step in which a request that emitted had all its tokens scheduled."""
    empty, none = np.zeros((0, 0), dtype=np.int32), torch.empty(0)
    emitted = ints(num_emitted)
    num_tokens = ints(num_computed) + np.where(emitted > 0, 1 + emitted, 99)
    return EmittedBatch(
        slots=np.arange(len(emitted)),
        num_computed=ints(num_computed),
        num_scheduled=ints(num_scheduled),
        num_emitted=emitted,
        num_tokens=num_tokens,
        token_ids=empty,
        sampling=SamplingView(
            empty, None, None, None, TextView(empty, emitted, num_tokens)
        ),
        blocks=BlockTables(empty, torch.from_numpy(empty), empty),
        hidden=HiddenStates(none, {}),
    )


def test_committed_rows_without_trees() -> None:
    """Red when a chunk's rows are left out, or those of a lost tree's drafts read.

    A chunk of 4 tokens; a chain of 3 drafts that were not accepted; a plain token.
    """
    batch = after_step([8, 30, 5], [4, 4, 1], [0, 1, 1])
    assert batch.end.tolist() == [12, 31, 6]
    rows = committed_rows(batch)
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == [0, 1, 2, 3, 4, 8]


def test_only_trees_with_siblings_branch() -> None:
    """Red when a chain is laid out as a tree, or a tree as a chain."""
    drawn = proposal()
    every, chain = np.arange(3), ints([1])
    assert drawn.is_branching(every, ints([4, 3, 1]))
    assert not drawn.is_branching(every, ints([2, 3, 1])), "the sibling was cut off"
    assert not drawn.is_branching(chain, ints([3]))


def test_one_copy_brings_what_lies_on_the_host() -> None:
    """Red when columns are mixed up on their way from a device."""
    tensors = {
        "table": torch.arange(12).view(3, 4)[:, 1:],
        "shares": torch.tensor([0.5, -1.0, 1e-300], dtype=torch.float64),
        "counts": torch.tensor([7, 8, 9]),
    }
    copied = HostCopy(tensors, wait=False).arrived()
    there = on_host({**tensors, "none": None})
    assert copied.keys() == there.keys() == tensors.keys()
    for name, numbers in there.items():
        assert np.array_equal(copied[name], numbers)
        assert copied[name].dtype == numbers.dtype


def test_committed_rows_of_steps_without_drafts() -> None:
    """Red when a plain step gathers rows that all lie in order."""
    batch = after_step([8, 5], [4, 1], [0, 1])
    assert committed_rows(batch) == slice(5)


def test_committed_rows_of_trees() -> None:
    """Red when a row is that of a rejected node, in another order, or waited for."""
    batch = after_step([8, 30, 5, 40], [2, 4, 1, 3], [0, 3, 1, 1])
    host_reqs = ints([1, 3])
    trees = RunningTrees(
        tree=TREES.select(torch.tensor([0, 1])),
        tree_index=0,
        reqs=torch.from_numpy(host_reqs),
        root_rows=torch.tensor([1, 6]),
        host_reqs=host_reqs,
        query_starts=ints([2, 7]),
        num_nodes=ints([4, 3]),
        root_positions=ints([30, 40]),
        token_ids=TREES.token_ids[:2, 1:].numpy(),
        parents=TREES.parents[:2, 1:].numpy(),
        slots=ints([1, 3]),
        proposal_rows=ints([0, 1]),
        branching=True,
    )
    scored = ScorerOutput(
        path=torch.tensor([[2, 3], [-1, -1]]),
        num_accepted=torch.tensor([2, 0]),
        next_token_ids=torch.tensor([0, 0]),
    )
    # As a layout might order them.
    node_rows = torch.tensor([[3, 4, 2, 5], [8, 7, 9, -5]])
    with NoWaiting():
        rows = committed_rows(batch, trees, scored, node_rows)
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == [0, 1, 3, 2, 5, 6, 8]
    # emitted less than was accepted: the next request's rows stay its own
    short = after_step([8, 30, 5, 40], [2, 4, 1, 3], [0, 2, 1, 1])
    rows = committed_rows(short, trees, scored, node_rows)
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == [0, 1, 3, 2, 6, 8]


def test_who_is_not_behind_reads_first() -> None:
    """Red when the budget goes to a prompt before the others have read their step."""
    for seed in range(30):
        check_reading(np.random.default_rng(seed))


def check_reading(rng: np.random.Generator) -> None:
    """Compare a random plan with one made request by request."""
    num_reqs = int(rng.integers(0, 7))
    reqs = np.sort(rng.choice(20, num_reqs, replace=False))
    end = rng.integers(0, 9, num_reqs)
    first = np.minimum(rng.integers(0, 9, num_reqs), end)
    may_draft = rng.random(num_reqs) < 0.7
    max_tokens, max_trees = int(rng.integers(1, 25)), int(rng.integers(0, 4))
    behind = rng.random(num_reqs) < 0.5
    plan = plan_reading(reqs, first, end, may_draft, max_tokens, max_trees, behind)
    candidates = np.flatnonzero(may_draft)[:max_trees]
    wanted = end - first
    wanted[candidates] += 1
    left, taken = max_tokens, np.zeros_like(wanted)
    for place in sorted(range(num_reqs), key=behind.__getitem__):
        taken[place] = min(wanted[place], left)
        left -= taken[place]
    expected: list[tuple[int, int, int]] = []
    drafting: list[int] = []
    for place in np.flatnonzero(taken):
        drafts = place in candidates and taken[place] == wanted[place]
        if drafts:
            drafting.append(len(expected))
        start = first[place]
        expected.append((reqs[place], start, start + taken[place] - drafts))
    found = zip(plan.reqs.tolist(), plan.first.tolist(), plan.end.tolist(), strict=True)
    assert list(found) == expected
    assert plan.drafting.tolist() == drafting
