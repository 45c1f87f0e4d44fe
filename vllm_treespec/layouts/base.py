"""What a layout of trees does for the target and for draft models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.matching import PlacedTrees
from vllm_treespec.batch.views import TargetInputs
from vllm_treespec.host_copies import on_device
from vllm_treespec.layouts.block_copies import BlockCopier
from vllm_treespec.scorers import ScorerOutput
from vllm_treespec.trees.sizes import TreeSizes

Numbers = TypeVar("Numbers", Tensor, np.ndarray)


@dataclass(frozen=True)
class LayoutLimits:
    """What a layout must have room for."""

    # bounds of all trees
    sizes: TreeSizes
    # trees in one step
    max_trees: int
    # whether a source with KV of its own reads levels
    has_own_kv: bool


@dataclass(frozen=True)
class ForkSpace:
    """Where fork blocks lie in the KV cache.

    ``first_block`` is the first fork block; tree number ``t`` of a step owns
    ``forks_per_tree`` forks, each of ``blocks_per_fork`` consecutive blocks. Each KV
    cache group has a space of its own: a block belongs to one group.
    """

    first_block: int
    forks_per_tree: int
    blocks_per_fork: int
    block_size: int

    @classmethod
    def of_branches(
        cls, limits: LayoutLimits, block_size: int, first_block: int = 0
    ) -> ForkSpace:
        """Forks where every path of a tree is a sequence (``BranchLayout``)."""
        forks = limits.sizes.max_leaves - 1
        if limits.has_own_kv:
            # One a node that is read at once, and one for the root.
            forks = max(forks, limits.sizes.draft_width + 1)
        return cls(
            first_block=first_block,
            forks_per_tree=forks,
            blocks_per_fork=(block_size - 1 + limits.sizes.fork_rows) // block_size + 1,
            block_size=block_size,
        )

    @classmethod
    def of_masks(
        cls, limits: LayoutLimits, block_size: int, first_block: int = 0
    ) -> ForkSpace:
        """Forks where masks say what a node sees (``MaskLayout``)."""
        last = limits.sizes.draft_nodes
        return cls(
            first_block=first_block,
            forks_per_tree=int(limits.has_own_kv),
            blocks_per_fork=(block_size - 1 + last) // block_size + 1,
            block_size=block_size,
        )

    def block(
        self, tree: Numbers, fork: Numbers | int, index: Numbers | int
    ) -> Numbers:
        """Block number of the given block of the given fork, int64, broadcast."""
        fork_number = tree * self.forks_per_tree + fork
        return self.first_block + fork_number * self.blocks_per_fork + index

    def num_blocks(self, max_trees: int) -> int:
        """Fork blocks of as many trees."""
        return max_trees * self.forks_per_tree * self.blocks_per_fork

    def of_group(self, number: int, max_trees: int) -> ForkSpace:
        """The space of a group, behind those of the groups before it."""
        before = number * self.num_blocks(max_trees)
        return replace(self, first_block=self.first_block + before)

    def slot(
        self,
        context: Numbers,
        offset: Numbers | int,
        tree: Numbers,
        fork: Numbers | int,
    ) -> Numbers:
        """KV slot on a fork of a request with ``context`` tokens, ``offset`` behind."""
        place = context % self.block_size + offset
        block = self.block(tree, fork, place // self.block_size)
        return block * self.block_size + place % self.block_size


@dataclass(frozen=True)
class RootBlocks:
    """Where the trees begin that a draft model, or a head, is going to grow.

    That is where the root lies, of a head that reads pairs where the last pair lies.
    """

    # int64 [num_trees], positions of the roots
    positions: Tensor
    # int64 [num_trees], the blocks that hold the roots
    blocks: Tensor
    # int32 [num_trees, max_blocks], the requests' blocks up to the roots'
    block_table: Tensor

    @classmethod
    def blank(cls, num_trees: int, max_blocks: int, device: torch.device) -> RootBlocks:
        """Roots at position 0 of block 0, where nothing lies."""
        zeros = torch.zeros(num_trees, dtype=torch.int64, device=device)
        table = torch.zeros((num_trees, max_blocks), dtype=torch.int32, device=device)
        return cls(zeros, zeros.clone(), table)


@dataclass(frozen=True)
class LevelInputs:
    """One level, or block, of all trees as sequences for a draft model's forward."""

    # int64 [num_trees * width]
    positions: Tensor
    slots: Tensor
    # int32 [num_seqs + 1] and [num_seqs]
    query_start_loc: Tensor
    seq_lens: Tensor
    # int32 [num_seqs, max_blocks]
    block_table: Tensor
    # rows and tokens of a sequence at most, on the host
    max_query_len: int
    max_seq_len: int
    # whether a row sees no later row of its sequence
    causal: bool = True

    @classmethod
    def of_texts(
        cls,
        positions: Tensor,
        slots: Tensor,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: Tensor,
    ) -> LevelInputs:
        """Sequences that bring any number of rows, int [n + 1] and [n] on the host."""
        device = positions.device
        return cls(
            positions,
            slots,
            on_device(query_start_loc.astype(np.int32), device),
            on_device(seq_lens.astype(np.int32), device),
            block_table,
            max_query_len=int(np.diff(query_start_loc).max()),
            max_seq_len=int(seq_lens.max()),
        )

    @classmethod
    def of_rows(
        cls,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_size: int,
    ) -> LevelInputs:
        """Sequences that have equally many rows; the host reads nothing of a device.

        Args:
            positions: int64 [num_rows].
            slots: int64 [num_rows].
            seq_lens: int64 [num_seqs].
            block_table: int32 [num_seqs, max_blocks].
            block_size: tokens of a block.

        """
        num_rows, num_seqs = len(positions), len(seq_lens)
        width = num_rows // num_seqs
        starts = torch.arange(
            0, num_rows + 1, width, dtype=torch.int32, device=positions.device
        )
        return cls(
            positions,
            slots,
            starts,
            seq_lens.int(),
            block_table,
            max_query_len=width,
            max_seq_len=block_table.shape[1] * block_size,
        )


