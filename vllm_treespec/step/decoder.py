"""A step with draft trees, in order: match, lay out, score, commit, draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from torch import Tensor

from vllm_treespec.batch.matching import (
    PlacedTrees,
    Proposal,
    RunningTrees,
    match,
    running_trees,
)
from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.batch.unseen import (
    SeenTrees,
    StepTrees,
    UnseenTrees,
    place_unseen,
)
from vllm_treespec.batch.views import (
    GREEDY_BELOW,
    EmittedBatch,
    SamplingView,
    ScheduledBatch,
    TargetInputs,
)
from vllm_treespec.host_copies import on_device
from vllm_treespec.layouts.base import TreeLayout
from vllm_treespec.schedule.clock import StepClock
from vllm_treespec.schedule.plan import RunningRequests, StepPlan
from vllm_treespec.scorers import ScorerOutput
from vllm_treespec.sources.base import Sources
from vllm_treespec.step.committed import CommittedReader, committed_rows, last_hidden
from vllm_treespec.step.drafting import StepDrafter, StepEnd
from vllm_treespec.step.method import EngineLimits, Method
from vllm_treespec.step.plain_draw import PlainDraw, draw_without_trees
from vllm_treespec.step.verifier import TreeVerifier
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes


class RanksDiffer(SystemExit):
    """A rank drew other drafts than rank 0, or would, so that its text would differ.

    vLLM takes the answers of rank 0 alone, but it stops the engine when the process
    of any rank ends.
    """


class TreeDecoder:
    """Decides everything of a step that has to do with draft trees.

    An engine's adapter calls ``begin_step`` before the target's forward, ``score``
    with its logits, ``commit`` when tokens are emitted, and at the end ``draft``, if it
    does not ``rest``. It reports requests through ``slots``, ``discard_trees`` and
    ``finish_requests``.

    An adapter that does not wait for a step's tokens calls ``plan`` and
    ``propose_unseen`` in the place of ``draft``, and ``note`` when they are there.

    A *tree* comes back when the scheduler sends the drafts that were proposed for its
    request in the step before, or the first ones of them. Other drafts are read as a
    chain of which nothing is accepted: that costs speed, never correctness.
    """

    def __init__(
        self,
        method: Method,
        sources: Sources,
        layout: TreeLayout,
        limits: EngineLimits,
        stats: StepStats,
    ) -> None:
        """Begin without requests."""
        self.method = method
        self.sources = sources
        self.layout = layout
        self.limits = limits
        self.stats = stats
        self.slots = RequestSlots(limits.seed)
        self.committed_reader = CommittedReader(sources.models, limits.max_num_tokens)
        self.drafter = StepDrafter(method, sources, self.slots, limits, stats)
        self.sizes = TreeSizes.largest([p.sizes for p in method.proposers])
        self.verifier = TreeVerifier(method, self.slots, self.sizes)
        self.step = 0
        self.proposal: Proposal | UnseenTrees | None = None
        self.clock = StepClock(method.schedule, stats)
        self.trees: PlacedTrees | None = None
        self.scored: ScorerOutput | None = None
        # int64 [num_trees, max_nodes], query row of every node of ``trees``
        self.node_rows: Tensor | None = None

    def discard_trees(self, slots: np.ndarray) -> None:
        """Forget the proposed trees of preempted requests, int64 [n]."""
        if self.proposal is not None and len(slots):
            self.proposal = self.proposal.without(slots)

    def finish_requests(self, slots: np.ndarray) -> None:
        """Forget the requests that ended, by their released slots, int64 [n]."""
        self.discard_trees(slots)
        self.clock.forget(slots)
        self.verifier.target.finish_requests(slots)
        self.sources.finish_requests(slots)

    def begin_step(
        self, batch: ScheduledBatch, inputs: Callable[[], TargetInputs]
    ) -> None:
        """Match the trees that come back, and lay out their nodes.

        Args:
            batch: the step.
            inputs: gives the target's inputs, which trees that branch change.

        Raises:
            RanksDiffer: this rank drew other drafts than those that came back.

        """
        with self.stats.stage("tree_build"):
            self.step += 1
            self.layout.clear()
            self.batch = batch
            self.scored = None
            self.trees = self._match(batch)
            # Chains are laid out by the engine.
            if self.trees is not None and self.trees.branching:
                self.layout.prepare_inputs(self.trees, inputs())

    def _match(self, batch: ScheduledBatch) -> PlacedTrees | None:
        """Find the trees that come back, cut to what was scheduled."""
        if self.proposal is None or not batch.num_drafts.any():
            return None
        if isinstance(self.proposal, UnseenTrees):
            return place_unseen(self.proposal, batch, self.step, self.limits.device)
        matched = match(self.proposal, batch, self.step)
        if self.limits.rank and len(matched.differing_slots):
            request = self.slots.name(int(matched.differing_slots[0]))
            raise RanksDiffer(
                f"tensor-parallel rank {self.limits.rank} drew other drafts than rank "
                f"0 for request {request}; give every rank the same kind of device "
                f"and, on CPU, as many cores (VLLM_CPU_OMP_THREADS_BIND), or remove "
                f"speculative_config"
            )
        return running_trees(self.proposal, matched, batch, self.limits.device)

    @property
    def root_rows(self) -> Tensor:
        """Row of each request's root among the step's logits, int64 [num_reqs]."""
        return on_device(self.batch.root_rows, self.limits.device)

    def score(self, logits: Tensor, sampling: SamplingView) -> ScorerOutput | None:
        """Verify the step's trees; None when there are none.

        Args:
            logits: [num_rows, vocab_size]; row i of a request is node i.
            sampling: of the requests of the batch.

        """
        trees = self.trees
        if trees is None:
            return None
        assert isinstance(trees, RunningTrees), "an engine's sampler verifies others"
        self.scored = self.verifier.score(trees, self.batch, logits, sampling)
        return self.scored

    def accept(self, scored: ScorerOutput) -> None:
        """Take what an engine has verified, which draws after every node itself."""
        self.scored = scored

    def cut_trees(self, num_nodes: Tensor) -> None:
        """Cut the step's trees to their first nodes, whatever these are.

        Args:
            num_nodes: int64 [num_reqs], of every request of the batch.

        """
        if self.trees is not None:
            limits = num_nodes[self.trees.reqs]
            self.trees = replace(self.trees, tree=self.trees.tree.cut(limits))

    def draw_plainly(self, logits: Tensor, sampling: SamplingView) -> PlainDraw | None:
        """Draw the tokens of requests without a tree; see ``draw_without_trees``."""
        target, step = self.verifier.target, (self.batch, self.trees)
        batched = self.method.batched
        return draw_without_trees(target, logits, sampling, *step, batched)

    def commit(self) -> None:
        """Bring the accepted paths' KV into the requests' own slots.

        The memory of draft distributions is free then.
        """
        if self.trees is not None:
            assert self.scored is not None
            with self.stats.stage("commit"):
                if self.trees.branching:
                    self.layout.commit(self.trees, self.scored)
                if self.committed_reader.features:
                    self.node_rows = self.layout.query_rows(self.trees)
            if self.trees.tree.draws is not None:
                # an asynchronous engine holds the step while the next one is verified
                scored = self.running.without_draws()
                self.trees, self.proposal = scored.trees, scored.proposal
        self.layout.clear()

    def rests(self, num_emitted: Iterable[int]) -> bool:
        """Whether the step needs no ``draft``: the next one is as plain as it.

        So it is for some steps where trees do not pay. Draft models note later what the
        target wrote in them, an index what was emitted: of an output that ends in a
        rest it misses the last tokens. Heads that read every step's hidden states never
        rest.

        Args:
            num_emitted: tokens of each request.

        """
        if self.trees is not None or self.committed_reader.reads_every_step:
            return False
        return all(num_emitted) and self.clock.rests(self.batch)

    def draft(
        self,
        batch: EmittedBatch,
        plan: StepPlan | None = None,
        unseen_part: Draft | None = None,
    ) -> Proposal | None:
        """Draw the next trees; None when no request drafts.

        Args:
            batch: after the step.
            plan: of the next one; None: it is made here.
            unseen_part: what ``StepDrafter.draw_unseen`` drew by this plan.

        """
        with self.stats.stage("draft"):
            step = self.running.seen(batch)
            self.trees = step.trees
            self._observe(step, batch)
            reqs = np.flatnonzero(self.slots.may_draft(batch.slots))
            rows: Tensor | slice | None = None
            self._note_texts(batch, reqs)
            if unseen_part is None:
                rows = self._note(batch)
            else:
                self.committed_reader.note_read(batch)
            planned_here = plan is None
            if plan is None:
                plan = self._plan(batch, reqs)
            given = batch, reqs, rows, step.accepted(batch), unseen_part
            self.proposal = proposal = self._draw(plan, *given)
            if planned_here:
                # else the host has waited since
                self.clock.drafted()
            return proposal

    @property
    def running(self) -> StepTrees:
        """The trees of the step that runs."""
        return StepTrees(self.batch, self.trees, self.proposal)

    def plan(self, slots: np.ndarray, sampled: np.ndarray) -> StepPlan:
        """Plan the step behind one that is not over.

        Args:
            slots: int64 [num_reqs], requests that all emit a token and may draft.
            sampled: bool [num_reqs], which are not greedy.

        """
        # the step before only decodes
        return self._plan_for(slots, sampled, np.zeros_like(slots), slots, True)

    def propose_unseen(
        self, draft: Draft, plan: StepPlan, slots: np.ndarray
    ) -> UnseenTrees:
        """Propose what ``StepDrafter.draw_unseen`` drew of requests, int64 [n]."""
        assert plan.tree is not None
        branches = self.method.proposers[plan.tree].sizes.max_width > 1
        self.proposal = unseen = UnseenTrees.from_draft(
            draft, plan.tree, self.step, slots, branches
        )
        self.clock.drafted()
        return unseen

    def note(self, step: StepTrees, batch: EmittedBatch) -> None:
        """Note a step behind which trees were drawn before it was over."""
        self._observe(step.seen(batch), batch)
        self.committed_reader.note_read(batch)

    def _observe(self, step: SeenTrees, batch: EmittedBatch) -> None:
        """Let the schedule learn from a step."""
        by_source = np.zeros((batch.num_reqs, 2), dtype=np.int64)
        if step.trees is not None:
            sources = self.method.schedule.trees[step.trees.tree_index].sources
            scored = batch, step.trees, step.proposal, sources
            by_source = self.clock.aid.run(by_source, self.stats.count_scored, *scored)
        accepted = step.accepted(batch)
        self.clock.observe(step.scheduled, batch, step.proposal, accepted, by_source)

    def _note_texts(self, batch: EmittedBatch, reqs: np.ndarray) -> None:
        """Let an index note what requests that may draft have put out, int64 [n]."""
        if self.sources.text is not None:
            emitted = reqs[batch.emitted[reqs]]
            self.sources.text.note_texts(batch.slots[emitted], batch.texts(emitted))

    def _note(self, batch: EmittedBatch) -> Tensor | slice | None:
        """Let models note what the step committed.

        Returns:
            query rows of the committed tokens, in order; None when no source asks for
            hidden states of every token.

        """
        rows: Tensor | slice | None = None
        if self.committed_reader.features:
            rows = committed_rows(batch, self.trees, self.scored, self.node_rows)
        self.committed_reader.note(batch, rows, self.clock.rest.num_steps)
        return rows

    def _plan(self, batch: EmittedBatch, reqs: np.ndarray) -> StepPlan:
        """Plan the next step for requests that may draft, int64 [n]."""
        reqs = reqs[batch.emitted[reqs]]
        slots = batch.slots[reqs]
        sampled = batch.sampling.host_temperature[reqs] >= GREEDY_BELOW
        num_behind = self.committed_reader.num_behind(batch, reqs)
        decoded = self.batch.only_decodes
        return self._plan_for(slots, sampled, num_behind, batch.slots, decoded)

    def _plan_for(
        self,
        slots: np.ndarray,
        sampled: np.ndarray,
        num_behind: np.ndarray,
        ran: np.ndarray,
        only_decoded: bool,
    ) -> StepPlan:
        """Plan a step; see ``RunningRequests`` and ``StepClock.plan``."""
        requests = RunningRequests(
            len(ran),
            slots.tolist(),
            sampled.tolist(),
            self.slots.max_drafts(slots).tolist(),
            num_behind.tolist(),
        )
        return self.clock.plan(requests, ran, only_decoded)

    def _draw(
        self,
        plan: StepPlan,
        batch: EmittedBatch,
        reqs: np.ndarray,
        rows: Tensor | slice | None,
        accepted: np.ndarray,
        unseen_part: Draft | None,
    ) -> Proposal | None:
        """Let sources read what they draft from, and draw.

        Args:
            plan: of the next step.
            batch: after the last one.
            reqs: int64 [n], requests that may draft.
            rows: query rows of the committed tokens.
            accepted: int64 [num_reqs], drafts of each tree.
            unseen_part: see ``draft``.

        """
        may_draft = np.isin(batch.slots[reqs], plan.slots)
        may_draft &= self._has_room(batch, plan.tree)[reqs]
        hidden: Tensor | None = None
        if plan.tree is not None and self.committed_reader.reads_roots:
            hidden = last_hidden(batch, self.root_rows, self.trees, self.scored)
        end = StepEnd(batch, self.step, accepted, hidden)
        candidates = self.drafter.look_up(plan, end, reqs[may_draft])
        if unseen_part is not None:
            # all of the batch, whose tokens were read
            drawn = candidates.reqs, True, 0, unseen_part
            return self.drafter.draw(plan, end, candidates, *drawn)
        models_draft = self.drafter.models_draft(candidates)
        drafting = self.committed_reader.read(
            batch,
            rows,
            reqs,
            may_draft,
            accepted[reqs],
            self.method.max_trees,
            models_draft,
            plan.max_caught_up,
        )
        if models_draft and not len(drafting) and candidates.found is not None:
            # While all of them catch up the index drafts alone.
            drafting, models_draft = candidates.reqs, False
        num_caught_up = self.committed_reader.num_caught_up
        return self.drafter.draw(
            plan, end, candidates, drafting, models_draft, num_caught_up
        )

    def _has_room(self, batch: EmittedBatch, index: int | None) -> np.ndarray:
        """Which requests have a root, and room for a tree below it, bool [num_reqs]."""
        if index is None:
            return np.zeros(batch.num_reqs, dtype=bool)
        depth = self.method.proposers[index].sizes.max_depth
        return batch.emitted & (batch.end + depth + 1 < self.limits.max_model_len)
