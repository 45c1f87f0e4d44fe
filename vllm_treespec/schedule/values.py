"""What the trees of an option bring, and what work they are.

Only additions, products and quotients: they give the same bits on any processor, so
that all ranks compute alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_treespec.schedule.base import ScheduledTree
from vllm_treespec.schedule.decay import PRIOR_WEIGHT, DecayedMean
from vllm_treespec.schedule.plan import Estimate, StepResult, Work
from vllm_treespec.schedule.ratios import Ratios
from vllm_treespec.trees.source import Source

# The least of a text's ratio that a request is compared with.
LEAST_RATIO = 0.05
# Rows of a pruned tree for each token that is accepted, before any was drawn.
PRIOR_ROWS = 2.0


@dataclass(frozen=True)
class TreeOption:
    """A tree of the schedule, as the scheduler sees it."""

    index: int
    # draft nodes at most
    num_drafts: int
    # accepted tokens before any was measured; of a model beside an index those it adds
    prior: float
    # what drafts it
    sources: Source
    # whether drafts are left out that are worth less than their row
    prunes: bool
    # forwards of draft models at most, and levels that these draft
    levels: int
    depth: int
    branches: bool

    @property
    def first_levels(self) -> int:
        """Levels that the first forward of draft models drafts."""
        return self.depth if self.levels == 1 else min(self.levels, 1)

    @property
    def index_only(self) -> bool:
        """Whether no model drafts."""
        return Source.MODEL not in self.sources

    @classmethod
    def of_tree(cls, index: int, tree: ScheduledTree) -> TreeOption:
        """Describe a tree of the schedule."""
        sizes, sources = tree.sizes, tree.sources
        has_model = Source.MODEL in sources
        beside = has_model and Source.INDEX in sources
        rate = min(0.6 + 0.08 * math.log2(sizes.max_leaves), 0.85)
        depth = sizes.draft_depth if beside else sizes.max_depth
        return cls(
            index,
            sizes.max_nodes - 1,
            sum(rate**level for level in range(1, depth + 1)),
            sources,
            tree.prunes_by_cost,
            sizes.draft_forwards if has_model else 0,
            sizes.draft_depth if has_model else 0,
            sizes.max_leaves > 1,
        )


@dataclass
class TreeStats:
    """Means of an option's trees."""

    # sampled -> accepted tokens of a tree
    accepted: dict[bool, DecayedMean] = field(
        default_factory=lambda: {False: DecayedMean(), True: DecayedMean()}
    )
    # rows of a tree; and of a step, the shares with any drafts and with branches, and
    # levels that were read
    rows: DecayedMean = field(default_factory=DecayedMean)
    drafted: DecayedMean = field(default_factory=DecayedMean)
    branches: DecayedMean = field(default_factory=DecayedMean)
    levels: DecayedMean = field(default_factory=DecayedMean)


