"""Drafts of a model and levels that are not worth their time are left out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.fast.enumeration import LawMeter, Weighted, draft_uniforms
from tests.fast.languages import (
    NUM_TOKENS,
    Language,
    LanguageDraft,
    plain_sampling,
    random_tables,
)
from tests.fast.test_measured_schedule import Tree, running
from vllm_treespec.proposers import (
    DynamicTree,
    Proposer,
    ProposerInputs,
    RsdC,
    RsdS,
    Sd,
)
from vllm_treespec.proposers.worth import Worth
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.schedule.base import StepOutcome
from vllm_treespec.schedule.measured import MeasuredSchedule
from vllm_treespec.schedule.prices import Prices
from vllm_treespec.scorers import recursive_rejection
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.tree import Draws, TreeBatch

EXACT = 1e-12
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
    draft: Any,
    prices: Prices | None,
    greedy: bool = True,
    may_wait: bool = True,
) -> Draft:
    """One tree for each request that has a price."""
    count = len(draft.logits)
    temperature = torch.zeros(count) if greedy else torch.ones(count)
    return proposer.propose(
        ProposerInputs(
            torch.zeros(count, dtype=torch.int64),
            SamplingTensors(temperature, all_greedy=greedy, all_random=not greedy),
            torch.rand(count, proposer.sizes.num_uniforms, dtype=torch.float64),
            [draft],
            prices=prices,
            host_may_wait=may_wait,
        )
    )


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_sure_model_drafts_deep(name: str, greedy: bool) -> None:
    """Red when all trees of a step have the same depth, whatever the model thinks."""
    levels = []
    for sureness in (0.3, 0.6, 0.95):
        draft = SureModel(sureness)
        drafted = propose(
            PROPOSERS[name], draft, Prices(0.02, 0.1, [1.0], level=0.3), greedy
        )
        assert drafted.levels == draft.num_read + 1
        levels.append(drafted.levels)
    assert levels[0] == 1 < levels[1] < levels[2] == 6


@pytest.mark.parametrize("name", PROPOSERS)
def test_dear_rows_leave_drafts_out(name: str) -> None:
    """Red when a model's drafts have no price of their own."""
    cheap, dear = (
        propose(PROPOSERS[name], SureModel(0.7), Prices(price, 0.0, [1.0]))
        for price in (0.01, 0.4)
    )
    assert int(dear.tree.num_nodes[0]) == 1 + 2 < int(cheap.tree.num_nodes[0])
    assert dear.claims is not None
    assert dear.claims[0, :3].tolist() == pytest.approx([0, 0.7, 0.49], abs=1e-5)
    assert not bool(dear.claims[0, 3:].any())


@pytest.mark.parametrize("greedy", [True, False])
def test_nodes_that_are_left_out_are_not_read(greedy: bool) -> None:
    """Red when a model reads nodes that no tree has, or when leaving them out tells."""
    proposer = DynamicTree(4, 3, 12)
    dear = Prices(0.06, 0.0, [1.0, 1.0])
    free = Prices(0.0, 0.0, [1.0, 1.0])
    for prices, widths in ((dear, [2, 3]), (free, [4, 4])):
        draft, on_a_gpu = SureModel(0.55, 0.95), SureModel(0.55, 0.95)
        # The first request's model knows two tokens, 0.9 and 0.1.
        for model in (draft, on_a_gpu):
            model.logits[0, 2:] = -torch.inf
        tree = propose(proposer, draft, prices, greedy).tree
        other = propose(proposer, on_a_gpu, prices, greedy, may_wait=False).tree
        assert draft.widths == widths
        assert on_a_gpu.widths == [4, 4]
        for found, expected in zip(
            (tree.token_ids, tree.parents, tree.num_nodes),
            (other.token_ids, other.parents, other.num_nodes),
            strict=True,
        ):
            assert found.equal(expected)


