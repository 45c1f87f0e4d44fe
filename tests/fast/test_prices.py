"""Drafts that promise less than they cost are left out; costs are measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.fast.test_measured_schedule import Tree, running
from tests.fast.toy_workloads import Scheduled, make_method
from vllm_treespec.proposers import ProposerInputs, RsdC, Sd
from vllm_treespec.proposers.suffix import Suffix
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.schedule.base import ListedSchedule, RunningRequests, StepOutcome
from vllm_treespec.schedule.measured import MeasuredSchedule
from vllm_treespec.schedule.prices import (
    DraftCosts,
    DraftParts,
    Prices,
    Promises,
    guessed_parts,
)
from vllm_treespec.scorers import RULES
from vllm_treespec.sources.continuations import Continuations, next_tokens
from vllm_treespec.sources.suffix_index import SuffixIndex
from vllm_treespec.step.method import Method
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import Language, ToyDraftModel
from vllm_treespec.trees.draft import NO_TOKEN, Draft

PLAIN = 0.05


def measured(
    each: float, first: float, seed: int, num_steps: int = 60, level: float = 0.0
) -> DraftCosts:
    """Costs after steps of 8 requests whose times scatter by 6 per cent."""
    costs, source = DraftCosts(), random.Random(seed)
    for step in range(num_steps):
        num_drafts = source.randrange(1, 30)
        num_levels = source.randrange(1, 5) if level else 0
        seconds = PLAIN + first + level * num_levels + each * num_drafts
        seconds *= source.gauss(1, 0.06)
        counts = DraftParts.of_step(num_levels, num_drafts, 0, False)
        costs.add(step, 8, counts, seconds, PLAIN)
    return costs


@pytest.mark.parametrize("each", [0.0, 0.0005, 0.002, 0.006])
@pytest.mark.parametrize("seed", range(4))
def test_costs_of_drafts_are_found(each: float, seed: int) -> None:
    """Red when the fit of measured times is not the line that they lie on."""
    prices = measured(each, 0.005, seed).prices(60, 8, PLAIN, [1.0])
    # A token of plain decoding takes 1/8 of a step.
    assert prices.draft == pytest.approx(each * 8 / PLAIN, rel=0.1, abs=0.05)
    assert prices.first == pytest.approx(0.005 * 8 / PLAIN, abs=1.2)


@pytest.mark.parametrize("level", [0.004, 0.02])
@pytest.mark.parametrize("seed", range(4))
def test_costs_of_levels_are_told_from_those_of_drafts(level: float, seed: int) -> None:
    """Red when a draft model's forwards make rows of the target dear."""
    prices = measured(0.0005, 0.005, seed, level=level).prices(60, 8, PLAIN, [1.0])
    assert prices.draft == pytest.approx(0.0005 * 8 / PLAIN, abs=0.06)
    assert prices.level == pytest.approx(level * 8 / PLAIN, rel=0.25, abs=0.2)


def test_levels_are_told_by_how_long_models_draft() -> None:
    """Red when a machine whose target is disturbed does not know what a level takes.

    Deeper trees have more drafts, so times of whole steps tell both apart badly.
    """
    level, each = 0.2 * PLAIN, 0.02 * PLAIN
    errors: list[float] = []
    errors_of_sums: list[float] = []
    for seed in range(8):
        source, known, unknown = random.Random(seed), DraftCosts(), DraftCosts()
        for step in range(60):
            num_levels = source.randrange(1, 4)
            num_drafts = 8 * num_levels + source.randrange(3)
            models = level * num_levels * source.gauss(1, 0.05)
            target = (PLAIN + each * num_drafts) * source.gauss(1, 0.25)
            counts = DraftParts.of_step(num_levels, num_drafts, 0, False)
            known.add(step, 8, counts, target + models, PLAIN, models)
            unknown.add(step, 8, counts, target + models, PLAIN)
        for costs, found in ((known, errors), (unknown, errors_of_sums)):
            price = costs.prices(60, 8, PLAIN, [1.0]).level
            found.append(abs(price - 8 * 0.2))
    assert max(errors) < 0.05 * 8 * 0.2
    assert sum(errors_of_sums) > 5 * sum(errors)


