"""The scenarios that schedules are judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.sim.costs import Costs
from tests.sim.drafting import Tree
from tests.sim.tape import Request, Tape, Text
from tests.sim.world import World
from vllm_treespec.trees.source import Source

HEAD = (Tree(16, 3, 8), Tree(5, 2, 4), Tree(4, 1, 4), Tree(2, 1, 2))
FIXED_INDEX = (Tree(16, 12, 16), Tree(8, 8, 8), Tree(4, 4, 4), Tree(2, 2, 2))
INDEX = Tree(16, 12, 16, Source.INDEX, prunes_by_cost=True)
BESIDE_INDEX = Tree(
    16, 12, 16, Source.INDEX | Source.MODEL, prunes_by_cost=True, draft_depth=3
)
HYBRID = (BESIDE_INDEX, INDEX)
MODEL = (Tree(8, 8, 1, prunes_by_cost=True),)
BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Scenario:
    """Worlds of one kind.

    Attributes:
        name: of the scenario.
        reason: what goes wrong where its score falls.
        world: makes the world of a number; numbers that differ by ``num_variants`` are
            seeds of the same variant.
        num_variants: batch sizes or costs that are tried.

    """

    name: str
    reason: str
    world: Callable[[int], World]
    num_variants: int = 1


# Fixed trees


def random_costs(tape: Tape) -> Costs:
    """Costs of a machine, in plain steps of one request."""
    source = tape.random
    return Costs(
        request=source.uniform(0.0, 0.1),
        fixed=source.uniform(0.02, 0.2),
        level=source.uniform(0.0, 0.2),
        row=source.choice([0.002, 0.02, 0.05]),
        free_rows=source.choice([4, 16, 64, 256]),
    )


def random_text(tape: Tape) -> Text:
    """A text in which a level is accepted rarely, often, or between."""
    return Text(level_accepted=tape.random.uniform(0.05, 0.95))


def fixed(
    methods: Sequence[Sequence[Tree]],
    num_steps: int,
    sizes: Sequence[int],
    is_timed: bool = False,
) -> Callable[[int], World]:
    """Trees of one of the methods that are drawn whole, over random costs."""

    def world(number: int) -> World:
        tape = Tape(number)
        costs, text = random_costs(tape), random_text(tape)
        tape.run(num_steps, tape.join(text, sizes[number % len(sizes)]))
        trees = methods[number % len(methods)]
        return World(costs, trees, tape.steps, is_timed=is_timed)

    return world


def bring_nothing(number: int) -> World:
    """Trees of low cost of which nothing is accepted."""
    tape = Tape(number)
    costs = Costs(request=0.05, fixed=tape.random.uniform(0.02, 0.08))
    tape.run(1000, tape.join(Text(), (1, 8)[number % 2]))
    return World(costs, (HEAD, FIXED_INDEX)[number % 2], tape.steps)


# The best tree is slower than plain decoding, as on chat on two cores.
COSTLY_ROWS = Costs(request=0.1, fixed=0.1, level=0.03, row=0.05, free_rows=8)


def come_and_go(number: int) -> World:
    """Eight requests of eight steps each follow one another."""
    tape = Tape(number)
    for _ in range(125):
        tape.run(8, tape.join(Text(level_accepted=0.25), 8))
    return World(COSTLY_ROWS, HEAD, tape.steps)


def batch_sizes(number: int) -> World:
    """Two batch sizes take turns."""
    tape = Tape(number)
    costs, text = random_costs(tape), random_text(tape)
    requests = tape.join(text, 32)
    for _ in range(8):
        for size in (BATCH_SIZES[number % 6], 1 + number % 9):
            num_steps = tape.random.randint(40, 200)
            tape.run(num_steps, requests[:size], f"size {size}")
    return World(costs, (HEAD, FIXED_INDEX)[number % 2], tape.steps)


def text_changes(before: float, after: float) -> Callable[[int], World]:
    """The next request's text is another one."""

    def world(number: int) -> World:
        tape = Tape(number)
        costs = random_costs(tape)
        for phase, accepted in (("before", before), ("after", after)):
            tape.run(1000, tape.join(Text(level_accepted=accepted)), phase)
        return World(costs, (HEAD, FIXED_INDEX)[number % 2], tape.steps)

    return world


def slow_periods(number: int) -> World:
    """The machine is at times two and a half times as slow."""
    tape = Tape(number)
    requests = tape.join(Text(level_accepted=0.4), 8)
    for period in range(24):
        tape.slowness = 2.5 if period % 4 == 3 else 1.0
        tape.run(tape.random.randint(20, 120), requests)
    return World(COSTLY_ROWS, HEAD, tape.steps)