@pytest.mark.parametrize(
    ("likely", "ends"),
    [([0.8], False), ([0.4, 0.4], True), ([0.8, 0.1], False), ([0.45, 0.35], True)],
)
def test_each_node_pays_for_the_draft_below_it(likely: list[float], ends: bool) -> None:
    """Red when unlikely nodes together pay for drafts that none of them is worth."""
    inputs = ProposerInputs(
        torch.zeros(1, dtype=torch.int64),
        plain_sampling(1),
        torch.zeros(1, 0, dtype=torch.float64),
        prices=Prices(0.35, 0.0, [1.0], level=0.15),
        host_may_wait=True,
    )
    nodes = torch.tensor([likely], dtype=torch.float64)
    assert Worth(None, inputs).ends(1, nodes) == ends


@pytest.mark.parametrize("name", PROPOSERS)
def test_requests_that_keep_little_count_little(name: str) -> None:
    """Red when one request's promises cost another its levels, or pay for them."""
    draft = SureModel(0.9, 0.9)
    both = propose(PROPOSERS[name], draft, Prices(0.01, 0.0, [1.0, 1.0], level=0.9))
    draft = SureModel(0.9, 0.9)
    one = propose(PROPOSERS[name], draft, Prices(0.01, 0.0, [1.0, 0.01], level=0.9))
    assert one.levels < both.levels
    assert int(one.tree.num_nodes[1]) == 1 < int(one.tree.num_nodes[0])


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_host_that_must_not_wait_reads_all_levels(name: str) -> None:
    """Red when a GPU's step waits for a probability."""
    draft = SureModel(0.3)
    prices = Prices(0.02, 0.1, [1.0], level=0.9)
    drafted = propose(PROPOSERS[name], draft, prices, may_wait=False)
    assert (draft.num_read, drafted.levels) == (5, 6)
    assert int(drafted.tree.depths.max()) < 6, "drafts are left out all the same"


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_host_that_must_not_wait_reads_as_many_levels_as_it_is_told(
    name: str,
) -> None:
    """Red when past steps cannot say how many levels a GPU's step reads."""
    draft = SureModel(0.95)
    prices = Prices(0.02, 0.1, [1.0], level=0.9, num_levels=3)
    drafted = propose(PROPOSERS[name], draft, prices, may_wait=False)
    assert (draft.num_read, drafted.levels) == (2, 3)
    assert int(drafted.tree.depths.max()) == 3


@pytest.mark.parametrize(("kind", "level"), [("random", 0.15), ("zeros", 0.25)])
def test_the_law_stays(kind: str, level: float) -> None:
    """Red when what was drawn decides whether it is a draft.

    Whether a level is read depends on the draws above it, of all nodes. So each draw
    is a request of its own here.
    """
    draft, target = random_tables(kind, 3, 3)
    proposer = Sd(3)
    uniforms, weights = draft_uniforms(draft, proposer.branching_factors)
    prices = Prices(0.05, 0.0, [1.0], level=level)
    drafts = [draw_alone(proposer, draft, row, prices) for row in uniforms]
    trees = [drafted.tree for drafted in drafts]
    by_depth: dict[int, list[int]] = {}
    for number, drafted in enumerate(drafts):
        by_depth.setdefault(drafted.levels, []).append(number)
    assert len(by_depth) > 1, "prices change nothing"
    law = sum(
        LawMeter(
            recursive_rejection,
            Weighted(together([trees[n] for n in numbers]), weights[numbers]),
            target,
        ).law(NUM_TOKENS)
        for numbers in by_depth.values()
    )
    assert float((law - target.true_law(NUM_TOKENS)).abs().max()) < EXACT


def together(trees: Sequence[TreeBatch]) -> TreeBatch:
    """Trees of one width as a batch."""
    draws = [tree.draws for tree in trees if tree.draws is not None]
    return TreeBatch(
        torch.cat([tree.token_ids for tree in trees]),
        torch.cat([tree.parents for tree in trees]),
        torch.cat([tree.depths for tree in trees]),
        torch.cat([tree.num_nodes for tree in trees]),
        Draws(
            torch.cat([draw.nodes for draw in draws]),
            torch.cat([draw.rows for draw in draws]),
            torch.cat([draw.without_replacement for draw in draws]),
            torch.cat([draw.probs for draw in draws]),
        ),
    )


