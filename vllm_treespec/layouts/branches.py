"""Trees along branches: causal sequences on fork blocks, for any stock kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vllm_treespec.batch.matching import PlacedTrees
from vllm_treespec.batch.views import TargetInputs
from vllm_treespec.host_copies import on_device
from vllm_treespec.layouts.base import (
    ForkSpace,
    LayoutLimits,
    LevelInputs,
    RootBlocks,
)
from vllm_treespec.layouts.block_copies import BlockCopier
from vllm_treespec.layouts.branch_plan import (
    BranchPlan,
    commit_copies,
    fork_block_table,
    plan_branches,
)
from vllm_treespec.scorers import ScorerOutput


class SharedPlan:
    """A group's plan of the running step, which its layers and builders see, too."""

    def __init__(self) -> None:
        """Begin without a plan."""
        self.plan: BranchPlan | None = None


class BranchLayout:
    """Every path of a tree is an ordinary causal sequence (``branch_plan.py``).

    A fork holds one path of the target's tree, or one node of the level that a draft
    model is reading, with the nodes above it.
    """

    forks: ForkSpace

    def __init__(self, limits: LayoutLimits) -> None:
        """Take what to have room for."""
        self.limits = limits
        # one a KV cache group, known once ``bind`` was called
        self.group_forks: list[ForkSpace] = []
        self.shared_plans: list[SharedPlan] = []
        self.copiers: list[BlockCopier] = []

    def num_fork_blocks(self, block_size: int, num_groups: int) -> int:
        """How many blocks the KV cache needs behind the scheduler's, of all groups."""
        forks = ForkSpace.of_branches(self.limits, block_size)
        return num_groups * forks.num_blocks(self.limits.max_trees)

    def bind(
        self, groups: Sequence[Sequence[Tensor]], first_block: int, block_size: int
    ) -> None:
        """Take the target's KV caches by group, and the first fork block."""
        self.forks = ForkSpace.of_branches(self.limits, block_size, first_block)
        self.group_forks = [
            self.forks.of_group(number, self.limits.max_trees)
            for number in range(len(groups))
        ]
        self.shared_plans = [SharedPlan() for _ in groups]
        self.copiers = [BlockCopier(kv_caches) for kv_caches in groups]

    def level_reader(self, copier: BlockCopier) -> BranchLevelReader:
        """Read levels for a draft model, each node in a fork of its own."""
        return BranchLevelReader(self.forks, copier)

    def prepare_inputs(self, trees: PlacedTrees, inputs: TargetInputs) -> None:
        """Put each tree's nodes in branch order, and give them their positions."""
        # A copy where the engine's is int32: commit comes after the engine's update.
        context_lens = inputs.batch.context_lens.long()
        self.batch = batch = replace(inputs.batch, context_lens=context_lens)
        plans = plan_branches(trees.tree, trees.reqs, batch, self.group_forks)
        for shared, copier, plan in zip(
            self.shared_plans, self.copiers, plans, strict=True
        ):
            shared.plan = plan
            copier.copy_disjoint(plan.copy_from, plan.copy_to)
        plan = plans[0]
        is_node = trees.tree.is_node()
        rows = plan.node_rows[is_node]
        roots = batch.query_start_loc[trees.reqs].long()[:, None].expand_as(is_node)
        inputs.place_nodes(rows, roots[is_node], trees.tree.depths[is_node])
        ids = inputs.input_ids[: len(plan.row_order)]
        ids.copy_(ids[plan.row_order])
        nodes = torch.arange(trees.tree.max_nodes, device=rows.device)
        logits_rows = (trees.root_rows[:, None] + nodes)[is_node]
        inputs.logits_indices[logits_rows] = rows.to(inputs.logits_indices.dtype)

    def query_rows(self, trees: PlacedTrees) -> Tensor:
        """Query row of every node, int64 [num_trees, max_nodes]."""
        plan = self.shared_plans[0].plan
        if plan is not None:
            return plan.node_rows
        starts = on_device(trees.query_starts, trees.reqs.device)
        return starts[:, None] + trees.tree.depths

    def commit(self, trees: PlacedTrees, scored: ScorerOutput) -> None:
        """Copy the accepted branches' fork blocks over the requests' own blocks."""
        plan = self.shared_plans[0].plan
        if plan is None:
            return
        copies = commit_copies(
            plan,
            scored.last_node(),
            scored.num_accepted,
            trees.reqs,
            self.batch,
            self.group_forks,
        )
        for copier, (sources, targets) in zip(self.copiers, copies, strict=True):
            copier.copy_disjoint(sources, targets)

    def clear(self) -> None:
        """Return to one sequence a request."""
        for shared in self.shared_plans:
            shared.plan = None


