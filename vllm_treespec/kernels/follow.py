"""Follow trees on a GPU: one launch walks every tree along the tokens that were drawn.

It computes what ``scorers.follow_path`` does, and lays the emitted tokens out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_treespec.scorers import ScorerOutput
from vllm_treespec.trees.tree import MAX_NODES, TreeBatch

NUM_WARPS = 1


@triton.jit(
    do_not_specialize=["id_stride", "parent_stride", "max_nodes", "max_depth"],
    do_not_specialize_on_alignment=[
        "drawn",
        "first_rows",
        "tree_of",
        "token_ids",
        "parents",
        "emitted",
        "nodes",
        "num_emitted",
        "path",
        "num_accepted",
        "next_token_ids",
    ],
)
def follow_kernel(
    drawn,  # int64 [num_rows], the token after every row's node
    first_rows,  # int32 [num_reqs + 1]
    tree_of,  # int32 [num_reqs], -1: no tree
    token_ids,
    id_stride,
    parents,
    parent_stride,
    max_nodes,
    max_depth,
    emitted,  # int64 [num_reqs, 1 + max_depth]
    nodes,  # int64 [num_reqs, 1 + max_depth]
    num_emitted,  # int32 [num_reqs]
    path,  # int64 [num_trees, max_depth]
    num_accepted,  # int64 [num_trees]
    next_token_ids,  # int64 [num_trees]
    BLOCK: tl.constexpr,
):
    """Walk the tree of one request, if it has one."""
    req = tl.program_id(0)
    row = tl.load(first_rows + req)
    tree = tl.load(tree_of + req)
    columns = tl.arange(0, BLOCK)
    used = columns < tl.where(tree >= 0, max_nodes, 0)
    parent = tl.load(parents + tree * parent_stride + columns, mask=used, other=-1)
    held = tl.load(token_ids + tree * id_stride + columns, mask=used, other=-1)
    token = tl.load(drawn + row)
    out = req * (1 + max_depth)
    node = token * 0
    count = token * 0
    last = token
    tl.store(emitted + out, token)
    tl.store(nodes + out, node)
    for depth in range(max_depth):
        # the root is no child, so that 0 stands for none
        child = tl.max(tl.where((parent == node) & (held == token), columns, 0), axis=0)
        found = child > 0
        token = tl.load(drawn + row + child)
        last = tl.where(found, token, last)
        count += found
        # no node's parent: the walk has ended
        node = tl.where(found, child, -2).to(tl.int64)
        tl.store(emitted + out + 1 + depth, tl.where(found, token, -1))
        tl.store(nodes + out + 1 + depth, child)
        if tree >= 0:
            tl.store(path + tree * max_depth + depth, tl.where(found, child, -1))
    tl.store(num_emitted + req, count + 1)
    if tree >= 0:
        tl.store(num_accepted + tree, count)
        tl.store(next_token_ids + tree, last)


@dataclass(frozen=True)
class Followed:
    """What the requests of a batch emit, those without a tree too."""

    # int64 [num_reqs, 1 + max_depth], padded with -1
    emitted: Tensor
    # int64 [num_reqs, 1 + max_depth], the node after which each token was drawn
    nodes: Tensor
    # int32 [num_reqs]
    num_emitted: Tensor
    # of the trees
    scored: ScorerOutput


def follow_trees(
    tree: TreeBatch, drawn: Tensor, first_rows: Tensor, tree_of: Tensor, max_depth: int
) -> Followed:
    """Accept the longest path along which every token is the one drawn before it.

    Args:
        tree: drafts.
        drawn: int64 [num_rows], the token drawn after every node; those of a request
            lie one behind the other.
        first_rows: int32 [num_reqs + 1], row of each request's root.
        tree_of: int32 [num_reqs], which tree each request has; -1: none.
        max_depth: levels below the root, or more.

    """
    num_reqs = len(tree_of)
    device, width = drawn.device, 1 + max_depth
    emitted, nodes = torch.empty((2, num_reqs, width), dtype=torch.int64, device=device)
    path = torch.empty((tree.num_reqs, max_depth), dtype=torch.int64, device=device)
    counted = torch.empty((2, tree.num_reqs), dtype=torch.int64, device=device)
    num_emitted = torch.empty(num_reqs, dtype=torch.int32, device=device)
    num_accepted, next_token_ids = counted
    follow_kernel[(num_reqs,)](
        drawn,
        first_rows,
        tree_of,
        tree.token_ids,
        tree.token_ids.stride(0),
        tree.parents,
        tree.parents.stride(0),
        tree.max_nodes,
        max_depth,
        emitted,
        nodes,
        num_emitted,
        path,
        num_accepted,
        next_token_ids,
        BLOCK=MAX_NODES,
        num_warps=NUM_WARPS,
    )
    scored = ScorerOutput(path, num_accepted, next_token_ids)
    return Followed(emitted, nodes, num_emitted, scored)


def warm_up(device: torch.device) -> None:
    """Follow one root, so that no request waits for the kernel's compiler."""
    root = torch.zeros((1, 1), dtype=torch.int64, device=device)
    tree = TreeBatch(root, root - 1, root, root[0] + 1)
    follow_trees(tree, root[0], torch.arange(2, device=device).int(), root[0].int(), 1)


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, int], int]]:
    """The kernel's one form, to be compiled ahead of time.

    Returns:
        name, kernel, types of its arguments, values of its constants, and warps.

    """
    signature = {
        "drawn": "*i64",
        "first_rows": "*i32",
        "tree_of": "*i32",
        "token_ids": "*i64",
        "id_stride": "i32",
        "parents": "*i64",
        "parent_stride": "i32",
        "max_nodes": "i32",
        "max_depth": "i32",
        "emitted": "*i64",
        "nodes": "*i64",
        "num_emitted": "*i32",
        "path": "*i64",
        "num_accepted": "*i64",
        "next_token_ids": "*i64",
    }
    constants = {"BLOCK": MAX_NODES}
    return [("follow", follow_kernel, signature, constants, NUM_WARPS)]
