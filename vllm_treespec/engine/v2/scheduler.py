"""vLLM's asynchronous scheduler with draft trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput

from vllm_treespec.batch.stats import StepCounts
from vllm_treespec.batch.unseen import UnseenTrees
from vllm_treespec.config.request_options import request_options
from vllm_treespec.engine.scheduler import (
    TreeDraftTokenIds,
    TreeSchedulerMixin,
    fill_tree_masks,
)
from vllm_treespec.engine.v2.tiers import enough, fitting, tiers

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    from vllm_treespec.step.decoder import TreeDecoder


@dataclass
class TreeCounts:
    """What a worker says of the trees of a step, beside its output."""

    # request id -> draft tokens of its tree
    num_drafts: dict[str, int]
    # what was counted since the last step
    counts: StepCounts


class UnseenCounts(TreeCounts):
    """The same of trees that the host sees when the step is over, not before."""

    def __init__(
        self, rows: Mapping[str, int], trees: UnseenTrees, counts: StepCounts
    ) -> None:
        """Take which tree each request has, and what was counted."""
        self.rows = rows
        self.trees = trees
        self.counts = counts

    @cached_property
    def num_drafts(self) -> dict[str, int]:  # type: ignore[override]
        """Request id -> draft tokens of its tree, if it has any."""
        found = self.trees.seen.num_drafts.tolist()
        return {name: found[row] for name, row in self.rows.items() if found[row]}

    def __reduce__(self) -> tuple[type[TreeCounts], tuple[dict[str, int], StepCounts]]:
        """It is sent when the step is over."""
        return TreeCounts, (self.num_drafts, self.counts)


def tree_counts(decoder: TreeDecoder, drafts: Mapping[str, list[int]]) -> TreeCounts:
    """What a worker says of the trees of the running step.

    Args:
        decoder: with these trees.
        drafts: of them, by request.

    """
    counts, proposal = decoder.stats.hand_over(), decoder.proposal
    if not isinstance(proposal, UnseenTrees):
        return TreeCounts(
            {name: len(tokens) for name, tokens in drafts.items()}, counts
        )
    rows: dict[str, int] = {}
    if decoder.trees is not None:
        names = map(decoder.slots.name, decoder.trees.slots.tolist())
        rows = dict(zip(names, decoder.trees.proposal_rows.tolist(), strict=True))
    return UnseenCounts(rows, proposal, counts)


class TreeAsyncScheduler(TreeSchedulerMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler, which reserves placeholders for trees.

    How large a tree is, is known to the worker alone, when the step begins. A request
    that drafts nothing gets no placeholders. Many requests get fewer, so that half of a
    step's tokens are left to prompts.
    """

    def __init__(self, *args: object, **options: object) -> None:
        """Make the stock scheduler."""
        super().__init__(*args, **options)
        # of structured outputs: request id -> drafts and their parents
        self._trees: dict[str, tuple[list[int], list[int]]] = {}
        self._num_drafts: dict[str, int] = {}
        self.tiers = tiers(1 + self.num_spec_tokens)
        # request id -> rows of a step that hold any tree it may have
        self._rows: dict[str, int] = {}

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Reserve placeholders for the trees of the next step."""
        scheduler_output.num_spec_tokens_to_schedule = self.num_spec_tokens
        super()._update_after_schedule(scheduler_output)
        for req_id in scheduler_output.finished_req_ids:
            self._rows.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            largest = 1 + max_drafts(self.requests[new.req_id])
            rows = enough(min(largest, self.tiers[-1]), self.tiers)
            self._rows[new.req_id] = rows
        tokens = self.scheduler_config.max_num_batched_tokens
        room = fitting(1 + tokens // 2 // max(1, len(self.running)), self.tiers)
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[req_id]
            rows = min(room, self._rows[req_id])
            # the stock scheduler's list is shared by all requests
            request.spec_token_ids = request.spec_token_ids[: rows - 1]

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step, and what its worker counted."""
        trees: TreeCounts | None = vars(model_runner_output).get("trees")
        self._num_drafts = {} if trees is None else trees.num_drafts
        if trees is not None:
            self.take_counts(trees.counts)
            self.leave_out_ended(trees.num_drafts, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count a request's drafts, and no placeholders."""
        num_drafts = self._num_drafts.get(request_id, 0)
        if not num_drafts:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_drafts, num_accepted_tokens, None, request_id
        )

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Take in the trees of structured outputs; they stay whole."""
        assert isinstance(draft_token_ids, TreeDraftTokenIds)
        reserved = scheduler_output.scheduled_spec_decode_tokens
        self._trees = {
            req_id: (drafts, draft_token_ids.parents[req_id])
            for req_id, drafts in zip(
                draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
            )
            if reserved.get(req_id)
            and req_id in self.requests
            and self.requests[req_id].use_structured_output
        }
        scheduler_output.num_invalid_spec_tokens = {}

    def get_grammar_bitmask(
        self, scheduler_output: SchedulerOutput
    ) -> GrammarOutput | None:
        """Masks of all structured outputs of the step, a row for every node."""
        trees, self._trees = self._trees, {}
        stock = super().get_grammar_bitmask(scheduler_output)
        if stock is None or not trees:
            return stock
        acceptable = list(stock.num_acceptable_drafts)
        stride = 1 + self.num_spec_tokens
        for place, req_id in enumerate(stock.structured_output_request_ids):
            if req_id in trees:
                drafts, parents = trees[req_id]
                first = place * stride
                rows = stock.grammar_bitmask[first : first + 1 + len(drafts)]
                request = self.requests[req_id].structured_output_request
                masks = torch.from_numpy(rows)
                fill_tree_masks(request.grammar, masks, drafts, parents)
                acceptable[place] = len(drafts)
        return GrammarOutput(
            stock.structured_output_request_ids, stock.grammar_bitmask, acceptable
        )


def max_drafts(request: Request) -> int:
    """Draft tokens that a tree of a request may have."""
    params = request.sampling_params
    return 0 if params is None else request_options(params.extra_args).limit
