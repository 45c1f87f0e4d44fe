"""Where nodes lie under masks: query rows, masks, positions, graph inputs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fast.no_waiting import NoWaiting, on_meta
from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.engine.mask_placement import MaskPlacement, node_rows
from vllm_treespec.engine.masked_draft_model import GraphInputs
from vllm_treespec.engine.masks import NodeMasks
from vllm_treespec.engine.tree_step import TreeStep

NOTHING: Any = None
# Two trees: root, two children, one grandchild below the second; and root, one child.
TREES = TreeBatch(
    token_ids=torch.tensor([[5, 6, 7, 8], [5, 9, 0, 0]]),
    parents=torch.tensor([[-1, 0, 0, 2], [-1, 0, -1, -1]]),
    depths=torch.tensor([[0, 1, 1, 2], [0, 1, 0, 0]]),
    num_nodes=torch.tensor([4, 2]),
)


class Table:
    """A block table of four requests."""

    def __init__(self, device: torch.device) -> None:
        self.blocks = torch.arange(8, device=device).view(4, 2)

    def get_device_tensor(self, num_reqs: int) -> torch.Tensor:
        return self.blocks[:num_reqs]


def test_node_rows() -> None:
    """Red when a node's query row or its place in padded tensors is another's."""
    rows, nodes = node_rows(np.array([3, 9]), np.array([4, 2]), 4)
    assert rows.tolist() == [3, 4, 5, 6, 9, 10]
    assert nodes.tolist() == [0, 1, 2, 3, 4, 5]


def two_trees(device: torch.device) -> tuple[MaskPlacement, Any, TreeStep]:
    """A placement, a runner and a step on a device.

    The batch: a prompt of 3 tokens, the first tree, a chain of 2, the second tree.
    """
    placement = MaskPlacement()
    placement.masks = NodeMasks(16, 4, device)
    starts = torch.tensor([0, 3, 7, 9, 11])
    positions = torch.tensor([0, 1, 2, 20, 21, 22, 23, 4, 5, 31, 32, -9])
    runner = SimpleNamespace(
        query_start_loc=SimpleNamespace(np=starts.numpy()),
        positions=positions.to(device),
        device=device,
        drafter=SimpleNamespace(max_depth=2),
        num_computed_tokens=torch.tensor([0, 20, 4, 31], device=device),
        input_batch=SimpleNamespace(num_reqs=4, block_table=[Table(device)]),
    )
    step = TreeStep(
        torch.tensor([1, 3], device=device),
        TREES if device.type == "cpu" else on_meta(TREES),
        0,
        NOTHING,
        host_reqs=np.array([1, 3]),
        host_num_nodes=np.array([4, 2]),
        host_roots=NOTHING,
    )
    return placement, runner, step


def test_place() -> None:
    """Red when masks, starts or positions of a step's nodes are wrong."""
    placement, runner, step = two_trees(torch.device("cpu"))
    placement.place(runner, step, NOTHING)
    masks = placement.masks
    assert masks.present
    expected = [0, 0, 0, 0b1, 0b11, 0b101, 0b1101, 0, 0, 0b1, 0b11]
    assert masks.node_masks[:11].tolist() == expected
    assert masks.tree_starts[[1, 3]].tolist() == [20, 31]
    assert placement.roots.tolist() == [20, 31]
    assert placement.block_table.tolist() == [[2, 3], [6, 7]]
    positions = [0, 1, 2, 20, 21, 21, 22, 4, 5, 31, 32, -9]
    assert runner.positions.tolist() == positions
    placement.clear()
    assert not masks.present
    assert not masks.node_masks.any()


def test_place_waits_for_nothing() -> None:
    """Red when placing trees asks the device for a value."""
    placement, runner, step = two_trees(torch.device("meta"))
    with NoWaiting():
        placement.place(runner, step, NOTHING)


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
