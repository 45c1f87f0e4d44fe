"""What our adapter uses of vLLM's V2 runner, with types; seen by type checkers only.

The seam table lists the same names for the running vLLM: a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import (
    CompilationConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
)
from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import BatchReqState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup


class AsyncOutput:
    """The tokens of a step, on their way to the host."""

    model_runner_output: ModelRunnerOutput
    copy_event: torch.cuda.Event
    # int [num_reqs, width], and how many each request emitted; after the event
    sampled_token_ids: np.ndarray
    num_sampled_tokens_np: np.ndarray


class InputBatch:
    """The requests of the running step."""

    req_ids: list[str]
    num_reqs: int
    # the runner's rows of the requests, int64 [num_reqs], on device and host
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray
    # of every row of logits: the runner's row of its request, its place in the request
    expanded_idx_mapping: Tensor
    expanded_local_pos: Tensor
    num_scheduled_tokens: np.ndarray
    query_start_loc: Tensor
    seq_lens: Tensor
    seq_lens_cpu_upper_bound: Tensor
    num_computed_tokens_np: np.ndarray
    prefill_len_np: np.ndarray
    is_prefilling_np: np.ndarray
    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    # int32 [num_reqs + 1], first row of each request among the logits
    cu_num_logits: Tensor
    cu_num_logits_np: np.ndarray


class ExecuteModelState:
    """What a step keeps between the target's forward and sampling."""

    input_batch: InputBatch
    hidden_states: Tensor
    aux_hidden_states: Sequence[Tensor] | None


class V2Runner:
    """vLLM's V2 ``GPUModelRunner``."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    parallel_config: ParallelConfig
    compilation_config: CompilationConfig
    kv_cache_config: KVCacheConfig
    device: torch.device
    model: VllmModelForTextGeneration
    vocab_size: int
    max_model_len: int
    max_num_tokens: int
    max_num_reqs: int
    num_speculative_steps: int
    speculator: Any
    lora_state: LoraState
    sampler: Sampler
    rejection_sampler: Any
    model_state: DefaultModelState
    req_states: RequestState
    block_tables: BlockTables
    attn_groups: Sequence[Sequence[AttentionGroup]]
    kernel_block_sizes: Sequence[int]
    execute_model_state: ExecuteModelState | None
    use_aux_hidden_state_outputs: bool
    cudagraph_manager: ModelCudaGraphManager
    lora_config: LoRAConfig | None

    def load_model(self, *args: object, **options: object) -> None:
        """Load the target, and make the samplers."""

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Describe the KV cache of every layer."""
        raise NotImplementedError

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: object, **options: object
    ) -> None:
        """Allocate the KV cache, and make metadata builders."""

    def profile_run(self, *args: object, **options: object) -> None:
        """Run the models once before the KV cache is made."""

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Remove requests that ended or were preempted."""

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Give new and resumed requests rows."""

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Note new blocks of running requests."""

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: BatchReqState,
        graph: BatchExecutionDescriptor,
        *args: object,
    ) -> InputBatch:
        """Bring the step's requests to the device."""
        raise NotImplementedError

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Block tables by group, and slot mappings [num_groups, num_tokens]."""
        raise NotImplementedError

    def prepare_dummy_attn(self, *args: object, **options: object) -> object:
        """Do the same for a run without requests."""
        raise NotImplementedError

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        *args: object,
        dummy_run: bool = False,
        **options: object,
    ) -> object:
        """Run the target."""
        raise NotImplementedError

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncOutput | None:
        """Sample from what the target computed."""
        raise NotImplementedError

    def postprocess_sampled(
        self,
        idx_mapping: Tensor,
        sampled_tokens: Tensor,
        num_sampled: Tensor,
        *args: object,
        **options: object,
    ) -> None:
        """Note on the device what was sampled."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Hand the drafts to the scheduler."""
        raise NotImplementedError

    def _dummy_run(
        self, num_tokens: int, *args: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        """Run the target without requests: hidden states, and those of last tokens."""
        raise NotImplementedError
