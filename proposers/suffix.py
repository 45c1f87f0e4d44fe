"""Suffix: a tree of what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.core.tree import NO_NODE, TreeBatch
from vllm_treespec.proposers.base import Proposer, ProposerInputs, register_proposer

# Occurrences that one tree is made of: the longest, and of those the latest. Frequent
# tokens occur so often that only the latest places are compared any further.
MAX_OCCURRENCES = 32
MAX_PLACES = 1024
END = -1


def sizes(num_drafts: int, depth: int, max_match: int) -> TreeSizes:
    """Sizes of trees of at most ``num_drafts`` draft tokens in ``depth`` levels.

    No level is deeper than the longest match, ``max_match`` tokens.
    """
    return TreeSizes(
        max_nodes=1 + num_drafts,
        max_depth=min(depth, num_drafts, max_match),
        max_width=num_drafts,
        max_leaves=num_drafts,
    )


@register_proposer("suffix_tree")
class Suffix(Proposer):
    """Drafts what followed the last tokens earlier (after arXiv 2411.04975).

    Looked up are the request's prompt and output and, as far as they fit into
    ``max_cached_tokens``, the outputs of earlier requests, the latest first. An
    occurrence of the last n tokens is followed for at most n tokens. Nodes of longer
    occurrences come first, then those of more frequent ones. Without an occurrence
    the tree is the root alone. Nothing is random, and nothing depends on the
    sampling parameters.
    """

    num_draft_models = 0
    needs_token_ids = True

    def __init__(
        self, num_drafts: int, depth: int, max_match: int, max_cached_tokens: int
    ) -> None:
        """Take the tree's limits, the longest match and the cache's size."""
        self.num_drafts = num_drafts
        self.sizes = sizes(num_drafts, depth, max_match)
        self.max_match = max_match
        self.cache = OutputCache(max_cached_tokens)

    def propose(self, inputs: ProposerInputs) -> TreeBatch:
        """Grow one tree per request from its tokens; ``draws`` is None."""
        assert inputs.token_ids is not None
        assert inputs.num_tokens is not None
        token_ids = inputs.token_ids.cpu().numpy()
        shape = (len(token_ids), self.sizes.max_nodes)
        tokens = np.zeros(shape, dtype=np.int64)
        parents = np.full(shape, NO_NODE, dtype=np.int64)
        depths = np.zeros(shape, dtype=np.int64)
        num_nodes = np.ones(len(token_ids), dtype=np.int64)
        for row, num_tokens in enumerate(inputs.num_tokens.tolist()):
            text = token_ids[row, :num_tokens]
            if inputs.req_ids is not None:
                self.cache.read(inputs.req_ids[row], text)
            tree = grow_tree(self._continuations(text), self.num_drafts)
            tokens[row, 0] = text[-1]
            num_nodes[row] = size = 1 + len(tree)
            if tree:
                drafts = np.array(tree)
                tokens[row, 1:size] = drafts[:, 0]
                parents[row, 1:size] = drafts[:, 1]
                depths[row, 1:size] = drafts[:, 2]
        device = inputs.root_token_ids.device
        return TreeBatch(
            token_ids=torch.from_numpy(tokens).to(device),
            parents=torch.from_numpy(parents).to(device),
            depths=torch.from_numpy(depths).to(device),
            num_nodes=torch.from_numpy(num_nodes).to(device),
        )

    def forget(self, req_ids: Iterable[str]) -> None:
        """Let other requests draft from these requests' outputs from now on."""
        self.cache.close(req_ids)

    def _continuations(self, text: np.ndarray) -> list[tuple[int, list[int]]]:
        """What followed the best occurrences of the last tokens, best first.

        Returns:
            pairs of the length of the match and the tokens that followed it.

        """
        depth = self.sizes.max_depth
        found = occurrences(text, text, self.max_match, depth)
        found += occurrences(self.cache.text, text, self.max_match, depth)
        # Of equally long matches the request's own come first: a sort keeps order.
        found.sort(key=lambda pair: -pair[0])
        return found[:MAX_OCCURRENCES]


