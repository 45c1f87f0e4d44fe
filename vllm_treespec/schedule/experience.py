"""What a measured schedule learned, kept from one start to the next."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)

from vllm_treespec.schedule.costs import StepCosts
from vllm_treespec.schedule.forward_times import ForwardTimes
from vllm_treespec.schedule.learned import StepTimes
from vllm_treespec.schedule.measured import MeasuredSchedule
from vllm_treespec.schedule.prices import DraftParts, Promises

PLAIN = "plain"
Kind = Literal["greedy", "sampled"]
KINDS: tuple[tuple[Kind, bool], ...] = (("greedy", False), ("sampled", True))
# Trees that recalled accepted tokens count for: the text may be another one now.
RECALLED_TREES = 8.0
# Accepted tokens, of those that were guessed of all trees, that they count for.
RECALLED_TEXT = 8.0
# Promised tokens that what is kept of them counts for.
RECALLED_PROMISES = 8.0


# As many as a DraftParts has fields.
Parts = tuple[
    NonNegativeFloat,
    NonNegativeFloat,
    NonNegativeFloat,
    NonNegativeFloat,
    NonNegativeFloat,
]


class Experience(BaseModel):
    """What a schedule learned of a machine and of the text it serves."""

    model_config = ConfigDict(allow_inf_nan=False)

    # batch size -> name of a tree, or "plain" -> seconds of a step; steps in which some
    # request is sampled apart
    seconds: dict[Kind, dict[PositiveInt, dict[str, PositiveFloat]]]
    # name of a tree -> accepted tokens of one
    accepted: dict[Kind, dict[str, NonNegativeFloat]]
    # batch size -> seconds of what drafts cost, see ``DraftParts``
    drafts: dict[Kind, dict[PositiveInt, Parts]] = {}
    # number of rows -> seconds of a forward of the target, and of the draft models, as
    # the start has timed them
    target_forwards: dict[PositiveInt, PositiveFloat] = {}
    draft_forwards: dict[PositiveInt, PositiveFloat] = {}
    # accepted tokens over those that trees promised, and a model's beside an index
    kept: dict[Kind, NonNegativeFloat] = {}
    model_kept: dict[Kind, NonNegativeFloat] = {}


def experience_of(schedule: MeasuredSchedule) -> Experience:
    """Write down what a schedule knows by now."""
    names, acceptance = _names(schedule), schedule.acceptance
    seconds = {
        kind: _plain_and_trees(schedule.times.costs_by_kind[sampled], names)
        for kind, sampled in KINDS
    }
    return Experience(
        seconds=seconds,
        accepted={
            kind: {
                names[option.index]: mean.total / mean.weight
                for option in schedule.options
                if (mean := acceptance.together(option, sampled)).weight
            }
            for kind, sampled in KINDS
        },
        drafts={
            kind: _drafts(schedule.times.costs_by_kind[sampled], seconds[kind])
            for kind, sampled in KINDS
        },
        target_forwards=dict(schedule.times.forwards.target),
        draft_forwards=dict(schedule.times.forwards.draft),
        kept=_kept(schedule.promises),
        model_kept=_kept(schedule.model_promises),
    )


def _plain_and_trees(
    costs: StepCosts, names: Mapping[int | None, str]
) -> dict[int, dict[str, float]]:
    """Seconds of steps by batch size, where plain ones are known, and name."""
    known = {
        size: {
            names[index]: times.seconds
            for index, times in by_index.items()
            if times.is_known(costs.steps_at[size])
        }
        for size, by_index in costs.times.items()
    }
    return {size: by_name for size, by_name in known.items() if PLAIN in by_name}


def _drafts(costs: StepCosts, sizes: Container[int]) -> dict[int, Parts]:
    """Seconds of what drafts cost, at these batch sizes."""
    return {
        size: times.fit(costs.steps_at[size])
        for size, times in costs.drafts.times.items()
        if size in sizes
    }


def _kept(promises: Promises) -> dict[Kind, float]:
    """Accepted tokens over promised ones, where any were promised."""
    return {
        kind: mean.total / mean.weight
        for kind, sampled in KINDS
        if (mean := promises.text[sampled]).weight > 0
    }


def recall(schedule: MeasuredSchedule, experience: Experience) -> None:
    """Let a schedule that has measured nothing begin with what another one knew.

    Times count as one measured step each, until they turn out to be another machine's.

    Raises:
        KeyError: the experience is of a tree that the schedule does not have.

    """
    indices = {name: index for index, name in _names(schedule).items()}
    schedule.times.begin_with(
        ForwardTimes(experience.target_forwards, experience.draft_forwards)
    )
    for kind, sampled in KINDS:
        _recall_costs(
            schedule.times.costs_by_kind[sampled],
            experience.seconds.get(kind, {}),
            experience.drafts.get(kind, {}),
            indices,
        )
        accepted = experience.accepted.get(kind, {})
        text = RECALLED_TEXT / max(len(accepted), 1)
        for name, tokens in accepted.items():
            option = schedule.by_index[indices[name]]
            schedule.acceptance.recall(option, sampled, tokens, RECALLED_TREES, text)
        for promises, kept in (
            (schedule.promises, experience.kept),
            (schedule.model_promises, experience.model_kept),
        ):
            if kind in kept:
                total = RECALLED_PROMISES * kept[kind]
                promises.text[sampled].add(0, RECALLED_PROMISES, total)


def _recall_costs(
    costs: StepCosts,
    seconds: Mapping[int, Mapping[str, float]],
    drafts: Mapping[int, Parts],
    indices: Mapping[str, int | None],
) -> None:
    """Let a kind of steps begin with seconds by batch size, and those of drafts."""
    for size, by_name in seconds.items():
        for name, step_seconds in by_name.items():
            times = StepTimes()
            times.add(costs.steps_at[size], step_seconds)
            costs.times.setdefault(size, {})[indices[name]] = times
            costs.recalled[size, indices[name]] = step_seconds
        if size in drafts:
            parts = DraftParts(*drafts[size])
            costs.drafts.recall(size, by_name[PLAIN], parts)


def _names(schedule: MeasuredSchedule) -> Mapping[int | None, str]:
    return {None: PLAIN, **{i: tree.name for i, tree in enumerate(schedule.trees)}}
