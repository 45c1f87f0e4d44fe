"""Drafts of a model, and its levels, that cost more than they bring are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.fast.drafting import at_temperature, draft_of, same_trees, together
from tests.fast.enumeration import EXACT, LawMeter, Weighted, draft_uniforms
from tests.fast.languages import (
    NUM_TOKENS,
    plain_sampling,
    random_tables,
)
from tests.fast.scheduled_trees import pruning_plan
from vllm_treespec.proposers import (
    DynamicTree,
    Proposer,
    ProposerInputs,
    RsdC,
    RsdS,
    Sd,
)
from vllm_treespec.proposers.draft_filter import DraftFilter
from vllm_treespec.proposers.hybrid import Hybrid
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.scorers import recursive_rejection
from vllm_treespec.sources.continuations import Continuation, Continuations
from vllm_treespec.trees.draft import Draft

PROPOSERS: dict[str, Proposer] = {
    "sd": Sd(6),
    "rsd_c": RsdC((2, 1, 1, 1, 1, 1)),
    "rsd_s": RsdS(2, 6),
    "dynamic": DynamicTree(2, 6, 12),
}


class SureModel:
    """A draft model whose likeliest token has the same probability everywhere."""

    vocabulary = None

    def __init__(self, *sureness: float) -> None:
        """Take the probability, of each request."""
        others = [(1 - p) / 7 for p in sureness]
        rows = [[p] + [o] * 7 for p, o in zip(sureness, others, strict=True)]
        self.logits = torch.tensor(rows).log()
        # nodes of each request, by level
        self.widths: list[int] = []

    @property
    def num_read(self) -> int:
        """Levels that were read."""
        return len(self.widths)

    def root_logits(self) -> torch.Tensor:
        """Logits below the roots."""
        return self.logits

    def extend(self, token_ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Logits below a level."""
        self.widths.append(token_ids.shape[1])
        return self.logits[:, None].expand(-1, token_ids.shape[1], -1)


def propose(
    proposer: Proposer,
    draft: SureModel,
    plan: StepPlan,
    greedy: bool = True,
    can_sync: bool = True,
) -> Draft:
    """One tree for each request."""
    count = len(draft.logits)
    return draft_of(
        proposer,
        draft,
        torch.rand(count, proposer.sizes.num_uniforms, dtype=torch.float64),
        at_temperature(0.0 if greedy else 1.0, count),
        plan=plan,
        can_sync=can_sync,
    )


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_sure_model_drafts_deep(name: str, greedy: bool) -> None:
    """Red when all trees of a step have the same depth, whatever the model thinks."""
    levels = []
    for sureness in (0.3, 0.6, 0.95):
        draft = SureModel(sureness)
        drafted = propose(
            PROPOSERS[name], draft, pruning_plan(1, 0.02, level_cost=0.3), greedy
        )
        assert drafted.levels == draft.num_read + 1
        levels.append(drafted.levels)
    assert levels[0] == 1 < levels[1] < levels[2] == 6


@pytest.mark.parametrize("name", PROPOSERS)
def test_dear_rows_leave_drafts_out(name: str) -> None:
    """Red when a model's drafts are not compared with the cost of their rows."""
    cheap, dear = (
        propose(PROPOSERS[name], SureModel(0.7), pruning_plan(1, row_cost))
        for row_cost in (0.01, 0.4)
    )
    assert int(dear.tree.num_nodes[0]) == 1 + 2 < int(cheap.tree.num_nodes[0])
    assert dear.claims is not None
    assert dear.claims[0, :3].tolist() == pytest.approx([0, 0.7, 0.49], abs=1e-5)
    assert not bool(dear.claims[0, 3:].any())


