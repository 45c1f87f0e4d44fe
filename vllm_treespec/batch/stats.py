"""Where a step's time goes, and what the target accepted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_treespec.aids import Aid, aiding
from vllm_treespec.batch.matching import (
    Proposal,
    RunningTrees,
    count_by_source,
    scored_by_source,
)
from vllm_treespec.batch.views import EmittedBatch
from vllm_treespec.trees.source import Source

# In the order of a step.
STAGES = ("tree_build", "forward", "score", "commit", "draft")
# What drafts the two parts of a hybrid tree.
SOURCES = ("index", "model")
# Also counted, parts of "draft": forwards of draft models or a head; what is kept of
# the target's hidden states.
DRAFT_FORWARD, KEEP_FEATURES = "draft_forward", "keep_features"

# Of so many trees and draft tokens a drafter that guesses one root's next token in ten
# has some accepted, but for 1.5 %.
MANY_TREES, MANY_DRAFTS = 40, 300


@dataclass
class StepCounts:
    """What a worker counted in some steps; it is not changed after it was handed over.

    It holds plain dicts and numbers only, which are pickled in each step.
    """

    # stage -> seconds
    seconds: dict[str, float] = field(default_factory=dict)
    # what a step drafted with, a tree's name or "plain" -> steps
    modes: dict[str, int] = field(default_factory=dict)
    # the same -> seconds of its steps that only decoded, and tokens emitted in them
    mode_seconds: dict[str, float] = field(default_factory=dict)
    mode_tokens: dict[str, int] = field(default_factory=dict)
    # nodes of a tree, its root included -> trees
    node_counts: dict[int, int] = field(default_factory=dict)
    # accepted draft tokens of a tree -> trees
    accepted: dict[int, int] = field(default_factory=dict)
    # tokens of the beams that trees were made of, and the trees' draft nodes
    beam_tokens: int = 0
    beam_nodes: int = 0
    # draft nodes of scored trees that were drafted from what an earlier step left over,
    # and how many of them were accepted
    leftover_nodes: int = 0
    leftover_accepted: int = 0
    # of trees that an index and a model draft: source -> draft nodes that were scored,
    # and accepted; a node that both drafted counts for both
    source_nodes: dict[str, int] = field(default_factory=dict)
    source_accepted: dict[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps, whatever their mode."""
        return sum(self.modes.values())

    @property
    def trees(self) -> int:
        """Scored trees."""
        return sum(self.node_counts.values())

    @property
    def nodes(self) -> int:
        """Nodes of the scored trees, roots included."""
        return sum(nodes * trees for nodes, trees in self.node_counts.items())

    def without(self, trees: Iterable[tuple[int, int]]) -> StepCounts:
        """The same without these trees, as far as they were counted.

        Args:
            trees: nodes of each, its root included, and accepted draft tokens.

        """
        node_counts, accepted = Counter(self.node_counts), Counter(self.accepted)
        for num_nodes, num_accepted in trees:
            if node_counts[num_nodes] and accepted[num_accepted]:
                node_counts[num_nodes] -= 1
                accepted[num_accepted] -= 1
        return replace(self, node_counts=dict(node_counts), accepted=dict(accepted))


@dataclass
class Acceptance:
    """Whether what a drafter drafted was ever accepted.

    Of trees that an index and a model draft, the model's drafts.
    """

    trees: int = 0
    drafts: int = 0
    accepted: int = 0

    def add(self, counts: StepCounts) -> None:
        """Add what a worker handed over."""
        self.trees += counts.trees
        if counts.source_nodes:
            self.drafts += counts.source_nodes["model"]
            self.accepted += counts.source_accepted["model"]
        else:
            self.drafts += counts.nodes - counts.trees
            self.accepted += sum(n * trees for n, trees in counts.accepted.items())

    @property
    def is_missing(self) -> bool:
        """Whether nothing was accepted of so much that a useful drafter has some."""
        enough = self.trees >= MANY_TREES and self.drafts >= MANY_DRAFTS
        return enough and not self.accepted


