"""Drafts whose logits are there before any token is drafted, and what they leave over.

A *chain* holds one row of logits a level below its root. What a drafted token says
about its children is added to its level's row. So a level that was not needed can be
drafted from again, below another root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.host_copies import on_device
from vllm_treespec.sources.base import ModelSource, Roots

Resample = Literal["off", "replace", "merge"]
# From tokens, int64 [...], to what they add to the logits of their children,
# [..., draft_vocab_size].
Info = Callable[[Tensor], Tensor]


class ChainDraft:
    """Trees below chains; a ``DraftModel`` that reads nothing.

    Attributes:
        levels_left: int64 [num_reqs], levels that there are below each root; None: as
            many as the trees may have.
        reused: bool [num_reqs], whose chain is an earlier step's; None: nobody's.
        leftover: the requests' chains of the step before, to be drafted from as well.

    """

    def __init__(
        self,
        logits: Tensor,
        info: Info,
        root_token_ids: Tensor,
        vocabulary: Tensor | None = None,
        first: Tensor | None = None,
        reused: Tensor | None = None,
        leftover: ChainDraft | None = None,
    ) -> None:
        """Take the chains.

        Args:
            logits: [num_reqs, num_levels, draft_vocab_size].
            info: what tokens add to their children's logits.
            root_token_ids: int64 [num_reqs].
            vocabulary: see ``DraftModel``.
            first: int64 [num_reqs], levels that lie above the roots; None: none do.
            reused: bool [num_reqs].
            leftover: of the same requests.

        """
        self.logits = logits
        self.info = info
        self.root_token_ids = root_token_ids
        self.vocabulary = vocabulary
        self.first = first
        self.reused = reused
        self.leftover = leftover
        self.levels_left = None if first is None else logits.shape[1] - first
        self.depth = 0

    def root_logits(self) -> Tensor:
        """Logits below the roots, [num_reqs, draft_vocab_size]."""
        return self._level() + self.info(self.root_token_ids)

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Logits below a level, whatever its parents; see ``DraftModel.extend``."""
        self.depth += 1
        return self._level()[:, None] + self.info(token_ids)

    def _level(self) -> Tensor:
        """The rows of the level that comes next; any row where there is none."""
        if self.first is None:
            return self.logits[:, self.depth]
        level = (self.first + self.depth).clamp(max=self.logits.shape[1] - 1)
        reqs = torch.arange(len(level), device=level.device)
        return self.logits[reqs, level]


@dataclass(frozen=True)
class Chains:
    """The chains that trees were begun with in one step."""

    # int64 [n], on the host; see ``RequestSlots``
    slots: np.ndarray
    # int64 [n], on the host, levels that lay above the roots
    first: np.ndarray
    # [n, num_levels, draft_vocab_size]
    logits: Tensor


@dataclass(frozen=True)
class Leftovers:
    """What the last step's chains have left for some requests, on the host."""

    # int64 [n], rows of the last step's chains; 0 where nothing is left
    rows: np.ndarray
    # int64 [n], levels that are used up; all of them where nothing is left
    first: np.ndarray
    # bool [n], where something is left
    some: np.ndarray