def draw_alone(
    proposer: Proposer, draft: Language, uniforms: torch.Tensor, prices: Prices
) -> Draft:
    """The tree of one request."""
    return proposer.propose(
        ProposerInputs(
            torch.zeros(1, dtype=torch.int64),
            plain_sampling(1),
            uniforms[None],
            [LanguageDraft(draft, 1)],
            prices=prices,
            host_may_wait=True,
        )
    )


# With the schedule


class Steps:
    """One request whose draft model is sure in some steps, and what they cost."""

    def __init__(
        self,
        level: float,
        each: float,
        may_wait: bool = True,
        sureness: Sequence[float] = (0.2, 0.5, 0.8, 0.95),
    ) -> None:
        """Take what a level and a row cost, in plain steps."""
        self.level, self.each = level, each
        self.may_wait = may_wait
        self.sureness = sureness
        self.random = random.Random(0)
        self.schedule = MeasuredSchedule(
            [Tree(8, 8, 1, weighs_drafts=True)], 64, host_may_wait=may_wait
        )
        self.tokens = self.seconds = 0.0

    def step(self, depth: int | None) -> None:
        """Run a step: with a tree of this depth, or as the schedule says."""
        sureness = self.random.choice(self.sureness)
        accepted = 0
        while self.random.random() < sureness:
            accepted += 1
        index, slots = self.schedule.choose(running([0]))
        num_levels = num_drafts = 0
        claimed = 0.0
        if depth is not None:
            num_levels = num_drafts = depth
        elif index is not None:
            prices = self.schedule.prices(slots)
            draft = SureModel(sureness)
            drafted = propose(Sd(8), draft, prices, may_wait=self.may_wait)
            assert drafted.claims is not None
            claimed = float(drafted.claims.sum())
            num_levels = drafted.levels
            num_drafts = int(drafted.tree.num_nodes[0]) - 1
        accepted = min(accepted, num_drafts)
        first = 0.05 if num_drafts else 0.0
        seconds = 1 + first + self.level * num_levels + self.each * num_drafts
        self.tokens += 1 + accepted
        self.seconds += seconds
        if depth is None:
            drawn = index is not None
            self.schedule.observe(
                StepOutcome(
                    index,
                    1,
                    [0] * drawn,
                    [num_drafts] * drawn,
                    [accepted] * drawn,
                    [63] * drawn,
                    [claimed] * drawn,
                    seconds * self.random.gauss(1, 0.05),
                    num_levels,
                )
            )

    def speed(self, depth: int | None = None) -> float:
        """Tokens in the time of a plain step, over 800 steps."""
        for _ in range(800):
            self.step(depth)
        return self.tokens / self.seconds


@pytest.mark.thorough
@pytest.mark.parametrize("level", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("each", [0.02, 0.1])
def test_weighing_beats_every_fixed_depth(level: float, each: float) -> None:
    """Red when a depth of one's own would be better than what is weighed."""
    weighed = Steps(level, each).speed()
    best = max(Steps(level, each).speed(depth) for depth in range(9))
    assert weighed > 0.98 * best


@pytest.mark.thorough
@pytest.mark.parametrize("level", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("each", [0.02, 0.1])
def test_where_the_host_must_not_wait_the_best_depth_is_found(
    level: float, each: float
) -> None:
    """Red when a GPU reads all levels in every step, whatever they bring."""
    chosen = Steps(level, each, may_wait=False).speed()
    best = max(Steps(level, each).speed(depth) for depth in range(9))
    assert chosen > 0.95 * best


@pytest.mark.thorough
def test_levels_are_read_again_when_the_text_changes() -> None:
    """Red when a depth that was right once is never left."""
    steps = Steps(0.2, 0.02, may_wait=False, sureness=(0.3,))
    shallow = steps.speed()
    steps.sureness, steps.tokens, steps.seconds = (0.95,), 0.0, 0.0
    deep = steps.speed()
    fixed = Steps(0.2, 0.02, sureness=(0.95,))
    assert shallow < 1.2
    assert deep > 0.85 * max(fixed.speed(depth) for depth in (6, 8))


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_model_that_never_pays_is_left_out(may_wait: bool) -> None:
    """Red when plain decoding would be much faster."""
    assert Steps(1.5, 0.3, may_wait).speed() > 0.97
