"""Trees along branches: causal sequences on fork blocks, for any stock kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_treespec.engine.attention import BranchingImpl, BranchSwitch
from vllm_treespec.engine.branches import (
    BatchLayout,
    ForkSpace,
    commit_copies,
    plan_branches,
)
from vllm_treespec.engine.kv_cache import BlockCopier
from vllm_treespec.engine.tree_step import TreeStep, check_attention


class BranchPlacement:
    """Places trees as ``branches.py`` plans them; what CPUs use."""

    def __init__(self) -> None:
        """Begin without trees."""
        self.switch = BranchSwitch()

    def prepare(self, runner: Any) -> None:
        """Nothing lasts but the fork blocks, which are part of the KV cache."""

    def bind(
        self,
        runner: Any,
        kv_caches: dict[str, Tensor],
        target_layers: list[str],
        forks: ForkSpace,
    ) -> None:
        """Let every layer and metadata builder see the plan of the running step."""
        check_attention(runner, kv_caches, BranchingImpl)
        self.forks = forks
        self.target_blocks = BlockCopier(kv_caches[name] for name in target_layers)
        layers = runner.compilation_config.static_forward_context
        for name in kv_caches:
            layers[name].impl.branches = self.switch
        for group in runner.attn_groups[0]:
            for builder in group.metadata_builders:
                builder.branches = self.switch

    def clear(self) -> None:
        """Back to one sequence a request."""
        self.switch.plan = None

    def place(self, runner: Any, step: TreeStep, logits_indices: Tensor) -> None:
        """Put each tree's nodes in branch order, and give them their positions."""
        self.layout = layout_of(runner)
        plan = plan_branches(step.tree, step.reqs, self.layout, self.forks)
        self.switch.plan = plan
        self.target_blocks.copy_apart(plan.copy_from, plan.copy_to)
        is_node = step.tree.is_node()
        rows = plan.node_rows[is_node]
        context = self.layout.context_lens[step.reqs]
        runner.positions[rows] = (context[:, None] + step.tree.depths)[is_node]
        ids = runner.input_ids.gpu[: len(plan.row_order)]
        ids.copy_(ids[plan.row_order])
        nodes = torch.arange(step.tree.max_nodes, device=rows.device)
        logits_rows = (step.first_row[:, None] + nodes)[is_node]
        logits_indices[logits_rows] = rows.to(logits_indices.dtype)

    def commit(self, step: TreeStep) -> None:
        """Copy the accepted branches' fork blocks over the requests' own blocks."""
        plan = self.switch.plan
        if plan is None:
            return
        assert step.scored is not None
        self.target_blocks.copy_apart(
            *commit_copies(
                plan,
                step.scored.last_node(),
                step.scored.num_accepted,
                step.reqs,
                self.layout,
                self.forks,
            )
        )


def layout_of(runner: Any) -> BatchLayout:
    """How vLLM laid out the batch of the running step."""
    num_reqs = runner.input_batch.num_reqs
    num_tokens = runner.query_start_loc.np[num_reqs]
    table = runner.input_batch.block_table[0]
    return BatchLayout(
        query_start_loc=runner.query_start_loc.gpu[: num_reqs + 1].long(),
        context_lens=runner.num_computed_tokens[:num_reqs].long(),
        block_table=table.get_device_tensor(num_reqs),
        slot_mapping=table.slot_mapping.gpu[:num_tokens].clone(),
    )
