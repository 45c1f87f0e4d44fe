"""The schedule that measures, against an engine of which all costs are known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from vllm_treespec.schedule.base import RunningRequests, StepOutcome
from vllm_treespec.schedule.learned import RequestHistory, Spread
from vllm_treespec.schedule.measured import MeasuredSchedule
from vllm_treespec.trees.sizes import TreeSizes


@dataclass(frozen=True)
class Tree:
    """A tree of so many draft nodes, levels and leaves."""

    num_drafts: int
    depth: int
    leaves: int
    batch_size: int = 10**9
    min_acceptance_length: float = 1.0
    weighs_drafts: bool = False
    is_free: bool = False
    # levels that a model drafts; 0: all
    draft_depth: int = 0

    @property
    def name(self) -> str:
        """Its numbers."""
        return f"{self.num_drafts} in {self.depth}"

    @property
    def sizes(self) -> TreeSizes:
        """Its sizes."""
        return TreeSizes(
            max_nodes=1 + self.num_drafts,
            max_depth=self.depth,
            max_width=self.leaves,
            max_leaves=self.leaves,
            draft_depth=self.draft_depth,
        )

    def has_shape(self, shape: Mapping[str, object]) -> bool:
        """By the number of draft nodes."""
        return shape == {"num_drafts": self.num_drafts}


HEAD = (Tree(16, 3, 8), Tree(5, 2, 4), Tree(4, 1, 4), Tree(2, 1, 2))
INDEX = (Tree(16, 12, 16), Tree(8, 8, 8), Tree(4, 4, 4), Tree(2, 2, 2))


# Draft tokens of a request that does not limit its trees.
ALL = 63


def running(
    slots: Sequence[int],
    sampled: bool = False,
    limits: Sequence[int] = (),
    num_behind: Sequence[int] = (),
) -> RunningRequests:
    """Requests that all may draft, without limits where none are given."""
    return RunningRequests(
        len(slots),
        slots,
        [sampled] * len(slots),
        limits or [ALL] * len(slots),
        num_behind or [0] * len(slots),
    )


def outcome(
    index: int | None,
    num_reqs: int,
    slots: Sequence[int],
    accepted: Sequence[int],
    seconds: float | None,
    limits: Sequence[int] = (),
) -> StepOutcome:
    """What a step brought whose trees all came back, each with a draft."""
    drafts = [1] * len(slots)
    limits = limits or [ALL] * len(slots)
    promised = [0.0] * len(slots)
    return StepOutcome(
        index, num_reqs, slots, drafts, accepted, limits, promised, seconds
    )


class Machine:
    """Costs of steps, and a text of which so much is accepted."""

    def __init__(self, seed: int, trees: Sequence[Tree]) -> None:
        """Draw the costs, in steps of the target with one request."""
        self.random = random.Random(seed)
        self.trees = trees
        self.request = self.random.uniform(0.0, 0.1)
        self.host = self.random.uniform(0.02, 0.2)
        self.level = self.random.uniform(0.0, 0.2)
        self.row = self.random.choice([0.002, 0.02, 0.05])
        self.free_rows = self.random.choice([4, 16, 64, 256])
        self.level_accepted = self.random.uniform(0.05, 0.95)
        # how slow it is now
        self.slowness = 1.0
        # how much longer steps of an option take
        self.factors: dict[int | None, float] = {}

    def rate(self, index: int) -> float:
        """How often a level of a tree is accepted where the one above was."""
        tree = self.trees[index]
        width = tree.num_drafts / tree.depth
        return 1 - (1 - self.level_accepted) ** width**0.3

    def accepted(self, index: int | None) -> float:
        """Tokens of a tree that are accepted in the mean."""
        if index is None:
            return 0.0
        levels = range(1, self.trees[index].depth + 1)
        return sum(self.rate(index) ** level for level in levels)

    def seconds(
        self, index: int | None, batch_size: int, num_trees: int | None = None
    ) -> float:
        """Time of a step with so many trees; None: one a request."""
        plain = 1 + self.request * (batch_size - 1)
        factor = self.factors.get(index, 1.0)
        if index is None:
            return plain * factor
        tree = self.trees[index]
        num_drafts = tree.num_drafts * (batch_size if num_trees is None else num_trees)
        rows = batch_size + num_drafts - max(self.free_rows, batch_size)
        extra = self.host + self.level * tree.depth + self.row * max(0, rows)
        return (plain + extra) * factor

    def speed(self, index: int | None, batch_size: int) -> float:
        """Tokens a second."""
        tokens = batch_size * (1 + self.accepted(index))
        return tokens / self.seconds(index, batch_size)

    def draw(self, index: int) -> int:
        """Accepted tokens of one tree."""
        accepted = 0
        while accepted < self.trees[index].depth and self.random.random() < self.rate(
            index
        ):
            accepted += 1
        return accepted


class Run:
    """Steps of a machine under a schedule."""

    def __init__(self, machine: Machine, schedule: MeasuredSchedule) -> None:
        """Begin without steps."""
        self.machine, self.schedule = machine, schedule
        self.seconds = 0.0
        # what the best option would have taken for the same tokens
        self.best_seconds = 0.0
        self.chosen: list[int | None] = []

    def steps(self, num_steps: int, batch_size: int, first_slot: int = 0) -> None:
        """Run steps of as many requests."""
        machine = self.machine
        options = [None, *range(len(machine.trees))]
        best = max(machine.speed(option, batch_size) for option in options)
        slots = range(first_slot, first_slot + batch_size)
        for _ in range(num_steps):
            requests = running(slots)
            index, drawn = self.schedule.choose(requests)
            self.chosen.append(index)
            accepted = [machine.draw(index) for _ in drawn if index is not None]
            exact = machine.seconds(index, batch_size, len(drawn))
            seconds = exact * machine.slowness * machine.random.gauss(1, 0.04)
            reads_prompt = machine.random.random() < 0.05
            if machine.random.random() < 0.01:
                seconds *= 3
            self.seconds += exact
            self.best_seconds += (batch_size + sum(accepted)) / best
            self.schedule.observe(
                outcome(
                    index,
                    batch_size,
                    drawn,
                    accepted,
                    None if reads_prompt else seconds,
                )
            )

    @property
    def share(self) -> float:
        """Tokens a second over those of the best option."""
        return self.best_seconds / self.seconds


def run_of(seed: int) -> Run:
    """A machine with trees of a head, or of an index."""
    trees = HEAD if seed % 2 else INDEX
    return Run(Machine(seed, trees), MeasuredSchedule(trees, 64))


def median(values: Sequence[float]) -> float:
    """The upper one of an even number."""
    return sorted(values)[len(values) // 2]


@pytest.mark.thorough
def test_it_finds_the_best_tree() -> None:
    """Red when choices are far from the best in hindsight, or dear to find."""
    shares = []
    for seed in range(48):
        run = run_of(seed)
        run.steps(2000, batch_size=(1, 2, 4, 8, 16, 32)[seed % 6])
        shares.append(run.share)
    assert median(shares) > 0.97
    assert sum(share < 0.95 for share in shares) <= 3
    assert min(shares) > 0.9


@pytest.mark.thorough
def test_trees_that_bring_nothing_cost_little() -> None:
    """Red when trees that cost little and bring nothing are looked at all the time."""
    shares = []
    for seed in range(24):
        run = run_of(seed)
        machine = run.machine
        machine.level_accepted = machine.level = machine.row = 0.0
        machine.host = machine.random.uniform(0.02, 0.08)
        run.steps(1000, batch_size=(1, 8)[seed % 2])
        shares.append(run.share)
    assert sum(shares) / len(shares) > 0.985


def where_rows_are_dear(seed: int, level_accepted: float) -> Run:
    """The best tree is slower than plain decoding, as on chat on two cores."""
    run = Run(Machine(seed, HEAD), MeasuredSchedule(HEAD, 64))
    machine = run.machine
    machine.request, machine.host, machine.level = 0.1, 0.1, 0.03
    machine.row, machine.free_rows = 0.05, 1
    machine.level_accepted = level_accepted
    return run


@pytest.mark.thorough
def test_new_requests_cost_little_where_no_tree_pays() -> None:
    """Red when each new request gets trees to see what it accepts of them.

    With 8 requests the best tree is a fifth slower.
    """
    shares = []
    for seed in range(16):
        run = where_rows_are_dear(seed, 0.25)
        for first_slot in range(0, 1000, 8):
            run.steps(8, batch_size=8, first_slot=first_slot)
            run.schedule.forget(range(first_slot, first_slot + 8))
        shares.append(run.share)
    assert sum(shares) / len(shares) > 0.97


@pytest.mark.thorough
def test_it_follows_the_batch_size() -> None:
    """Red when what one batch size showed is not used, or believed, at another."""
    shares = []
    for seed in range(40):
        run = run_of(seed)
        for _ in range(15):
            run.steps(
                run.machine.random.randint(50, 300), (1, 2, 4, 8, 16, 32)[seed % 6]
            )
            run.steps(run.machine.random.randint(50, 300), 1 + seed % 9)
        shares.append(run.share)
    assert median(shares) > 0.95
    assert min(shares) > 0.8


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), [(0.1, 0.9), (0.9, 0.05)])
def test_it_recovers_when_the_text_changes(before: float, after: float) -> None:
    """Red when a tree that became good, or bad, is not noticed."""
    shares = []
    for seed in range(20):
        run = run_of(seed)
        run.machine.level_accepted = before
        run.steps(1500, batch_size=1)
        run.machine.level_accepted = after
        run.seconds = run.best_seconds = 0.0
        run.steps(1500, batch_size=1, first_slot=1)
        shares.append(run.share)
    assert median(shares) > 0.9


def test_it_recovers_when_the_machine_changes() -> None:
    """Red when times of another load, or of longer texts, are believed for ever."""
    for slower in (None, 0):
        machine = Machine(0, INDEX)
        machine.host, machine.level, machine.row = 0.3, 0.1, 0.03
        machine.level_accepted = 0.5
        run = Run(machine, MeasuredSchedule(INDEX, 64))
        # Each step of this option took five times as long.
        machine.factors[slower] = 5.0
        run.steps(1000, batch_size=1)
        machine.factors.clear()
        run.steps(2500, batch_size=1)
        run.seconds = run.best_seconds = 0.0
        run.steps(1000, batch_size=1)
        assert run.share > 0.9


@pytest.mark.thorough
def test_it_follows_a_machine_whose_speed_changes() -> None:
    """Red when the times of a slow hour decide what is drawn after it.

    The machine becomes two and a half times as slow for some time while trees do not
    pay, as where other work runs beside.
    """
    shares = []
    for seed in range(16):
        run = where_rows_are_dear(seed, 0.4)
        for number in range(40):
            run.machine.slowness = 2.5 if number % 4 == 3 else 1.0
            run.steps(run.machine.random.randint(20, 120), batch_size=8)
        shares.append(run.share)
    assert sum(shares) / len(shares) > 0.96
    assert min(shares) > 0.93


def test_steps_that_cannot_be_timed_end_the_search() -> None:
    """Red when an option is tried for ever because no step of it is timed."""
    schedule = MeasuredSchedule(HEAD, 64)
    chosen: Counter[int | None] = Counter()
    for step in range(1000):
        index, slots = schedule.choose(running([0, 1]))
        chosen[index] += 1
        seconds = 1.0 if index is None and step < 50 else None
        schedule.observe(outcome(index, 2, slots, [0] * len(slots), seconds))
    assert chosen[None] > 850


def test_a_short_job_loses_little() -> None:
    """Red when looking for the best tree costs more than it brings."""
    runs = [run_of(seed) for seed in range(40)]
    for run in runs:
        run.steps(100, batch_size=16)
    plain = [
        r.machine.speed(None, 16)
        / max(r.machine.speed(o, 16) for o in (None, *range(4)))
        for r in runs
    ]
    gains = [r.share / p for r, p in zip(runs, plain, strict=True)]
    assert median(gains) >= 1.0
    assert min(gains) > 0.7


def test_each_request_is_judged_by_itself() -> None:
    """Red when one request of bad drafts hides that another's are good."""
    machine = Machine(0, INDEX)
    machine.host, machine.level, machine.row = 0.2, 0.05, 0.02
    run = Run(machine, MeasuredSchedule(INDEX, 64))
    for number in range(20):
        is_edit = number % 5 == 4
        machine.level_accepted = 0.9 if is_edit else 0.02
        run.steps(250, batch_size=1, first_slot=number)
        if number > 8:
            last = Counter(run.chosen[-150:])
            assert (last.most_common(1)[0][0] is not None) == is_edit