def occurrences(
    corpus: np.ndarray, text: np.ndarray, max_match: int, depth: int
) -> list[tuple[int, list[int]]]:
    """Find where the last tokens of ``text`` stand in ``corpus``, and what follows.

    Args:
        corpus: int64 [corpus_len]; ``END`` matches nothing and ends what follows.
        text: int64 [text_len], not empty.
        max_match: longest match that is told apart.
        depth: tokens to follow at most.

    Returns:
        pairs of the length of the match and of at most that many tokens after it;
        longest matches first, of equally long ones the latest first.

    """
    ends = 1 + np.flatnonzero(corpus[:-1] == text[-1])[-MAX_PLACES:]
    # of matches of 1, 2, ... tokens, where they end
    by_length = [ends]
    for length in range(1, min(max_match, len(text))):
        ends = ends[np.searchsorted(ends, length, side="right") :]
        ends = ends[corpus[ends - 1 - length] == text[-1 - length]]
        if not len(ends):
            break
        by_length.append(ends)
    longest: dict[int, int] = {}
    for length in range(len(by_length), 0, -1):
        for end in by_length[length - 1][: -MAX_OCCURRENCES - 1 : -1].tolist():
            longest.setdefault(end, length)
        if len(longest) >= MAX_OCCURRENCES:
            break
    found = []
    for end, length in longest.items():
        rest = corpus[end : end + min(length, depth)].tolist()
        if END in rest:
            rest = rest[: rest.index(END)]
        found.append((length, rest))
    return found[:MAX_OCCURRENCES]


def grow_tree(
    continuations: Sequence[tuple[int, list[int]]], num_drafts: int
) -> list[tuple[int, int, int]]:
    """Merge continuations into a tree and keep its best nodes.

    Args:
        continuations: pairs of the length of a match and the tokens after it, longest
            matches first.
        num_drafts: nodes to keep at most.

    Returns:
        token, parent and depth of each draft node in level order, siblings side by
        side and the best first.

    """
    number: dict[tuple[int, int], int] = {}
    # of node 0, the root, and then of the drafts in the order in which they came up
    parents, tokens, depths, longest, counts = [0], [0], [0], [0], [0]
    for length, rest in continuations:
        parent = 0
        for depth, token in enumerate(rest, start=1):
            node = number.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                parents.append(parent)
                tokens.append(token)
                depths.append(depth)
                longest.append(length)
                counts.append(0)
            counts[node] += length == longest[node]
            parent = node
    # No node ranks before its parent, so any number of the first ones is a tree.
    ranked = sorted(
        range(1, len(tokens)), key=lambda i: (-longest[i], -counts[i], depths[i])
    )
    children: dict[int, list[int]] = {}
    for node in ranked[:num_drafts]:
        children.setdefault(parents[node], []).append(node)
    drafts: list[tuple[int, int, int]] = []
    level_order = [0]
    for place, node in enumerate(level_order):
        for child in children.get(node, ()):
            level_order.append(child)
            drafts.append((tokens[child], place, depths[child]))
    return drafts


@dataclass
class Output:
    """What a running request has put out so far."""

    # of the request's tokens, prompt included
    num_read: int
    token_ids: list[int] = field(default_factory=list)


class OutputCache:
    """The latest outputs of finished requests, of bounded length.

    Attributes:
        text: int64 [at most max_tokens], output after output, each ended by ``END``.

    """

    def __init__(self, max_tokens: int) -> None:
        """Take the number of tokens to keep."""
        self.max_tokens = max_tokens
        self.text = np.empty(0, dtype=np.int64)
        self.running: dict[str, Output] = {}

    def read(self, req_id: str, text: np.ndarray) -> None:
        """Note a running request's new output; its output begins at its first root."""
        output = self.running.setdefault(req_id, Output(num_read=len(text) - 1))
        output.token_ids += text[output.num_read :].tolist()
        output.num_read = len(text)

    def close(self, req_ids: Iterable[str]) -> None:
        """Move the outputs of finished requests into ``text``."""
        # Every rank must get the same text, whatever order its set has.
        for req_id in sorted(req_ids):
            output = self.running.pop(req_id, None)
            if output is not None:
                text = np.concatenate([self.text, output.token_ids, [END]])
                self.text = text[max(0, len(text) - self.max_tokens) :]
