"""What a draft model is given to read, level by level, under masks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fast.masked_reads import PAGE, bind, committed
from tests.fast.no_waiting import NoWaiting, OnDevice
from tests.fast.small_engine import engine_config, model_config
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.engine.draft_model import PagedDraftModel
from vllm_treespec.layouts.base import LevelInputs
from vllm_treespec.layouts.node_masks import NodeMasks


class Recorded(PagedDraftModel):
    """Notes what it reads instead of running a model."""

    masks: NodeMasks

    def __init__(self, device: torch.device, folder: Path) -> None:
        model_config().save_pretrained(folder)
        config = engine_config({"method": "suffix_tree"})
        super().__init__(config, str(folder), None, "draft_model", StepStats())
        # logits are the hidden states
        self.output_layer = torch.nn.Identity()
        self.copies = bind(self, device)

    def _forward(self, token_ids: Tensor, inputs: LevelInputs) -> Tensor:
        self.token_ids, self.inputs = token_ids, inputs
        self.masks_then = self.masks.node_masks.clone(), self.masks.tree_starts.clone()
        return super()._forward(token_ids, inputs)

    def _run(
        self,
        attn_metadata: dict[str, Any] | None,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor | None,
    ) -> Tensor:
        return torch.empty((len(token_ids), 7), device=self.device)


def begin(model: Recorded) -> None:
    """Begin the trees below the roots that were read."""
    start = {"states": model.last_states, **vars(model.last_roots)}
    model.grow(start, torch.empty(0), depth=2)


def test_levels_lie_side_by_side(tmp_path: Path) -> None:
    """Red when a level's slots, positions, masks or keys are another node's.

    Request 0 has its root in slot 1 of a page, request 1 at the begin of one. Nodes
    1, 2 and 3 are level 1; nodes 4 and 5 below 2 and 1 (and below 3 and 3) are level 2.
    """
    model = Recorded(torch.device("cpu"), tmp_path)
    model.read(committed(model.device))
    inputs = model.inputs
    assert model.token_ids.tolist() == [4, 5, 18]
    assert inputs.positions.tolist() == [4, 5, 8]
    assert inputs.slots.tolist() == [8, 9, 12 * PAGE]
    assert inputs.query_start_loc.tolist() == [0, 2, 3]
    assert inputs.seq_lens.tolist() == [6, 9]
    begin(model)
    # The copy of a block to itself is the second request's, whose root is there.
    assert model.copies.sources.tolist() == [2, 12]
    assert model.copies.targets.tolist() == [10, 12]

    model.extend(torch.tensor([[7, 8, 9]] * 2), torch.zeros((2, 3), dtype=torch.int64))
    model.extend(torch.tensor([[5, 6]] * 2), torch.tensor([[1, 0], [2, 2]]))
    inputs = model.inputs
    assert inputs.positions.tolist() == [7, 7, 10, 10]
    first, second = 10 * PAGE + 1, 12 * PAGE
    assert inputs.slots.tolist() == [first + 4, first + 5, second + 4, second + 5]
    assert inputs.query_start_loc.tolist() == [0, 2, 4]
    assert inputs.seq_lens.tolist() == [5 + 6, 8 + 6]
    # wider by a fork: nodes may lie past the blocks of the longest request
    assert inputs.block_table.tolist() == [[1, 10, 11, 0, 0, 0], [3, 4, 12, 13, 0, 0]]
    masks, tree_starts = model.masks_then
    assert masks[:4].tolist() == [0b010101, 0b100011, 0b011001, 0b101001]
    assert tree_starts[:2].tolist() == [5, 8]
    assert not model.masks.has_masks


@pytest.mark.parametrize("level", ["read", "extend"])
def test_the_host_never_waits(level: str, tmp_path: Path) -> None:
    """Red when reading waits for the device."""
    device = torch.device("meta")
    model, tokens = Recorded(device, tmp_path), committed(device)
    if level == "read":
        with NoWaiting():
            model.read(tokens)
        return
    model.read(tokens)
    ids = torch.zeros((2, 3), dtype=torch.int64, device=device)
    with OnDevice():
        begin(model)
        model.extend(ids, torch.zeros_like(ids))