def one_edit(number: int) -> World:
    """One request accepts much of its trees, three beside it nothing."""
    tape = Tape(number)
    for _ in range(4):
        chats = tape.join(Text("chat", level_accepted=0.02), 3)
        tape.run(250, [*tape.join(Text("edit", level_accepted=0.9)), *chats])
    costs = Costs(request=0.02, fixed=0.2, row=0.05, free_rows=4)
    return World(costs, FIXED_INDEX, tape.steps)


def mixed_kinds(number: int) -> World:
    """Greedy requests accept trees, sampled ones hardly; together, or in turn."""
    tape = Tape(number)
    text = Text(level_accepted=0.7, sampled_kept=0.15)
    for turn in range(40):
        if number % 2:
            tape.run(25, tape.join(text, 4, sampled=turn % 2 > 0), f"kind {turn % 2}")
        else:
            tape.run(25, [*tape.join(text, 3), *tape.join(text, 3, sampled=True)])
    costs = Costs(request=0.03, sampled=0.02, fixed=0.1, row=0.02, free_rows=4)
    return World(costs, HEAD, tape.steps)


def limits(number: int) -> World:
    """Of four edits one takes one draft at most, and another one none."""
    tape = Tape(number)
    text = Text(level_accepted=0.8)
    requests = tape.join(text, 2)
    requests += [*tape.join(text, limit=1), *tape.join(text, limit=0)]
    tape.run(1000, requests)
    costs = Costs(fixed=0.2, row=0.02, free_rows=4)
    return World(costs, FIXED_INDEX, tape.steps)


# An index