def test_drafting_takes_no_time_of_the_target() -> None:
    """Red when what models take makes rows or any drafts dear, too."""
    costs = DraftCosts()
    counts = DraftParts.of_step(2, 8, 0, False)
    for step in range(60):
        costs.add(step, 8, counts, 2 * PLAIN, PLAIN, PLAIN)
    prices = costs.prices(60, 8, PLAIN, [1.0])
    assert prices.level == pytest.approx(4.0, rel=0.05)
    assert prices.draft < 0.05
    assert prices.first < 0.4


def test_levels_are_learned_where_no_draft_was_worth_a_row() -> None:
    """Red when a model whose drafts are all left out looks cheap."""
    costs = DraftCosts()
    for step in range(60):
        costs.add(step, 1, DraftParts.of_step(2, 0, 0, False), 2 * PLAIN, PLAIN)
    assert costs.prices(60, 1, PLAIN, [1.0]).level == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_branches_are_told_from_drafts(seed: int) -> None:
    """Red when trees that are no chains make all drafts dear."""
    costs, source = DraftCosts(), random.Random(seed)
    for step in range(80):
        branches, num_drafts = source.random() < 0.5, source.randrange(2, 30)
        seconds = PLAIN * (1.02 + 0.1 * branches + 0.01 * num_drafts)
        counts = DraftParts.of_step(0, num_drafts, 0, branches)
        costs.add(step, 8, counts, seconds * source.gauss(1, 0.03), PLAIN)
    prices = costs.prices(80, 8, PLAIN, [])
    assert prices.branches == pytest.approx(0.8, abs=0.25)
    assert prices.first < 0.45


def test_catching_up_is_told_from_levels() -> None:
    """Red when a draft model that reads a long prompt makes its levels dear."""
    costs, source = DraftCosts(), random.Random(0)
    for step in range(60):
        counts = DraftParts.of_step(3, 4, 500 if step % 10 == 0 else 0, False)
        seconds = PLAIN * (1.45 + 0.01 * counts.caught_up) * source.gauss(1, 0.05)
        costs.add(step, 1, counts, seconds, PLAIN)
    assert costs.caught_up_seconds(60, 1, PLAIN) == pytest.approx(0.01 * PLAIN, rel=0.2)
    assert costs.prices(60, 1, PLAIN, [1.0]).level == pytest.approx(0.12, abs=0.04)


def test_a_disturbed_step_changes_little() -> None:
    """Red when one step that took ten times as long makes drafts too dear."""
    costs = measured(0.001, 0.005, seed=0)
    before = costs.prices(60, 8, PLAIN, []).draft
    costs.add(60, 8, DraftParts.of_step(0, 20, 0, False), 0.8, PLAIN)
    assert costs.prices(61, 8, PLAIN, []).draft < before + 0.05


def test_old_costs_are_forgotten() -> None:
    """Red when drafts that were too dear once are never tried again."""
    costs, fresh = measured(0.02, 0.0, seed=0), DraftCosts()
    dear, guess = (c.prices(60, 8, PLAIN, []).draft for c in (costs, fresh))
    assert dear > 2 > 0.2 > guess
    later = costs.prices(3000, 8, PLAIN, []).draft
    assert later == pytest.approx(guess, rel=0.3)


def test_promises_are_compared_with_what_is_accepted() -> None:
    """Red when a text, or a request, that keeps little is not trusted less."""
    promises = Promises()
    assert promises.kept(0, 1, False) == 1
    for step in range(60):
        promises.observe(step, 1, False, promised=2.0, accepted=2)
        promises.observe(step, 2, False, promised=2.0, accepted=0)
    good, bad, other = (promises.kept(60, slot, False) for slot in (1, 2, 3))
    assert good == pytest.approx(1.0, abs=0.15)
    assert bad < 0.1
    assert other == pytest.approx(0.5, abs=0.1)
    assert promises.kept(60, 3, True) == 1
    promises.forget([2])
    assert promises.kept(60, 2, False) == other


