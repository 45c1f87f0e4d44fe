"""Ancestor masks for the attention kernel, in tensors that stay at their addresses.

CUDA graphs replay with the addresses they were captured with, and vLLM makes its
metadata builders more than once: so these tensors belong to the runner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.kernels.workspace import Workspace


class NodeMasks:
    """Ancestor masks of the query rows of a forward, for ``tree_attention``.

    A mask of 0 is an ordinary causal row, so that a captured graph serves batches
    with and without trees.
    """

    def __init__(self, max_tokens: int, max_reqs: int, device: torch.device) -> None:
        """Allocate for the largest batch."""
        self.max_tokens = max_tokens
        self.device = device
        # int64 [max_tokens], bit j of a row: sees node j of its request's tree
        self.node_masks = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        # int32 [max_reqs], position of node 0 of each request's tree
        self.tree_starts = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        # whether any row has a mask; known on the host
        self.has_masks = False
        # CUDA graphs that read the masks, by their numbers of requests and of rows
        self.graphs: set[tuple[int, int]] = set()
        self.workspaces: dict[tuple[int, int], Workspace] = {}

    def clear(self) -> None:
        """Make all rows causal."""
        if self.has_masks:
            self.node_masks.zero_()
        self.has_masks = False

    def set_masks(
        self, rows: Tensor, masks: Tensor, reqs: Tensor, tree_starts: Tensor
    ) -> None:
        """Set the masks of some rows and the trees' starts of some requests.

        Args:
            rows: int64 [n], query rows.
            masks: int64 [n].
            reqs: int64 [num_trees], requests of the batch.
            tree_starts: [num_trees], positions of their trees' node 0.

        """
        self.has_masks = True
        self.node_masks[rows] = masks
        self.tree_starts[reqs] = tree_starts.to(self.tree_starts.dtype)

    def workspace(self, num_heads: int, head_size: int) -> Workspace:
        """The kernel's buffers for layers of this shape, made once."""
        key = num_heads, head_size
        if key not in self.workspaces:
            self.workspaces[key] = Workspace(
                self.max_tokens, num_heads, head_size, self.device
            )
        return self.workspaces[key]

    def num_bytes(self) -> int:
        """Bytes of the masks and of the buffers made so far."""
        buffers = self.workspaces.values()
        tensors = [t for b in buffers for t in (b.partials, b.partial_lse)]
        return sum(t.nbytes for t in (self.node_masks, self.tree_starts, *tensors))