class StepStats:
    """Counts the steps of one worker.

    There are two counts: the totals since the worker started or was last reset, and
    what was not handed over yet. Neither changes the other.
    """

    def __init__(self) -> None:
        self.aid = Aid("Counting steps", "metrics of draft trees stand still")
        self._totals = StepCounts()
        self._pending = StepCounts()

    @property
    def _counts(self) -> tuple[StepCounts, StepCounts]:
        return self._totals, self._pending

    def reset(self) -> None:
        """Start the totals anew."""
        self._totals = StepCounts()

    def hand_over(self) -> StepCounts:
        """What was counted since the last call."""
        counts, self._pending = self._pending, StepCounts()
        return counts

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        start = time.perf_counter()
        yield
        self.add_seconds(name, time.perf_counter() - start)

    @aiding
    def add_seconds(self, stage: str, seconds: float) -> None:
        """Add time to a stage."""
        for counts in self._counts:
            counts.seconds[stage] = counts.seconds.get(stage, 0.0) + seconds

    @aiding
    def count_step(self, name: str) -> None:
        """Count a step, by what it drafts with: a tree's name or "plain"."""
        for counts in self._counts:
            counts.modes[name] = counts.modes.get(name, 0) + 1

    @aiding
    def count_timed(self, name: str, seconds: float, num_tokens: int) -> None:
        """Count the time of a step that only decoded, and the tokens it emitted.

        It scored what the step before had drafted: a tree's name or "plain".
        """
        for counts in self._counts:
            counts.mode_seconds[name] = counts.mode_seconds.get(name, 0.0) + seconds
            counts.mode_tokens[name] = counts.mode_tokens.get(name, 0) + num_tokens

    @aiding
    def count_trees(self, num_nodes: list[int], num_accepted: list[int]) -> None:
        """Count the scored trees of a step."""
        for counts in self._counts:
            for nodes in num_nodes:
                counts.node_counts[nodes] = counts.node_counts.get(nodes, 0) + 1
            for accepted in num_accepted:
                counts.accepted[accepted] = counts.accepted.get(accepted, 0) + 1

    def count_scored(
        self,
        batch: EmittedBatch,
        trees: RunningTrees,
        proposal: Proposal | None,
        sources: Source,
    ) -> np.ndarray:
        """Count the trees that were scored in a step.

        Args:
            batch: after the step.
            trees: of the step.
            proposal: they were cut from; None: it was discarded.
            sources: what drafts them.

        Returns:
            accepted drafts of each request that an index, and that a model drafted,
            int64 [num_reqs, 2].

        """
        by_source = np.zeros((batch.num_reqs, 2), dtype=np.int64)
        num_accepted = batch.num_emitted[trees.host_reqs] - 1
        has_drafts = trees.num_nodes > 1
        self.count_trees(
            trees.num_nodes[has_drafts].tolist(), num_accepted[has_drafts].tolist()
        )
        for req, *parts in scored_by_source(trees, proposal, batch):
            if Source.INDEX in sources:
                by_source[req] = count_by_source(parts[1])
                self.count_sources(count_by_source(parts[0]), by_source[req])
            else:
                left_over = (int((part == Source.LEFTOVER).sum()) for part in parts)
                self.count_leftovers(*left_over)
        return by_source

    @aiding
    def count_beams(self, num_beam_tokens: int, num_nodes: int) -> None:
        """Count tokens of beams and the draft nodes that they were merged into."""
        for counts in self._counts:
            counts.beam_tokens += num_beam_tokens
            counts.beam_nodes += num_nodes

    @aiding
    def count_leftovers(self, num_nodes: int, num_accepted: int) -> None:
        """Count scored draft nodes that came from what an earlier step left over."""
        for counts in self._counts:
            counts.leftover_nodes += num_nodes
            counts.leftover_accepted += num_accepted

    @aiding
    def count_sources(self, num_nodes: np.ndarray, num_accepted: np.ndarray) -> None:
        """Count scored and accepted draft nodes by source, int64 [2] both."""
        for counts in self._counts:
            for totals, numbers in (
                (counts.source_nodes, num_nodes),
                (counts.source_accepted, num_accepted),
            ):
                for source, number in zip(SOURCES, numbers.tolist(), strict=True):
                    totals[source] = totals.get(source, 0) + number

    def as_dict(self) -> dict[str, Any]:
        """Totals: seconds per stage, steps, modes and their seconds and tokens, trees,
        nodes, accepted lengths, node counts of trees, tokens of beams and the nodes
        that these became, nodes from leftovers and how many were accepted, nodes by
        source and accepted ones."""
        totals = self._totals
        return {
            "seconds": dict(totals.seconds),
            "steps": totals.steps,
            "modes": dict(totals.modes),
            "mode_seconds": dict(totals.mode_seconds),
            "mode_tokens": dict(totals.mode_tokens),
            "trees": totals.trees,
            "nodes": totals.nodes,
            "accepted": dict(totals.accepted),
            "node_counts": dict(totals.node_counts),
            "beam_tokens": totals.beam_tokens,
            "beam_nodes": totals.beam_nodes,
            "leftover_nodes": totals.leftover_nodes,
            "leftover_accepted": totals.leftover_accepted,
            "source_nodes": dict(totals.source_nodes),
            "source_accepted": dict(totals.source_accepted),
        }
