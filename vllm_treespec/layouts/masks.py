"""Trees under masks: nodes in their requests' own slots; what GPUs use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_treespec.batch.matching import PlacedTrees, RunningTrees
from vllm_treespec.batch.views import TargetInputs
from vllm_treespec.host_copies import on_device
from vllm_treespec.kernels.kv_move import KvMover
from vllm_treespec.layouts.base import (
    ForkSpace,
    LayoutLimits,
    LevelInputs,
    RootBlocks,
)
from vllm_treespec.layouts.block_copies import BlockCopier
from vllm_treespec.layouts.branch_plan import fork_block_table
from vllm_treespec.layouts.node_masks import NodeMasks
from vllm_treespec.scorers import ScorerOutput
from vllm_treespec.trees.tree import ancestor_bits, ancestors


class MaskLayout:
    """Node ``i`` of a tree is its request's query row ``i``, in the slot after ``i``.

    The engine has given every row a slot and a position as if the drafts were a chain.
    The slots stay, a node's position becomes its depth's, and attention sees ancestors
    only. Commit moves the accepted rows' keys and values together. A draft model reads
    all nodes of a tree in one fork.
    """

    forks: ForkSpace

    def __init__(self, limits: LayoutLimits, masks: NodeMasks) -> None:
        """Take what to have room for, and the masks that attention reads."""
        self.limits = limits
        self.masks = masks

    def num_fork_blocks(self, block_size: int, num_groups: int) -> int:
        """How many blocks the KV cache needs behind the scheduler's.

        Only draft models and heads have forks here, which are in one group.
        """
        forks = ForkSpace.of_masks(self.limits, block_size)
        return forks.num_blocks(self.limits.max_trees)

    def bind(
        self, groups: Sequence[Sequence[Tensor]], first_block: int, block_size: int
    ) -> None:
        """Take the target's KV caches by group, and the first fork block."""
        self.forks = ForkSpace.of_masks(self.limits, block_size, first_block)
        # by group; a group may hold a head's layer alone
        self.movers = {
            number: KvMover(kv_caches, block_size)
            for number, kv_caches in enumerate(groups)
            if kv_caches
        }

    def warm_up(self) -> None:
        """Commit nothing once, so that no request waits for the kernel's compiler."""
        for mover in self.movers.values():
            zero = torch.zeros((1, 1), dtype=torch.int64, device=mover.layers.device)
            mover.move(zero, zero[0], zero[0], zero.int())

    def level_reader(self, copier: BlockCopier) -> MaskLevelReader:
        """Read levels for a draft model, all nodes in one fork."""
        return MaskLevelReader(self.forks, copier, self.masks)

    def prepare_inputs(self, trees: PlacedTrees, inputs: TargetInputs) -> None:
        """Give the nodes their masks and their depths' positions."""
        batch = inputs.batch
        if isinstance(trees, RunningTrees):
            host = host_nodes(trees, self.limits.sizes.max_depth)
            rows, roots_of_nodes, masks, depths = on_device(host, trees.reqs.device)
        else:
            rows, roots_of_nodes, masks, depths = self._device_nodes(trees)
        self.root_positions = roots = batch.context_lens[trees.reqs].long()
        self.block_tables = {
            number: batch.groups[number].block_table[trees.reqs]
            for number in self.movers
        }
        self.masks.set_masks(rows, masks, trees.reqs, roots)
        inputs.place_nodes(rows, roots_of_nodes, depths)

    def _device_nodes(self, trees: PlacedTrees) -> Sequence[Tensor]:
        """The same as ``host_nodes`` where the host has not seen the trees.

        Entries that hold no node have a row, too. They see their trees as a chain.
        """
        tree, rows = trees.tree, self.query_rows(trees)
        bits = ancestor_bits(tree, self.limits.sizes.max_depth)
        roots = rows[:, :1].expand_as(rows)
        return [part.flatten() for part in (rows, roots, bits, tree.depths)]

    def query_rows(self, trees: PlacedTrees) -> Tensor:
        """Query row of every node, int64 [num_trees, max_nodes]."""
        starts = on_device(trees.query_starts, trees.reqs.device)
        nodes = torch.arange(trees.tree.max_nodes, device=starts.device)
        return starts[:, None] + nodes

    def commit(self, trees: PlacedTrees, scored: ScorerOutput) -> None:
        """Move the accepted nodes' keys and values up to their depths' slots."""
        for number, mover in self.movers.items():
            mover.move(
                scored.path,
                scored.num_accepted,
                self.root_positions,
                self.block_tables[number],
            )

    def clear(self) -> None:
        """Make all rows causal again."""
        self.masks.clear()


