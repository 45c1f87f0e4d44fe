"""What our adapter uses of vLLM's V1 runner, with types; seen by type checkers only.

The seam table lists the same names for the running vLLM: a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.config import (
    CompilationConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
)
from vllm.config.scheduler import SchedulerConfig
from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_treespec.engine.drafter import TreeDrafter


class Buffer:
    """One array on the host and on the device."""

    np: np.ndarray
    gpu: Tensor


class BlockTable:
    """The blocks of the requests of the batch."""

    block_table: Buffer
    num_blocks_per_row: np.ndarray
    slot_mapping: Buffer

    def get_device_tensor(self, num_reqs: int) -> Tensor:
        """Blocks by request, int32 [num_reqs, max_blocks]."""
        raise NotImplementedError


class InputBatch:
    """The requests of the running step."""

    num_reqs: int
    req_ids: list[str]
    req_id_to_index: dict[str, int]
    num_computed_tokens_cpu: np.ndarray
    num_tokens_no_spec: np.ndarray
    token_ids_cpu: np.ndarray
    temperature_cpu: np.ndarray
    repetition_penalties_cpu: np.ndarray
    frequency_penalties_cpu: np.ndarray
    presence_penalties_cpu: np.ndarray
    num_prompt_tokens: np.ndarray
    sampling_metadata: SamplingMetadata
    block_table: Sequence[BlockTable]
    generators: dict[int, torch.Generator]
    logitsprocs: LogitsProcessors
    logitsprocs_need_output_token_ids: bool


class V1Runner:
    """vLLM's ``GPUModelRunner``, which its CPU runner extends."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    compilation_config: CompilationConfig
    device: torch.device
    model: VllmModelForTextGeneration
    max_model_len: int
    max_num_tokens: int
    max_num_reqs: int
    drafter: TreeDrafter
    sampler: Sampler
    requests: Mapping[str, CachedRequestState]
    input_batch: InputBatch
    input_ids: Buffer
    positions: Tensor
    uses_mrope: bool
    mrope_positions: Buffer
    query_start_loc: Buffer
    num_computed_tokens: Tensor
    attn_groups: Sequence[Sequence[AttentionGroup]]
    cudagraph_dispatcher: CudagraphDispatcher
    discard_request_mask: Buffer
    use_aux_hidden_state_outputs: bool

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Describe the KV cache of every layer."""
        raise NotImplementedError

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        """Before which layers the target hands out hidden states."""

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        **options: object,
    ) -> dict[str, Tensor]:
        """Allocate the KV cache; by name of the layer."""
        raise NotImplementedError

    def profile_run(self, *args: object, **options: object) -> None:
        """Run the models once before the KV cache is made."""

    def _update_states(self, scheduler_output: SchedulerOutput) -> object:
        """Update the requests of the batch."""

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> tuple[Tensor, SpecDecodeMetadata | None, int]:
        """Fill the input buffers of a step."""
        raise NotImplementedError

    def _sample(
        self, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        """Sample from the logits of a step."""
        raise NotImplementedError

    def _update_states_after_model_execute(
        self, output_token_ids: Tensor, scheduler_output: SchedulerOutput
    ) -> None:
        """Update the requests with the emitted tokens, before the bookkeeping."""

    def _bookkeeping_sync(self, *args: object) -> object:
        """Do the bookkeeping of a step."""

    def _dummy_run(
        self, num_tokens: int, *args: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        """Run the target without requests: hidden states, and those of last tokens."""
        raise NotImplementedError

    def _sync_device(self) -> None:
        """Wait until the device is done."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Hand the drafts to the scheduler."""
        raise NotImplementedError