@pytest.mark.parametrize(
    ("factors", "least", "most"), [([1.0], 0.15, 0.3), ([0.2, 1.8], 0.6, 1.0)]
)
def test_it_learns_how_much_requests_differ(
    factors: list[float], least: float, most: float
) -> None:
    """Red when chance counts as a difference between requests, or the other way."""
    rng, spread = random.Random(0), Spread()
    for number in range(60):
        history = RequestHistory()
        share = 1 / (1 + rng.choice(factors))
        for _ in range(30):
            accepted = 0
            while rng.random() > share:
                accepted += 1
            history.add(number, 1.0, accepted)
        spread.add(number, history)
    assert least <= spread.value(60) < most


def test_a_lucky_request_is_believed_where_requests_differ() -> None:
    """Red when a factor does not depend on how much requests differ."""
    history = RequestHistory()
    for _ in range(10):
        history.add(0, 1.0, 2.0)
    alike, unlike = history.expected(0, 0.2), history.expected(0, 0.8)
    assert 1.0 < alike < 1.3 < 1.7 < unlike < 2.0


def test_a_request_without_use_gets_no_tree() -> None:
    """Red when three chats cost the editing request beside them its tree."""
    schedule = MeasuredSchedule(INDEX, 64)
    slots = range(4)
    requests = running(slots)
    drawn_for: Counter[int] = Counter()
    for step in range(600):
        index, drawn = schedule.choose(requests)
        drafts = 0 if index is None else INDEX[index].num_drafts
        accepted = [min(6, drafts) if slot == 0 else 0 for slot in drawn]
        seconds = 1 + (0.2 + 0.05 * drafts * len(drawn) if drawn else 0)
        schedule.observe(outcome(index, 4, drawn, accepted, seconds))
        if step >= 300:
            drawn_for.update(drawn)
    assert drawn_for[0] > 250
    assert all(drawn_for[slot] < 100 for slot in (1, 2, 3))