class MaskLevelReader:
    """Reads a tree's nodes side by side in one fork, each seeing its ancestors.

    Nodes are numbered as they are read: the root is node 0, in the fork's copy of the
    block that holds it, and a level's nodes lie behind those read before. So a level
    is read without moving any keys and values.
    """

    def __init__(self, forks: ForkSpace, copier: BlockCopier, masks: NodeMasks) -> None:
        """Take the fork blocks, the copier of a draft model's blocks, and the masks."""
        self.forks = forks
        self.copier = copier
        self.masks = masks

    def begin(self, roots: RootBlocks) -> None:
        """Copy the roots' blocks, which hold the end of the contexts, to the forks."""
        num_trees, device = len(roots.blocks), roots.blocks.device
        trees = torch.arange(num_trees, device=device)
        first_column = roots.positions // self.forks.block_size
        # Nodes lie side by side, so that a tree may reach past the blocks of the
        # longest request, even though its depth does not.
        table = pad(roots.block_table, (0, self.forks.blocks_per_fork))
        self.fork_tables = fork_block_table(
            table,
            trees,
            first_column,
            trees,
            torch.zeros_like(trees),
            self.forks,
        )
        self.copier.copy(roots.blocks, self.forks.block(trees, 0, 0))
        self.node_masks = torch.ones((num_trees, 1), dtype=torch.int64, device=device)
        self.trees = trees
        self.roots = roots
        self.num_read = 1
        self.depth = 0

    def next_level(self, parents: Tensor) -> LevelInputs:
        """Lay the nodes out behind those read before, and mask them."""
        self.depth += 1
        first, self.num_read = self.num_read, self.num_read + parents.shape[1]
        nodes = torch.arange(first, self.num_read, device=parents.device)
        self.node_masks = self.node_masks.gather(1, parents) | (1 << nodes)
        self._set_masks()
        return self._rows(nodes, torch.full_like(nodes, self.depth))

    def block(self, width: int) -> LevelInputs:
        """Lay the rows out behind the root."""
        self.num_read = 1 + width
        rows = torch.arange(1, self.num_read, device=self.trees.device)
        return self._rows(rows, rows)

    def show(self, block: LevelInputs, causal: bool) -> LevelInputs:
        """Mask the rows: each sees all of them, or none later."""
        width = self.num_read - 1
        rows = torch.arange(1, self.num_read, device=self.trees.device)
        last = rows if causal else torch.full_like(rows, width)
        self.node_masks = ((2 << last) - 1).expand(len(self.trees), -1)
        self._set_masks()
        return block

    def _set_masks(self) -> None:
        masks = self.node_masks.flatten()
        rows = torch.arange(len(masks), device=masks.device)
        self.masks.set_masks(rows, masks, self.trees, self.roots.positions)

    def _rows(self, nodes: Tensor, depths: Tensor) -> LevelInputs:
        """Some nodes of every tree, int64 [width]."""
        context = self.roots.positions[:, None]
        return LevelInputs.of_rows(
            positions=(context + depths).flatten(),
            slots=self.forks.slot(context, nodes, self.trees[:, None], 0).flatten(),
            seq_lens=self.roots.positions + self.num_read,
            block_table=self.fork_tables,
            block_size=self.forks.block_size,
        )

    def end_level(self) -> None:
        """Make all rows causal again."""
        self.masks.clear()


def host_nodes(trees: RunningTrees, max_depth: int) -> np.ndarray:
    """What is known on the host of every node of a batch of trees.

    Returns:
        int64 [4, total_num_nodes]: its query row, that of its tree's root, its
        ancestors and itself as bits, its depth.

    """
    bits, depths = ancestors(trees.parents, max_depth)
    nodes = np.arange(bits.shape[1])
    used = nodes < trees.num_nodes[:, None]
    roots = np.broadcast_to(trees.query_starts[:, None], used.shape)
    return np.stack([part[used] for part in (roots + nodes, roots, bits, depths)])
