"""The V1 model runner with draft trees: one mixin, the same on CPU and GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_treespec.engine.attention import BranchSwitch
from vllm_treespec.engine.branches import BatchLayout, commit_copies, plan_branches
from vllm_treespec.engine.drafter import Proposal, TreeDrafter
from vllm_treespec.engine.drafting import DraftingMixin
from vllm_treespec.engine.kv_cache import BlockCopier, with_fork_blocks
from vllm_treespec.engine.reading import ReadMarks
from vllm_treespec.engine.requests import sampling_tensors
from vllm_treespec.engine.scoring import score_trees, with_plain_samples
from vllm_treespec.engine.tree_step import TreeStep, first_rows
from vllm_treespec.scorers import TargetLogits
from vllm_treespec.uniforms import SCORING, UniformSource

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class TreeRunnerMixin(DraftingMixin):
    """Overrides the steps of vLLM's V1 runner in which a tree is not a chain.

    In the order of a step: ``_prepare_inputs`` puts the nodes of each tree in branch
    order with their positions, ``_sample`` scores the trees,
    ``_update_states_after_model_execute`` commits the accepted paths' KV, and
    ``propose_draft_token_ids`` draws the next trees. Everything else is stock.
    """

    drafter: TreeDrafter

    def init_trees(self) -> None:
        """Set up our state; called once, when the stock runner is made."""
        runner: Any = self
        self.branches = BranchSwitch()
        self.uniforms = UniformSource(runner.model_config.seed)
        self.stats = self.drafter.stats
        self.stats.share(runner.vllm_config)
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
        groups = runner.attn_groups[0]
        ours: set[str] = set()
        for draft_model in self.drafter.draft_models:
            draft_model.bind(kv_caches, groups, self.forks)
            ours.update(draft_model.layer_names)
        self.marks = ReadMarks(
            kv_cache_config.num_blocks * per_block, kernel_block_sizes[0]
        )
        self.target_blocks = BlockCopier(
            cache for name, cache in kv_caches.items() if name not in ours
        )
        layers = runner.compilation_config.static_forward_context
        for name in kv_caches:
            layers[name].impl.branches = self.branches
        for group in groups:
            for builder in group.metadata_builders:
                builder.branches = self.branches
        return kv_caches

    def profile_run(self, *args: Any, **options: Any) -> None:
        """Run the models once before the KV cache is made, draft models included."""
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
        """Prepare the stock inputs, then put trees in branch order."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        with self.stats.stage("tree_build"):
            self.branches.plan = None
            self.tree_step = step = self._match_trees(scheduler_output)
            if step is not None and self.drafter.branching:
                logits_indices, metadata, _ = prepared
                self._put_in_branch_order(step, logits_indices, metadata)
        self._reached_forward = time.perf_counter()
        return prepared

    def _put_in_branch_order(
        self, step: TreeStep, logits_indices: Tensor, metadata: Any
    ) -> None:
        """Reorder the step's nodes along branches, and give them their positions.

        Changes vLLM's input ids and positions and ``logits_indices`` in place; row
        ``i`` of a request's logits stays node ``i``.
        """
        runner: Any = self
        plan = plan_branches(step.tree, step.reqs, step.layout, self.forks)
        self.branches.plan = step.plan = plan
        self.target_blocks.copy_apart(plan.copy_from, plan.copy_to)
        is_node = step.tree.is_node()
        rows = plan.node_rows[is_node]
        context = step.layout.context_lens[step.reqs]
        runner.positions[rows] = (context[:, None] + step.tree.depths)[is_node]
        ids = runner.input_ids.gpu[: len(plan.row_order)]
        ids.copy_(ids[plan.row_order])
        first = first_rows(metadata.cu_num_sampled_tokens)[step.reqs]
        nodes = torch.arange(step.tree.max_nodes, device=first.device)
        logits_indices[(first[:, None] + nodes)[is_node]] = rows.to(
            logits_indices.dtype
        )

    def _match_trees(self, scheduler_output: SchedulerOutput) -> TreeStep | None:
        """Find the trees whose drafts the scheduler sends back in this step.

        A request whose drafts are not (a prefix of) its last tree is read as a chain
        and emits one token from its root; that costs speed, never correctness.
        """
        runner: Any = self
        if self.proposal is None:
            return None
        found: list[tuple[int, int, int]] = []
        limits = self._node_limits(scheduler_output)
        for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            row = self.proposal.find(req_id, drafts)
            if row is not None:
                index = runner.input_batch.req_id_to_index[req_id]
                whole = len(drafts) == len(self.proposal.drafts[row])
                limit = limits[req_id] if whole else len(drafts) + 1
                found.append((index, row, limit))
        if not found:
            return None
        reqs, rows, limit = torch.tensor(sorted(found), device=runner.device).T
        num_reqs = runner.input_batch.num_reqs
        num_tokens = scheduler_output.total_num_scheduled_tokens
        table = runner.input_batch.block_table[0]
        layout = BatchLayout(
            query_start_loc=runner.query_start_loc.gpu[: num_reqs + 1].long(),
            context_lens=runner.num_computed_tokens[:num_reqs].long(),
            block_table=table.get_device_tensor(num_reqs),
            slot_mapping=table.slot_mapping.gpu[:num_tokens].clone(),
        )
        tree = self.proposal.tree
        if rows.tolist() != list(range(tree.num_reqs)):
            tree = tree.select(rows)
        return TreeStep(reqs, tree.cut(limit), self.proposal.scheduled, layout)

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
            sampling = sampling_tensors(metadata, step.reqs)
            step.scored = score_trees(
                step.tree,
                TargetLogits(logits, first[step.reqs], sampling),
                self._uniforms(
                    step.reqs.tolist(),
                    step.layout.context_lens[step.reqs].tolist(),
                    1 + self.drafter.max_draws,
                    SCORING,
                ),
                self.drafter.rule,
            )
            self.drafter.schedule.observe(
                step.scheduled, step.scored.num_accepted.tolist()
            )
            self.stats.observe(
                step.tree.num_nodes.tolist(), step.scored.num_accepted.tolist()
            )
            return with_plain_samples(
                runner.sampler,
                metadata,
                logits,
                first,
                step.reqs,
                step.tree,
                step.scored,
            )

    def _update_states_after_model_execute(
        self, output_token_ids: Tensor, scheduler_output: SchedulerOutput
    ) -> None:
        """Commit: bring the accepted paths' KV into the requests' own slots."""
        super()._update_states_after_model_execute(output_token_ids, scheduler_output)  # type: ignore[misc]
        step = self.tree_step
        self.branches.plan = None
        if step is None or step.plan is None:
            return
        assert step.scored is not None
        with self.stats.stage("commit"):
            last = step.scored.last_node()
            depth = step.scored.num_accepted
            copies = commit_copies(
                step.plan, last, depth, step.reqs, step.layout, self.forks
            )
            self.target_blocks.copy_apart(*copies)


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """vLLM's CPU model runner with draft trees.

    It also mends what kills stock vLLM 0.32 on CPU: a token is drawn for a prompt that
    is not complete, too, and then the generator of its seeded request is set back by an
    offset, which CPU generators do not have. Here they are set aside meanwhile.
    """

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        """Sample without the generators of incomplete prompts."""
        batch = self.input_batch
        incomplete = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
        self._set_aside = {
            r: batch.generators.pop(r)
            for r in incomplete.tolist()
            if r in batch.generators
        }
        return super()._sample(logits, spec_decode_metadata)

    def _bookkeeping_sync(self, *args: Any) -> Any:
        """Keep the books, then put the generators back."""
        result = super()._bookkeeping_sync(*args)
        self.input_batch.generators.update(self._set_aside)
        return result
