"""The V2 model runner with draft trees: it asks the decoder, and translates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.lora_utils import get_num_active_loras_for_dispatch

from vllm_treespec.batch.matching import Proposal
from vllm_treespec.batch.unseen import UnseenTrees
from vllm_treespec.config.request_options import request_options
from vllm_treespec.engine.drafter import TreeDrafter, engine_limits
from vllm_treespec.engine.kv_cache import with_fork_blocks
from vllm_treespec.engine.request_check import drafters_can_read
from vllm_treespec.engine.scheduler import TreeDraftTokenIds
from vllm_treespec.engine.v2.axes import TreeRopeState
from vllm_treespec.engine.v2.blocks import HostBlocks
from vllm_treespec.engine.v2.late import (
    Emitted,
    StepInFlight,
    by_request,
    drafts_of,
    trim,
)
from vllm_treespec.engine.v2.lora import TreeLoraState
from vllm_treespec.engine.v2.noise import SamplerNoise
from vllm_treespec.engine.v2.ranks import RankCheck
from vllm_treespec.engine.v2.scheduler import tree_counts
from vllm_treespec.engine.v2.speculator import LateDrafts
from vllm_treespec.engine.v2.texts import HostTexts
from vllm_treespec.engine.v2.tiers import can_fill, tiers
from vllm_treespec.engine.v2.unseen import UnseenDrafter
from vllm_treespec.engine.v2.verify import TreeSampler
from vllm_treespec.engine.v2.views import (
    emitted_batch,
    noted_batch,
    scheduled_batch,
    target_inputs,
)
from vllm_treespec.host_copies import on_device
from vllm_treespec.layouts.base import LayoutLimits, TreeLayout
from vllm_treespec.step.captured_scores import captured
from vllm_treespec.step.decoder import TreeDecoder

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import DraftTokenIds

    from vllm_treespec.engine.draft_model import PagedDraftModel
    from vllm_treespec.engine.v2.vllm_types import AsyncOutput, InputBatch, V2Runner
    from vllm_treespec.schedule.plan import StepPlan
    from vllm_treespec.trees.draft import Draft
else:
    V2Runner = object


class TreeRunnerMixin(V2Runner):
    """Overrides the steps of vLLM's V2 runner in which a tree is not a chain.

    A step begins by drawing its trees (``bind``): there the tokens of the step before
    are awaited, once. The scheduler has reserved placeholders for the largest trees;
    those that a request does not need are trimmed. Everything else is stock.
    """

    decoder: TreeDecoder
    # vLLM's numbers of the KV cache groups in our order: that of draft sources first
    group_order: list[int]
    draft_model_class: type[PagedDraftModel]
    # of the last step
    emitted: Emitted
    drafter_class = TreeDrafter
    sampler_class = TreeSampler

    @abstractmethod
    def make_layout(self, limits: LayoutLimits) -> TreeLayout:
        """Make this device's layout of trees."""

    @abstractmethod
    def connect_attention(self) -> None:
        """Let metadata builders see the layout's trees."""

    def init_trees(self) -> None:
        """Set up our state; called once, when the stock runner is made."""
        self.drafter = self.drafter_class(self.vllm_config)
        self.decoder = self.drafter.make_decoder(
            self.make_layout, self.draft_model_class, True, engine_limits(self)
        )
        drafter = self.decoder.drafter
        drafter.rank_by(SamplerNoise(self))
        self.aux_layers = self.drafter.aux_layers
        self.speculator = LateDrafts(
            self.vllm_config,
            self.max_num_reqs,
            self.num_speculative_steps,
            self.device,
            captured(self.decoder, self.max_num_reqs, self.vocab_size),
        )
        drafter.replay_by(self.speculator.replay)
        self.rank_check = RankCheck()
        self.unseen = UnseenDrafter(self)
        self.tiers = tiers(1 + self.num_speculative_steps)
        self.lora_state = TreeLoraState(self)
        self.texts = HostTexts(self.max_num_reqs, self.max_model_len)
        # steps whose tokens are not in ``texts`` yet; several while the schedule rests
        self.in_flight: list[StepInFlight] = []
        # of the step that begins: the scheduler's placeholders, and drafts in them
        self.reserved: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}
        # requests that were preempted and keep their slots: id -> length of its prompt
        self.preempted: dict[str, int] = {}

    def load_model(self, *args: object, **options: object) -> None:
        """Load the target, then draft models or a head."""
        super().load_model(*args, **options)
        self.drafter.load_model(self.model)
        self.rejection_sampler = self.sampler_class(self)
        if self.model_config.uses_mrope:
            self.model_state.rope_state.__class__ = TreeRopeState
        if self.aux_layers:
            self.model.set_aux_hidden_state_layers(self.aux_layers)
            self.use_aux_hidden_state_outputs = True

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: object, **options: object
    ) -> None:
        """Allocate the KV cache with fork blocks behind the scheduler's blocks.

        vLLM calls it twice where it measures graphs before.
        """
        groups = kv_cache_config.kv_cache_groups
        num_fork_blocks = self.drafter.num_fork_blocks(groups)
        super().initialize_kv_cache(
            with_fork_blocks(kv_cache_config, num_fork_blocks), *args, **options
        )
        # block tables count blocks of the scheduler's size
        block_size = groups[0].kv_cache_spec.block_size
        assert set(self.kernel_block_sizes) == {block_size}
        layers = self.compilation_config.static_forward_context
        names = chain.from_iterable(group.layer_names for group in groups)
        self.group_order = self.drafter.bind(
            groups,
            {name: layers[name].kv_cache for name in names},
            (kv_cache_config.num_blocks, block_size),
            self.attn_groups,
        )
        first = self.group_order[0]
        width = self.block_tables.block_tables[first].gpu.shape[1]
        self.host_blocks = HostBlocks(self.max_num_reqs, width)
        self.speculator.bind(width)
        self.connect_attention()

    def wait_for_device(self) -> None:
        """Wait until the device is done."""
        torch.accelerator.synchronize()

    def group_tables(self, number: int) -> tuple[Tensor, Tensor]:
        """Block table and slot mapping of a KV cache group, for the largest batch."""
        tables = self.block_tables
        return tables.input_block_tables[number], tables.slot_mappings[number]

    def profile_run(self, *args: object, **options: object) -> None:
        """Run all models and heads once before the KV cache is made."""
        super().profile_run(*args, **options)
        for source in self.drafter.paged:
            source.warm_up()

    @torch.inference_mode()
    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        *args: object,
        dummy_run: bool = False,
        **options: object,
    ) -> object:
        """Bind the step's trees, then run the target."""
        if not dummy_run:
            scheduler_output = self.bind(scheduler_output)
        return super().execute_model(
            scheduler_output, *args, dummy_run=dummy_run, **options
        )

    def bind(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Draw the trees of the step that begins, and trim its placeholders."""
        drawn = self._draw(scheduler_output)
        self.reserved = dict(scheduler_output.scheduled_spec_decode_tokens)
        drafts = drafts_of(drawn, self.decoder.slots)
        self.drafts = {
            req_id: drafts[req_id][: len(placeholders)]
            for req_id, placeholders in self.reserved.items()
            if drafts.get(req_id)
        }
        fill = 0
        if self.drafts:
            if isinstance(drawn, Proposal):
                self.rank_check.compare(drawn, self.decoder.step)
                self._put_drafts()
            fill = self._fill(scheduler_output) - 1
        return trim(scheduler_output, self.drafts, fill)

    def _fill(self, scheduler_output: SchedulerOutput) -> int:
        """Rows that every request brings, so that the step has a full CUDA graph.

        Returns:
            1: the step has none, or has one as it is.

        """
        num_tokens = scheduler_output.num_scheduled_tokens
        num_reqs, num_loras = len(num_tokens), 0
        if self.lora_config is not None:
            num_loras = get_num_active_loras_for_dispatch(
                self.lora_config, self.lora_state, list(num_tokens), dummy_run=False
            )
        most = 1 + max(map(len, self.drafts.values()))
        for rows in self.tiers:
            if rows >= most and can_fill(num_tokens, self.reserved, rows):
                graph = self.cudagraph_manager.dispatch(
                    num_reqs, num_reqs * rows, rows, num_loras, max_query_len=rows
                )
                if graph.cg_mode == CUDAGraphMode.FULL:
                    return rows
        return 1

    def _draw(self, scheduled: SchedulerOutput) -> Proposal | UnseenTrees | None:
        """Draw the trees that follow the last step; None without any."""
        decoder = self.decoder
        last = self.in_flight[-1] if self.in_flight else None
        if last is None or last.rested or last.followed:
            # no step since the last trees were drawn
            return decoder.proposal
        if decoder.rests(last.completes):
            last.rested = True
            return None
        self._settle(self.in_flight[:-1])
        plan: StepPlan | None = None
        drawn: UnseenTrees | Draft | None = None
        if self.unseen.may_draw(last, scheduled):
            plan = self.unseen.plan(last)
            if self.unseen.fits(plan, last, scheduled):
                drawn = self.unseen.draw(plan, last)
        if isinstance(drawn, UnseenTrees):
            return drawn
        num_emitted = self._settle([last])
        batch = emitted_batch(self, last, num_emitted)
        return self.drafter.propose(batch, plan, drawn)

    def _settle(self, steps: Sequence[StepInFlight]) -> np.ndarray:
        """Note the tokens of steps in flight, the first ones, and wait for the last.

        Returns:
            int64 [num_reqs], tokens that each request emitted in the last step.

        """
        num_emitted = np.zeros(0, dtype=np.int64)
        for step in steps:
            tokens, num_emitted = step.wait()
            step.found_computed(self.texts.num_tokens[step.rows])
            self.texts.append(step.rows, tokens, num_emitted)
            drawn = step.trees.proposal
            if isinstance(drawn, UnseenTrees):
                self.rank_check.compare(drawn.seen, self.decoder.step)
                self.decoder.drafter.count_beams(drawn.seen)
            if step.followed:
                batch = noted_batch(self, step, num_emitted)
                self.decoder.note(step.trees, batch)
        self.in_flight = self.in_flight[len(steps) :]
        return num_emitted

    def _put_drafts(self) -> None:
        """Bring the drafts to the device, where vLLM takes the step's inputs from."""
        rows = [self.req_states.req_id_to_index[req_id] for req_id in self.drafts]
        tokens = np.zeros((len(rows), self.num_speculative_steps), dtype=np.int64)
        for line, drafts in zip(tokens, self.drafts.values(), strict=True):
            line[: len(drafts)] = drafts
        index = on_device(np.array(rows), self.device)
        self.req_states.draft_tokens[index] = on_device(tokens, self.device)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Forget the requests that ended, and discard trees of preempted ones."""
        decoder, new = self.decoder, scheduler_output.scheduled_new_reqs
        ended = scheduler_output.finished_req_ids
        preempted = scheduler_output.preempted_req_ids or set()
        if self.in_flight and (ended or preempted or new):
            # their rows may become those of others
            self._settle(self.in_flight)
        decoder.discard_trees(decoder.slots.lookup(sorted(preempted)))
        for req_id in preempted:
            row = self.req_states.req_id_to_index[req_id]
            self.preempted[req_id] = self.texts.num_prompt_tokens[row]
        # Preempted ones go on as new ones, some at once. So does a session, whose next
        # turn has a longer prompt: here it is a new request.
        turns = {
            request.req_id
            for request in new
            if self.preempted.pop(request.req_id, None) != request.prompt_len
        }
        for req_id in ended:
            self.preempted.pop(req_id, None)
        decoder.finish_requests(decoder.slots.release(ended | turns))
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Note the prompts of new requests, and all tokens of resumed ones."""
        super().add_requests(scheduler_output)
        if not scheduler_output.scheduled_new_reqs:
            return
        known = set(self.decoder.slots.names())
        for new in scheduler_output.scheduled_new_reqs:
            row = self.req_states.req_id_to_index[new.req_id]
            self.texts.start(row, new.prefill_token_ids, new.prompt_len)
            self.host_blocks.start(row, new.block_ids[self.group_order[0]])
            if new.req_id not in known:
                params = new.sampling_params
                limit = request_options(params.extra_args).limit
                supported = drafters_can_read(new, self.vocab_size)
                supported &= self.rejection_sampler.may_draft_trees(row)
                self.decoder.slots.add(new.req_id, supported, params.seed, limit)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Note the new blocks of running requests."""
        super().update_requests(scheduler_output)
        cached, group = scheduler_output.scheduled_cached_reqs, self.group_order[0]
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None:
                row = self.req_states.req_id_to_index[req_id]
                self.host_blocks.append(row, blocks[group])

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Prepare the stock inputs, then lay out the trees."""
        tables, slots = super().prepare_attn(input_batch)
        self.decoder.begin_step(
            scheduled_batch(
                input_batch,
                self.decoder.slots,
                self._num_computed(input_batch),
                self.drafts,
                self.reserved,
            ),
            partial(target_inputs, self, input_batch, tables, slots),
        )
        return tables, slots

    def _num_computed(self, batch: InputBatch) -> np.ndarray:
        """Tokens whose KV is in the cache, int64 [num_reqs].

        vLLM's own count on the host assumes that all placeholders are accepted. Steps
        in flight are plain: each of their requests emits one token.
        """
        rows = batch.idx_mapping_np
        decoded = self.texts.num_tokens[rows] + len(self.in_flight) - 1
        computed = np.where(
            batch.is_prefilling_np, batch.num_computed_tokens_np, decoded
        )
        return computed.astype(np.int64)

    def prepare_dummy_attn(self, *args: object, **options: object) -> object:
        """Prepare a run without requests, and without trees."""
        self.decoder.layout.clear()
        return super().prepare_dummy_attn(*args, **options)

    def postprocess_sampled(
        self,
        idx_mapping: Tensor,
        sampled_tokens: Tensor,
        num_sampled: Tensor,
        *args: object,
        **options: object,
    ) -> None:
        """Commit: bring the accepted paths' KV into the requests' own slots."""
        super().postprocess_sampled(
            idx_mapping, sampled_tokens, num_sampled, *args, **options
        )
        self.decoder.commit()
        nodes, self.rejection_sampler.nodes = self.rejection_sampler.nodes, None
        self.emitted = Emitted(sampled_tokens, num_sampled, nodes)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncOutput | None:
        """Sample, and note the step whose tokens are then on their way to the host."""
        state = self.execute_model_state
        output = super().sample_tokens(grammar_output)
        if state is None or output is None:
            return output
        self.in_flight.append(
            StepInFlight(
                output,
                state.input_batch,
                self.decoder.running,
                self.emitted,
                state.hidden_states,
                state.aux_hidden_states or (),
            )
        )
        output.model_runner_output.trees = tree_counts(self.decoder, self.drafts)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Hand the trees of the step that began to the scheduler, for its grammars."""
        proposal = self.decoder.proposal
        if not isinstance(proposal, Proposal):
            # none, or none of a structured output
            return TreeDraftTokenIds([], [], {})
        parents = by_request(proposal, proposal.draft_parents(), self.decoder.slots)
        return TreeDraftTokenIds(
            list(self.drafts),
            list(self.drafts.values()),
            {req_id: parents[req_id] for req_id in self.drafts},
        )
