"""Draws the trees of a step: an index is asked first, and models where they pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.matching import Proposal
from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.batch.views import GREEDY_BELOW, EmittedBatch
from vllm_treespec.host_copies import on_device
from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sampling.uniforms import DRAFTING, keyed_uniforms
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.sources.base import (
    DeviceSource,
    DraftModel,
    GraphSource,
    Roots,
    SampledTokens,
    Sources,
)
from vllm_treespec.sources.continuations import Continuations
from vllm_treespec.step.method import EngineLimits, Method
from vllm_treespec.step.noise import HashedNoise, PositionNoise
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.tree import TreeBatch


@dataclass(frozen=True)
class StepEnd:
    """A step whose tokens were emitted: what its next trees begin with."""

    batch: EmittedBatch
    # its number
    step: int
    # int64 [num_reqs], drafts accepted of each request's tree, -1 without one
    accepted: np.ndarray
    # [num_reqs, hidden_size], the target's hidden states from which the last tokens
    # were emitted; None: no source asks
    hidden: Tensor | None


@dataclass(frozen=True)
class Candidates:
    """Requests that may draft, with what is known of them before models draft."""

    plan: StepPlan
    # int64 [n], their places in the batch, ascending
    reqs: np.ndarray
    # of these requests; None: there are none
    roots: Roots | None = None
    # what an index found; None: it is not looked up
    found: Continuations | None = None


# What a step's trees grow from, by the source that grows them.
Start = Callable[[GraphSource], Mapping[str, Tensor]]
# Draws what a proposer would draw in a graph; None: no graph fits.
Replay = Callable[[Start, Proposer, ProposerInputs], Draft | None]


class LateModels(Sequence[DraftModel]):
    """The draft models of a step, begun when one of them is first looked at."""

    def __init__(self, begin: Sequence[Callable[[], DraftModel]]) -> None:
        """Begin none; ``begin`` has a call for each."""
        self.begin = begin

    @cached_property
    def begun(self) -> list[DraftModel]:
        """All of them."""
        return [begin() for begin in self.begin]

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, index: Any) -> Any:
        return self.begun[index]


class StepDrafter:
    """Lets the planned tree's proposer draft from the method's sources.

    ``look_up`` comes first, then ``models_draft``. Then the sources read, and ``draw``
    comes last. So an index is looked up once a step, unless some of the requests cannot
    draft yet.
    """

    def __init__(
        self,
        method: Method,
        sources: Sources,
        slots: RequestSlots,
        limits: EngineLimits,
        stats: StepStats,
    ) -> None:
        """Take what a decoder has."""
        self.noise: PositionNoise = HashedNoise(slots, limits.device)
        self.replay: Replay | None = None
        self.method = method
        self.sources = sources
        self.slots = slots
        self.limits = limits
        self.stats = stats

    def replay_by(self, replay: Replay) -> None:
        """Draw trees in graphs, where there is a fitting one."""
        self.replay = replay

    def rank_by(self, noise: PositionNoise) -> None:
        """Rank drafts by the noise of an engine that draws the target's tokens."""
        self.noise = noise

    def look_up(self, plan: StepPlan, end: StepEnd, reqs: np.ndarray) -> Candidates:
        """Look up the requests that may draft in an index, if the plan says so.

        Args:
            plan: of the step.
            end: of the step before.
            reqs: int64 [n], ascending. No more are looked up than may carry trees.

        """
        reqs = reqs[: self.method.max_trees]
        if plan.tree is None or not len(reqs):
            return Candidates(plan, reqs)
        proposer = self.method.proposers[plan.tree]
        roots = self._roots(end, reqs, proposer.sizes.draft_depth)
        found: Continuations | None = None
        if plan.lookup:
            assert self.sources.text is not None
            found = self.sources.text.look_up(end.batch.texts(reqs))
        plan = plan.of_slots(roots.slots.tolist())
        if found is not None and plan.model and plan.prunes:
            plan = replace(plan, index_hits=proposer.index_hits(plan, found))
        return Candidates(plan, reqs, roots, found)

    def models_draft(self, candidates: Candidates) -> bool:
        """Whether draft models or heads draft: not where an index does as well."""
        plan = candidates.plan
        if not plan.model or candidates.roots is None:
            return False
        return not plan.index_hits or plan.level_pays(plan.first_level)

    def draw(
        self,
        plan: StepPlan,
        end: StepEnd,
        candidates: Candidates,
        reqs: np.ndarray,
        models_draft: bool,
        num_caught_up: int,
        unseen_part: Draft | None = None,
    ) -> Proposal | None:
        """Draw one tree for each of these requests; None where there are none.

        Args:
            plan: of the step.
            end: of the step before.
            candidates: what ``look_up`` found.
            reqs: int64 [n] ascending, the requests. The sources have read their tokens.
            models_draft: if not, sources that need no forward draft alone.
            num_caught_up: tokens of earlier steps that sources read for the trees.
            unseen_part: see ``ProposerInputs``; then all requests of the batch draft.

        """
        if plan.tree is None or not len(reqs):
            return None
        if not np.array_equal(reqs, candidates.reqs):
            # Some must still be read, and others draft.
            candidates = self.look_up(plan, end, reqs)
        roots = candidates.roots
        assert roots is not None
        proposer = self.method.proposers[plan.tree]
        device = self.limits.device
        sampling = end.batch.sampling.select(reqs, on_device(reqs, device))
        keys, sizes = self.slots.keys(roots.slots), proposer.sizes
        uniforms = keyed_uniforms(keys, roots.positions, DRAFTING, sizes.num_uniforms)
        noise: Tensor | None = None
        models = self.sources.models if models_draft else ()
        draws = bool(models) and unseen_part is None
        if draws and self.method.rule.follows_noise and not sampling.all_greedy:
            noise = self.noise.keys(roots, sizes.max_depth)
        inputs = ProposerInputs(
            root_token_ids=roots.root_token_ids,
            sampling=sampling,
            uniforms=on_device(uniforms, device),
            draft_models=LateModels([partial(m.begin, roots) for m in models]),
            replay=self._replay(lambda source: source.start(roots), draws),
            noise_keys=noise,
            noise_of=self.noise.of,
            unseen_part=unseen_part,
            continuations=[] if candidates.found is None else [candidates.found],
            plan=candidates.plan,
            can_sync=not self.method.batched,
        )
        draft = inputs.draw(proposer)
        proposal = Proposal.from_draft(
            draft,
            plan.tree,
            end.step,
            roots.slots,
            reqs,
            self._node_limits(end.batch, reqs, draft.tree),
            num_caught_up,
        )
        self.count_beams(proposal)
        return proposal

    def count_beams(self, proposal: Proposal) -> None:
        """Count tokens of beams that trees were made of, if they were."""
        per_tree = self.method.proposers[proposal.tree_index].num_beam_tokens
        if per_tree is not None:
            num_nodes = int((proposal.parents >= 0).sum())
            self.stats.count_beams(per_tree * len(proposal.slots), num_nodes)

    def _replay(
        self, start: Start, models_draft: bool
    ) -> Callable[[Proposer, ProposerInputs], Draft | None] | None:
        """Draws in a graph what models draft; None: there are no graphs."""
        if self.replay is None or not models_draft:
            return None
        return partial(self.replay, start)

    @cached_property
    def unseen_sources(self) -> Sequence[DeviceSource]:
        """The models, if they draft by the device's work alone; else none.

        Then they can draw before the host knows what trees grow from.
        """
        if not self.method.batched:
            return ()
        models = self.sources.models
        found = [model for model in models if isinstance(model, DeviceSource)]
        return found if len(found) == len(models) else ()

    def unseen_part(self, plan: StepPlan) -> Proposer | None:
        """What of the planned trees is drawn by the device's work alone; None: nothing.

        Beside an index that is what models draft, even where the index will turn out to
        do as well alone.
        """
        if plan.tree is None or not plan.model or not self.unseen_sources:
            return None
        return self.method.proposers[plan.tree].graph_part

    def draw_unseen(
        self,
        plan: StepPlan,
        slots: np.ndarray,
        sampled: SampledTokens,
        sampling: SamplingTensors,
        noise_keys: Tensor | None,
    ) -> Draft:
        """Draw one tree for each request below roots that the host does not know.

        Args:
            plan: of these requests, see ``unseen_part``, which draws.
            slots: int64 [num_reqs], of the requests.
            sampled: what the step before committed.
            sampling: of the requests.
            noise_keys: see ``ProposerInputs``.

        """
        proposer, sources = self.unseen_part(plan), self.unseen_sources
        assert proposer is not None
        starts: dict[GraphSource, Mapping[str, Tensor]] = {
            source: source.start_unseen(sampled) for source in sources
        }
        roots, depth = sampled.root_token_ids, proposer.sizes.draft_depth
        count = proposer.sizes.num_uniforms
        uniforms = torch.zeros((len(roots), count), device=roots.device)
        if not sampling.all_greedy:
            keys = self.slots.keys(slots)
            uniforms = keyed_uniforms(keys, sampled.end, DRAFTING, count)
        inputs = ProposerInputs(
            root_token_ids=roots,
            sampling=sampling,
            uniforms=uniforms,
            draft_models=LateModels(
                [
                    partial(source.grow, start, roots, depth)
                    for source, start in starts.items()
                ]
            ),
            replay=self._replay(lambda source: starts[source], True),
            noise_keys=noise_keys,
            noise_of=self.noise.of,
            plan=plan,
        )
        return inputs.draw(proposer)

    def _node_limits(
        self, batch: EmittedBatch, drafting: np.ndarray, tree: TreeBatch
    ) -> np.ndarray:
        """Nodes that each request's tree may have, int64 [num_trees].

        A sampled request gets no draft of a tree that would keep no draws when cut.
        """
        limits = 1 + self.slots.max_drafts(batch.slots[drafting])
        if tree.draws is not None:
            sampled = batch.sampling.host_temperature[drafting] >= GREEDY_BELOW
            limits[sampled & (limits < tree.draws.min_nodes)] = 1
        return limits

    def _roots(self, end: StepEnd, drafting: np.ndarray, depth: int) -> Roots:
        """Requests that draft, with what the sources read of them."""
        batch, device = end.batch, self.limits.device
        positions = batch.end[drafting]
        root_token_ids = batch.token_ids[drafting, positions].astype(np.int64)
        hidden = end.hidden
        if hidden is not None:
            hidden = hidden[on_device(drafting, device)]
        return Roots(
            slots=batch.slots[drafting],
            positions=positions,
            root_token_ids=on_device(root_token_ids, device),
            accepted=end.accepted[drafting],
            depth=depth,
            hidden=hidden,
        )