@pytest.mark.parametrize("greedy", [True, False])
def test_nodes_that_are_left_out_are_not_read(greedy: bool) -> None:
    """Red when a model reads nodes that no tree has, or when leaving them out tells."""
    proposer = DynamicTree(4, 3, 12)
    dear, free = pruning_plan(2, 0.06), pruning_plan(2)
    for plan, widths in ((dear, [2, 3]), (free, [4, 4])):
        draft, on_a_gpu = SureModel(0.55, 0.95), SureModel(0.55, 0.95)
        # The first request's model knows two tokens, 0.9 and 0.1.
        for model in (draft, on_a_gpu):
            model.logits[0, 2:] = -torch.inf
        tree = propose(proposer, draft, plan, greedy).tree
        other = propose(proposer, on_a_gpu, plan, greedy, can_sync=False).tree
        assert draft.widths == widths
        assert on_a_gpu.widths == [4, 4]
        assert same_trees(tree, other)


@pytest.mark.parametrize(
    ("likely", "ends"),
    [([0.8], False), ([0.4, 0.4], True), ([0.8, 0.1], False), ([0.45, 0.35], True)],
)
def test_each_node_pays_for_the_draft_below_it(likely: list[float], ends: bool) -> None:
    """Red when unlikely nodes together pay for drafts that none of them is worth."""
    assert ends_at(likely, pruning_plan(1, 0.35, 0.15)) == ends


def ends_at(
    likely: list[float], plan: StepPlan, index_hits: Sequence[float] = ()
) -> bool:
    """Whether a tree with these nodes in its first level ends there."""
    inputs = ProposerInputs(
        torch.zeros(1, dtype=torch.int64),
        plain_sampling(1),
        torch.zeros(1, 0, dtype=torch.float64),
        plan=replace(plan, index_hits=index_hits),
        can_sync=True,
    )
    nodes = torch.tensor([likely], dtype=torch.float64)
    return DraftFilter(None, inputs).ends(1, nodes)


def test_levels_add_nothing_where_the_index_is_right() -> None:
    """Red when a model reads on for tokens that the index has."""
    plan = pruning_plan(1, 0.05, 0.3)
    hits: list[list[float]] = [[], [0.1], [0.8]]
    assert [ends_at([0.8], plan, one) for one in hits] == [False, False, True]


@pytest.mark.parametrize("name", PROPOSERS)
def test_requests_that_keep_little_count_little(name: str) -> None:
    """Red when one request's claims cost another its levels, or pay for them."""
    both, one = (
        propose(
            PROPOSERS[name],
            SureModel(0.9, 0.9),
            pruning_plan(2, 0.01, level_cost=0.9, kept_of_model=kept),
        )
        for kept in ([1.0, 1.0], [1.0, 0.01])
    )
    assert one.levels < both.levels
    assert int(one.tree.num_nodes[1]) == 1 < int(one.tree.num_nodes[0])


@pytest.mark.parametrize("can_sync", [True, False])
def test_a_step_has_rows_for_so_many_drafts(can_sync: bool) -> None:
    """Red when a model's trees take more rows than a step has, or one takes all."""
    plan = replace(pruning_plan(2), max_rows=9)
    drafted = propose(
        PROPOSERS["dynamic"], SureModel(0.9, 0.9), plan, can_sync=can_sync
    )
    assert (drafted.tree.num_nodes - 1).tolist() == [4, 4]


@pytest.mark.parametrize("name", PROPOSERS)
def test_no_more_levels_are_read_than_a_step_has_time_for(name: str) -> None:
    """Red when a host that may wait reads on behind the plan's last level."""
    plan = pruning_plan(1, max_levels=2)
    assert propose(PROPOSERS[name], SureModel(0.95), plan).levels == 2


@pytest.mark.parametrize(("max_levels", "num_levels"), [(None, 6), (3, 3)])
@pytest.mark.parametrize("name", PROPOSERS)
def test_the_plan_says_how_many_levels_are_read_without_a_sync(
    name: str, max_levels: int | None, num_levels: int
) -> None:
    """Red when a GPU's step waits for a probability, or reads other levels."""
    draft = SureModel(0.3)
    plan = pruning_plan(1, 0.02, level_cost=0.9, max_levels=max_levels)
    drafted = propose(PROPOSERS[name], draft, plan, can_sync=False)
    assert (draft.num_read, drafted.levels) == (num_levels - 1, num_levels)
    deepest = int(drafted.tree.depths.max())
    assert deepest == min(num_levels, 3), "unlikely drafts are left out all the same"


