"""From vLLM's V2 runner to the decoder's views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.batch.views import (
    GREEDY_BELOW,
    BlockTables,
    EmittedBatch,
    GroupBlocks,
    HiddenStates,
    PagedBatch,
    SamplingView,
    ScheduledBatch,
    TargetInputs,
)
from vllm_treespec.engine.v2.axes import InputsWithAxes
from vllm_treespec.sampling.texts import NO_TEXTS, TextView
from vllm_treespec.sources.base import FINAL_LAYER

if TYPE_CHECKING:
    from vllm_treespec.engine.v2.late import StepInFlight
    from vllm_treespec.engine.v2.runner import TreeRunnerMixin
    from vllm_treespec.engine.v2.vllm_types import InputBatch

# in the place of a tensor that nobody reads
NOTHING = torch.empty(0)


def scheduled_batch(
    batch: InputBatch,
    slots: RequestSlots,
    num_computed: np.ndarray,
    drafts: Mapping[str, Sequence[int]],
    reserved: Mapping[str, Sequence[int]],
) -> ScheduledBatch:
    """The requests of a step, in the order of the runner's batch.

    Args:
        batch: of the step.
        slots: of the requests.
        num_computed: int64 [num_reqs], tokens whose KV is in the cache.
        drafts: of the requests that bring a tree.
        reserved: the scheduler's placeholders.

    """
    by_request = [drafts.get(req_id, ()) for req_id in batch.req_ids]
    num_reqs = len(by_request)
    room = (1 + len(reserved.get(req_id, ())) for req_id in batch.req_ids)
    return ScheduledBatch(
        slots=slots.lookup(batch.req_ids),
        num_computed=num_computed,
        num_scheduled=batch.num_scheduled_tokens.astype(np.int64),
        num_drafts=np.fromiter(map(len, by_request), np.int64, num_reqs),
        draft_token_ids=np.fromiter(chain.from_iterable(by_request), np.int64),
        room=np.fromiter(room, np.int64, num_reqs),
        num_rows=np.diff(batch.cu_num_logits_np).astype(np.int64),
    )


def target_inputs(
    runner: TreeRunnerMixin,
    batch: InputBatch,
    block_tables: Sequence[Tensor],
    slot_mappings: Tensor,
) -> TargetInputs:
    """The input buffers of this step; KV cache groups in the decoder's order."""
    inputs = TargetInputs(
        input_ids=batch.input_ids,
        positions=(batch.positions,),
        logits_indices=batch.logits_indices,
        batch=PagedBatch(
            query_start_loc=batch.query_start_loc[: batch.num_reqs + 1],
            context_lens=runner.req_states.num_computed_tokens.gpu[batch.idx_mapping],
            groups=tuple(
                GroupBlocks(block_tables[number], slot_mappings[number])
                for number in runner.group_order
            ),
        ),
    )
    if not runner.model_config.uses_mrope:
        return inputs
    return InputsWithAxes(**vars(inputs), rope_state=runner.model_state.rope_state)


def sampling_view(
    runner: TreeRunnerMixin, rows: np.ndarray, index: Tensor, texts: TextView
) -> SamplingView:
    """Sampling parameters as requests gave them, by the runner's rows.

    Args:
        runner: knows them.
        rows: int [num_reqs].
        index: the same on the device.
        texts: of the requests.

    """
    states = runner.sampler.sampling_states
    temperature = states.temperature.np[rows]
    greedy = bool((temperature < GREEDY_BELOW).all())
    top_k, top_p, _ = states.get_top_k_top_p(index, rows, runner.vocab_size)
    return SamplingView(
        host_temperature=temperature,
        temperature=None if greedy else states.temperature.gpu[index],
        top_k=top_k,
        top_p=top_p,
        texts=texts,
    )


def final_sampling(runner: TreeRunnerMixin, batch: InputBatch) -> SamplingView:
    """Sampling parameters where logits are final: greedy, or the logits as they are."""
    view = sampling_view(runner, batch.idx_mapping_np, batch.idx_mapping, NO_TEXTS)
    temperature = view.temperature
    if temperature is not None:
        greedy = temperature < GREEDY_BELOW
        temperature = torch.ones_like(temperature).masked_fill(greedy, 0.0)
    return SamplingView(view.host_temperature, temperature, None, None, NO_TEXTS)


def hidden_states(runner: TreeRunnerMixin, step: StepInFlight) -> HiddenStates:
    """What the target computed in a step; it is overwritten in the next one."""
    return HiddenStates(
        sampled=step.hidden[step.batch.logits_indices],
        by_layer=hidden_by_layer(runner, step),
    )


def hidden_by_layer(runner: TreeRunnerMixin, step: StepInFlight) -> dict[int, Tensor]:
    """The same by layer, each [num_tokens, hidden_size]."""
    layers = zip(runner.aux_layers, step.aux_hidden, strict=True)
    return {FINAL_LAYER: step.hidden, **dict(layers)}


def emitted_batch(
    runner: TreeRunnerMixin, step: StepInFlight, num_emitted: np.ndarray
) -> EmittedBatch:
    """The requests after a step.

    Args:
        runner: has noted the step's tokens.
        step: the last one.
        num_emitted: int64 [num_reqs], tokens that each request emitted in it.

    """
    noted, index = noted_batch(runner, step, num_emitted), step.batch.idx_mapping
    table = runner.block_tables.block_tables[runner.group_order[0]].gpu
    return replace(
        noted,
        sampling=sampling_view(runner, step.rows, index, noted.sampling.texts),
        blocks=replace(noted.blocks, device_table=table[index]),
        hidden=hidden_states(runner, step),
    )


def noted_batch(
    runner: TreeRunnerMixin, step: StepInFlight, num_emitted: np.ndarray
) -> EmittedBatch:
    """The same as far as it is on the host; its tensors are empty."""
    rows = step.rows
    texts = runner.texts.view(rows)
    temperature = runner.sampler.sampling_states.temperature.np[rows]
    return EmittedBatch(
        slots=step.scheduled.slots,
        num_computed=step.scheduled.num_computed,
        num_scheduled=step.scheduled.num_scheduled,
        num_emitted=num_emitted,
        num_tokens=texts.num_tokens,
        token_ids=texts.token_ids,
        sampling=SamplingView(temperature, None, None, None, texts),
        blocks=BlockTables(
            host_table=runner.host_blocks.table[rows],
            device_table=NOTHING,
            num_blocks=runner.host_blocks.num_blocks[rows],
        ),
        hidden=HiddenStates(NOTHING, {}),
    )
