"""Draws trees in tensors that last, so that CUDA graphs can replay how they are drawn.

A graph replays kernels with the addresses and numbers of its capture. So what differs
from step to step lies in tensors here, and a graph's batch has one of few sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_treespec.batch.stats import StepStats
from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.sources.base import GraphSource
from vllm_treespec.step.drafting import Start, StepDrafter
from vllm_treespec.step.method import Method
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.source import Source
from vllm_treespec.trees.tree import TreeBatch

# Larger batches draw without a graph: their kernels take longer than their launches.
BATCH_SIZES = (1, 2, 4, 8)
NO_LIMIT = 2**31 - 1


class Sampling(Enum):
    """Which sampling parameters some request of a batch has; each has its kernels."""

    GREEDY = 0
    TEMPERATURE = 1
    LIMITS = 2

    @classmethod
    def of(cls, sampling: SamplingTensors) -> Sampling:
        """The kind of a batch."""
        if sampling.all_greedy:
            return cls.GREEDY
        if sampling.top_k is None and sampling.top_p is None:
            return cls.TEMPERATURE
        return cls.LIMITS


class TreeShape(NamedTuple):
    """What one graph draws."""

    # number of the proposer
    proposer: int
    # unused ones included
    num_trees: int
    # that draft models read at most
    levels: int
    sampling: Sampling

    @property
    def place(self) -> TreeShape:
        """The shape in whose tensors the trees lie: all sampled ones share them."""
        if self.sampling == Sampling.GREEDY:
            return self
        return self._replace(sampling=Sampling.TEMPERATURE)


class CapturedTrees:
    """The inputs of graphs, what a graph runs, and the trees that it has drawn.

    Trees are valid until the next ones are drawn: on the device, what reads them was
    launched before.
    """

    def __init__(
        self,
        method: Method,
        max_reqs: int,
        proposers: Sequence[Proposer],
        sources: Sequence[GraphSource],
        noise_of: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
        stats: StepStats,
    ) -> None:
        """Take what draws; nothing is allocated."""
        self.stats = stats
        self.follows_noise = method.rule.follows_noise
        self.proposers = proposers
        self.sources = sources
        self.noise_of = noise_of
        self.device = device
        most = min(method.max_trees, max_reqs)
        self.sizes = sorted({min(size, most) for size in BATCH_SIZES})
        self.cuts_levels = method.schedule.cuts_levels
        # by the place of their shape
        self.drafts: dict[TreeShape, Draft] = {}
        # float32, where draft distributions lie; those of all shapes lie in one place
        self.probs = torch.empty(0, device=device)

    def shapes(self) -> Sequence[TreeShape]:
        """All shapes, those of the largest batches first."""
        return [
            TreeShape(number, size, levels, sampling)
            for size in reversed(self.sizes)
            for number, proposer in enumerate(self.proposers)
            for levels in reversed(self._levels(proposer))
            for sampling in (Sampling if proposer.reads_sampling else [Sampling.GREEDY])
        ]

    def shape_of(self, proposer: Proposer, inputs: ProposerInputs) -> TreeShape | None:
        """The shape of a step's trees; None: no graph draws them, or not so many."""
        num_trees = len(inputs.root_token_ids)
        size = next((n for n in self.sizes if num_trees <= n), None)
        if size is None or proposer not in self.proposers:
            return None
        levels = self._levels(proposer)
        most = inputs.plan.max_levels
        read = levels[-1] if most is None else min(max(most, levels[0]), levels[-1])
        sampling = Sampling.GREEDY
        if proposer.reads_sampling:
            sampling = Sampling.of(inputs.sampling)
        return TreeShape(self.proposers.index(proposer), size, read, sampling)

    def _levels(self, proposer: Proposer) -> range:
        """Numbers of levels that a plan may allow."""
        depth = proposer.sizes.max_depth
        can_end = self.cuts_levels and proposer.can_end_early
        return range(1 if can_end else depth, depth + 1)

    def allocate(self, max_blocks: int) -> None:
        """Make the inputs of all graphs, and forget what was drawn.

        Args:
            max_blocks: columns of the block table.

        """
        size, device = self.sizes[-1], self.device
        depth = max(proposer.sizes.max_depth for proposer in self.proposers)
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        self.starts = [source.blank_start(size, max_blocks) for source in self.sources]
        self.root_token_ids = zeros
        self.temperature = torch.zeros(size, device=device)
        self.top_k = torch.full_like(zeros, NO_LIMIT)
        self.top_p = torch.ones(size, device=device)
        self.noise_keys = zeros[:, None].repeat(1, depth)
        most = max(proposer.sizes.num_uniforms for proposer in self.proposers)
        self.uniforms = torch.zeros((size, most), dtype=torch.float64, device=device)
        self.min_log_claims = zeros.double()
        self.num_drafts = zeros.clone()
        self.drafts = {}

    def run(self, shape: TreeShape) -> None:
        """Draw trees of a shape from what lies in the inputs: what a graph captures."""
        proposer, inputs = self.proposers[shape.proposer], self._inputs(shape)
        given = inputs.root_token_ids, proposer.sizes.draft_depth
        models = [
            source.grow(
                {name: part[: shape.num_trees] for name, part in start.items()}, *given
            )
            for source, start in zip(self.sources, self.starts, strict=True)
        ]
        draft = proposer.propose(replace(inputs, draft_models=models))
        if shape.place not in self.drafts:
            self.drafts[shape.place] = self._lasting(draft)
        lasting = _tensors(self.drafts[shape.place])
        for lasting_part, part in zip(lasting, _tensors(draft), strict=True):
            lasting_part.copy_(part)

    def _lasting(self, draft: Draft) -> Draft:
        """A draft of this shape in tensors that last."""
        draws = draft.tree.draws
        lasting = [torch.empty_like(part) for part in _tensors(draft)]
        if draws is not None:
            size = draws.probs.numel()
            if size > len(self.probs):
                self.probs = torch.empty(size, device=self.device)
            lasting[-1] = self.probs[:size].view_as(draws.probs)
        return _with_tensors(draft, lasting)

    def _inputs(self, shape: TreeShape) -> ProposerInputs:
        """The inputs of a shape, in part the same for all batches."""
        size, kind = shape.num_trees, shape.sampling
        proposer = self.proposers[shape.proposer]
        limits = kind == Sampling.LIMITS
        follows = kind != Sampling.GREEDY and self.follows_noise
        return ProposerInputs(
            self.root_token_ids[:size],
            SamplingTensors(
                self.temperature[:size],
                self.top_k[:size] if limits else None,
                self.top_p[:size] if limits else None,
                all_greedy=kind == Sampling.GREEDY,
            ),
            uniforms=self.uniforms[:size, : proposer.sizes.num_uniforms],
            noise_keys=self.noise_keys[:size] if follows else None,
            noise_of=self.noise_of,
            min_log_claims=self.min_log_claims[:size],
            num_drafts=self.num_drafts[:size],
            plan=StepPlan(prunes=True, max_levels=shape.levels),
        )

    def fill(self, shape: TreeShape, inputs: ProposerInputs, start: Start) -> None:
        """Copy a step's inputs to where its graph reads them.

        Unused trees have no context, and nothing is read of what they draw.
        """
        num_trees = len(inputs.root_token_ids)
        for source, kept in zip(self.sources, self.starts, strict=True):
            for name, part in start(source).items():
                kept[name][:num_trees] = part
                kept[name][num_trees : shape.num_trees].zero_()
        self.root_token_ids[:num_trees] = inputs.root_token_ids
        limits = inputs.max_drafts()
        self.num_drafts[:num_trees] = NO_LIMIT if limits is None else limits
        at_least = self.proposers[shape.proposer].min_probability
        least = inputs.log_min_claims(Source.MODEL, at_least)
        self.min_log_claims[:num_trees] = least
        if shape.sampling != Sampling.GREEDY:
            self._fill_sampling(num_trees, inputs.sampling)
            self.uniforms[:num_trees, : inputs.uniforms.shape[1]] = inputs.uniforms
        if inputs.noise_keys is not None:
            # an index beside the model drafts deeper
            depth = self.proposers[shape.proposer].sizes.max_depth
            self.noise_keys[:num_trees, :depth] = inputs.noise_keys[:, :depth]

    def _fill_sampling(self, num_trees: int, given: SamplingTensors) -> None:
        self.temperature[:num_trees] = given.temperature
        self.top_k[:num_trees] = NO_LIMIT if given.top_k is None else given.top_k
        self.top_p[:num_trees] = 1.0 if given.top_p is None else given.top_p

    def drawn(self, shape: TreeShape, num_trees: int) -> Draft:
        """The first trees that were drawn last."""
        draft = self.drafts[shape.place]
        return _with_tensors(draft, [part[:num_trees] for part in _tensors(draft)])


