"""What is drafted for a plan, by the arithmetic of the package's proposers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.sim.tape import Draw, Request, depth_of
from vllm_treespec.proposers.draft_filter import HOPED
from vllm_treespec.proposers.hybrid import index_rows
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source


@dataclass(frozen=True)
class Tree:
    """A tree of a schedule; implements ``ScheduledTree``."""

    num_drafts: int
    depth: int
    leaves: int
    # what drafts it
    sources: Source = Source.MODEL
    # whether drafts are left out that are worth less than their row
    prunes_by_cost: bool = False
    # levels that a model drafts; 0: all
    draft_depth: int = 0
    batch_size: int = 10**9
    min_acceptance_length: float = 1.0

    @property
    def name(self) -> str:
        """Its numbers and sources."""
        return f"{self.num_drafts} in {self.depth}, {self.sources!r}"

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

    def rate(self, level_accepted: float) -> float:
        """How often a level is accepted below an accepted one, in a whole tree."""
        width = self.num_drafts / self.depth
        return 1 - (1 - level_accepted) ** width**0.3


@dataclass(frozen=True)
class Drafted:
    """What a step's trees hold, and what the text makes of them.

    The sequences have an entry for each request of the plan.
    """

    num_drafts: Sequence[int]
    num_accepted: Sequence[int]
    claimed: Mapping[Source, Sequence[float]] = field(default_factory=dict)
    accepted: Mapping[Source, Sequence[int]] = field(default_factory=dict)
    branches: bool = False
    lookup: bool = False
    levels: int = 0


class Found(NamedTuple):
    """An index's part of a tree: nodes of a continuation and of the one beside it."""

    main: int = 0
    rival: int = 0
    claimed: float = 0.0


@dataclass(frozen=True)
class Part:
    """What one source drafted for each request."""

    nodes: Sequence[int]
    claimed: Sequence[float]
    accepted: Sequence[int]
    branches: bool = False
    levels: int = 0


