"""Rewrites draft trees as ordinary causal sequences.

Every root-to-leaf path of a tree is an ordinary causal sequence. The paths of one
request share the blocks of its context; a path that is not the first one gets *fork
blocks* of its own for the part that differs. With that, any paged attention kernel
computes exact tree attention, with all its features, and no mask:

* The nodes of a request are put in depth-first order, so that each path ends a run
  of new nodes: that run is the query of the path's sequence.
* The first path lives in the request's own slots, where its KV stays if accepted.
* Each further path gets fork blocks: a copy of the context's last, partly filled
  block, and behind it the KV of all its nodes (nodes on several paths are written
  several times).
* Commit copies the accepted path's fork blocks over the request's own blocks.

Where layers lie in several KV cache groups, a plan is made for each. The plans differ
in blocks and slots only: order of nodes and sequences are found once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.views import GroupBlocks, PagedBatch
from vllm_treespec.layouts.base import ForkSpace
from vllm_treespec.trees.tree import TreeBatch


@dataclass(frozen=True)
class BranchPlan:
    """A batch with trees, rewritten as causal sequences that share a group's blocks."""

    # int64 [num_tokens]: the row of the old order that comes to each place
    row_order: Tensor
    # int64 [num_trees, max_nodes]: place of each node
    node_rows: Tensor
    # int64 [num_trees, max_nodes]: which of its tree's paths a node ends or extends
    node_branch: Tensor
    # int32 [num_seqs + 1], [num_seqs], [num_seqs, max_blocks]
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    # int64 [num_writes]: which row's key and value go to which slot
    write_rows: Tensor
    write_slots: Tensor
    # int64 [num_copies]: blocks to copy before the forward
    copy_from: Tensor
    copy_to: Tensor


@dataclass(frozen=True)
class Paths:
    """The root-to-leaf paths of a batch's trees, in branch order."""

    # bool [num_trees, max_nodes]
    is_node: np.ndarray
    # int64 [num_trees, max_nodes]: place of each node in the batch, and the path that
    # it ends or extends
    rows: np.ndarray
    branch: np.ndarray
    # of each tree the nodes of each path, from the root to the leaf
    of_trees: list[list[list[int]]]


@dataclass(frozen=True)
class CausalSequences:
    """One sequence a path, and one a request without a tree."""

    # int64 [num_seqs]: end of each one's query, its length, and its request
    query_end: np.ndarray
    lens: np.ndarray
    req: np.ndarray
    # int64 [num_trees]: that of each tree's first path
    first: np.ndarray


@dataclass(frozen=True)
class Forks:
    """The paths that need fork blocks, and what is written where: in every group."""

    # int64 [num_forks]: tree of each path and which fork of the tree it gets, its
    # sequence, its request, and the request's tokens whose KV is in the cache
    tree: np.ndarray
    fork: np.ndarray
    seq: np.ndarray
    req: np.ndarray
    context: np.ndarray
    # int64 [num_writes]: rows whose key and value are written
    write_rows: np.ndarray
    # int64 [num_own]: where the slot mapping names the slots of the first of them,
    # which go to their requests' own slots
    own_places: np.ndarray
    # int64 [num_writes - num_own]: fork that the others go to, and their depth on it
    write_fork: np.ndarray
    write_depth: np.ndarray