def test_greedy_and_sampled_requests_are_learned_apart() -> None:
    """Red when what greedy requests accept is expected of sampled ones."""
    schedule = MeasuredSchedule([Tree(4, 1, 4)], 64)
    with_tree = {False: 0, True: 0}
    for step in range(1200):
        sampled = step % 40 >= 20
        slot = 1000 + step // 20
        index, slots = schedule.choose(running([slot], sampled))
        accepted = [0 if sampled else 1] * len(slots)
        seconds = 1.0 if index is None else 1.4
        schedule.observe(outcome(index, 1, slots, accepted, seconds))
        if step >= 600:
            with_tree[sampled] += len(slots)
        if step % 20 == 19:
            schedule.forget([slot])
    assert with_tree[False] > 270
    assert with_tree[True] < 120


def test_limited_trees_do_not_fool_the_schedule() -> None:
    """Red when requests that limit their trees hide what whole trees bring.

    Two edits accept six tokens of a tree; beside them one request takes one draft at
    most, another one switched trees off.
    """
    schedule = MeasuredSchedule(INDEX, 64)
    limits = {0: ALL, 1: ALL, 2: 1}
    requests = RunningRequests(4, [*limits], [False] * 3, [*limits.values()], [0] * 3)
    drawn_for: Counter[int] = Counter()
    for step in range(600):
        index, drawn = schedule.choose(requests)
        most = 0 if index is None else min(6, INDEX[index].num_drafts)
        allowed = [limits[slot] for slot in drawn]
        accepted = [min(most, limit) for limit in allowed]
        rows = sum(min(limit, 16) for limit in allowed)
        seconds = 1 + (0.2 + 0.02 * rows if drawn else 0)
        schedule.observe(outcome(index, 4, drawn, accepted, seconds, allowed))
        if step >= 300:
            drawn_for.update(drawn)
            if index is not None:
                option = schedule.by_index[index]
                accepted_of_whole = schedule.acceptance.of_text(4, option, False)
                assert accepted_of_whole.expected == pytest.approx(most, rel=0.2)
    assert drawn_for[0] > 250
    assert drawn_for[1] > 250