@pytest.mark.parametrize(("kind", "level"), [("random", 0.15), ("zeros", 0.25)])
def test_the_law_stays(kind: str, level: float) -> None:
    """Red when what was drawn decides whether it is a draft.

    Whether a level is read depends on the draws above it, of all nodes. So each draw
    is a request of its own here.
    """
    draft, target = random_tables(kind, 3, 3)
    proposer = Sd(3)
    uniforms, weights = draft_uniforms(draft, proposer.branching_factors)
    plan = pruning_plan(1, 0.05, level)
    drafts = [
        draft_of(proposer, draft, row[None], plan=plan, can_sync=True)
        for row in uniforms
    ]
    trees = [drafted.tree for drafted in drafts]
    by_depth: dict[int, list[int]] = {}
    for number, drafted in enumerate(drafts):
        by_depth.setdefault(drafted.levels, []).append(number)
    assert len(by_depth) > 1, "costs change nothing"
    law = sum(
        LawMeter(
            recursive_rejection,
            Weighted(together([trees[n] for n in numbers]), weights[numbers]),
            target,
        ).law(NUM_TOKENS)
        for numbers in by_depth.values()
    )
    assert float((law - target.true_law(NUM_TOKENS)).abs().max()) < EXACT


@pytest.mark.parametrize(("min_probability", "kept"), [(None, 1), (0.05, 2), (0.0, 3)])
def test_without_costs_unlikely_drafts_are_left_out(
    min_probability: float | None, kept: int
) -> None:
    """Red when the model's part of a fixed tree holds all that it drafted."""
    inputs = ProposerInputs(
        torch.zeros(1, dtype=torch.int64), at_temperature(0.0), torch.zeros(1, 0)
    )
    drafts = torch.tensor([[[0.3, 0.07, 0.01]]], dtype=torch.float64).log()
    left = DraftFilter(min_probability, inputs).of_drafts(drafts)
    assert int(left.isfinite().sum()) == kept


# Whether a model drafts beside an index

# One token matches, or eight: the next one is right with 0.95 (1 - 0.8 ** match).
SHORT: list[Continuation] = [(1, [7, 8, 9])]
LONG: list[Continuation] = [(8, [1, 2, 3])]
NONE: list[Continuation] = []


def needs_model(
    found: list[list[Continuation]], level_cost: float, kept: float = 1.0
) -> bool:
    """Whether a first level that adds 0.6 where nothing was found is worth its cost."""
    proposer = Hybrid(16, 12, top_k=4, model_depth=3, min_probability=0.1)
    count = len(found)
    plan = pruning_plan(count, 0.05, level_cost, kept=[kept] * count)
    plan = replace(plan, index_hits=proposer.index_hits(plan, Continuations(found)))
    return plan.level_pays(plan.first_level)


@pytest.mark.parametrize(
    ("found", "kept", "level_cost", "needed"),
    [
        (NONE, 1.0, 0.5, True),
        (NONE, 1.0, 0.7, False),
        # 0.6 x 0.81
        (SHORT, 1.0, 0.45, True),
        (SHORT, 1.0, 0.5, False),
        # 0.6 x 0.21 = 0.126
        (LONG, 1.0, 0.12, True),
        (LONG, 1.0, 0.13, False),
        # of what such a match claims half is accepted: 0.6 x 0.6
        (LONG, 0.5, 0.33, True),
        # what is not worth its row is not drafted, so it is not found either
        (SHORT, 0.2, 0.55, True),
    ],
)
def test_a_model_drafts_what_an_index_lacks(
    found: list[Continuation], kept: float, level_cost: float, needed: bool
) -> None:
    """Red when a level of the model is read for tokens that the index has."""
    assert needs_model([found], level_cost, kept) == needed


def test_requests_pay_for_a_level_together() -> None:
    """Red when each request must be worth a forward of the model alone."""
    assert not needs_model([NONE], 0.7)
    assert needs_model([NONE, NONE], 0.75)
    assert not needs_model([NONE, LONG], 0.77)
