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

import torch
from torch import Tensor

from vllm_treespec.core.tree import TreeBatch, ancestor_mask, first_child, preorder
from vllm_treespec.core.views import GroupBlocks, PagedBatch
from vllm_treespec.layouts.base import ForkSpace


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
    is_node: Tensor
    # bool [num_trees, max_nodes, max_nodes], see ``ancestor_mask``
    ancestors: Tensor
    # int64 [num_trees, max_nodes]: place of each node in the batch, and the path that
    # it ends or extends
    rows: Tensor
    branch: Tensor
    # int64 [num_leaves]
    leaf_tree: Tensor
    leaf_node: Tensor
    leaf_branch: Tensor


@dataclass(frozen=True)
class Forks:
    """The paths that need fork blocks, and what is written where: in every group."""

    # int64 [num_forks]: tree of each path and which fork of the tree it gets, its
    # sequence, its request, and the request's tokens whose KV is in the cache
    tree: Tensor
    fork: Tensor
    seq: Tensor
    req: Tensor
    context: Tensor
    # int64 [num_writes]: rows whose key and value are written
    write_rows: Tensor
    # int64 [num_own]: where the slot mapping names the slots of the first of them,
    # which go to their requests' own slots
    own_places: Tensor
    # int64 [num_writes - num_own]: fork that the others go to, and their depth on it
    write_fork: Tensor
    write_depth: Tensor


def plan_branches(
    tree: TreeBatch, tree_reqs: Tensor, batch: PagedBatch, spaces: Sequence[ForkSpace]
) -> list[BranchPlan]:
    """Rewrite a batch in which some requests carry trees, one plan for each group.

    Args:
        tree: as many nodes per request as it has query tokens.
        tree_reqs: int64 [num_trees], the requests of the trees, ascending.
        batch: as the engine laid it out.
        spaces: where the fork blocks of each group lie.

    """
    start = batch.query_start_loc[tree_reqs]
    paths = find_paths(tree, start)
    num_rows = batch.groups[0].slot_mapping.shape[0]
    row_order = torch.arange(num_rows, device=start.device)
    nodes = torch.arange(tree.max_nodes, device=start.device).expand_as(paths.rows)
    row_order[paths.rows[paths.is_node]] = (start[:, None] + nodes)[paths.is_node]

    seq_end, seq_lens, leaf_seq, req_of_seq = plan_sequences(
        tree, tree_reqs, batch, paths
    )
    query_start_loc = torch.nn.functional.pad(seq_end, (1, 0)).int()
    seq_lens = seq_lens.int()
    forks = find_forks(tree, tree_reqs, batch, paths, leaf_seq, num_rows)
    plans = []
    for blocks, space in zip(batch.groups, spaces, strict=True):
        copy_from, copy_to = tail_copies(forks, blocks, space)
        plans.append(
            BranchPlan(
                row_order=row_order,
                node_rows=paths.rows,
                node_branch=paths.branch,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=fork_block_table(
                    blocks.block_table[req_of_seq],
                    forks.seq,
                    forks.context // space.block_size,
                    forks.tree,
                    forks.fork,
                    space,
                ),
                write_rows=forks.write_rows,
                write_slots=write_slots(forks, blocks, space),
                copy_from=copy_from,
                copy_to=copy_to,
            )
        )
    return plans


def find_paths(tree: TreeBatch, start: Tensor) -> Paths:
    """Order each tree's nodes depth first, from ``start``, int64 [num_trees], on."""
    is_node = tree.is_node()
    ancestors = ancestor_mask(tree)
    rank = preorder(tree, ancestors)
    is_leaf = is_node & (first_child(tree) < 0)
    leaf_at_rank = torch.zeros_like(is_leaf).scatter(1, rank, is_leaf)
    leaves_before = leaf_at_rank.long().cumsum(1) - leaf_at_rank.long()
    branch = leaves_before.gather(1, rank)
    leaf_tree, leaf_node = is_leaf.nonzero(as_tuple=True)
    return Paths(
        is_node=is_node,
        ancestors=ancestors,
        rows=start[:, None] + rank,
        branch=branch,
        leaf_tree=leaf_tree,
        leaf_node=leaf_node,
        leaf_branch=branch[leaf_tree, leaf_node],
    )


