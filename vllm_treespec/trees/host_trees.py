"""Trees that the host makes node by node: an index's, and those of two sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vllm_treespec.host_copies import on_device
from vllm_treespec.trees.draft import Draft, HostDraft, HostMade
from vllm_treespec.trees.source import Source
from vllm_treespec.trees.tree import NO_NODE, TreeBatch


class DraftNode(NamedTuple):
    """A draft node of a tree."""

    token: int
    # node number, 0 is the root
    parent: int
    depth: int
    # see ``Draft``
    claim: float
    # bits of ``Source``; 0: the method has one source
    source: int = 0


# The draft nodes of a tree in level order, siblings side by side.
DraftNodes = Sequence[DraftNode]


def nodes_on_host(draft: Draft, source: int = 0) -> list[list[DraftNode]]:
    """The nodes of trees that claim something; the host waits for the device once.

    Claims of rounded numbers that rise below a node are as high as its own.

    Args:
        draft: whose nodes have no sources of their own.
        source: of all of them.

    """
    read = draft.on_host()
    assert read.claims is not None
    trees: list[list[DraftNode]] = []
    columns = read.token_ids.tolist(), read.parents.tolist(), read.claims.tolist()
    for num_nodes, *of_tree in zip(read.num_nodes.tolist(), *columns, strict=True):
        tree = [DraftNode(0, NO_NODE, 0, math.inf)]
        for token, parent, claim in zip(*of_tree, strict=True):
            if len(tree) == num_nodes:
                break
            above = tree[parent]
            most = min(claim, above.claim)
            tree.append(DraftNode(token, parent, above.depth + 1, most, source))
        trees.append(tree[1:])
    return trees


def num_leaves(tree: DraftNodes) -> int:
    """Draft nodes without children."""
    return len(tree) + 1 - len({0, *(node.parent for node in tree)})


def subtree(tree: DraftNodes, nodes: Sequence[int]) -> list[DraftNode]:
    """Some nodes of a tree, ascending, and with each its parent."""
    number = {0: 0} | {node: new for new, node in enumerate(nodes, start=1)}
    drafts = [tree[node - 1] for node in nodes]
    return [draft._replace(parent=number[draft.parent]) for draft in drafts]


class MergedTree:
    """Several trees of one root, of which equal paths are one."""

    def __init__(self) -> None:
        """Begin with the root."""
        # nodes as they were found, the root first; token -> node of their children
        self.nodes = [DraftNode(0, NO_NODE, 0, 0.0)]
        self.children: list[dict[int, int]] = [{}]

    def add(self, tree: DraftNodes, places: int) -> None:
        """Add a tree; of nodes that are new as many as there are places for.

        These are those of the highest claims, among equals the earlier ones. A node
        claims no more than its parent. One that is not new keeps its claim.
        """
        # node of the tree -> merged node
        numbers = {0: 0}
        for node in sorted(range(1, 1 + len(tree)), key=lambda n: -tree[n - 1].claim):
            draft = tree[node - 1]
            if draft.parent not in numbers:
                continue
            siblings = self.children[numbers[draft.parent]]
            if draft.token not in siblings:
                if places <= 0:
                    continue
                places -= 1
                siblings[draft.token] = len(self.nodes)
                self.nodes.append(draft)
                self.children.append({})
            number = numbers[node] = siblings[draft.token]
            found = self.nodes[number]
            self.nodes[number] = found._replace(source=found.source | draft.source)

    def in_level_order(self) -> list[DraftNode]:
        """The draft nodes, children of one node as they were found."""
        drafts: list[DraftNode] = []
        order = [0]
        for parent, node in enumerate(order):
            below = self.children[node].values()
            order += below
            drafts += [self.nodes[child]._replace(parent=parent) for child in below]
        return drafts


def merge(one: DraftNodes, other: DraftNodes, places: int) -> list[DraftNode]:
    """Put two trees of one root together; equal paths become one.

    Siblings from ``one`` come first. A node of both has the claim of ``one``, and the
    sources of both. There are ``places`` for nodes of ``other`` alone.
    """
    merged = MergedTree()
    merged.add(one, len(one))
    merged.add(other, places)
    return merged.in_level_order()


def merge_drafts(
    trees: Sequence[DraftNodes],
    other: Draft,
    source: Source,
    places: Sequence[int],
    max_nodes: int,
) -> Draft:
    """Merge trees with those of a draft of the same roots, see ``merge``.

    The host waits for the device once, unless it made these.

    Args:
        trees: of each request.
        other: deterministic trees.
        source: of all their nodes.
        places: of each request.
        max_nodes: of a merged tree, its root included.

    """
    others = nodes_on_host(other, source)
    merged = [merge(*each) for each in zip(trees, others, places, strict=True)]
    roots = other.tree.token_ids[:, 0]
    return draft_of(merged, roots, max_nodes, other.levels)


def draft_of(
    trees: Sequence[DraftNodes],
    root_token_ids: Tensor,
    max_nodes: int,
    levels: int = 0,
    shadow: tuple[np.ndarray, np.ndarray] | None = None,
) -> Draft:
    """Bring trees to the device of their roots, in one copy.

    Args:
        trees: of each request.
        root_token_ids: int64 [num_reqs].
        max_nodes: of a tree, its root included.
        levels: that draft models read for them.
        shadow: tokens and claims of shadow drafts, see ``HostDraft``.

    """
    shape = (len(trees), max_nodes)
    tokens, depths, sources = np.zeros((3, *shape), dtype=np.int64)
    parents = np.full(shape, NO_NODE, dtype=np.int64)
    num_nodes = np.ones(len(trees), dtype=np.int64)
    claims = np.zeros(shape)
    for row, tree in enumerate(trees):
        num_nodes[row] = size = 1 + len(tree)
        if tree:
            given = zip(*tree, strict=True)
            parts = (tokens, parents, depths, claims, sources)
            for part, numbers in zip(parts, given, strict=True):
                part[row, 1:size] = numbers
    made = HostDraft(
        tokens[:, 1:],
        parents[:, 1:],
        num_nodes,
        claims[:, 1:],
        sources[:, 1:] if sources.any() else None,
        *(shadow or (None, None)),
    )
    host = np.hstack([tokens, parents, depths, num_nodes[:, None]])
    there = on_device(host, root_token_ids.device)
    widths = [max_nodes] * 3 + [1]
    token_ids, tree_parents, tree_depths, tree_sizes = there.split(widths, dim=1)
    token_ids[:, 0] = root_token_ids
    batch = TreeBatch(token_ids, tree_parents, tree_depths, tree_sizes[:, 0])
    return Draft(batch, levels=levels, host_made=HostMade(batch, made))
