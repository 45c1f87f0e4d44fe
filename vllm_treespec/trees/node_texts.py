"""The texts that lead to the nodes of trees, by row of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_treespec.trees.tree import TreeBatch, ancestor_bits


@dataclass(frozen=True)
class NodeTexts:
    """The drafts on the path to every row of the logits, its own token included.

    A root has none, and so have rows that belong to no node.
    """

    # int64 [num_rows, max_depth], from the root's child on; -1 behind the last one
    paths: Tensor
    # int64 [num_rows], how many each row has
    depths: Tensor

    @classmethod
    def of_trees(
        cls, tree: TreeBatch, root_rows: Tensor, num_rows: int, max_depth: int
    ) -> NodeTexts:
        """Follow all nodes up to their roots; the host does not wait for the device.

        Args:
            tree: the trees.
            root_rows: int64 [num_trees], rows of their roots; node i is i rows below.
            num_rows: of the logits.
            max_depth: levels below the roots, or more.

        """
        nodes = torch.arange(tree.max_nodes, device=root_rows.device)
        bits = ancestor_bits(tree, max_depth)
        on_path = ((bits[..., None] >> nodes) & 1).bool() & (nodes > 0)
        # what is not on a path goes to a last column, other entries to a last row
        column = torch.where(on_path, tree.depths[:, None] - 1, max_depth)
        tokens = tree.token_ids[:, None].expand_as(column)
        of_nodes = tokens.new_full((*bits.shape, max_depth + 1), -1)
        of_nodes.scatter_(2, column, tokens)
        row = torch.where(tree.is_node(), root_rows[:, None] + nodes, num_rows)
        paths = tokens.new_full((num_rows + 1, max_depth), -1)
        paths[row] = of_nodes[..., :max_depth]
        paths = paths[:num_rows]
        return cls(paths, (paths >= 0).sum(dim=1))

    def tails(
        self, length: int, token_ids: Tensor, reqs: Tensor, num_tokens: Tensor
    ) -> Tensor:
        """Last tokens of the text of every row: committed ones, then its path.

        Args:
            length: how many, at least one.
            token_ids: int [max_num_reqs, max_len], committed tokens.
            reqs: int64 [num_rows], of which of these requests each row is.
            num_tokens: int [num_rows], how many are committed.

        Returns:
            int64 [num_rows, length]; any token before the begin of a text.

        """
        # the place of each token behind the committed ones
        place = self.depths[:, None] + torch.arange(-length, 0, device=reqs.device)
        drafts = self.paths.gather(1, place.clamp(min=0))
        committed = (num_tokens[:, None] + place.clamp(max=-1)).clamp(min=0)
        return torch.where(place >= 0, drafts, token_ids[reqs[:, None], committed])