# The proposer

# One long match, and a short one with two continuations.
LONG, SHORT = [(8, [1, 2, 3, 4])], [(1, [5, 6]), (1, [7])]
# Of two equally likely tokens after one that matches.
SHORT_CLAIM = 0.95 * (1 - 0.8) / 2


def propose(found: Sequence[list[tuple[int, list[int]]]], prices: Prices) -> Draft:
    return Suffix(16, 4, 0.01).propose(
        ProposerInputs(
            root_token_ids=torch.zeros(len(found), dtype=torch.int64),
            sampling=SamplingTensors(torch.zeros(len(found)), all_greedy=True),
            uniforms=torch.zeros(len(found), 0, dtype=torch.float64),
            continuations=[Continuations(list(found))],
            prices=prices,
        )
    )


def num_drafts(draft: Draft) -> list[int]:
    return (draft.tree.num_nodes - 1).tolist()


def claimed(draft: Draft) -> list[float]:
    """What each tree's drafts claim, and its shadow draft."""
    assert draft.claims is not None
    assert draft.shadow is not None
    return (draft.claims.sum(1) + draft.shadow.claims).tolist()


def test_drafts_below_their_price_are_left_out() -> None:
    """Red when trees of one step cannot have different sizes."""
    assert num_drafts(propose([LONG, SHORT], Prices(0.0, 0.0, [1, 1]))) == [4, 3]
    draft = propose([LONG, SHORT], Prices(0.3, 0.0, [1, 1]))
    assert num_drafts(draft) == [4, 0]
    assert draft.claims is not None
    # 0.95 (1 - 0.8^8), and so on along the path
    path = [0.95 * (1 - 0.8**n) for n in (8, 9, 10, 11)]
    claims = [0.0, *torch.tensor(path).cumprod(0).tolist()]
    assert draft.claims[0, :5].tolist() == pytest.approx(claims)
    assert not bool(draft.claims[0, 5:].any() | draft.claims[1].any())
    assert claimed(draft)[1] == pytest.approx(SHORT_CLAIM), "of a shadow draft"


def test_what_a_request_keeps_counts() -> None:
    """Red when a request whose promises fail gets as many drafts as others."""
    draft = propose([LONG, LONG, SHORT], Prices(0.3, 0.0, [1.0, 0.42, 4.0]))
    assert num_drafts(draft) == [4, 1, 2]


def test_few_drafts_are_not_worth_a_step_with_drafts() -> None:
    """Red when one unlikely draft costs a step all that drafts cost besides."""
    price = Prices(0.1, 1.5, [1.0])
    assert num_drafts(propose([LONG], price)) == [4]
    none = propose([SHORT], price)
    assert num_drafts(none) == [0]
    assert claimed(none) == pytest.approx([SHORT_CLAIM]), "of a shadow draft"
    assert none.tree.parents.tolist() == [[-1] * 17]
    both = propose([LONG, SHORT], Prices(0.08, 1.5, [1.0, 1.0]))
    assert num_drafts(both)[1] > 0


def test_branches_must_be_worth_what_they_cost() -> None:
    """Red when a step pays for trees where chains bring nearly as much."""
    # the second tree is a chain; without its branch the first one is
    found = [[(2, [1, 2, 3]), (2, [5, 6, 7])], LONG]
    price = Prices(0.05, 0.0, [1.0, 1.0])
    whole = propose(found, price)
    assert num_drafts(whole) == [4, 4]
    chains = propose(found, replace(price, branches=1.0))
    assert num_drafts(chains) == [2, 4]
    assert chains.tree.parents[0, :3].tolist() == [-1, 0, 1]
    assert chains.tree.token_ids[0, 1:3].tolist() == [1, 2]
    two_paths, one_path = claimed(whole)
    assert claimed(chains) == pytest.approx([two_paths / 2, one_path])
    assert num_drafts(propose(found, replace(price, branches=0.1))) == [4, 4]
    dear = propose(found, replace(price, first=9.0))
    assert num_drafts(dear) == [0, 0]


