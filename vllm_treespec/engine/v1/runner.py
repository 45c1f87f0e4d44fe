"""The V1 model runner with draft trees: it asks the decoder, and translates."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessors

from vllm_treespec.batch.views import HiddenStates
from vllm_treespec.config.request_options import request_options
from vllm_treespec.engine.drafter import engine_limits
from vllm_treespec.engine.kv_cache import with_fork_blocks
from vllm_treespec.engine.request_check import drafters_can_read
from vllm_treespec.engine.scheduler import TreeDraftTokenIds
from vllm_treespec.engine.v1.custom_processors import (
    custom_processors,
    may_change,
)
from vllm_treespec.engine.v1.sampler_output import (
    has_processed_logprobs,
    sampler_output,
)
from vllm_treespec.engine.v1.views import (
    emitted_batch,
    forbidden_of,
    may_draft_trees,
    sampling_view,
    scheduled_batch,
    target_inputs,
)
from vllm_treespec.layouts.base import LayoutLimits, TreeLayout
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.step.decoder import TreeDecoder

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import DraftTokenIds, SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from vllm_treespec.batch.matching import Proposal
    from vllm_treespec.engine.draft_model import PagedDraftModel
    from vllm_treespec.engine.v1.vllm_types import V1Runner
else:
    V1Runner = object


class TreeRunnerMixin(V1Runner):
    """Overrides the steps of vLLM's V1 runner in which a tree is not a chain.

    What they do is decided by ``TreeDecoder``; a device's runner says which layout and
    which draft models it has. Everything else is stock.
    """

    decoder: TreeDecoder
    # vLLM's numbers of the KV cache groups in our order: that of draft sources first
    group_order: list[int]
    draft_model_class: type[PagedDraftModel]
    # whether rules run in their batched form, where the host never waits
    batched_rules: bool

    @abstractmethod
    def make_layout(self, limits: LayoutLimits) -> TreeLayout:
        """Make this device's layout of trees."""

    @abstractmethod
    def connect_attention(self, kv_caches: dict[str, Tensor]) -> None:
        """Let attention layers and metadata builders see the layout's trees."""

    def init_trees(self) -> None:
        """Set up our state; called once, when the stock runner is made."""
        limits = engine_limits(self)
        self.decoder = self.drafter.make_decoder(
            self.make_layout, self.draft_model_class, self.batched_rules, limits
        )
        self._aux_layers = self.drafter.aux_layers
        self.use_aux_hidden_state_outputs = bool(self._aux_layers)
        self._forward_start = 0.0
        # what the next trees begin with; None: they are drawn, or not drawn at all
        self._step_end: tuple[list[list[int]], HiddenStates] | None = None
        self._add_custom_processors()

    def _add_custom_processors(self) -> None:
        """Let custom logits processors see the batch; their requests have no trees."""
        self.custom_processors = custom_processors(self.vllm_config, self.device)
        batch = self.input_batch
        batch.logitsprocs = LogitsProcessors(
            [*batch.logitsprocs.all, *self.custom_processors]
        )
        batch.logitsprocs_need_output_token_ids |= bool(self.custom_processors)

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        """Before which layers vLLM hands out hidden states."""
        return self._aux_layers or None

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        **options: object,
    ) -> dict[str, Tensor]:
        """Allocate the KV cache with fork blocks behind the scheduler's blocks."""
        groups = kv_cache_config.kv_cache_groups
        kv_caches = super().initialize_kv_cache_tensors(
            with_fork_blocks(kv_cache_config, self.drafter.num_fork_blocks(groups)),
            kernel_block_sizes,
            **options,
        )
        (kernel_block_size, *_) = kernel_block_sizes
        num_tokens = kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size
        size = num_tokens // kernel_block_size, kernel_block_size
        self.group_order = self.drafter.bind(groups, kv_caches, size, self.attn_groups)
        self.connect_attention(kv_caches)
        return kv_caches

    def wait_for_device(self) -> None:
        """Wait until the device is done."""
        self._sync_device()

    def group_tables(self, number: int) -> tuple[Tensor, Tensor]:
        """Block table and slot mapping of a KV cache group, for the largest batch."""
        table = self.input_batch.block_table[number]
        return table.get_device_tensor(self.max_num_reqs), table.slot_mapping.gpu

    def profile_run(self, *args: object, **options: object) -> None:
        """Run all models and heads once before the KV cache is made."""
        super().profile_run(*args, **options)
        for source in self.drafter.paged:
            source.warm_up()

    def _update_states(self, scheduler_output: SchedulerOutput) -> object:
        """Add new requests, release finished ones, discard trees of preempted ones."""
        decoder = self.decoder
        # The next turn of a session is scheduled as a new request: it is one here, too.
        ended = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        ended |= scheduler_output.finished_req_ids
        decoder.finish_requests(decoder.slots.release(ended))
        updated = super()._update_states(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            params = self.requests[new.req_id].sampling_params
            limit = request_options(params.extra_args).limit
            supported = self._is_supported(new.req_id)
            forbidden = forbidden_of(
                params, self.model_config.get_vocab_size(), self.device
            )
            decoder.slots.add(new.req_id, supported, params.seed, limit, forbidden)
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        decoder.discard_trees(decoder.slots.lookup(sorted(resumed)))
        return updated

    def _is_supported(self, req_id: str) -> bool:
        """Whether trees can follow the parameters of a new request in the batch."""
        request = self.requests[req_id]
        row = self.input_batch.req_id_to_index[req_id]
        return (
            drafters_can_read(request, self.model_config.get_vocab_size())
            and not may_change(self.custom_processors, row)
            and may_draft_trees(
                request.sampling_params,
                self.drafter.grammar_after_reasoning,
                has_processed_logprobs(self.sampler),
            )
        )

    def _input_fits_in_drafter(self, common_attn_metadata: object | None) -> bool:
        """Whether to call the drafter: it checks the length of each request itself."""
        return common_attn_metadata is not None

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> tuple[Tensor, SpecDecodeMetadata | None, int]:
        """Prepare the stock inputs, then lay out the trees."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        logits_indices, _, _ = prepared
        slots = self.decoder.slots
        self.decoder.begin_step(
            scheduled_batch(self, slots, scheduler_output, num_scheduled_tokens),
            partial(target_inputs, self, logits_indices, self.group_order),
        )
        self._forward_start = time.perf_counter()
        return prepared

    def _sample(
        self, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        """Score the trees, and draw for requests without one."""
        decoder, sampling = self.decoder, sampling_view(self.input_batch)
        if logits is None:
            return super()._sample(logits, spec_decode_metadata)
        forward_seconds = time.perf_counter() - self._forward_start
        decoder.stats.add_seconds("forward", forward_seconds)
        with decoder.stats.stage("score"):
            if sampling.likeliest_only and not len(decoder.batch.draft_token_ids):
                return super()._sample(logits, None)
            scored = decoder.score(logits, sampling)
            return sampler_output(
                self.sampler,
                self.input_batch.sampling_metadata,
                logits,
                decoder.root_rows,
                decoder.trees,
                scored,
                decoder.draw_plainly(logits, sampling),
            )

    def _update_states_after_model_execute(
        self, output_token_ids: Tensor, scheduler_output: SchedulerOutput
    ) -> None:
        """Commit: bring the accepted paths' KV into the requests' own slots."""
        super()._update_states_after_model_execute(output_token_ids, scheduler_output)
        self.decoder.commit()

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: list[list[int]],
        sampling_metadata: SamplingMetadata,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: Sequence[Tensor] | None,
        *_: object,
    ) -> list[list[int]]:
        """Note what the next trees begin with; they are drawn when they are taken."""
        self._step_end = None
        if not self.decoder.rests(map(len, sampled_token_ids)):
            layers = zip(self._aux_layers, aux_hidden_states or (), strict=True)
            hidden = HiddenStates(
                sampled=sample_hidden_states,
                by_layer={FINAL_LAYER: hidden_states, **dict(layers)},
            )
            # The scheduler cuts its own lists where a request ends.
            self._step_end = [[*tokens] for tokens in sampled_token_ids], hidden
        return [[] for _ in sampled_token_ids]

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Draw the next trees, and hand them to the scheduler with what was counted.

        The engine has sent out the step's tokens by now, so that they need not wait.
        """
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        parents: dict[str, list[int]] = {}
        if self._step_end is not None:
            proposal = self._propose(*self._step_end)
            if proposal is not None:
                for req, row in zip(proposal.reqs, proposal.drafts(), strict=True):
                    drafts.draft_token_ids[req] = row
                names = [self.decoder.slots.name(slot) for slot in proposal.slots]
                parents = dict(zip(names, proposal.draft_parents(), strict=True))
        counts = self.decoder.stats.hand_over()
        return TreeDraftTokenIds(
            drafts.req_ids, drafts.draft_token_ids, parents, counts
        )

    @torch.inference_mode()
    def _propose(
        self, sampled_token_ids: list[list[int]], hidden: HiddenStates
    ) -> Proposal | None:
        """Draw the next tree of every request that may have one."""
        self._step_end = None
        batch = emitted_batch(
            self, self.decoder.batch, sampled_token_ids, hidden, self.group_order[0]
        )
        return self.drafter.propose(batch)