@pytest.mark.parametrize("limit", [1, 4, 0])
def test_limits_of_all_requests(limit: int) -> None:
    """Red when trees that all are small are timed as whole ones, or never.

    No limit of 0 comes in; a worker sets it where a cut tree would keep no draws. Of
    such steps nothing is learned, and trees are left out.
    """
    schedule = MeasuredSchedule([Tree(16, 4, 8)], 64)
    with_tree = 0
    for step in range(1000):
        index, slots = schedule.choose(running([0, 1], limits=[max(limit, 1)] * 2))
        accepted = [min(limit, 1)] * len(slots)
        seconds = 1 + 0.01 * limit * len(slots)
        allowed = [limit] * len(slots)
        schedule.observe(outcome(index, 2, slots, accepted, seconds, allowed))
        with_tree += step >= 500 and index is not None
    assert with_tree > 450 if limit else with_tree < 100
    times = schedule.costs.times[2].get(0)
    assert (times is not None) == (limit > 0)
    if times is not None:
        assert times.seconds > 1 + 0.01 * 2 * 2 * limit, "a whole tree takes longer"


def test_all_ranks_choose_alike() -> None:
    """Red when a rank chooses by its own clock."""
    told: list[list[float]] = []

    def first(seconds: list[float]) -> list[float]:
        told.append(list(seconds))
        return seconds

    chosen = []
    for rank in range(2):
        turn = iter(told)
        share = first if rank == 0 else lambda _, turn=turn: next(turn)
        machine = Machine(3, HEAD)
        run = Run(machine, MeasuredSchedule(HEAD, 64, share))
        if rank:
            machine.free_rows = 0  # is slower, and must not matter
        for batch_size in (1, 4, 1, 16):
            run.steps(200, batch_size)
        chosen.append(run.chosen)
        assert rank == 0 or next(turn, None) is None, "rank 0 told more"
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 2


