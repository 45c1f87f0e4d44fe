"""Trees under masks: nodes in their requests' own slots; what GPUs use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.core.tree import MAX_NODES, ancestor_bits
from vllm_treespec.engine.branches import ForkSpace
from vllm_treespec.engine.masks import NodeMasks
from vllm_treespec.engine.tree_attention import TreeAttentionImpl
from vllm_treespec.engine.tree_step import TreeStep, check_attention
from vllm_treespec.kernels.kv_move import KvMover


class MaskPlacement:
    """Node ``i`` of a tree is its request's query row ``i``, in the slot after ``i``.

    vLLM has given every row a slot and a position as if the drafts were a chain. The
    slots stay, a node's position becomes its depth's, and attention sees ancestors
    only. Commit moves the accepted rows' keys and values together.
    """

    def prepare(self, runner: Any) -> None:
        """Allocate masks, draft models' inputs, and the kernel's buffers for all."""
        max_trees = runner.drafter.config.max_trees
        self.masks = NodeMasks(
            max(runner.max_num_tokens, max_trees * MAX_NODES),
            max(runner.max_num_reqs, max_trees),
            runner.device,
        )
        models = [runner.model_config]
        for draft_model in runner.drafter.draft_models:
            draft_model.prepare(self.masks, runner.cudagraph_dispatcher)
            models.append(draft_model.model_config)
        for model in models:
            self.masks.workspace(
                model.get_num_attention_heads(runner.parallel_config),
                model.get_head_size(),
            )

    def bind(
        self,
        runner: Any,
        kv_caches: dict[str, Tensor],
        target_layers: list[str],
        forks: ForkSpace,
    ) -> None:
        """Let every metadata builder see the masks."""
        check_attention(runner, kv_caches, TreeAttentionImpl)
        caches = [kv_caches[name] for name in target_layers]
        self.mover = KvMover(caches, forks.block_size)
        for group in runner.attn_groups[0]:
            for builder in group.metadata_builders:
                builder.masks = self.masks

    def clear(self) -> None:
        """Back to causal rows."""
        self.masks.clear()

    def place(self, runner: Any, step: TreeStep, logits_indices: Tensor) -> None:
        """Give the nodes their masks and their depths' positions."""
        tree = step.tree
        starts = runner.query_start_loc.np[step.host_reqs]
        rows, nodes = node_rows(starts, step.host_num_nodes, tree.max_nodes)
        index = torch.from_numpy(np.stack([rows, nodes])).to(runner.device)
        self.roots = roots = runner.num_computed_tokens[step.reqs].long()
        table = runner.input_batch.block_table[0]
        num_reqs = runner.input_batch.num_reqs
        self.block_table = table.get_device_tensor(num_reqs)[step.reqs]
        masks = ancestor_bits(tree, runner.drafter.max_depth)
        self.masks.put(index[0], masks.flatten()[index[1]], step.reqs, roots)
        positions = roots[:, None] + tree.depths
        runner.positions[index[0]] = positions.flatten()[index[1]]

    def commit(self, step: TreeStep) -> None:
        """Move the accepted nodes' keys and values up to their depths' slots."""
        assert step.scored is not None
        self.mover.move(
            step.scored.path,
            step.scored.num_accepted,
            self.roots,
            self.block_table,
        )


def node_rows(
    starts: np.ndarray, num_nodes: np.ndarray, max_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Query row of every node of a batch of trees, and its place in padded tensors.

    Args:
        starts: int [num_trees], first query row of each tree's request.
        num_nodes: int [num_trees].
        max_nodes: width of the padded tensors.

    Returns:
        int64 [total_num_nodes], both.

    """
    tree = np.repeat(np.arange(len(num_nodes)), num_nodes)
    node = np.arange(len(tree)) - np.repeat(np.cumsum(num_nodes) - num_nodes, num_nodes)
    return starts[tree].astype(np.int64) + node, tree * max_nodes + node