def plan_branches(
    tree: TreeBatch, tree_reqs: Tensor, batch: PagedBatch, spaces: Sequence[ForkSpace]
) -> list[BranchPlan]:
    """Rewrite a batch in which some requests carry trees, one plan for each group.

    All of it lies on the host, where NumPy takes a third of torch's time.

    Args:
        tree: as many nodes per request as it has query tokens.
        tree_reqs: int64 [num_trees], the requests of the trees, ascending.
        batch: as the engine laid it out.
        spaces: where the fork blocks of each group lie.

    """
    reqs = tree_reqs.numpy()
    query_start = batch.query_start_loc.numpy().astype(np.int64)
    context = batch.context_lens.numpy().astype(np.int64)
    start = query_start[reqs]
    paths = find_paths(tree, start)
    row_order = np.arange(len(batch.groups[0].slot_mapping))
    nodes = start[:, None] + np.arange(tree.max_nodes)
    row_order[paths.rows[paths.is_node]] = nodes[paths.is_node]
    sequences = find_sequences(paths, reqs, query_start, context)
    forks = find_forks(paths, reqs, sequences, context, start, len(row_order))
    shared = {
        "row_order": torch.from_numpy(row_order),
        "node_rows": torch.from_numpy(paths.rows),
        "node_branch": torch.from_numpy(paths.branch),
        "query_start_loc": as_int32(np.append(0, sequences.query_end)),
        "seq_lens": as_int32(sequences.lens),
        "write_rows": torch.from_numpy(forks.write_rows),
    }
    plans = []
    for blocks, space in zip(batch.groups, spaces, strict=True):
        copy_from, copy_to = tail_copies(forks, blocks, space)
        table = fork_block_table(
            blocks.block_table[torch.from_numpy(sequences.req)],
            torch.from_numpy(forks.seq),
            torch.from_numpy(forks.context // space.block_size),
            torch.from_numpy(forks.tree),
            torch.from_numpy(forks.fork),
            space,
        )
        plans.append(
            BranchPlan(
                **shared,
                block_table=table,
                write_slots=torch.from_numpy(write_slots(forks, blocks, space)),
                copy_from=torch.from_numpy(copy_from),
                copy_to=torch.from_numpy(copy_to),
            )
        )
    return plans


def as_int32(numbers: np.ndarray) -> Tensor:
    """A tensor as the engine's kernels read it."""
    return torch.from_numpy(numbers.astype(np.int32))


def find_paths(tree: TreeBatch, start: np.ndarray) -> Paths:
    """Order each tree's nodes depth first, from ``start``, int64 [num_trees], on."""
    nodes = np.arange(tree.max_nodes)
    is_node = tree.is_node().numpy()
    rows = start[:, None] + nodes
    branch = np.zeros_like(rows)
    of_trees = []
    for row, (parents, size) in enumerate(
        zip(tree.parents.tolist(), tree.num_nodes.tolist(), strict=True)
    ):
        order, paths = depth_first(parents[:size])
        rows[row, order] = start[row] + nodes[:size]
        # A node is on the first path that it is part of.
        for number, path in reversed(list(enumerate(paths))):
            branch[row, path] = number
        of_trees.append(paths)
    return Paths(is_node, rows, branch, of_trees)


def depth_first(parents: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Walk down a tree, older siblings first.

    Args:
        parents: of its nodes, -1 at the root.

    Returns:
        the nodes in the order of the walk; the nodes of each path, root to leaf.

    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    order, paths, waiting = [], [], [[0]]
    while waiting:
        path = waiting.pop()
        order.append(path[-1])
        below = children[path[-1]]
        if not below:
            paths.append(path)
        waiting += [[*path, child] for child in reversed(below)]
    return order, paths


def find_sequences(
    paths: Paths, reqs: np.ndarray, query_start: np.ndarray, context: np.ndarray
) -> CausalSequences:
    """Make one sequence a path, and one a request without a tree.

    Args:
        paths: of the trees.
        reqs: int64 [num_trees], the trees' requests.
        query_start: int64 [num_reqs + 1].
        context: int64 [num_reqs].

    """
    num_seqs = np.ones_like(context)
    num_seqs[reqs] = [len(of_tree) for of_tree in paths.of_trees]
    req = np.arange(len(context)).repeat(num_seqs)
    query_end = query_start[1:][req]
    lens = (context + np.diff(query_start))[req]
    first = (num_seqs.cumsum() - num_seqs)[reqs]
    for tree, of_tree in enumerate(paths.of_trees):
        seqs = slice(first[tree], first[tree] + len(of_tree))
        query_end[seqs] = paths.rows[tree, [path[-1] for path in of_tree]] + 1
        lens[seqs] = context[reqs[tree]] + [len(path) for path in of_tree]
    return CausalSequences(query_end, lens, req, first)


def find_forks(
    paths: Paths,
    reqs: np.ndarray,
    sequences: CausalSequences,
    context: np.ndarray,
    start: np.ndarray,
    num_rows: int,
) -> Forks:
    """Find the paths after the first ones, and what is written where.

    Rows without a tree and nodes on first paths go to their requests' own slots. A
    node goes to every fork whose path it lies on.
    """
    is_plain = np.ones(num_rows, dtype=bool)
    is_plain[paths.rows[paths.is_node]] = False
    plain_rows = np.flatnonzero(is_plain)
    own_rows, own_places = [plain_rows], [plain_rows]
    forked, fork_rows = [], []
    for tree, (first, *others) in enumerate(paths.of_trees):
        own_rows.append(paths.rows[tree, first])
        own_places.append(start[tree] + np.arange(len(first)))
        forked += [(tree, fork, len(path)) for fork, path in enumerate(others)]
        fork_rows += [paths.rows[tree, path] for path in others]
    numbers = np.array(forked, dtype=np.int64).reshape(-1, 3)
    tree_of, fork, lens = numbers.T
    which = np.arange(len(lens)).repeat(lens)
    depth = np.arange(len(which)) - (lens.cumsum() - lens)[which]
    req = reqs[tree_of]
    return Forks(
        tree=tree_of,
        fork=fork,
        seq=sequences.first[tree_of] + fork + 1,
        req=req,
        context=context[req],
        write_rows=np.concatenate([*own_rows, *fork_rows]),
        own_places=np.concatenate(own_places),
        write_fork=which,
        write_depth=depth,
    )


def write_slots(forks: Forks, blocks: GroupBlocks, space: ForkSpace) -> np.ndarray:
    """Slots of a group that ``forks.write_rows`` go to, int64 [num_writes]."""
    which = forks.write_fork
    fork_slots = space.slot(
        forks.context[which], forks.write_depth, forks.tree[which], forks.fork[which]
    )
    return np.append(blocks.slot_mapping.numpy()[forks.own_places], fork_slots)


def tail_copies(
    forks: Forks, blocks: GroupBlocks, space: ForkSpace
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of a group to copy so that forks begin with their contexts' ends.

    Returns:
        source and destination blocks, int64 [num_copies].

    """
    table = blocks.block_table.numpy()
    tail = table[forks.req, forks.context // space.block_size].astype(np.int64)
    partly_filled = forks.context % space.block_size != 0
    fork_blocks = space.block(forks.tree, forks.fork, 0)
    return tail[partly_filled], fork_blocks[partly_filled]


def fork_block_table(
    block_table: Tensor,
    rows: Tensor,
    first_column: Tensor,
    tree: Tensor,
    fork: Tensor,
    forks: ForkSpace,
) -> Tensor:
    """Point the given rows of a block table at fork blocks from a column on.

    Columns past the table are left out: no position of a request lies there.

    Returns:
        int32 [num_seqs, max_blocks], a new table.

    """
    width = block_table.shape[1]
    index = torch.arange(forks.blocks_per_fork, device=rows.device)
    blocks = forks.block(tree[:, None], fork[:, None], index)
    wider = torch.nn.functional.pad(block_table, (0, forks.blocks_per_fork))
    wider[rows[:, None], first_column[:, None] + index] = blocks.to(wider.dtype)
    return wider[:, :width].contiguous()


def commit_copies(
    plan: BranchPlan,
    last_node: Tensor,
    last_depth: Tensor,
    tree_reqs: Tensor,
    batch: PagedBatch,
    spaces: Sequence[ForkSpace],
) -> list[tuple[Tensor, Tensor]]:
    """Blocks to copy so that the accepted paths end up in their requests' own slots.

    Args:
        plan: of the step, of any group.
        last_node: int64 [num_trees], deepest accepted node.
        last_depth: int64 [num_trees], its depth.
        tree_reqs: int64 [num_trees].
        batch: of the step.
        spaces: where the fork blocks of each group lie.

    Returns:
        source and destination blocks of each group, int64 [num_copies].

    """
    reqs, deepest = tree_reqs.numpy(), last_node.numpy()
    branch = plan.node_branch.numpy()[np.arange(len(deepest)), deepest]
    context = batch.context_lens.numpy().astype(np.int64)[reqs]
    first = context // spaces[0].block_size
    last = (context + last_depth.numpy()) // spaces[0].block_size
    index = np.arange(spaces[0].blocks_per_fork)
    moved = (branch > 0)[:, None] & (first[:, None] + index <= last[:, None])
    tree, index = moved.nonzero()
    fork, req, column = branch[tree] - 1, reqs[tree], first[tree] + index
    copies = []
    for blocks, space in zip(batch.groups, spaces, strict=True):
        sources = torch.from_numpy(space.block(tree, fork, index))
        targets = blocks.block_table.numpy()[req, column].astype(np.int64)
        copies.append((sources, torch.from_numpy(targets)))
    return copies
