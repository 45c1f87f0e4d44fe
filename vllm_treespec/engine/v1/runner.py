"""The V1 model runner with draft trees: one mixin, the same on CPU and GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.core.uniforms import SCORING, UniformSource
from vllm_treespec.engine.kv_cache import with_fork_blocks
from vllm_treespec.engine.ranks import check_same_drafts
from vllm_treespec.engine.reading import ReadMarks
from vllm_treespec.engine.scoring import with_plain_samples
from vllm_treespec.engine.tree_step import TreeStep, first_rows
from vllm_treespec.engine.v1.drafter import Proposal, TreeDrafter
from vllm_treespec.engine.v1.drafting import DraftingMixin
from vllm_treespec.engine.v1.requests import sampling_tensors
from vllm_treespec.scorers import TargetLogits

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class TreeRunnerMixin(DraftingMixin):
    """Overrides the steps of vLLM's V1 runner in which a tree is not a chain.

    In the order of a step: ``_prepare_inputs`` puts the nodes of each tree into their
    places and gives them their positions, ``_sample`` scores the trees,
    ``_update_states_after_model_execute`` commits the accepted paths' KV, and
    ``propose_draft_token_ids`` draws the next trees. Everything else is stock.
    """

    drafter: TreeDrafter

    def init_trees(self) -> None:
        """Set up our state; called once, when the stock runner is made."""
        runner: Any = self
        self.placement = self.drafter.placement()
        self.uniforms = UniformSource(runner.model_config.seed)
        self.stats = self.drafter.stats
        self.tree_step: TreeStep | None = None
        self.proposal: Proposal | None = None
        self._reached_forward = 0.0

    def initialize_kv_cache_tensors(
        self, kv_cache_config: Any, kernel_block_sizes: list[int], **options: Any
    ) -> dict[str, Tensor]:
        """Allocate the KV cache with fork blocks behind the scheduler's blocks."""
        runner: Any = self
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                f"draft trees need a model with one KV cache group, this one has "
                f"{len(kv_cache_config.kv_cache_groups)}; remove speculative_config"
            )
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        grown = with_fork_blocks(
            kv_cache_config, self.drafter.num_fork_blocks(block_size)
        )
        kv_caches = super().initialize_kv_cache_tensors(  # type: ignore[misc]
            grown, kernel_block_sizes, **options
        )
        per_block = block_size // kernel_block_sizes[0]
        self.forks = self.drafter.fork_space(
            kv_cache_config.num_blocks * per_block, kernel_block_sizes[0]
        )
        ours: set[str] = set()
        for draft_model in self.drafter.draft_models:
            draft_model.bind(kv_caches, runner.attn_groups[0], self.forks)
            ours.update(draft_model.layer_names)
        self.marks = ReadMarks(
            kv_cache_config.num_blocks * per_block, kernel_block_sizes[0]
        )
        target_layers = [name for name in kv_caches if name not in ours]
        self.placement.bind(runner, kv_caches, target_layers, self.forks)
        return kv_caches

    def profile_run(self, *args: Any, **options: Any) -> None:
        """Run the models once before the KV cache is made, draft models included."""
        self.placement.prepare(self)
        super().profile_run(*args, **options)  # type: ignore[misc]
        for draft_model in self.drafter.draft_models:
            draft_model.warm_up()

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Take in what the scheduler says, finished requests too."""
        self.drafter.forget(scheduler_output.finished_req_ids)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Whether to call the drafter: it looks at each request on its own."""
        return common_attn_metadata is not None

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> tuple[Tensor, Any, int]:
        """Prepare the stock inputs, then put trees into their places."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        with self.stats.stage("tree_build"):
            self.placement.clear()
            logits_indices, metadata, _ = prepared
            self.tree_step = step = self._match_trees(scheduler_output, metadata)
            if step is not None and self.drafter.branching:
                self.placement.place(self, step, logits_indices)
        self._reached_forward = time.perf_counter()
        return prepared

    def _match_trees(
        self, scheduler_output: SchedulerOutput, metadata: Any
    ) -> TreeStep | None:
        """Find the trees whose drafts the scheduler sends back in this step.

        A request whose drafts are not (a prefix of) its last tree is read as a chain
        and emits one token from its root; that costs speed, never correctness.
        """
        runner: Any = self
        if self.proposal is None:
            return None
        found: list[tuple[int, int, int, int]] = []
        limits = self._node_limits(scheduler_output)
        rank = runner.parallel_config.rank
        for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            check_same_drafts(rank, self.proposal, req_id, drafts)
            row = self.proposal.find(req_id, drafts)
            if row is not None:
                index = runner.input_batch.req_id_to_index[req_id]
                num_drafts = len(self.proposal.drafts[row])
                whole = len(drafts) == num_drafts
                limit = limits[req_id] if whole else len(drafts) + 1
                found.append((index, row, limit, min(limit, num_drafts + 1)))
        if not found:
            return None
        host = np.array(sorted(found)).T
        reqs, rows, limit = torch.from_numpy(host[:3]).to(runner.device)
        tree = self.proposal.tree
        if host[1].tolist() != list(range(tree.num_reqs)):
            tree = tree.select(rows)
        return TreeStep(
            reqs,
            tree.cut(limit),
            self.proposal.scheduled,
            first_rows(metadata.cu_num_sampled_tokens)[reqs],
            host_reqs=host[0],
            host_num_nodes=host[3],
            host_roots=runner.input_batch.num_computed_tokens_cpu[host[0]],
        )

    def _node_limits(self, scheduler_output: SchedulerOutput) -> dict[str, int]:
        """How many tokens the scheduler had room for, by request.

        Draws that repeat a token take no room, but whether they count must not depend
        on that. So a whole tree is cut, too, to what the scheduler would have taken.
        """
        runner: Any = self
        limits = {}
        left = runner.scheduler_config.max_num_scheduled_tokens
        if left is None:
            left = runner.max_num_tokens
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            computed = runner.requests[req_id].num_computed_tokens
            limits[req_id] = min(left, runner.max_model_len - 1 - computed)
            left -= num_tokens
        return limits

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        """Score the trees; requests without one are sampled as by stock vLLM."""
        runner: Any = self
        if logits is None or spec_decode_metadata is None:
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        self.stats.spent("forward", time.perf_counter() - self._reached_forward)
        with self.stats.stage("score"):
            first = first_rows(spec_decode_metadata.cu_num_sampled_tokens)
            step = self.tree_step
            metadata = runner.input_batch.sampling_metadata
            if step is None:
                return runner.sampler(logits=logits[first], sampling_metadata=metadata)
            step.scored = self.drafter.score(
                step.scheduled,
                step.tree,
                TargetLogits(
                    logits,
                    step.first_row,
                    sampling_tensors(runner.input_batch, step.host_reqs, step.reqs),
                ),
                self._uniforms(
                    step.host_reqs.tolist(),
                    step.host_roots.tolist(),
                    1 + self.drafter.max_draws,
                    SCORING,
                ),
            )
            return with_plain_samples(runner.sampler, metadata, logits, first, step)

    def _update_states_after_model_execute(
        self, output_token_ids: Tensor, scheduler_output: SchedulerOutput
    ) -> None:
        """Commit: bring the accepted paths' KV into the requests' own slots."""
        super()._update_states_after_model_execute(output_token_ids, scheduler_output)  # type: ignore[misc]
        if self.tree_step is not None and self.drafter.branching:
            with self.stats.stage("commit"):
                self.placement.commit(self.tree_step)
        self.placement.clear()
