"""What the decoder sees of an engine's step: small frozen views, torch and NumPy only.

Requests are numbered by their place in the batch of the step. A request also has a
*slot*, a number that stays its own from its arrival to its end (see ``requests.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sampling.penalties import PenaltyView
from vllm_treespec.sampling.texts import TextView

GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class ScheduledBatch:
    """The requests of a step before the target's forward, on the host."""

    # int64 [num_reqs]
    slots: np.ndarray
    # int64 [num_reqs], tokens whose KV is in the cache
    num_computed: np.ndarray
    # int64 [num_reqs], tokens of this step, drafts and filling included
    num_scheduled: np.ndarray
    # int64 [num_reqs], how many of them are drafts
    num_drafts: np.ndarray
    # int64 [sum of num_drafts], the drafts, request after request
    draft_token_ids: np.ndarray
    # int64 [num_reqs], tokens that the scheduler had room for, see ``scheduler_room``
    room: np.ndarray
    # int64 [num_reqs], rows of logits: the root's, the drafts', and those that fill a
    # batch up to a CUDA graph's, which nothing reads
    num_rows: np.ndarray

    @cached_property
    def root_rows(self) -> np.ndarray:
        """Row of each request's root among the logits, int64 [num_reqs]."""
        return np.cumsum(self.num_rows) - self.num_rows

    @cached_property
    def root_positions(self) -> np.ndarray:
        """Position of the last token before the drafts, int64 [num_reqs]."""
        return self.num_computed + self.num_scheduled - self.num_rows

    @cached_property
    def query_starts(self) -> np.ndarray:
        """First query row of each request, int64 [num_reqs]."""
        return np.cumsum(self.num_scheduled) - self.num_scheduled

    @cached_property
    def only_decodes(self) -> bool:
        """Whether no request reads more than its last token and drafts."""
        return np.array_equal(self.num_scheduled, self.num_rows)


@dataclass(frozen=True)
class GroupBlocks:
    """Where one KV cache group keeps the batch: layers of a group share blocks."""

    # int32 [num_reqs, max_blocks]. Blocks before a window are freed; their columns
    # name block 0. Those from ``context_lens`` on are always there.
    block_table: Tensor
    # int64 [num_tokens]
    slot_mapping: Tensor


@dataclass(frozen=True)
class PagedBatch:
    """How the batch lies in the paged KV cache, on the device.

    A request's query tokens lie at ``query_start_loc[r]`` and following; the first of
    them has position ``context_lens[r]``.
    """

    # int [num_reqs + 1]
    query_start_loc: Tensor
    # int [num_reqs], tokens whose KV is already in the cache
    context_lens: Tensor
    # one a KV cache group; that of draft models or heads with KV of their own first
    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True)
class TargetInputs:
    """The inputs of the target's forward, as if all drafts were chains.

    A layout brings nodes into place by changing ``input_ids``, ``logits_indices`` and
    positions.
    """

    # int [num_tokens]
    input_ids: Tensor
    # int64 [..., at least num_tokens] each. A target whose positions have several axes
    # (M-RoPE) has a second tensor, with the axes in front: behind an image they run
    # from another number than the tokens before.
    positions: tuple[Tensor, ...]
    # int [num_rows], the query row that each row of the logits is taken from
    logits_indices: Tensor
    batch: PagedBatch

    def place_nodes(self, rows: Tensor, roots: Tensor, depths: Tensor) -> None:
        """Give the nodes of trees the positions of their depths, on every axis.

        Args:
            rows: int64 [num_nodes], query rows of the nodes.
            roots: int64 [num_nodes], those of their trees' roots.
            depths: int64 [num_nodes].

        """
        for positions in self.positions:
            positions[..., rows] = positions[..., roots] + depths


@dataclass(frozen=True)
class SamplingView:
    """Sampling parameters of the requests of a batch."""

    # float32 [num_reqs], on the host
    host_temperature: np.ndarray
    # float32 [num_reqs], or None when all requests are greedy
    temperature: Tensor | None
    # int [num_reqs], or None when no request limits it
    top_k: Tensor | None
    # float32 [num_reqs], or None when no request limits it
    top_p: Tensor | None
    texts: TextView
    # None when no request has any
    penalties: PenaltyView | None = None

    @property
    def likeliest_only(self) -> bool:
        """Whether every request takes the target's own likeliest token."""
        return self.temperature is None and self.penalties is None

    def select(self, host_reqs: np.ndarray, reqs: Tensor) -> SamplingTensors:
        """Return the parameters of some requests.

        Args:
            host_reqs: int64 [n], their places in the batch.
            reqs: the same on the device.

        """
        greedy = self.host_temperature[host_reqs] < GREEDY_BELOW
        if greedy.all():
            return SamplingTensors(
                torch.zeros(len(reqs), device=reqs.device), all_greedy=True
            )
        assert self.temperature is not None
        temperature = self.temperature[reqs]
        return SamplingTensors(
            temperature=temperature.masked_fill(temperature < GREEDY_BELOW, 0.0),
            top_k=None if self.top_k is None else self.top_k[reqs].long(),
            top_p=None if self.top_p is None else self.top_p[reqs],
            all_random=not greedy.any(),
        )