def test_trees_without_drafts_have_shadow_drafts() -> None:
    """Red when nothing is learned of a text whose drafts all cost too much."""
    draft = propose([LONG, SHORT, []], Prices(0.9, 0.0, [0.9, 1.0, 1.0]))
    assert num_drafts(draft) == [0, 0, 0]
    assert draft.shadow is not None
    assert draft.shadow.token_ids.tolist() == [1, 7, NO_TOKEN]
    expected = [0.95 * (1 - 0.8**8), SHORT_CLAIM, 0.0]
    assert draft.shadow.claims.tolist() == pytest.approx(expected)
    drawn = propose([LONG], Prices(0.1, 0.0, [1.0]))
    assert drawn.shadow is not None
    assert drawn.shadow.token_ids.tolist() == [NO_TOKEN], "drafts tell more"
    assert drawn.shadow.claims.tolist() == [0.0]


# With the schedule


class Weighing:
    """Requests whose drafts are chains of known probabilities, and what they cost."""

    def __init__(self, seed: int, num_reqs: int, each: float, kept: float) -> None:
        """Take the cost of a draft, and how true its probabilities are.

        Args:
            seed: of the text and of the scatter of times.
            num_reqs: that run, always the same.
            each: as a part of a plain step's time for a token.
            kept: what is accepted of a promised token.

        """
        self.random = random.Random(seed)
        self.num_reqs, self.each, self.kept = num_reqs, each, kept
        tree = Tree(16, 12, 16, weighs_drafts=True, is_free=True)
        self.schedule = MeasuredSchedule([tree], 64)
        self.tokens = self.seconds = 0.0

    def chain(self) -> list[float]:
        """Probabilities that a request's drafts promise; often none is found."""
        rate = self.random.choice([0.0, 0.0, 0.3, 0.6, 0.9])
        return [rate**level for level in range(1, 13)] if rate else []

    def weigh(
        self, chains: list[list[float]], prices: Prices | None
    ) -> list[list[float]]:
        """The drafts that are worth their price."""
        if prices is None:
            return [[] for _ in chains]
        kept = [
            [p for p in chain if p * factor > prices.draft]
            for chain, factor in zip(chains, prices.kept, strict=True)
        ]
        gained = sum(
            sum(chain) * factor - len(chain) * prices.draft
            for chain, factor in zip(kept, prices.kept, strict=True)
        )
        return kept if gained > prices.first else [[] for _ in chains]

    def accepted(self, chain: list[float]) -> int:
        """Drafts of a chain that are accepted."""
        draw = self.random.random()
        return sum(p * self.kept > draw for p in chain)

    def step(self, price: float | None = None) -> None:
        """Run a step, at a price of one's own instead of the schedule's."""
        slots = list(range(self.num_reqs))
        index, drawn = self.schedule.choose(running(slots))
        prices = None if index is None else self.schedule.prices(drawn)
        if price is not None:
            drawn, prices = slots, Prices(price, 0.0, [1.0] * self.num_reqs)
        offered = [self.chain() for _ in slots][: len(drawn)]
        chains = self.weigh(offered, prices)
        accepted = [self.accepted(chain) for chain in chains]
        # of what is not drawn the first draft is guessed
        told = [
            chain or offer[:1] for chain, offer in zip(chains, offered, strict=True)
        ]
        kept = [
            number if chain else self.accepted(guess)
            for number, chain, guess in zip(accepted, chains, told, strict=True)
        ]
        drafts = [len(chain) for chain in chains]
        first = 0.08 if any(drafts) else 0.01 * (prices is not None)
        seconds = 1 + first + self.each * sum(drafts) / self.num_reqs
        self.tokens += self.num_reqs + sum(accepted)
        self.seconds += seconds
        if price is not None:
            return
        self.schedule.observe(
            StepOutcome(
                index,
                self.num_reqs,
                list(drawn),
                drafts,
                accepted,
                [63] * len(drafts),
                [sum(chain) for chain in told],
                seconds * self.random.gauss(1, 0.05),
                num_kept=kept,
            )
        )

    def speed(self, num_steps: int, price: float | None = None) -> float:
        """Tokens a second, where plain decoding emits ``num_reqs``."""
        for _ in range(num_steps):
            self.step(price)
        return self.tokens / self.seconds / self.num_reqs