def draft(
    plan: StepPlan,
    tree: Tree,
    requests: Sequence[Request],
    draws: Sequence[Draw],
    can_sync: bool,
) -> Drafted:
    """Draft for the requests of a plan."""
    if not plan.prunes:
        return whole_trees(tree, requests, draws)
    parts: dict[Source, Part] = {}
    places = [min(request.limit, tree.num_drafts) for request in requests]
    needed, elsewhere = plan.model, [0.0] * len(requests)
    if plan.lookup:
        if needed:
            elsewhere = likely_found(plan, draws)
            needed = model_is_needed(plan, elsewhere)
        # Those of one path are the model's.
        most = tree.num_drafts - tree.sizes.draft_depth if needed else tree.num_drafts
        of_index = [min(count, most) for count in places]
        parts[Source.INDEX] = draft_by_index(plan, tree, of_index, draws, needed)
        found = parts[Source.INDEX].nodes
        places = [a - b for a, b in zip(places, found, strict=True)]
    if plan.max_rows is not None and len(requests):
        left = plan.max_rows - sum(of_index_nodes(parts))
        places = [min(each, left // len(requests)) for each in places]
    if needed:
        parts[Source.MODEL] = draft_by_model(
            plan, tree, places, draws, elsewhere, can_sync
        )
    elif plan.model:
        nothing = [0] * len(requests)
        parts[Source.MODEL] = Part(nothing, [0.0] * len(requests), nothing)
    nodes = zip(*(part.nodes for part in parts.values()), strict=True)
    # Of a continuation that was not worth its row a guess may come true.
    accepted = [
        [min(a, b) for a, b in zip(part.accepted, part.nodes, strict=True)]
        for part in parts.values()
    ]
    return Drafted(
        num_drafts=[sum(each) for each in nodes],
        num_accepted=[max(each) for each in zip(*accepted, strict=True)],
        claimed={source: part.claimed for source, part in parts.items()},
        accepted={source: part.accepted for source, part in parts.items()},
        branches=has_branches(parts),
        lookup=plan.lookup,
        levels=sum(part.levels for part in parts.values()),
    )


def of_index_nodes(parts: Mapping[Source, Part]) -> Sequence[int]:
    """Nodes of each tree that an index drafted."""
    return parts[Source.INDEX].nodes if Source.INDEX in parts else ()


def has_branches(parts: Mapping[Source, Part]) -> bool:
    """Whether some tree is no chain: two parts do not begin alike."""
    if any(part.branches for part in parts.values()):
        return True
    nodes = zip(*(part.nodes for part in parts.values()), strict=True)
    return len(parts) > 1 and any(all(each) for each in nodes)


def whole_trees(
    tree: Tree, requests: Sequence[Request], draws: Sequence[Draw]
) -> Drafted:
    """Trees that are drawn whole, cut to the limits of their requests."""
    nodes = [min(tree.num_drafts, request.limit) for request in requests]
    accepted = []
    for request, draw, count in zip(requests, draws, nodes, strict=True):
        rate = tree.rate(request.text.level_accepted * request.truth)
        accepted.append(min(depth_of(rate, draw.luck), tree.depth, count))
    levels = tree.sizes.draft_depth if Source.MODEL in tree.sources else 0
    return Drafted(nodes, accepted, branches=tree.leaves > 1, levels=levels)


def likely_found(plan: StepPlan, draws: Sequence[Draw]) -> list[float]:
    """How likely each request's next token is one that the index drafts."""
    kept, least = plan.kept[Source.INDEX], plan.min_claim(Source.INDEX)
    return [
        min(draw.rate * factor, 1.0) if draw.rate >= lowest else 0.0
        for draw, factor, lowest in zip(draws, kept, least, strict=True)
    ]


def model_is_needed(plan: StepPlan, elsewhere: Sequence[float]) -> bool:
    """Whether a model's first level is worth its forward beside an index."""
    both = zip(plan.first_level, elsewhere, strict=True)
    return sum(added * (1 - found) for added, found in both) > plan.level_cost


def grow(draw: Draw, least: float, places: int, max_depth: int) -> Found:
    """The likeliest nodes of both continuations that are worth their row."""
    main, rival, claimed = 0, 0, 0.0
    longest = min(max_depth, draw.length)
    next_main, next_rival = draw.rate, draw.rival
    while main + rival < places:
        likelier = max(next_main, next_rival)
        if not likelier or likelier < least:
            break
        claimed += likelier
        if next_main >= next_rival:
            main += 1
            next_main = next_main * draw.rate if main < longest else 0.0
        else:
            rival += 1
            next_rival = next_rival * draw.rival if rival < longest else 0.0
    return Found(main, rival, claimed)


def within_rows(
    found: Sequence[Found],
    draws: Sequence[Draw],
    kept: Sequence[float],
    max_rows: int | None,
) -> list[Found]:
    """The likeliest nodes of all requests, as many as a step has rows for."""
    if max_rows is None or sum(each.main + each.rival for each in found) <= max_rows:
        return list(found)
    ranked = sorted(
        (-factor * rate**level, row, which)
        for row, (each, draw, factor) in enumerate(zip(found, draws, kept, strict=True))
        for which, rate, count in (
            (0, draw.rate, each.main),
            (1, draw.rival, each.rival),
        )
        for level in range(1, count + 1)
    )[:max_rows]
    counts = [[0, 0] for _ in found]
    claims = [0.0] * len(found)
    for value, row, which in ranked:
        counts[row][which] += 1
        claims[row] -= value / kept[row]
    return [
        Found(main, rival, claimed)
        for (main, rival), claimed in zip(counts, claims, strict=True)
    ]


def chain_of(draw: Draw, found: Found) -> Found:
    """The likelier continuation alone."""
    claimed = sum(draw.rate**level for level in range(1, found.main + 1))
    return Found(found.main, 0, claimed)


def gain_of(plan: StepPlan, found: Sequence[Found]) -> float:
    """Accepted tokens that the index's nodes likely bring, less what they cost."""
    nodes = sum(each.main + each.rival for each in found)
    if not nodes:
        return 0.0
    kept = zip(found, plan.kept[Source.INDEX], strict=True)
    tokens = sum(each.claimed * factor for each, factor in kept)
    branches = any(each.rival for each in found)
    cost = nodes * plan.row_cost + plan.fixed_cost + branches * plan.branch_cost
    return tokens - cost


def draft_by_index(
    plan: StepPlan,
    tree: Tree,
    places: Sequence[int],
    draws: Sequence[Draw],
    beside_model: bool,
) -> Part:
    """What an index drafts: trees, chains or nothing, whichever gains most.

    Beside a model all nodes are drafted that are worth their row. Without, the
    likeliest token of a tree that is empty is claimed, too.
    """
    found = [
        grow(draw, least, count, tree.depth)
        for draw, least, count in zip(
            draws, plan.min_claim(Source.INDEX), places, strict=True
        )
    ]
    max_rows = plan.max_rows
    if max_rows is not None and beside_model:
        max_rows = index_rows(max_rows, tree.sizes.draft_depth, len(found))
    found = within_rows(found, draws, plan.kept[Source.INDEX], max_rows)
    if not beside_model:
        chains = [chain_of(*both) for both in zip(draws, found, strict=True)]
        nothing = [Found()] * len(found)
        offers = (nothing, chains, found)
        found = max(offers, key=lambda offer: gain_of(plan, offer))
    claimed, accepted = [], []
    for draw, each in zip(draws, found, strict=True):
        if each.main or beside_model:
            claimed.append(each.claimed)
            of_rival = min(draw.rival_depth, each.rival)
            accepted.append(max(min(draw.depth, each.main), of_rival))
        else:
            claimed.append(draw.rate)
            accepted.append(min(draw.depth, 1))
    nodes = [each.main + each.rival for each in found]
    return Part(nodes, claimed, accepted, any(each.rival for each in found))


def draft_by_model(
    plan: StepPlan,
    tree: Tree,
    places: Sequence[int],
    draws: Sequence[Draw],
    elsewhere: Sequence[float],
    can_sync: bool,
) -> Part:
    """What a model drafts level by level; see ``DraftFilter``.

    Args:
        plan: of the step.
        tree: that is drawn.
        places: nodes that each request's tree still may have.
        draws: of each request.
        elsewhere: how likely an index drafts each request's next token.
        can_sync: whether what was drafted decides if another level is read.

    """
    least = plan.min_claim(Source.MODEL)
    kept = plan.kept[Source.MODEL]
    claims, nodes = [1.0] * len(draws), [0] * len(draws)
    claimed = [0.0] * len(draws)
    level = 0
    for level in range(1, tree.sizes.draft_depth + 1):
        for row, draw in enumerate(draws):
            claim = claims[row] * draw.sure
            is_sent = claim >= least[row] and nodes[row] < places[row]
            claims[row] = claim if is_sent and claim else 0.0
            nodes[row] += claims[row] > 0
            claimed[row] += claims[row]
        if level == plan.max_levels:
            break
        if can_sync:
            gain = 0.0
            for claim, factor, found in zip(claims, kept, elsewhere, strict=True):
                hoped = HOPED * claim * claim ** (1 / level)
                gain += max(hoped * factor - plan.row_cost, 0.0) * (1 - found)
            if gain <= plan.level_cost:
                break
    accepted = [
        min(draw.model_depth, count) for draw, count in zip(draws, nodes, strict=True)
    ]
    return Part(nodes, claimed, accepted, levels=level)
