"""What the adaptive scheduler learned, kept from one start to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)

from vllm_treespec.schedule.batch_sizes import size_group
from vllm_treespec.schedule.cost import Fit, Terms
from vllm_treespec.schedule.forward_times import ForwardTimes
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.trees.source import Source

Kind = Literal["greedy", "sampled"]
KINDS: tuple[tuple[Kind, bool], ...] = (("greedy", False), ("sampled", True))
SourceName = Literal["index", "model"]
SOURCES: tuple[tuple[SourceName, Source], ...] = (
    ("index", Source.INDEX),
    ("model", Source.MODEL),
)
# Trees, or claimed tokens, that a restored mean counts for: the text may be another.
RESTORED = 8.0


class SavedCosts(BaseModel):
    """What steps of a batch size take."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid")

    # of a plain step
    seconds: PositiveFloat
    # of the other terms over their priors, by name
    factors: dict[str, NonNegativeFloat]


class SchedulerState(BaseModel):
    """What a scheduler learned of a machine and of the text it serves."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid")

    # by kind of step and batch size
    costs: dict[Kind, dict[PositiveInt, SavedCosts]]
    # by kind of request, name of a tree -> accepted tokens of one
    accepted: dict[Kind, dict[str, NonNegativeFloat]]
    # accepted over claimed tokens
    kept: dict[Kind, dict[SourceName, NonNegativeFloat]]
    # number of rows -> seconds of a forward of the target, and of the draft models, as
    # the start has timed them
    target_forwards: dict[PositiveInt, PositiveFloat] = {}
    draft_forwards: dict[PositiveInt, PositiveFloat] = {}


def state_of(scheduler: AdaptiveScheduler) -> SchedulerState:
    """Write down what a scheduler knows by now."""
    cost, names = scheduler.cost, names_of(scheduler)
    accepted: dict[Kind, dict[str, float]] = {kind: {} for kind, _ in KINDS}
    for kind, sampled in KINDS:
        for index, name in names.items():
            tokens = scheduler.values.stats[index].accepted[sampled]
            if tokens.weight:
                accepted[kind][name] = tokens.total / tokens.weight
    return SchedulerState(
        costs={
            kind: {
                size: SavedCosts(
                    seconds=cost.pace * fit.plain * fit.factors[0],
                    factors=dict(zip(Terms._fields[1:], fit.factors[1:], strict=True)),
                )
                for (size, of_sampled), fit in cost.fits.items()
                if of_sampled == sampled
            }
            for kind, sampled in KINDS
        },
        accepted=accepted,
        kept={
            kind: {
                name: mean.total / mean.weight
                for name, source in SOURCES
                if (mean := scheduler.calibration.ratios.texts.get((source, sampled)))
                and mean.weight
            }
            for kind, sampled in KINDS
        },
        target_forwards=dict(cost.forwards.target),
        draft_forwards=dict(cost.forwards.draft),
    )


def restore(scheduler: AdaptiveScheduler, state: SchedulerState) -> None:
    """Let a scheduler that has measured nothing begin with what another one knew.

    Times count with half the doubt of those that were never measured.

    Raises:
        ValueError: the state is of a batch size that is not measured.
        KeyError: the state is of a tree that the schedule does not have, or of a term
            that the cost model does not have.

    """
    indices = {name: index for index, name in names_of(scheduler).items()}
    cost, values = scheduler.cost, scheduler.values
    cost.begin_with(
        ForwardTimes(
            dict(sorted(state.target_forwards.items())),
            dict(sorted(state.draft_forwards.items())),
        )
    )
    for kind, sampled in KINDS:
        for size, saved in state.costs.get(kind, {}).items():
            if size_group(size) != size:
                raise ValueError(f"there is no batch size {size}")
            factors = [1.0, *(saved.factors[name] for name in Terms._fields[1:])]
            known = Fit.new(saved.seconds)
            known.factors = factors
            cost.fits[size, sampled] = known.inherit(saved.seconds)
        for name, tokens in state.accepted.get(kind, {}).items():
            stats = values.stats[indices[name]]
            stats.accepted[sampled].add(0, RESTORED, RESTORED * tokens)
        for source_name, source in SOURCES:
            kept = state.kept.get(kind, {}).get(source_name)
            if kept is not None:
                scheduler.calibration.ratios.add_to_text(
                    0, source, sampled, RESTORED, RESTORED * kept
                )


def names_of(scheduler: AdaptiveScheduler) -> Mapping[int, str]:
    """Names of the schedule's trees, by their index."""
    return {index: tree.name for index, tree in enumerate(scheduler.trees)}