class LevelReader(Protocol):
    """How one draft model reads the levels of a step's trees."""

    def begin(self, roots: RootBlocks) -> None:
        """Begin the trees below these roots, which the model has read."""

    def next_level(self, parents: Tensor) -> LevelInputs:
        """Prepare to read one more level; see ``DraftModel.extend``."""

    def block(self, width: int) -> LevelInputs:
        """Prepare to read ``width`` rows of each tree, one position after the other.

        The first lies at the position behind the root's. Next comes ``show``.
        """

    def show(self, block: LevelInputs, causal: bool) -> LevelInputs:
        """The same block for layers in which a row sees no later one, or all rows.

        To be called again before layers are read in which that differs.
        """

    def end_level(self) -> None:
        """Take note that the level, or the block, was read."""


class TreeLayout(Protocol):
    """Brings the nodes of trees into the batch and the KV cache, and commits them."""

    @property
    def forks(self) -> ForkSpace:
        """Where the first group's fork blocks lie; known once ``bind`` was called."""

    def num_fork_blocks(self, block_size: int, num_groups: int) -> int:
        """How many blocks the KV cache needs behind the scheduler's, of all groups."""

    def bind(
        self, groups: Sequence[Sequence[Tensor]], first_block: int, block_size: int
    ) -> None:
        """Take the KV caches, and the first fork block.

        Args:
            groups: of every KV cache group the caches of the target's layers in it,
                [num_blocks, ...]; sources with KV of their own are in the first.
            first_block: the first one that the scheduler does not know.
            block_size: tokens of a block, in every group.

        """

    def level_reader(self, copier: BlockCopier) -> LevelReader:
        """Read levels for a draft model; ``copier`` copies blocks of its layers.

        They are in the first group.
        """

    def prepare_inputs(self, trees: PlacedTrees, inputs: TargetInputs) -> None:
        """Lay the nodes out; row ``i`` of a request's logits stays node ``i``."""

    def query_rows(self, trees: PlacedTrees) -> Tensor:
        """Query row of every node, int64 [num_trees, max_nodes]; anything elsewhere."""

    def commit(self, trees: PlacedTrees, scored: ScorerOutput) -> None:
        """Bring the accepted paths' KV into the requests' own slots."""

    def clear(self) -> None:
        """Forget the trees of the step before."""