def plan_sequences(
    tree: TreeBatch, tree_reqs: Tensor, batch: PagedBatch, paths: Paths
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make one sequence a path, and one a request without a tree.

    Returns:
        end of each sequence's query and its length, int64 [num_seqs]; the sequence of
        each leaf, int64 [num_leaves]; the request of each sequence, int64 [num_seqs].

    """
    reqs = torch.arange(len(batch.context_lens), device=tree_reqs.device)
    num_seqs = torch.ones_like(reqs)
    num_seqs[tree_reqs] = torch.bincount(paths.leaf_tree, minlength=tree.num_reqs)
    first_seq = num_seqs.cumsum(0) - num_seqs
    req_of_seq = reqs.repeat_interleave(num_seqs)
    seq_end = batch.query_start_loc[1:].repeat_interleave(num_seqs)
    seq_lens = (batch.context_lens + batch.query_start_loc.diff())[req_of_seq]

    leaf_req = tree_reqs[paths.leaf_tree]
    leaf_seq = first_seq[leaf_req] + paths.leaf_branch
    leaf_depth = tree.depths[paths.leaf_tree, paths.leaf_node]
    seq_end[leaf_seq] = paths.rows[paths.leaf_tree, paths.leaf_node] + 1
    seq_lens[leaf_seq] = batch.context_lens[leaf_req] + leaf_depth + 1
    return seq_end, seq_lens, leaf_seq, req_of_seq


def find_forks(
    tree: TreeBatch,
    tree_reqs: Tensor,
    batch: PagedBatch,
    paths: Paths,
    leaf_seq: Tensor,
    num_rows: int,
) -> Forks:
    """Find the paths after the first ones, and what is written where.

    Rows without a tree and nodes on first paths go to their requests' own slots. A
    node goes to every fork whose path it lies on.
    """
    start = batch.query_start_loc[tree_reqs]
    own = paths.is_node & (paths.branch == 0)
    plain = torch.ones(num_rows, dtype=torch.bool, device=start.device)
    plain[paths.rows[paths.is_node]] = False
    plain_rows = plain.nonzero()[:, 0]

    forked = paths.leaf_branch > 0
    fork_tree = paths.leaf_tree[forked]
    on_fork = paths.ancestors[fork_tree, paths.leaf_node[forked]]
    which, node = (on_fork & paths.is_node[fork_tree]).nonzero(as_tuple=True)
    fork_req = tree_reqs[fork_tree]
    fork_rows = paths.rows[fork_tree[which], node]
    return Forks(
        tree=fork_tree,
        fork=paths.leaf_branch[forked] - 1,
        seq=leaf_seq[forked],
        req=fork_req,
        context=batch.context_lens[fork_req],
        write_rows=torch.cat([plain_rows, paths.rows[own], fork_rows]),
        own_places=torch.cat([plain_rows, (start[:, None] + tree.depths)[own]]),
        write_fork=which,
        write_depth=tree.depths[fork_tree[which], node],
    )


def write_slots(forks: Forks, blocks: GroupBlocks, space: ForkSpace) -> Tensor:
    """Slots of a group that ``forks.write_rows`` go to, int64 [num_writes]."""
    which = forks.write_fork
    fork_slots = space.slot(
        forks.context[which], forks.write_depth, forks.tree[which], forks.fork[which]
    )
    return torch.cat([blocks.slot_mapping[forks.own_places], fork_slots])


def tail_copies(
    forks: Forks, blocks: GroupBlocks, space: ForkSpace
) -> tuple[Tensor, Tensor]:
    """Blocks of a group to copy so that forks begin with their contexts' ends.

    Returns:
        source and destination blocks, int64 [num_copies].

    """
    tail = blocks.block_table[forks.req, forks.context // space.block_size]
    partly_filled = forks.context % space.block_size != 0
    fork_blocks = space.block(forks.tree, forks.fork, 0)
    return tail[partly_filled].long(), fork_blocks[partly_filled]


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
    trees = torch.arange(last_node.shape[0], device=last_node.device)
    branch = plan.node_branch[trees, last_node]
    context = batch.context_lens[tree_reqs]
    first = context // spaces[0].block_size
    last = (context + last_depth) // spaces[0].block_size
    index = torch.arange(spaces[0].blocks_per_fork, device=last_node.device)
    moved = (branch > 0)[:, None] & (first[:, None] + index <= last[:, None])
    tree, index = moved.nonzero(as_tuple=True)
    fork, req, column = branch[tree] - 1, tree_reqs[tree], first[tree] + index
    return [
        (space.block(tree, fork, index), blocks.block_table[req, column].long())
        for blocks, space in zip(batch.groups, spaces, strict=True)
    ]