def test_without_drafting_requests_steps_are_plain() -> None:
    """Red when requests that may not draft are timed as if they had trees."""
    schedule = MeasuredSchedule(HEAD, 64)
    for _ in range(20):
        assert schedule.choose(RunningRequests(4, [], [], [], [])) == (None, ())
        schedule.observe(StepOutcome(None, 4, [], [], [], [], [], 1.0))


def test_a_forced_tree_is_drawn() -> None:
    """Red when a benchmark of one tree measures another, or teaches its times."""
    schedule = MeasuredSchedule(HEAD, 64)
    schedule.force_tree({"num_drafts": 5})
    for _ in range(20):
        assert schedule.choose(running([0])) == (1, [0])
        schedule.observe(outcome(1, 1, [0], [0], 100.0))
    assert not schedule.costs.times
    with pytest.raises(ValueError, match="it has 16 in 3, 5 in 2"):
        schedule.force_tree({"num_drafts": 7})


def test_ended_requests_are_forgotten() -> None:
    """Red when a request starts with the fame of another that had its slot."""
    schedule = MeasuredSchedule(HEAD, 64)
    run = Run(Machine(1, HEAD), schedule)
    run.steps(50, batch_size=2)
    assert schedule.acceptance.requests.keys() == {(0, False), (1, False)}
    schedule.forget([0, 1, 7])
    assert not schedule.acceptance.requests


def test_surer_trees_are_tried_first() -> None:
    """Red when the widest of several trees of one size is the first to cost time."""
    surer = [Tree(16, 12, 16) for _ in range(3)]
    schedule = MeasuredSchedule(surer, max_trees=16)
    assert [option.index for option in schedule.options] == [None, 2, 1, 0]