class BranchLevelReader:
    """Reads a level's nodes as sequences, each in a fork copied from its parent's."""

    def __init__(self, forks: ForkSpace, copier: BlockCopier) -> None:
        """Take the fork blocks, and the copier of the draft model's blocks."""
        self.forks = forks
        self.copier = copier

    def begin(self, roots: RootBlocks) -> None:
        """Point every fork of the trees behind its request's context."""
        device = roots.blocks.device
        num_trees = len(roots.blocks)
        # The last fork holds the root.
        forks_per_level = self.forks.forks_per_tree - 1
        rows = torch.arange(num_trees * forks_per_level, device=device)
        tree = rows // forks_per_level
        tables = fork_block_table(
            roots.block_table[tree],
            rows,
            roots.positions[tree] // self.forks.block_size,
            tree,
            rows % forks_per_level,
            self.forks,
        )
        self.fork_tables = tables.unflatten(0, (num_trees, forks_per_level))
        self.trees = torch.arange(num_trees, device=device)[:, None]
        self.roots = roots
        self.depth = self.width = 0

    def next_level(self, parents: Tensor) -> LevelInputs:
        """Copy each node's fork from its parent's, and lay the nodes out."""
        self.depth += 1
        width = parents.shape[1]
        fork = torch.arange(width, device=parents.device)
        self._copy_forks(parents, fork)
        self.width = width
        context = self.roots.positions[:, None]
        slots = self.forks.slot(context, self.depth, self.trees, fork)
        ends = self.roots.positions + self.depth + 1
        return LevelInputs.of_rows(
            positions=(context + self.depth).repeat(1, width).flatten(),
            slots=slots.flatten(),
            seq_lens=ends.repeat_interleave(width),
            block_table=self.fork_tables[:, :width].flatten(0, 1),
            block_size=self.forks.block_size,
        )

    def block(self, width: int) -> LevelInputs:
        """Lay the rows of each tree out in its first fork."""
        rows = torch.arange(1, width + 1, device=self.trees.device)
        self._copy_roots(rows[:1] - 1)
        context = self.roots.positions[:, None]
        return LevelInputs.of_rows(
            positions=(context + rows).flatten(),
            slots=self.forks.slot(context, rows, self.trees, 0).flatten(),
            seq_lens=self.roots.positions + width + 1,
            block_table=self.fork_tables[:, 0].contiguous(),
            block_size=self.forks.block_size,
        )

    def show(self, block: LevelInputs, causal: bool) -> LevelInputs:
        """Let the kernel know."""
        return replace(block, causal=causal)

    def _copy_roots(self, fork: Tensor) -> None:
        targets = self.forks.block(self.trees, fork, 0)
        sources = self.roots.blocks.repeat_interleave(len(fork))
        self.copier.copy(sources, targets.flatten())

    def _copy_forks(self, parents: Tensor, fork: Tensor) -> None:
        if self.depth == 1:
            self._copy_roots(fork)
            return
        if self.width == len(fork) == 1:
            # One node a level goes on in its parent's fork.
            return
        index = torch.arange(self.forks.blocks_per_fork, device=parents.device)
        tree = self.trees[..., None]
        sources = self.forks.block(tree, parents[..., None], index)
        targets = self.forks.block(tree, fork[:, None], index)
        self.copier.copy(sources.flatten(), targets.flatten())

    def end_level(self) -> None:
        """Do nothing: a level leaves only its forks, which the next one copies."""
