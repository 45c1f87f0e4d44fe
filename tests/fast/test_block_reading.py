"""Where the rows of a block lie that a head reads at once, and what they see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.fast.masked_reads import PAGE, Copies
from vllm_treespec.layouts.base import (
    ForkSpace,
    LayoutLimits,
    LevelReader,
    RootBlocks,
)
from vllm_treespec.layouts.branches import BranchLevelReader
from vllm_treespec.layouts.masks import MaskLevelReader
from vllm_treespec.layouts.node_masks import NodeMasks
from vllm_treespec.trees.sizes import TreeSizes

# The head reads the root and four rows behind it, in one fork. From the end of a page
# they reach into a third one, which four rows would not.
SIZES = TreeSizes(
    max_nodes=8,
    max_depth=4,
    max_width=2,
    max_leaves=3,
    draft_width=1,
    draft_nodes=5,
)
LIMITS = LayoutLimits(SIZES, max_trees=2, has_own_kv=True)
WIDTH = 5
# the last tokens before the roots lie here, of two requests
LAST = np.array([4, 7])
FIRST_FORK = 10


def branches() -> tuple[LevelReader, ForkSpace, Copies, NodeMasks | None]:
    """How blocks are read along branches."""
    forks = ForkSpace.of_branches(LIMITS, PAGE, FIRST_FORK)
    copies = Copies()
    return BranchLevelReader(forks, copies), forks, copies, None


def masks() -> tuple[LevelReader, ForkSpace, Copies, NodeMasks | None]:
    """How blocks are read under masks."""
    forks = ForkSpace.of_masks(LIMITS, PAGE, FIRST_FORK)
    copies, node_masks = Copies(), NodeMasks(32, 4, torch.device("cpu"))
    return MaskLevelReader(forks, copies, node_masks), forks, copies, node_masks


Made = tuple[LevelReader, ForkSpace, Copies, NodeMasks | None]


def begin(reader: LevelReader) -> None:
    """Begin below the last tokens of two requests."""
    table = torch.tensor([[1, 2, 0, 0, 0], [3, 4, 0, 0, 0]], dtype=torch.int32)
    positions = torch.from_numpy(LAST)
    blocks = table.gather(1, (positions // PAGE)[:, None])[:, 0].long()
    reader.begin(RootBlocks(positions, blocks, table))


@pytest.mark.parametrize("make", [branches, masks])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_follow_the_context(make: Callable[[], Made], causal: bool) -> None:
    """Red when a row has another position or slot, or lies in blocks of a request.

    The tables must lead attention to where the rows were written.
    """
    reader, forks, copies, node_masks = make()
    begin(reader)
    inputs = reader.show(reader.block(WIDTH), causal)
    positions = LAST[:, None] + 1 + np.arange(WIDTH)
    assert inputs.positions.tolist() == positions.flatten().tolist()
    assert inputs.query_start_loc.tolist() == [0, WIDTH, 2 * WIDTH]
    assert inputs.seq_lens.tolist() == (LAST + 1 + WIDTH).tolist()
    # masks say what a row sees, or else the kernel
    assert inputs.causal == (causal or node_masks is not None)
    slots = inputs.slots.view(2, WIDTH)
    for tree, table in enumerate(inputs.block_table.long()):
        places = torch.from_numpy(positions[tree])
        found = table[places // PAGE] * PAGE + places % PAGE
        assert slots[tree].tolist() == found.tolist()
    assert slots.min() >= FIRST_FORK * PAGE
    assert slots.max() < (FIRST_FORK + forks.num_blocks(2)) * PAGE
    assert len(slots.unique()) == 2 * WIDTH
    # the blocks that hold the end of the contexts are read from the forks
    assert copies.sources.tolist() == [2, 4]
    assert copies.targets.tolist() == inputs.block_table[[0, 1], LAST // PAGE].tolist()


@pytest.mark.parametrize("causal", [True, False])
def test_masks_show_the_block(causal: bool) -> None:
    """Red when a row of a block sees a later one where it must not, or misses one.

    Bit 0 is the last token of the context.
    """
    reader, _, _, node_masks = masks()
    assert node_masks is not None
    begin(reader)
    block = reader.block(WIDTH)
    # as for a layer before that sees other rows
    reader.show(block, not causal)
    reader.show(block, causal)
    seen = [[j <= row or not causal for j in range(WIDTH)] for row in range(WIDTH)]
    wanted = [1 + sum(bit << (1 + j) for j, bit in enumerate(row)) for row in seen]
    assert node_masks.node_masks[: 2 * WIDTH].tolist() == 2 * wanted
    assert node_masks.tree_starts[:2].tolist() == LAST.tolist()
    reader.end_level()
    assert not node_masks.has_masks
