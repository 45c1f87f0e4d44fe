"""Where nodes lie under masks: query rows, masks, positions, graph inputs."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.fast.no_waiting import NoWaiting, on_meta
from vllm_treespec.batch.matching import RunningTrees
from vllm_treespec.batch.views import GroupBlocks, PagedBatch, TargetInputs
from vllm_treespec.engine.graphed_draft_model import GraphInputs
from vllm_treespec.layouts.base import LayoutLimits
from vllm_treespec.layouts.masks import MaskLayout
from vllm_treespec.layouts.node_masks import NodeMasks
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch

NOTHING: Any = None
CACHE = torch.zeros((16, 1, 2, 4))
# Two trees: root, two children, one grandchild below the second; and root, one child.
TREES = TreeBatch(
    token_ids=torch.tensor([[5, 6, 7, 8], [5, 9, 0, 0]]),
    parents=torch.tensor([[-1, 0, 0, 2], [-1, 0, -1, -1]]),
    depths=torch.tensor([[0, 1, 1, 2], [0, 1, 0, 0]]),
    num_nodes=torch.tensor([4, 2]),
)


def two_trees(
    device: torch.device,
) -> tuple[MaskLayout, RunningTrees, TargetInputs]:
    """A layout, trees and inputs on a device.

    The batch: a prompt of 3 tokens, the first tree, a chain of 2, the second tree.
    """
    sizes = TreeSizes(max_nodes=4, max_depth=2, max_width=2, max_leaves=2)
    limits = LayoutLimits(sizes, max_trees=4, has_own_kv=False)
    layout = MaskLayout(limits, NodeMasks(16, 4, device))
    # in the second group there is no layer of the target
    layout.bind([[CACHE], [], [CACHE]], first_block=16, block_size=2)
    positions = torch.tensor([0, 1, 2, 20, 21, 22, 23, 4, 5, 31, 32, -9])
    # behind an image the axes of M-RoPE run from another number than the tokens before
    axes = (positions - 6).repeat(3, 1)
    inputs = TargetInputs(
        input_ids=NOTHING,
        positions=(positions.to(device), axes.to(device)),
        logits_indices=NOTHING,
        batch=PagedBatch(
            query_start_loc=torch.tensor([0, 3, 7, 9, 11], device=device),
            context_lens=torch.tensor([0, 20, 4, 31], device=device),
            groups=(
                GroupBlocks(torch.arange(8, device=device).view(4, 2), NOTHING),
                GroupBlocks(NOTHING, NOTHING),
                GroupBlocks(torch.arange(8, 16, device=device).view(4, 2), NOTHING),
            ),
        ),
    )
    trees = RunningTrees(
        TREES if device.type == "cpu" else on_meta(TREES),
        0,
        torch.tensor([1, 3], device=device),
        root_rows=NOTHING,
        host_reqs=np.array([1, 3]),
        query_starts=np.array([3, 9]),
        num_nodes=np.array([4, 2]),
        root_positions=np.array([20, 31]),
        token_ids=TREES.token_ids[:, 1:].numpy(),
        parents=TREES.parents[:, 1:].numpy(),
        slots=np.array([5, 0]),
        proposal_rows=np.array([0, 1]),
        branching=True,
    )
    return layout, trees, inputs


def test_place() -> None:
    """Red when masks, starts or positions of a step's nodes are wrong."""
    layout, trees, inputs = two_trees(torch.device("cpu"))
    layout.prepare_inputs(trees, inputs)
    masks = layout.masks
    assert masks.has_masks
    expected = [0, 0, 0, 0b1, 0b11, 0b101, 0b1101, 0, 0, 0b1, 0b11]
    assert masks.node_masks[:11].tolist() == expected
    assert masks.tree_starts[[1, 3]].tolist() == [20, 31]
    assert layout.root_positions.tolist() == [20, 31]
    tables = {number: table.tolist() for number, table in layout.block_tables.items()}
    assert tables == {0: [[2, 3], [6, 7]], 2: [[10, 11], [14, 15]]}
    positions = [0, 1, 2, 20, 21, 21, 22, 4, 5, 31, 32, -9]
    assert inputs.positions[0].tolist() == positions
    assert (inputs.positions[1] == inputs.positions[0] - 6).all()
    assert layout.query_rows(trees)[0].tolist() == [3, 4, 5, 6]
    assert layout.query_rows(trees)[1, :2].tolist() == [9, 10]
    layout.clear()
    assert not masks.has_masks
    assert not masks.node_masks.any()


def test_place_waits_for_nothing() -> None:
    """Red when placing trees waits for the device."""
    layout, trees, inputs = two_trees(torch.device("meta"))
    with NoWaiting():
        layout.prepare_inputs(trees, inputs)


def test_workspaces_last() -> None:
    """Red when layers of one shape get buffers of their own, or graphs other ones."""
    masks = NodeMasks(16, 4, torch.device("cpu"))
    first = masks.workspace(4, 64)
    assert masks.workspace(4, 64) is first
    assert masks.workspace(2, 64) is not first


@pytest.mark.parametrize("size", [3, 8])
def test_graph_inputs(size: int) -> None:
    """Red when the padding of a graph's inputs writes to slots of earlier forwards."""
    inputs = GraphInputs(10, torch.device("cpu"))
    inputs.slots.fill_(77)
    ids = torch.tensor([4, 5, 6])
    inputs.fill(ids.int(), ids + 10, ids + 20, size)
    assert inputs.token_ids[:3].tolist() == [4, 5, 6]
    assert inputs.positions[:3].tolist() == [14, 15, 16]
    assert inputs.slots[:size].tolist() == [24, 25, 26] + [-1] * (size - 3)