class ChainMemory:
    """Keeps the chains of the last step, and begins the trees of the next one.

    Of a tree of which ``a`` drafts were accepted, the levels up to ``a + 1`` are used
    up: the token after the accepted ones, the new root, belongs to the last of these.
    With ``"replace"`` a request of which enough levels are left drafts from them alone;
    with ``"merge"`` it drafts from a fresh chain, and from them beside it.
    """

    def __init__(self, resample: Resample, min_levels: int) -> None:
        """Begin without chains; fewer levels than ``min_levels`` are dropped."""
        self.resample = resample
        self.min_levels = min_levels
        self.last: Chains | None = None

    def drafts_unread(self, slots: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """Which requests need no fresh chain; see ``ModelSource``."""
        if self.resample != "replace":
            return np.zeros(len(slots), dtype=bool)
        return self._left(slots, accepted).some

    def begin(
        self,
        roots: Roots,
        fresh_logits: Callable[[np.ndarray], Tensor],
        info: Info,
        vocabulary: Tensor | None,
    ) -> ChainDraft:
        """Begin the trees of a step.

        Args:
            roots: the requests that draft.
            fresh_logits: runs chains of ``roots.depth`` levels for some of them, int64
                [n] on the host: to [n, roots.depth, draft_vocab_size].
            info: what tokens add to their children's logits.
            vocabulary: see ``DraftModel``.

        """
        every = np.arange(len(roots.slots))
        token_ids = roots.root_token_ids
        if self.resample == "off":
            return ChainDraft(fresh_logits(every), info, token_ids, vocabulary)
        last, left = self.last, self._left(roots.slots, roots.accepted)
        if last is not None and left.some.any():
            if self.resample == "replace":
                return self._replace(roots, last, left, fresh_logits, info, vocabulary)
            rows, first = _on_device(np.stack([left.rows, left.first]), token_ids)
            leftover = ChainDraft(last.logits[rows], info, token_ids, vocabulary, first)
        else:
            leftover = None
        logits = fresh_logits(every)
        self.last = Chains(roots.slots, np.zeros_like(every), logits)
        return ChainDraft(logits, info, token_ids, vocabulary, leftover=leftover)

    def _replace(
        self,
        roots: Roots,
        last: Chains,
        left: Leftovers,
        fresh_logits: Callable[[np.ndarray], Tensor],
        info: Info,
        vocabulary: Tensor | None,
    ) -> ChainDraft:
        """Begin with what is left, and with fresh chains where nothing is."""
        token_ids = roots.root_token_ids
        reqs, first = np.flatnonzero(left.some), left.first
        fresh = np.flatnonzero(~left.some)
        rows, places = _on_device(np.stack([left.rows[reqs], reqs]), token_ids)
        logits = last.logits[rows]
        if len(fresh):
            # Chains of fewer levels end with the longest: their first levels are
            # called used up.
            new = fresh_logits(fresh)
            num_levels = max(last.logits.shape[1], roots.depth)
            logits = logits.new_zeros((len(left.some), num_levels, new.shape[2]))
            logits[places, -last.logits.shape[1] :] = last.logits[rows]
            (new_places,) = _on_device(fresh[None], token_ids)
            logits[new_places, -roots.depth :] = new
            longer = num_levels - last.logits.shape[1]
            first = np.where(left.some, first + longer, num_levels - roots.depth)
        self.last = Chains(roots.slots, first, logits)
        on_device = _on_device(np.stack([first, left.some]), token_ids)
        return ChainDraft(
            logits, info, token_ids, vocabulary, on_device[0], on_device[1].bool()
        )

    def _left(self, slots: np.ndarray, accepted: np.ndarray) -> Leftovers:
        """What is left for requests in these slots; see ``Roots.accepted``."""
        last = self.last
        nothing = np.zeros(len(slots), dtype=np.int64)
        if last is None or not len(last.slots):
            return Leftovers(nothing, nothing, nothing.astype(bool))
        row_of = np.full(1 + max(slots.max(initial=0), last.slots.max()), -1)
        row_of[last.slots] = np.arange(len(last.slots))
        rows = row_of[slots]
        first = last.first[rows] + accepted + 1
        num_levels = last.logits.shape[1]
        some = (rows >= 0) & (accepted >= 0)
        some &= num_levels - first >= self.min_levels
        return Leftovers(
            np.where(some, rows, 0), np.where(some, first, num_levels), some
        )


class ReusingSource(ModelSource):
    """A source of chains, which may draft from what its last ones left over."""

    memory: ChainMemory

    def drafts_unread(self, slots: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """Which requests need no fresh chain; see ``ModelSource``."""
        return self.memory.drafts_unread(slots, accepted)


def _on_device(numbers: np.ndarray, like: Tensor) -> Tensor:
    """Rows of whole numbers, int64, on the device of ``like``."""
    return on_device(numbers.astype(np.int64), like.device)