@pytest.mark.thorough
@pytest.mark.parametrize("num_reqs", [1, 8])
@pytest.mark.parametrize("each", [0.01, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("kept", [0.5, 1.0])
def test_the_best_price_is_found(num_reqs: int, each: float, kept: float) -> None:
    """Red when the schedule draws too much, or too little, for what drafts cost."""
    found = Weighing(0, num_reqs, each, kept).speed(1500)
    best = max(
        Weighing(0, num_reqs, each, kept).speed(1500, price)
        for price in (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)
    )
    assert found > 0.92 * max(best, 1.0)


def test_prices_of_a_new_batch_size_are_those_of_the_nearest() -> None:
    """Red when each batch size learns anew what a row and a level take."""
    costs = DraftCosts()
    for number in range(200):
        levels, drafts = number % 4, number % 7
        seconds = 0.05 + (drafts > 0) * 0.004 + levels * 0.006 + drafts * 0.003
        counts = DraftParts.of_step(levels, drafts, 0, False)
        costs.add(number, 4, counts, seconds, plain=0.05)
    prices = costs.prices(200, 8, plain=0.08, kept=[1.0])
    assert prices.draft == pytest.approx(0.003 * 8 / 0.08, rel=0.1)
    assert prices.level == pytest.approx(0.006 * 8 / 0.08, rel=0.1)
    far = costs.prices(200, 1, plain=0.4, kept=[1.0])
    assert far.draft == pytest.approx(guessed_parts(1, 0.4).each / 0.4)


@pytest.mark.parametrize("seed", range(6))
def test_drafts_that_never_pay_cost_little_from_the_start(seed: int) -> None:
    """Red when a short job of such a text is slower than plain decoding."""
    assert Weighing(seed, 8, each=0.8, kept=0.4).speed(120) > 0.92


def test_a_text_that_changes_is_noticed() -> None:
    """Red when drafts that were not believed are not tried again for long."""
    text = Weighing(0, 8, each=0.2, kept=0.02)
    assert text.speed(600) > 0.97
    text.kept, text.tokens, text.seconds = 1.0, 0.0, 0.0
    best = Weighing(1, 8, each=0.2, kept=1.0).speed(1500, price=0.2)
    assert text.speed(150) > 0.9 * best > 1.2


def test_ranks_have_equal_prices() -> None:
    """Red when prices depend on a rank's own clock."""
    first = Weighing(0, 4, 0.2, 1.0)
    seconds: list[list[float]] = []
    first.schedule.times.share = lambda own: seconds.append(own) or own  # type: ignore[func-returns-value]
    first.speed(200)
    second = Weighing(0, 4, 0.2, 1.0)
    second.random = random.Random(0)
    second.schedule.times.share = lambda own: seconds.pop(0)
    observe = second.schedule.observe

    def slower(outcome: StepOutcome) -> None:
        assert outcome.seconds is not None
        object.__setattr__(outcome, "seconds", outcome.seconds * 3)
        observe(outcome)

    second.schedule.observe = slower  # type: ignore[method-assign]
    second.speed(200)
    slots = list(range(4))
    second.schedule.times.share = first.schedule.times.share = lambda own: (
        [1.0] * len(own)
    )
    assert second.schedule.costs.drafts.times == first.schedule.costs.drafts.times
    assert second.schedule.choose(running(slots)) == first.schedule.choose(
        running(slots)
    )
    assert second.schedule.prices(slots) == first.schedule.prices(slots)


class Dear(MeasuredSchedule):
    """Asks so much that nothing is drawn, and keeps what it is told."""

    def __init__(self) -> None:
        """Have one tree."""
        super().__init__([Tree(8, 5, 8, weighs_drafts=True, is_free=True)], 64)
        self.outcomes: list[StepOutcome] = []

    def _choose(self, requests: RunningRequests) -> tuple[int | None, Sequence[int]]:
        """Always ask the index."""
        return 0, requests.slots

    def _prices(self, slots: Sequence[int]) -> Prices:
        """More than any draft promises."""
        return Prices(9.0, 0.0, [1.0] * len(slots))

    def observe(self, outcome: StepOutcome) -> None:
        """Keep it."""
        self.outcomes.append(outcome)


def test_shadow_drafts_are_compared_with_what_was_emitted() -> None:
    """Red when one is judged by another step's token, or by another request's."""
    language, schedule = Language(3), Dear()
    proposer = Suffix(8, depth=5, min_probability=0.0)
    method = Method(schedule, [proposer], RULES["coupled_draw"], False, 16)
    index = SuffixIndex(depth=5, max_match=6, max_cached_tokens=0)
    engine = FakeEngine(language, method, [index], Habits(), 0)
    prompt = [1, 2, 3, 1, 2]
    (answer,) = engine.run(Request("r", list(prompt), max_tokens=30))
    text = np.array(prompt + answer)
    expected = []
    for end in range(1 + len(prompt), len(text)):
        likely = next_tokens(index.continuations(text[:end]), 0)
        best = max(((share, t) for t, (share, _) in likely.items()), default=(0, -1))
        if best[1] >= 0:
            expected.append((best[0], int(best[1] == text[end])))
    told = [
        (promised, kept)
        for outcome in schedule.outcomes
        for promised, kept in zip(outcome.promised, outcome.num_kept, strict=True)
        if promised
    ]
    assert told == [(pytest.approx(p), kept) for p, kept in expected]
    assert {kept for _, kept in told} == {0, 1}
    assert not any(sum(outcome.num_accepted) for outcome in schedule.outcomes)


@pytest.mark.parametrize("factors", [[1, 1], [2, 1]])
def test_schedules_are_told_of_branches(factors: list[int]) -> None:
    """Red when chains count as trees with branches, or trees as chains."""
    language = Language(0)
    method = make_method([RsdC(factors)], "recursive_rejection")
    engine = FakeEngine(language, method, [ToyDraftModel(language)], Habits(), 0)
    told: list[bool] = []

    def observe(outcome: StepOutcome) -> None:
        told.append(outcome.has_branches)

    method.schedule.observe = observe  # type: ignore[method-assign]
    engine.run(Request("r", [1, 2, 3], max_tokens=20))
    assert any(told) == (factors == [2, 1])
    assert not told[0], "no tree came back to the first step"


@pytest.mark.parametrize("weighs", [True, False])
def test_claims_reach_schedules_that_weigh_drafts(weighs: bool) -> None:
    """Red when fixed trees, whose drafts have no price, change what claims are worth.

    So too when a tree of which not all is proposed claims nothing, or all.
    """
    language, proposer = Language(0), Sd(4)
    schedule = ListedSchedule([Scheduled(1000, proposer.sizes, weighs_drafts=weighs)])
    method = Method(schedule, [proposer], RULES["recursive_rejection"], False, 16)
    engine = FakeEngine(language, method, [ToyDraftModel(language)], Habits(), 0)
    outcomes: list[StepOutcome] = []
    schedule.observe = outcomes.append  # type: ignore[method-assign, assignment]
    engine.run(Request("r", [1, 2, 3], max_tokens=20))
    told = {
        (drafts, claimed)
        for outcome in outcomes
        for drafts, claimed in zip(outcome.num_drafts, outcome.promised, strict=True)
    }
    assert told == {(4, 4.0 * weighs)}, "a draft that is not weighed claims 1"
