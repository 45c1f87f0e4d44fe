"""A step's plan, what a step did, and what it brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vllm_treespec.trees.source import Source

# Times a plain step that one with trees takes at most, unless a spec-config says it.
MAX_SLOWDOWN = 2.0


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    error: float


class Work(NamedTuple):
    """What a step did, or would do: the regressors of its time."""

    # that run, each with one row of its own
    requests: int
    # whether some of them is sampled
    sampled: bool = False
    # draft nodes that the target reads, of all requests
    rows: float = 0.0
    # whether there are any; as a mean over steps, their share
    drafted: float = 0.0
    # whether some tree is no chain; the same
    branches: float = 0.0
    # whether an index is looked up; the same
    lookup: float = 0.0
    # that draft models read
    levels: float = 0.0
    # tokens of earlier steps that draft models read
    caught_up: float = 0.0


@dataclass(frozen=True)
class RunningRequests:
    """The requests for which a step is planned."""

    # all that run, those that decode plainly included
    num_reqs: int
    # of the requests that may draft
    slots: Sequence[int]
    # whether these requests are sampled, that is not greedy
    sampled: Sequence[bool]
    # draft tokens that each of these requests lets its tree have
    limits: Sequence[int]
    # tokens of earlier steps that draft models would have to read for these requests
    num_behind: Sequence[int]


@dataclass(frozen=True)
class StepPlan:
    """All that drafting may spend, fixed before it draws.

    Costs are in tokens: seconds times the tokens a second that time is worth. The
    sequences have an entry for each of ``slots``.
    """

    # index of the tree in the schedule; None: a plain step
    tree: int | None = None
    # of the requests that draft
    slots: Sequence[int] = ()
    # whether the index is looked up, and whether draft models may read
    lookup: bool = False
    model: bool = False
    # whether drafts are left out that are worth less than their row
    prunes: bool = False
    # of one more row of the target, of any drafts at all, of trees that are no chains,
    # and of a level that draft models read
    row_cost: float = 0.0
    fixed_cost: float = 0.0
    branch_cost: float = 0.0
    level_cost: float = 0.0
    # draft nodes of all trees at most; None: as many as are worth their row
    max_rows: int | None = None
    # accepted over claimed tokens
    kept: Mapping[Source, Sequence[float]] = field(default_factory=dict)
    # accepted tokens that a model's first forward adds where an index finds nothing
    first_level: Sequence[float] = ()
    # how likely an index drafts the next token, so that a model's levels add nothing;
    # (): no index was looked up beside a model
    index_hits: Sequence[float] = ()
    # that draft models read at most; None: as many as what they draft is worth
    max_levels: int | None = None
    # tokens of earlier steps that draft models read at most; None: as many as fit
    max_caught_up: int | None = None
    # whether its step takes as long as others like it; not right behind another tree
    is_usual: bool = field(default=True, compare=False)

    def of_slots(self, slots: Sequence[int]) -> StepPlan:
        """The same for some of the requests, in this order."""
        if list(slots) == list(self.slots) or not self.prunes:
            return replace(self, slots=slots)
        place = {slot: number for number, slot in enumerate(self.slots)}
        places = [place[slot] for slot in slots]
        kept = {
            source: [kept[number] for number in places]
            for source, kept in self.kept.items()
        }
        first_level = [self.first_level[number] for number in places]
        return replace(self, slots=slots, kept=kept, first_level=first_level)

    def min_claim(self, source: Source, at_least: float = 0.0) -> list[float]:
        """The probability from which on a request's draft is worth its row."""
        return [max(at_least, self.row_cost / kept) for kept in self.kept[source]]

    def level_pays(self, gains: Sequence[float]) -> bool:
        """Whether a level that draft models read is worth its forward.

        Args:
            gains: accepted tokens that it adds for each request where an index finds
                nothing, less what their rows cost.

        """
        hits = self.index_hits or [0.0] * len(gains)
        added = (gain * (1 - hit) for gain, hit in zip(gains, hits, strict=True))
        return sum(added) > self.level_cost


PLAIN_PLAN = StepPlan()


@dataclass(frozen=True)
class StepResult:
    """What a step brought, and what it took.

    The sequences have an entry for each request whose tree came back.
    """

    # of the tree in the schedule; None: plain
    tree: int | None
    work: Work
    slots: Sequence[int] = ()
    num_drafts: Sequence[int] = ()
    num_accepted: Sequence[int] = ()
    # draft tokens that the request lets its tree have
    limits: Sequence[int] = ()
    # sum of the claims of each source's nodes, and how many of these were accepted. An
    # index also claims the likeliest token where no draft was worth its row
    claimed: Mapping[Source, Sequence[float]] = field(default_factory=dict)
    accepted: Mapping[Source, Sequence[int]] = field(default_factory=dict)
    # of a step, from its plan to the next one; None: it did other work, too
    seconds: float | None = None
    # of these, from the plan to the drafts; 0: not known
    drafting_seconds: float = 0.0
    # that it was, all alike
    num_steps: int = 1
    # see ``StepPlan``
    is_usual: bool = True
