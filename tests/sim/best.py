"""The best policy in hindsight, of a few constant ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.sim.drafting import Tree
from tests.sim.tape import Request
from tests.sim.world import Record, World, run
from vllm_treespec.schedule.plan import (
    PLAIN_PLAN,
    RunningRequests,
    StepPlan,
    StepResult,
)
from vllm_treespec.trees.source import Source

# Factors of the true costs.
FACTORS = (0.5, 1.0, 2.0)
# Levels that a model reads in every step.
DEPTHS = (1, 2, 3, 5, 8)

Chosen = Callable[[Request], bool]


def everybody(_: Request) -> bool:
    """Draft for all requests."""
    return True


@dataclass(frozen=True)
class Policy:
    """What is planned in every step.

    Attributes:
        tree: None: plain steps.
        row: factor of the true costs of rows, and of any drafts and branches.
        level: factor of the true cost of a level.
        depth: levels that are read; None: by their worth.
        chosen: which requests draft.

    """

    tree: int | None = None
    row: float = 1.0
    level: float = 1.0
    depth: int | None = None
    chosen: Chosen = everybody


class Constant:
    """A schedule that plans by one policy; it knows the texts and the true costs."""

    rest_steps = 0

    def __init__(self, world: World, policy: Policy) -> None:
        """Take both."""
        self.world, self.policy = world, policy
        self.num_planned = 0

    def plan(self, requests: RunningRequests) -> StepPlan:
        """Plan the next step of the tape."""
        step = self.world.steps[self.num_planned]
        self.num_planned += 1
        policy = self.policy
        if policy.tree is None:
            return PLAIN_PLAN
        drafting = [r for r in step.requests if r.limit and policy.chosen(r)]
        if not drafting:
            return PLAIN_PLAN
        slots = [request.slot for request in drafting]
        tree = self.world.trees[policy.tree]
        model = Source.MODEL in tree.sources
        if not tree.prunes_by_cost:
            return StepPlan(policy.tree, slots, model=model)
        costs, count = self.world.costs, requests.num_reqs
        rate = count / costs.plain(count, sum(r.sampled for r in step.requests))
        level = costs.level + costs.level_request * (len(slots) - 1)
        return StepPlan(
            policy.tree,
            slots,
            lookup=Source.INDEX in tree.sources,
            model=model,
            prunes=True,
            row_cost=policy.row * rate * costs.more_row(count),
            fixed_cost=policy.row * rate * costs.fixed,
            branch_cost=policy.row * rate * costs.branches,
            # A constant depth is read whatever it brings.
            level_cost=policy.level * rate * level if policy.depth is None else -1.0,
            kept={
                Source.INDEX: [r.text.kept * r.truth for r in drafting],
                Source.MODEL: [r.text.model_kept * r.truth for r in drafting],
            },
            first_level=[first_level(request) for request in drafting],
            max_levels=policy.depth,
        )

    def observe(self, result: StepResult) -> None:
        """Learn nothing."""

    def forget(self, slots: Sequence[int]) -> None:
        """Have nothing to forget."""


def first_level(request: Request) -> float:
    """How often a model's first token is accepted."""
    text = request.text
    sure = sum(text.sureness) / len(text.sureness)
    return min(sure * text.model_kept * request.truth, 1.0)


def shapes(world: World, index: int, tree: Tree) -> list[Policy]:
    """The policies of one tree for all requests."""
    if not tree.prunes_by_cost:
        return [Policy(index)]
    if Source.MODEL not in tree.sources:
        return [Policy(index, row=factor) for factor in FACTORS]
    fixed = [
        Policy(index, depth=depth)
        for depth in DEPTHS
        if depth <= tree.sizes.draft_depth
    ]
    if not world.can_sync:
        return fixed
    return [*fixed, *(Policy(index, level=factor) for factor in FACTORS)]


def of_text(name: str) -> Chosen:
    """Draft for the requests of one text."""
    return lambda request: request.text.name == name


def of_kind(sampled: bool) -> Chosen:
    """Draft for greedy requests, or for sampled ones."""
    return lambda request: request.sampled == sampled


def groups(world: World) -> list[Chosen]:
    """All requests, and those of one text or kind where some are of another."""
    requests = {request for step in world.steps for request in step.requests}
    names = sorted({request.text.name for request in requests})
    kinds = sorted({request.sampled for request in requests})
    return [
        everybody,
        *(of_text(name) for name in names if len(names) > 1),
        *(of_kind(kind) for kind in kinds if len(kinds) > 1),
    ]


def policies(world: World) -> list[Policy]:
    """All that are compared."""
    drafting = [
        replace(policy, chosen=chosen)
        for chosen in groups(world)
        for index, tree in enumerate(world.trees)
        for policy in shapes(world, index, tree)
    ]
    return [Policy(), *drafting]


@dataclass(frozen=True)
class Best:
    """The record of the best policy of each phase."""

    by_phase: dict[str, Record]

    def share(
        self, world: World, record: Record, num_steps: int | None = None
    ) -> float:
        """A run's tokens a second over those of the best policy of each phase.

        Args:
            world: that was run.
            record: of the run.
            num_steps: that count, from the first; None: all.

        """
        steps = world.steps[:num_steps]
        seconds = 0.0
        for phase, best in self.by_phase.items():
            places = [i for i, step in enumerate(steps) if step.phase == phase]
            best_tokens = sum(best.tokens[i] for i in places)
            if best_tokens:
                best_seconds = sum(best.seconds[i] for i in places)
                tokens = sum(record.tokens[i] for i in places)
                seconds += tokens * best_seconds / best_tokens
        return seconds / sum(record.seconds[: len(steps)])


def best_of(world: World) -> Best:
    """The best policy in hindsight, of each phase of a world.

    Each policy is constant, knows the true costs and how true claims are, and runs the
    same tape: plain; each whole tree always; an index pruned at half, once and twice
    the true costs; a model whose levels are weighed by half, once and twice their true
    cost, or of which a constant number of levels is read. Where requests are of several
    texts or kinds, each policy is also tried for those of one of them alone. A schedule
    that does more at the right time can have a share above 1.
    """
    records = [run(world, Constant(world, policy)) for policy in policies(world)]
    by_phase: dict[str, Record] = {}
    for phase in sorted({step.phase for step in world.steps}):
        places = [i for i, step in enumerate(world.steps) if step.phase == phase]

        def speed(record: Record, places: Sequence[int] = places) -> float:
            tokens = sum(record.tokens[i] for i in places)
            return tokens / sum(record.seconds[i] for i in places)

        by_phase[phase] = max(records, key=speed)
    return Best(by_phase)