def _tensors(draft: Draft) -> list[Tensor]:
    """What a draft consists of; draft distributions come last."""
    tree, draws = draft.tree, draft.tree.draws
    parts = [tree.token_ids, tree.parents, tree.depths, tree.num_nodes]
    if draft.claims is not None:
        parts.append(draft.claims)
    if draws is not None:
        parts += [draws.nodes, draws.rows, draws.without_replacement, draws.probs]
    return parts


def _with_tensors(draft: Draft, tensors: Sequence[Tensor]) -> Draft:
    """The same draft of other tensors, see ``_tensors``."""
    parts = iter(tensors)
    tree = TreeBatch(next(parts), next(parts), next(parts), next(parts))
    claims = None if draft.claims is None else next(parts)
    draws = draft.tree.draws
    if draws is not None:
        nodes, rows, without_replacement, probs = parts
        draws = replace(
            draws,
            nodes=nodes,
            rows=rows,
            without_replacement=without_replacement,
            probs=probs,
        )
    return replace(draft, tree=replace(tree, draws=draws), claims=claims)


def captured_trees(drafter: StepDrafter, max_reqs: int) -> CapturedTrees | None:
    """Trees that graphs can draw: the device alone draws them from what models read.

    None: a model has another part in it, or no proposer draws by the device's work.

    Args:
        drafter: with its method and sources.
        max_reqs: of a step.

    """
    method, models = drafter.method, drafter.sources.models
    parts = [proposer.graph_part for proposer in method.proposers]
    proposers = [part for part in parts if part is not None]
    sources = [source for source in models if isinstance(source, GraphSource)]
    if not method.batched or not proposers:
        return None
    if not sources or len(sources) != len(models):
        return None
    return CapturedTrees(
        method,
        max_reqs,
        proposers,
        sources,
        drafter.noise.of,
        drafter.limits.device,
        drafter.stats,
    )