def pruned(number: int) -> World:
    """Chains of known claims, which are true or not; a row costs little or much."""
    tape = Tape(number)
    row, kept = (0.01, 0.1, 0.3, 0.6)[number % 4], (1.0, 0.5)[number // 4 % 2]
    count = (1, 8)[number % 2]
    text = Text(repeats=0.6, rates=(0.3, 0.6, 0.9), kept=kept)
    tape.run(1000, tape.join(text, count))
    costs = Costs(row=row / count, free_rows=count, fixed=0.08, lookup=0.01)
    return World(costs, (INDEX,), tape.steps)


def branching(number: int) -> World:
    """An index that finds two continuations; what branches cost differs."""
    tape = Tape(number)
    text = Text(repeats=0.6, rates=(0.55,), rival=0.8, rival_rate=0.4)
    tape.run(1000, tape.join(text, 4))
    branches = (0.01, 0.3)[number % 2]
    costs = Costs(row=0.02, free_rows=4, fixed=0.05, branches=branches, lookup=0.01)
    return World(costs, (INDEX,), tape.steps)


def repeating(*phases: tuple[int, float]) -> Callable[[int], World]:
    """Eight requests, one of which ends every eight steps; texts repeat more or less.

    Args:
        phases: steps, and how often a continuation is found.

    """

    def world(number: int) -> World:
        tape = Tape(number)
        for phase, (num_steps, repeats) in enumerate(phases):
            text = Text(repeats=repeats, rates=(0.95,), length=8)
            requests = tape.join(text, 8)
            for _ in range(num_steps // 8):
                tape.run(8, requests, f"phase {phase}")
                requests = [*requests[1:], *tape.join(text)]
        costs = Costs(lookup=0.03, fixed=0.08, row=0.3 / 8, free_rows=8)
        return World(costs, (INDEX,), tape.steps)

    return world


# A model

LEVELS = tuple((level, row) for level in (0.05, 0.2, 0.5) for row in (0.02, 0.1))


def model_levels(can_sync: bool) -> Callable[[int], World]:
    """One request whose model is sure in some steps; costs of a level and of a row."""

    def world(number: int) -> World:
        tape = Tape(number)
        level, row = LEVELS[number % 6]
        tape.run(800, tape.join(Text(sureness=(0.2, 0.5, 0.8, 0.95))))
        costs = Costs(fixed=0.05, level=level, row=row)
        return World(costs, MODEL, tape.steps, can_sync)

    return world


def surer_text(number: int) -> World:
    """The host cannot wait, and a text follows that a model knows well."""
    tape = Tape(number)
    for sure in (0.3, 0.95, 0.3):
        tape.run(500, tape.join(Text(sureness=(sure,))), f"sure {sure}")
    costs = Costs(fixed=0.05, level=0.2, row=0.02)
    return World(costs, MODEL, tape.steps, can_sync=False)


def never_pays(number: int) -> World:
    """A model whose levels take longer than a plain step."""
    tape = Tape(number)
    tape.run(800, tape.join(Text(sureness=(0.2, 0.5, 0.8, 0.95))))
    costs = Costs(fixed=0.05, level=1.5, row=0.3)
    return World(costs, MODEL, tape.steps, can_sync=number % 2 == 0)


# An index and a model


def hybrid_costs(
    level: float,
    caught_up: float = 0.0,
    free_rows: int = 1,
    small_kernel: float = 1.0,
) -> Costs:
    """A level that costs so much; rows that cost little."""
    return Costs(
        row=0.01,
        free_rows=free_rows,
        small_kernel=small_kernel,
        fixed=0.05,
        lookup=0.01,
        level=level,
        caught_up=caught_up,
    )


def answers(
    sure: float,
    level: float,
    num_answers: int,
    num_steps: int,
    size: int = 1,
    repeats: float = 0.0,
    prompt: int = 0,
    drift: float = 0.0,
    memory: float = 1.0,
    cold: int = 0,
) -> Callable[[int], World]:
    """Batches of answers follow one another; most tokens are a model's to find."""

    def world(number: int) -> World:
        tape = Tape(number, drift, memory)
        text = Text(repeats=repeats, rates=(0.7,), length=4, sureness=(sure,))
        for _ in range(num_answers):
            tape.run(num_steps, tape.join(text, size, prompt=prompt))
        costs = hybrid_costs(level, caught_up=0.01 if prompt else 0.0, free_rows=size)
        return World(
            costs,
            HYBRID,
            tape.steps,
            reads_late=prompt > 0,
            cold_steps=cold,
            cold_model=cold,
        )

    return world


def edits_in_turn(number: int) -> World:
    """Edits that repeat take turns with answers; the model adds little to either."""
    tape = Tape(number)
    for turn in range(40):
        repeats = 0.0 if turn % 2 else 1.0
        text = Text(repeats=repeats, rates=(0.8,), sureness=(0.17,))
        tape.run(24, tape.join(text), f"turn {turn % 2}")
    return World(hybrid_costs(0.23), HYBRID, tape.steps)


def one_size_pays(number: int) -> World:
    """A model pays for one request, and not for four."""
    tape = Tape(number)
    num_steps = (64, 250)[number % 2]
    for turn in range(8):
        size, sure = ((4, 0.17), (1, 0.6))[turn % 2]
        requests = tape.join(Text(sureness=(sure,)), size)
        tape.run(num_steps, requests, f"size {size}")
    return World(hybrid_costs(0.2), HYBRID, tape.steps)


# Shapes of costs


def graph_sizes(trees: Sequence[Tree]) -> Callable[[int], World]:
    """Rows are padded to the sizes of CUDA graphs; forwards are timed at the start."""

    def world(number: int) -> World:
        tape = Tape(number)
        size = (1, 8, 16, 32)[number % 4]
        text = Text(
            repeats=0.3,
            rates=(0.5, 0.8, 0.95),
            sureness=(0.3, 0.7, 0.9),
            level_accepted=0.6,
        )
        for _ in range(6):
            tape.run(120, tape.join(text, size))
        costs = Costs(
            row=0.004,
            free_rows=32,
            padded=True,
            fixed=0.08,
            branches=0.05,
            lookup=0.05,
            level=0.08,
            level_request=0.001,
        )
        return World(costs, trees, tape.steps, can_sync=False, is_timed=True)

    return world


def small_kernel(number: int) -> World:
    """A forward of one row takes longer than one of four, as BLAS has it on CPUs."""
    tape = Tape(number)
    text = Text(repeats=0.2, rates=(0.4, 0.7), sureness=(0.3, 0.6, 0.8))
    tape.run(800, tape.join(text, (1, 2)[number % 2]))
    costs = hybrid_costs(0.15, small_kernel=1.3)
    return World(costs, HYBRID, tape.steps, is_timed=number // 2 % 2 == 0)


def service(number: int) -> World:
    """Requests of all kinds arrive at random and end after some time."""
    tape = Tape(number, drift=0.1, memory=200)
    source, running, ends = tape.random, list[Request](), dict[int, int]()
    texts = (
        Text("chat", repeats=0.08, rates=(0.4, 0.8), sureness=(0.3, 0.6, 0.9)),
        Text("edit", repeats=0.7, rates=(0.7, 0.95), sureness=(0.6, 0.9)),
    )
    for step in range(0, 1200, 4):
        load = (4, 16)[step // 400 % 2]
        running = [r for r in running if ends[r.slot] > step]
        while len(running) < load and (not running or source.random() < 0.3):
            sampled, prompt = source.random() < 0.3, source.randrange(50, 400)
            text = source.choice(texts)
            running += tape.join(text, sampled=sampled, prompt=prompt)
            ends[running[-1].slot] = step + source.randrange(20, 200)
        tape.run(4, running, f"load {load}")
    costs = Costs(
        row=0.02,
        free_rows=4,
        request=0.01,
        sampled=0.01,
        fixed=0.06,
        branches=0.03,
        lookup=0.02,
        level=0.12,
        level_request=0.005,
        caught_up=0.002,
    )
    return World(costs, HYBRID, tape.steps, is_timed=True, reads_late=True)
