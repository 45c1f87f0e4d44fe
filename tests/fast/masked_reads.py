"""What draft models and heads read under masks: their room, and two requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.layouts.base import ForkSpace
from vllm_treespec.layouts.block_copies import BlockCopier
from vllm_treespec.layouts.masks import MaskLevelReader
from vllm_treespec.layouts.node_masks import NodeMasks
from vllm_treespec.sources.base import CommittedTokens
from vllm_treespec.sources.feature_store import FeatureStore

PAGE = 4
# Behind 10 blocks of the scheduler's, two blocks a tree.
FORKS = ForkSpace(first_block=10, forks_per_tree=1, blocks_per_fork=2, block_size=PAGE)


class Copies(BlockCopier):
    """Notes which blocks are copied."""

    def __init__(self) -> None:
        super().__init__([])

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        self.sources, self.targets = sources, targets


def bind(model: Any, device: torch.device) -> Copies:
    """Give a model room for two trees; the blocks that it copies."""
    model.device = device
    model.forks, model.groups = FORKS, []
    copies = Copies()
    model.masks = NodeMasks(32, 4, device)
    model.level_reader = MaskLevelReader(FORKS, copies, model.masks)
    return copies


def bind_head(head: Any, hidden_size: int, device: torch.device) -> None:
    """The same for a head, which keeps features."""
    bind(head, device)
    num_slots = FORKS.first_block * PAGE
    features = head.head.features
    head.store = FeatureStore(num_slots, hidden_size, torch.float32, device, features)


def committed(device: torch.device) -> CommittedTokens:
    """Two requests with roots at positions 5 and 8; the second has no block there."""
    table = torch.tensor([[1, 2, 0, 0], [3, 4, 0, 0]], dtype=torch.int32)
    return CommittedTokens(
        token_ids=np.arange(20).reshape(2, 10),
        reqs=np.array([0, 1]),
        slots=np.array([0, 1]),
        first=np.array([4, 8]),
        end=np.array([5, 8]),
        drafting=np.array([0, 1]),
        block_table=table.to(device),
        host_table=table.numpy(),
        num_blocks=np.array([2, 2]),
    )
