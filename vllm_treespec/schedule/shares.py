"""How a tree's places are shared out between two parts, by what each brought lately."""

from __future__ import annotations

import numpy as np

from vllm_treespec.aids import Aid, aiding
from vllm_treespec.trees.source import Source

# What is left of the counts of earlier trees when another tree is counted.
DECAY = 0.8
# Draft nodes, and accepted ones, that each part of a new request is taken to have had.
FIRST_NODES, FIRST_ACCEPTED = 8.0, 2.0
# No part gets less of a tree, so that it can show what it brings.
LEAST_SHARE = 0.125
# Accepted nodes per draft node from which on the first part may draft alone.
SURE_RATE = 0.5


def count_by_source(sources: np.ndarray) -> np.ndarray:
    """Count nodes of an index, and of a model, those of both for both, int64 [2].

    Args:
        sources: int64 [n], bits of ``Source`` of each node.

    """
    bits = np.array([Source.INDEX, Source.MODEL])
    return np.asarray(((sources[:, None] & bits) > 0).sum(0))


class Shares:
    """Counts, request by request, how many nodes of each part were accepted.

    The first part is a suffix index, the second a draft model or a head. A node that
    both drafted counts for both. The shares depend on past steps and on committed
    tokens alone, so that they are the same on every rank.
    """

    def __init__(self, sure_match: int | None) -> None:
        """Take the match from which on an index may be sure; None: it never is."""
        self.sure_match = sure_match
        self.aid = Aid("Sharing trees between index and model", "each has one half")
        # slot -> float64 [2, 2]: draft nodes of each part, and accepted ones
        self._counts: dict[int, np.ndarray] = {}

    @aiding
    def observe(self, slot: int, num_nodes: np.ndarray, accepted: np.ndarray) -> None:
        """Count a scored tree.

        Args:
            slot: of its request.
            num_nodes: int64 [2], its draft nodes by part.
            accepted: int64 [2], how many of them were accepted.

        """
        counts = self._counts.get(slot, np.zeros((2, 2)))
        self._counts[slot] = DECAY * counts + np.stack([num_nodes, accepted])

    def first(self, slots: np.ndarray, matches: np.ndarray) -> np.ndarray:
        """Share of its tree's places that each request's first part gets.

        Args:
            slots: int64 [n].
            matches: int64 [n], how many last tokens the index found earlier.

        Returns:
            float64 [n], above 0. It is 1 where the index is sure: its match is long,
            and half of what it drafted lately was accepted.

        """
        halves = np.full(len(slots), 0.5)
        return self.aid.run(halves, self._first, slots, matches)

    def _first(self, slots: np.ndarray, matches: np.ndarray) -> np.ndarray:
        """The same by what was counted."""
        rates = self._rates(slots)
        share = rates[:, 0] / rates.sum(axis=1)
        share = share.clip(LEAST_SHARE, 1 - LEAST_SHARE)
        if self.sure_match is None:
            return share
        sure = (rates[:, 0] >= SURE_RATE) & (matches >= self.sure_match)
        return np.where(sure, 1.0, share)

    def finish_requests(self, slots: np.ndarray) -> None:
        """Forget the requests that ended, by their slots, int64 [n]."""
        for slot in slots.tolist():
            self._counts.pop(slot, None)

    def _rates(self, slots: np.ndarray) -> np.ndarray:
        """Accepted nodes per draft node of each part, float64 [n, 2]."""
        none = np.zeros((2, 2))
        counts = np.array([self._counts.get(slot, none) for slot in slots.tolist()])
        counts = counts.reshape(-1, 2, 2)
        return (counts[:, 1] + FIRST_ACCEPTED) / (counts[:, 0] + FIRST_NODES)