class OptionValues:
    """Accepted tokens and work of each option's trees.

    Greedy and sampled requests are apart. Each request has a factor of its own: how
    much more is accepted of its trees than of others'. Of an index and a model that
    draft together each part has its own means: the index's are those of the index
    alone, the model's are of what it adds.
    """

    def __init__(self, options: Iterable[TreeOption]) -> None:
        """Begin with nothing measured; ``options``: of which trees are drawn."""
        self.options = list(options)
        # number of the current one
        self.step = 0
        self.index_only = next((o for o in self.options if o.index_only), None)
        # by option
        self.stats = [TreeStats() for _ in self.options]
        # accepted tokens over those of the priors
        self.ratios = Ratios()

    def parts(self, option: TreeOption) -> list[TreeOption]:
        """The index alone and the option that adds to it; else the option itself."""
        if option.index_only or Source.INDEX not in option.sources:
            return [option]
        if self.index_only is None:
            return [option]
        return [self.index_only, option]

    def tokens(self, option: TreeOption, slot: int, sampled: bool) -> Estimate:
        """Accepted tokens of a request's next tree.

        The error is that of what most requests accept. The number of a tree's accepted
        tokens is taken as geometric.
        """
        mean = variance = 0.0
        for part in self.parts(option):
            usual, num_trees = self._usual(part, sampled)
            factor = self.factor(part, slot, sampled)
            mean += usual * factor
            variance += factor * factor * usual * (1.0 + usual) / num_trees
        return Estimate(mean, math.sqrt(variance))

    def factor(self, option: TreeOption, slot: int, sampled: bool) -> float:
        """How much more is accepted of a request's trees than of others'."""
        request = self.ratios.request(option.sources, slot)
        if request is None:
            return 1.0
        of_text = max(self._of_text(option, sampled), LEAST_RATIO)
        return request.mean(self.step, of_text, PRIOR_WEIGHT / of_text) / of_text

    def _of_text(self, option: TreeOption, sampled: bool) -> float:
        """Accepted tokens over those of the priors, for a request like most."""
        return self.ratios.of_text(self.step, option.sources, sampled)

    def _usual(self, option: TreeOption, sampled: bool) -> tuple[float, float]:
        """Accepted tokens of a tree, or of a model's part, for a request like most.

        Returns:
            their mean, and the trees that it counts for.

        """
        accepted = self.stats[option.index].accepted[sampled]
        prior = option.prior * self._of_text(option, sampled)
        return accepted.mean(self.step, prior), PRIOR_WEIGHT + accepted.weight

    def work(
        self, option: TreeOption, requests: int, num_trees: float, sampled: bool
    ) -> Work:
        """What a step does with so many whole trees.

        Args:
            option: that is drawn.
            requests: that run.
            num_trees: of them; cut trees count for their part.
            sampled: whether some request is.

        """
        lookup = float(Source.INDEX in option.sources)
        if not option.prunes:
            rows = num_trees * option.num_drafts
            branches = float(option.branches)
            return Work(requests, sampled, rows, 1.0, branches, lookup, option.levels)
        tokens = min(option.prior, option.num_drafts)
        stats, step = self.stats[option.index], self.step
        return Work(
            requests,
            sampled,
            stats.rows.mean(step, PRIOR_ROWS * tokens) * num_trees,
            stats.drafted.mean(step, 1.0, 1.0),
            stats.branches.mean(step, 1.0, 1.0),
            lookup,
            stats.levels.mean(step, min(option.levels, 1.0 + tokens), 1.0),
        )

    def observe(
        self, option: TreeOption, kinds: Mapping[int, bool], result: StepResult
    ) -> None:
        """Learn from the trees of a step.

        Args:
            option: what it drew.
            kinds: whether requests are sampled, by slot. Others tell nothing.
            result: what it brought.

        """
        if not result.slots:
            return
        parts, by_part = self.parts(option), [list(result.num_accepted)]
        if len(parts) > 1:
            nothing = [0] * len(result.slots)
            found = [
                min(a, b)
                for a, b in zip(
                    result.num_accepted,
                    result.accepted.get(Source.INDEX, nothing),
                    strict=True,
                )
            ]
            added = [a - b for a, b in zip(result.num_accepted, found, strict=True)]
            by_part = [found, added]
        for part, accepted in zip(parts, by_part, strict=True):
            self._observe_part(part, kinds, result, accepted)
        stats, step = self.stats[option.index], self.step
        for limit, drafts in zip(result.limits, result.num_drafts, strict=True):
            if limit >= option.num_drafts:
                stats.rows.add(step, 1.0, drafts)
        stats.drafted.add(step, 1.0, result.work.drafted)
        stats.branches.add(step, 1.0, result.work.branches)
        stats.levels.add(step, 1.0, result.work.levels)

    def _observe_part(
        self,
        part: TreeOption,
        kinds: Mapping[int, bool],
        result: StepResult,
        accepted: Sequence[int],
    ) -> None:
        """Learn what was accepted of one part of the trees."""
        stats, step = self.stats[part.index], self.step
        for slot, tokens, limit in zip(
            result.slots, accepted, result.limits, strict=True
        ):
            if slot not in kinds:
                continue
            sampled = kinds[slot]
            ratio = part.prior, tokens
            self.ratios.add_to_request(step, part.sources, slot, *ratio)
            if limit >= part.num_drafts:
                stats.accepted[sampled].add(step, 1.0, tokens)
                self.ratios.add_to_text(step, part.sources, sampled, *ratio)

    def forget(self, slots: Sequence[int]) -> None:
        """Forget requests that ended; their slots will be other requests'."""
        self.ratios.forget(slots)
