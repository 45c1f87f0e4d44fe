"""From vLLM's V1 runner to the decoder's views."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from vllm_treespec.batch.forbidden import Forbidden
from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.batch.views import (
    BlockTables,
    EmittedBatch,
    GroupBlocks,
    HiddenStates,
    PagedBatch,
    SamplingView,
    ScheduledBatch,
    TargetInputs,
    scheduler_room,
)
from vllm_treespec.host_copies import on_device
from vllm_treespec.sampling.penalties import PenaltyView
from vllm_treespec.sampling.texts import TextView

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_treespec.engine.v1.vllm_types import InputBatch, V1Runner


def may_draft_trees(
    params: SamplingParams,
    grammar_after_reasoning: bool = False,
    processed_logprobs: bool = False,
) -> bool:
    """Whether a request drafts trees; otherwise it decodes plainly.

    vLLM computes most masks for the last token only; a tree needs them for every node.
    Some are computed for every node: a grammar's by our scheduler, penalties and what
    is forbidden by the decoder. vLLM lifts ``min_tokens`` where a grammar allows
    nothing but the end; that is not done here.

    Args:
        params: of the request.
        grammar_after_reasoning: whether a grammar begins at the end of some reasoning
            only, which vLLM looks for along one path.
        processed_logprobs: whether logprobs are those that tokens are drawn from, which
            vLLM's sampler knows for one token a request.

    """
    return not (
        params.min_p
        or params.logit_bias
        or params.logprob_token_ids
        or (params.min_tokens and params.structured_outputs)
        or params.thinking_token_budget is not None
        or (grammar_after_reasoning and params.structured_outputs)
        or (processed_logprobs and params.logprobs is not None)
    )


def forbidden_of(
    params: SamplingParams, vocab_size: int, device: torch.device
) -> Forbidden | None:
    """What a request must not emit; None: it may emit everything."""
    stops = sorted(params.all_stop_token_ids) if params.min_tokens else []
    if not (stops or params.bad_words or params.allowed_token_ids):
        return None
    not_allowed = None
    if params.allowed_token_ids:
        not_allowed = torch.ones(vocab_size, dtype=torch.bool)
        not_allowed[params.allowed_token_ids] = False
        not_allowed = on_device(not_allowed, device)
    return Forbidden(
        not_allowed,
        bad_words=params.bad_words_token_ids or (),
        stop_tokens=stops,
        min_tokens=params.min_tokens,
    )


def scheduled_batch(
    runner: V1Runner,
    slots: RequestSlots,
    scheduler_output: SchedulerOutput,
    num_scheduled: np.ndarray,
) -> ScheduledBatch:
    """What the scheduler sends in this step, in the order of the batch.

    ``num_scheduled`` int32 [num_reqs] is in that order too.
    """
    batch = runner.input_batch
    req_ids = batch.req_ids
    drafts = scheduler_output.scheduled_spec_decode_tokens
    by_request: list[Sequence[int]] = [drafts.get(req_id, ()) for req_id in req_ids]
    num_drafts = np.fromiter(map(len, by_request), np.int64, len(req_ids))
    num_computed = batch.num_computed_tokens_cpu[: len(req_ids)].astype(np.int64)
    num_scheduled = num_scheduled.astype(np.int64)
    in_turn = map(batch.req_id_to_index.get, scheduler_output.num_scheduled_tokens)
    order = np.fromiter(in_turn, np.int64, len(req_ids))
    room = np.empty_like(num_computed)
    room[order] = scheduler_room(
        num_scheduled[order],
        num_computed[order],
        token_budget(runner, scheduler_output),
        runner.max_model_len,
    )
    return ScheduledBatch(
        slots=slots.lookup(req_ids),
        num_computed=num_computed,
        num_scheduled=num_scheduled,
        num_drafts=num_drafts,
        draft_token_ids=np.fromiter(chain.from_iterable(by_request), np.int64),
        room=room,
        num_rows=1 + num_drafts,
    )


def token_budget(runner: V1Runner, scheduler_output: SchedulerOutput) -> int | None:
    """Tokens that a step could have; None where a worker cannot tell.

    Under priorities the scheduler may preempt requests that it has scheduled in the
    same step. Until then their tokens, of which it tells nothing, were not to be had.
    """
    config = runner.scheduler_config
    if config.policy == "priority" and scheduler_output.preempted_req_ids:
        return None
    return min(
        config.max_num_scheduled_tokens or runner.max_num_tokens, runner.max_num_tokens
    )


def target_inputs(
    runner: V1Runner, logits_indices: Tensor, group_order: Sequence[int]
) -> TargetInputs:
    """The input buffers of this step; KV cache groups in the order of these numbers."""
    num_reqs = runner.input_batch.num_reqs
    num_tokens = int(runner.query_start_loc.np[num_reqs])
    tables = [runner.input_batch.block_table[number] for number in group_order]
    positions: tuple[Tensor, ...] = (runner.positions,)
    if runner.uses_mrope:
        positions += (runner.mrope_positions.gpu,)
    return TargetInputs(
        input_ids=runner.input_ids.gpu,
        positions=positions,
        logits_indices=logits_indices,
        batch=PagedBatch(
            query_start_loc=runner.query_start_loc.gpu[: num_reqs + 1],
            context_lens=runner.num_computed_tokens[:num_reqs],
            groups=tuple(
                GroupBlocks(
                    block_table=table.get_device_tensor(num_reqs),
                    slot_mapping=table.slot_mapping.gpu[:num_tokens],
                )
                for table in tables
            ),
        ),
    )


def sampling_view(batch: InputBatch) -> SamplingView:
    """Sampling parameters of the requests; the batch's metadata are up to date."""
    metadata = batch.sampling_metadata
    texts = TextView(
        batch.token_ids_cpu, batch.num_prompt_tokens, batch.num_tokens_no_spec
    )
    penalties = None
    if not metadata.no_penalties:
        penalties = PenaltyView(
            repetition=batch.repetition_penalties_cpu,
            frequency=batch.frequency_penalties_cpu,
            presence=batch.presence_penalties_cpu,
            texts=texts,
        )
    return SamplingView(
        host_temperature=batch.temperature_cpu,
        temperature=metadata.temperature,
        top_k=metadata.top_k,
        top_p=metadata.top_p,
        texts=texts,
        penalties=penalties,
    )


def emitted_batch(
    runner: V1Runner,
    scheduled: ScheduledBatch,
    sampled_token_ids: Sequence[Sequence[int]],
    hidden: HiddenStates,
    group: int,
) -> EmittedBatch:
    """The requests after this step.

    Args:
        runner: after its bookkeeping.
        scheduled: what was scheduled.
        sampled_token_ids: new tokens of every request.
        hidden: of the step.
        group: number of the KV cache group of draft sources.

    """
    batch = runner.input_batch
    num_reqs = batch.num_reqs
    table = batch.block_table[group]
    return EmittedBatch(
        slots=scheduled.slots,
        num_computed=scheduled.num_computed,
        num_scheduled=scheduled.num_scheduled,
        num_emitted=np.fromiter(map(len, sampled_token_ids), np.int64, num_reqs),
        num_tokens=batch.num_tokens_no_spec[:num_reqs].astype(np.int64),
        token_ids=batch.token_ids_cpu,
        sampling=sampling_view(batch),
        blocks=BlockTables(
            host_table=table.block_table.np[:num_reqs],
            device_table=table.get_device_tensor(num_reqs),
            num_blocks=table.num_blocks_per_row[:num_reqs],
        ),
        hidden=hidden,
    )
