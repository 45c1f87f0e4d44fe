"""The end of a step: what draft models read, and the next draft trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.core.stats import StepStats
from vllm_treespec.core.uniforms import DRAFTING, UniformSource
from vllm_treespec.engine.draft_model import CommittedTokens
from vllm_treespec.engine.reading import ReadingPlan, ReadMarks
from vllm_treespec.engine.scheduler import TreeDraftTokenIds
from vllm_treespec.engine.tree_step import TreeStep, last_rows
from vllm_treespec.engine.v1.drafter import Proposal, TreeDrafter
from vllm_treespec.engine.v1.requests import drafts_tree, sampling_tensors
from vllm_treespec.proposers import ProposerInputs

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True)
class WrittenTokens:
    """How far the target has computed each request of the batch."""

    # int64 [num_reqs]: all tokens before it; a sampled request's root lies there
    end: np.ndarray
    # bool [num_reqs]: got new tokens in this step
    sampled: np.ndarray


class DraftingMixin:
    """The part of our runner that draws trees; ``TreeRunnerMixin`` sets it up."""

    drafter: TreeDrafter
    marks: ReadMarks
    proposal: Proposal | None
    stats: StepStats
    tree_step: TreeStep | None
    uniforms: UniformSource

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        *_: Any,
    ) -> list[list[int]]:
        """Draw the next tree of every request that may have one."""
        runner: Any = self
        batch = runner.input_batch
        schedule = self.drafter.schedule
        with self.stats.stage("draft"):
            self._observe(sampled_token_ids)
            scheduled = schedule.choose(batch.num_reqs)
            self.stats.mode(
                "plain" if scheduled is None else schedule.trees[scheduled].name
            )
            self.proposal = None
            drafts: list[list[int]] = [[] for _ in range(batch.num_reqs)]
            written = self._written_tokens(sampled_token_ids)
            if scheduled is None:
                return drafts
            drafting = self._drafting(written, scheduled)
            if not drafting:
                return drafts
            hidden = None
            if self.drafter.head is not None:
                reqs = torch.tensor(drafting, device=runner.device)
                rows = last_rows(self.tree_step, spec_decode_metadata, reqs)
                hidden = sample_hidden_states[rows]
            self.proposal = self.drafter.propose(
                scheduled,
                [batch.req_ids[r] for r in drafting],
                self._proposer_inputs(scheduled, drafting, written.end[drafting]),
                hidden,
            )
            for r, row in zip(drafting, self.proposal.drafts, strict=True):
                drafts[r] = row
            return drafts

    def _observe(self, sampled_token_ids: list[list[int]]) -> None:
        """Note how many drafts of each tree of this step were accepted."""
        step = self.tree_step
        if step is None:
            return
        num_accepted = [len(sampled_token_ids[r]) - 1 for r in step.host_reqs]
        self.drafter.schedule.observe(step.scheduled, num_accepted)
        self.stats.observe(step.host_num_nodes.tolist(), num_accepted)

    def take_draft_token_ids(self) -> Any:
        """Hand the drafts to the scheduler, with their trees and what was counted."""
        drafts = super().take_draft_token_ids()  # type: ignore[misc]
        if drafts is None:
            return None
        return TreeDraftTokenIds(
            drafts.req_ids,
            drafts.draft_token_ids,
            self.proposal.parents() if self.proposal is not None else {},
            self.stats.hand_over(),
        )

    def _proposer_inputs(
        self,
        scheduled: int,
        reqs: list[int],
        roots: np.ndarray,
    ) -> ProposerInputs:
        """What the proposer may draw from, for the drafting requests."""
        runner: Any = self
        batch, proposer = runner.input_batch, self.drafter.proposers[scheduled]
        inputs = ProposerInputs(
            root_token_ids=torch.from_numpy(batch.token_ids_cpu[reqs, roots])
            .long()
            .to(runner.device),
            sampling=sampling_tensors(
                batch, np.array(reqs), torch.tensor(reqs, device=runner.device)
            ),
            uniforms=self._uniforms(
                reqs, roots.tolist(), proposer.sizes.num_uniforms, DRAFTING
            ),
            draft_models=self.drafter.draft_models,
        )
        if not proposer.needs_token_ids:
            return inputs
        longest = int(roots.max()) + 1
        return replace(
            inputs,
            token_ids=torch.from_numpy(batch.token_ids_cpu[reqs, :longest]).long(),
            num_tokens=torch.from_numpy(roots + 1),
            req_ids=[batch.req_ids[r] for r in reqs],
        )

    def _written_tokens(self, sampled_token_ids: list[list[int]]) -> WrittenTokens:
        """Note what the target computed in this step, which nobody has read yet."""
        runner: Any = self
        batch = runner.input_batch
        num_reqs = batch.num_reqs
        first = batch.num_computed_tokens_cpu[:num_reqs].astype(np.int64)
        chunk_end = first + runner.num_scheduled_tokens.np[:num_reqs]
        root = batch.num_tokens_no_spec[:num_reqs].astype(np.int64) - 1
        sampled = np.fromiter((len(s) > 0 for s in sampled_token_ids), bool, num_reqs)
        end = np.where(sampled, root, chunk_end)
        if self.drafter.draft_models:
            self.marks.written(batch.block_table[0].block_table.np, first, end)
        return WrittenTokens(end, sampled)

    def _drafting(self, written: WrittenTokens, scheduled: int) -> list[int]:
        """Batch indices of the requests that draft; their draft models have read."""
        drafter = self.drafter
        if not drafter.draft_models:
            reqs, may_draft = self._tree_requests(written, scheduled)
            return [r for r in reqs if may_draft[r]][: drafter.config.max_trees]
        committed = self._committed_tokens(written, scheduled)
        if len(committed.reqs):
            drafter.read(committed)
        return committed.reqs[committed.drafting].tolist()

    def _tree_requests(
        self, written: WrittenTokens, scheduled: int
    ) -> tuple[list[int], np.ndarray]:
        """Requests that draft trees, and whether a request may do so in this step.

        Returns:
            batch indices, and bool [num_reqs].

        """
        runner: Any = self
        reasons = self.drafter.reasons
        reqs = [
            r
            for r, req_id in enumerate(runner.input_batch.req_ids)
            if drafts_tree(runner.requests[req_id].sampling_params, reasons)
        ]
        depth = self.drafter.proposers[scheduled].sizes.max_depth
        fits = written.end + depth + 1 < runner.max_model_len
        return reqs, written.sampled & fits

    def _committed_tokens(
        self, written: WrittenTokens, scheduled: int
    ) -> CommittedTokens:
        """What the draft models have to read, and which requests draft."""
        runner: Any = self
        batch = runner.input_batch
        table = batch.block_table[0]
        blocks = table.block_table.np
        plan = ReadingPlan(
            self.marks, runner.max_num_tokens, self.drafter.config.max_trees
        )
        tree_reqs, may_draft = self._tree_requests(written, scheduled)
        for r in tree_reqs:
            plan.add(r, blocks[r], int(written.end[r]), bool(may_draft[r]))
        reqs = np.array(plan.reqs, dtype=np.int64)
        plan.mark(blocks[reqs])
        return CommittedTokens(
            token_ids=batch.token_ids_cpu,
            reqs=reqs,
            first=np.array(plan.first, dtype=np.int64),
            end=np.array(plan.end, dtype=np.int64),
            drafting=np.array(plan.drafting, dtype=np.int64),
            block_table=table.get_device_tensor(batch.num_reqs)[reqs],
            num_blocks=table.num_blocks_per_row[reqs],
        )

    def _uniforms(
        self, reqs: list[int], positions: list[int], count: int, purpose: int
    ) -> Tensor:
        """Uniform numbers for some requests of the batch, on the device."""
        runner: Any = self
        ids = runner.input_batch.req_ids
        seeds = [runner.requests[ids[r]].sampling_params.seed for r in reqs]
        drawn = self.uniforms.draw(seeds, positions, count, purpose)
        return drawn.to(runner.device)
