"""What batched forms of rules share: groups of rows, node numbers, accepted paths.

A batched form computes all nodes of all trees together. The host knows all shapes and
never waits for the device, so a CUDA graph can hold a whole rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import NO_NODE, TreeBatch

# Distributions that are held side by side: 256 of 128 k tokens take 128 MiB in
# float32, and are enough work to fill a device.
ROWS_PER_GROUP = 256


def groups(rows: Tensor, width: int = 1) -> tuple[Tensor, ...]:
    """Split rows into groups that hold at most ``ROWS_PER_GROUP`` distributions.

    Args:
        rows: [n], at least one goes into every group.
        width: distributions of each row.

    """
    return rows.split(max(ROWS_PER_GROUP // width, 1))


def node_numbers(tree: TreeBatch) -> Tensor:
    """Every entry's node, int64 [num_reqs, max_nodes]; the root in unused entries."""
    columns = torch.arange(tree.max_nodes, device=tree.token_ids.device)
    return columns * tree.is_node()


def accepted_path(
    ancestors: Tensor, depths: Tensor, kept_bits: Tensor, sizes: TreeSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the path along which every node was kept below its parent.

    Args:
        ancestors: int64 [num_reqs, max_nodes], see ``ancestor_bits``.
        depths: int64 [num_reqs, max_nodes], 0 in unused entries.
        kept_bits: int64 [num_reqs], bit i is set iff node i was kept; at most one
            child of a node is, and the root need not be.
        sizes: the trees' bounds.

    Returns:
        path int64 [num_reqs, max_depth], its length and its last node, int64
        [num_reqs], 0 for the root.

    """
    accepted = (ancestors & ~(kept_bits | 1)[:, None]) == 0
    places = depths * accepted
    columns = torch.arange(depths.shape[1], device=depths.device)
    path = torch.full(
        (len(depths), max(sizes.max_depth, 1) + 1), NO_NODE, device=depths.device
    )
    # Column 0 takes the root and all that was not accepted.
    path.scatter_(1, places, columns.expand_as(places))
    last = (columns * (places > 0)).amax(dim=1)
    return path[:, 1:].contiguous(), places.amax(dim=1), last