@dataclass(frozen=True)
class BlockTables:
    """The blocks of the requests of a batch, in the first KV cache group."""

    # int32 [num_reqs, max_blocks], on the host and on the device
    host_table: np.ndarray
    device_table: Tensor
    # int [num_reqs], filled columns
    num_blocks: np.ndarray


@dataclass(frozen=True)
class HiddenStates:
    """The target's hidden states of a step, on the device."""

    # [num_rows, hidden_size], after the last layer, by row of the logits
    sampled: Tensor
    # layer -> [num_tokens, hidden_size], by query row; before that layer, or behind the
    # final norm (``sources.base.FINAL_LAYER``)
    by_layer: dict[int, Tensor]


@dataclass(frozen=True)
class EmittedBatch:
    """The requests of a step after their new tokens were emitted."""

    # int64 [num_reqs], on the host: see ``ScheduledBatch``
    slots: np.ndarray
    num_computed: np.ndarray
    num_scheduled: np.ndarray
    # int64 [num_reqs], tokens emitted in this step; 0 where a prompt is not complete
    num_emitted: np.ndarray
    # int64 [num_reqs], committed tokens, new ones included
    num_tokens: np.ndarray
    # int [num_reqs, max_len], committed tokens by position, on the host
    token_ids: np.ndarray
    sampling: SamplingView
    blocks: BlockTables
    hidden: HiddenStates

    @property
    def num_reqs(self) -> int:
        """Number of requests."""
        return len(self.slots)

    @cached_property
    def emitted(self) -> np.ndarray:
        """Which requests emitted tokens, bool [num_reqs]."""
        return self.num_emitted > 0

    @cached_property
    def end(self) -> np.ndarray:
        """How far the target has computed, int64 [num_reqs], exclusive.

        Where tokens were emitted that is the position of the new root.
        """
        chunk_end = self.num_computed + self.num_scheduled
        return np.where(self.emitted, self.num_tokens - 1, chunk_end)

    def texts(self, reqs: np.ndarray) -> list[np.ndarray]:
        """Committed tokens of requests that emitted some, their new roots included.

        Args:
            reqs: int64 [n].

        """
        ends = (1 + self.end[reqs]).tolist()
        return [
            self.token_ids[req, :end]
            for req, end in zip(reqs.tolist(), ends, strict=True)
        ]


def scheduler_room(
    num_scheduled: np.ndarray,
    num_computed: np.ndarray,
    token_budget: int | None,
    max_model_len: int,
) -> np.ndarray:
    """How many tokens the scheduler had room for, by request.

    A draw that repeats a token adds no node. Whether a draw counts must not depend on
    that. So a tree that comes back whole is cut, too: to the tokens for which there was
    room.

    Args:
        num_scheduled: int64 [num_reqs], in the order in which requests were scheduled.
        num_computed: int64 [num_reqs], in the same order.
        token_budget: tokens a step may have; None: not known.
        max_model_len: most tokens of a request.

    Returns:
        int64 [num_reqs]; 0 where it is not known.

    """
    if token_budget is None:
        return np.zeros_like(num_scheduled)
    left = token_budget - (np.cumsum(num_scheduled) - num_scheduled)
    return np.minimum(left, max_model_len - 1 - num_computed)


def ragged_rows(flat: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """Pad rows that lie one after another, int64 [len(counts), width], with -1.

    ``ragged_rows([7, 8, 9], [2, 0, 1], 2)`` is ``[[7, 8], [-1, -1], [9, -1]]``.
    """
    rows = np.full((len(counts), width), -1, dtype=np.int64)
    rows[np.arange(width) < counts[:, None]] = flat
    return rows


def cut_rows(rows: np.ndarray, counts: Sequence[int]) -> list[list[int]]:
    """Take the first entries of every row as lists, as many as ``counts`` says."""
    return [row[:n] for row, n in zip(rows.tolist(), counts, strict=True)]
