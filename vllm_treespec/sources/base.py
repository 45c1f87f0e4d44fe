"""What a draft source is, what it may read, and what it gets in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.sources.continuations import Continuations

# Stands for the target's hidden states behind its final norm.
FINAL_LAYER = -1


@dataclass(frozen=True)
class Reads:
    """What a model or head reads of a request; the decoder provides no more."""

    # the target's final hidden state from which a root was emitted (``Roots.hidden``)
    root_hidden: bool = False
    # hidden states of every committed token, before these layers of the target;
    # ``FINAL_LAYER`` stands for those behind its final norm
    features: tuple[int, ...] = ()
    # every committed token, into KV of its own (``ModelSource.read``)
    own_kv: bool = False
    # whether it may read a token in a later step than the target computes it; features
    # are at hand in that step only, so it keeps them (``ModelSource.keep``)
    catches_up: bool = False

    @property
    def every_token(self) -> bool:
        """Whether the source is handed all committed tokens, once each."""
        return self.own_kv or bool(self.features)


@dataclass(frozen=True)
class CommittedTokens:
    """Committed tokens that a source reads before it drafts.

    For each reading request the tokens from ``first`` to ``end`` (exclusive). A
    drafting request's root is the token at ``end``: the target has not computed it.
    """

    # int [batch size, max_len], tokens by position, on the host
    token_ids: np.ndarray
    # int64 [num_reading], rows of ``token_ids``
    reqs: np.ndarray
    # int64 [num_reading], see ``RequestSlots``
    slots: np.ndarray
    # int64 [num_reading]
    first: np.ndarray
    end: np.ndarray
    # int64 [num_drafting], which of the reading requests draft, ascending
    drafting: np.ndarray
    # int32 [num_reading, max_blocks], on the device and on the host, and the filled
    # columns, int [num_reading]
    block_table: Tensor
    host_table: np.ndarray
    num_blocks: np.ndarray
    # layer -> [sum of end - first, hidden_size], token after token, which the engine
    # may overwrite in the next step; empty for a source that catches up
    features: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenRows:
    """Tokens of requests; the device alone knows how many.

    Each request has equally many entries. Those behind its last token hold anything
    that can be read.
    """

    # int64 [num_reqs], tokens of each request, at least 1
    num_tokens: Tensor
    # int64 [num_reqs, width]
    positions: Tensor
    # int32 [num_reqs, max_blocks]
    block_table: Tensor

    @property
    def end(self) -> Tensor:
        """The position behind each request's last token, int64 [num_reqs]."""
        return self.positions[:, 0] + self.num_tokens

    def slots(self, block_size: int) -> Tensor:
        """KV slots of the tokens, -1 behind the last; [num_reqs, width]."""
        last_column = self.block_table.shape[1] - 1
        columns = (self.positions // block_size).clamp(max=last_column)
        blocks = self.block_table.gather(1, columns).long()
        slots = blocks * block_size + self.positions % block_size
        return slots.masked_fill(self.positions >= self.end[:, None], -1)

    def last(self, of_tokens: Tensor) -> Tensor:
        """What belongs to each request's last token, [num_reqs, size].

        Args:
            of_tokens: [num_reqs, width, size].

        """
        rows = (self.num_tokens - 1)[:, None, None].expand(-1, 1, of_tokens.shape[2])
        return of_tokens.gather(1, rows)[:, 0]


@dataclass(frozen=True)
class SampledTokens(TokenRows):
    """What a step committed of requests that decode, known to the device alone.

    A request committed its root and the accepted drafts.
    """

    # tokens of the step, int [num_rows], and the rows of committed ones, int64
    # [num_reqs, width]
    input_ids: Tensor
    rows: Tensor
    # int64 [num_reqs, width], the token behind each of them; the last one is the root
    # of the tree that comes next
    next_token_ids: Tensor
    # int [num_reqs], filled columns of the block table, on the host
    num_blocks: np.ndarray
    # layer -> [num_reqs, width, hidden_size], of the committed tokens
    features: dict[int, Tensor]
    # [num_reqs, hidden_size], the target's final one, from which the root was emitted,
    # if the source asks
    hidden: Tensor | None

    @property
    def root_token_ids(self) -> Tensor:
        """Next roots, int64 [num_reqs]."""
        return self.next_token_ids.gather(1, self.num_tokens[:, None] - 1)[:, 0]

    def with_roots(self, block_table: Tensor) -> tuple[Tensor, TokenRows]:
        """Committed tokens and the next root, and the same rows of them.

        Args:
            block_table: int32 [num_reqs, max_blocks], with the roots' blocks.

        Returns:
            int64 [num_reqs, 1 + width]; and what else is known of these.

        """
        first = self.input_ids[self.rows[:, :1]].long()
        token_ids = torch.cat([first, self.next_token_ids], dim=1)
        positions = torch.cat([self.positions, self.positions[:, -1:] + 1], dim=1)
        return token_ids, TokenRows(self.num_tokens + 1, positions, block_table)


@dataclass(frozen=True)
class Roots:
    """The requests that draft in a step."""

    # int64 [num_reqs], on the host; see ``RequestSlots``
    slots: np.ndarray
    # int64 [num_reqs], on the host and on the device
    positions: np.ndarray
    root_token_ids: Tensor
    # int64 [num_reqs], on the host: drafts accepted of the tree that came back in this
    # step, -1 where none did
    accepted: np.ndarray
    # levels of the trees that will be drawn, at most
    depth: int
    # [num_reqs, hidden_size], if the source asks
    hidden: Tensor | None = None


class DraftModel(Protocol):
    """Grows the trees of a step, one forward per level."""

    @property
    def vocabulary(self) -> Tensor | None:
        """Token of every column of the logits, int64 [draft_vocab_size], ascending.

        None stands for the target's whole vocabulary.
        """

    def root_logits(self) -> Tensor:
        """Logits after the committed tokens, [num_reqs, draft_vocab_size]."""

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level and return the logits after each of its nodes.

        Args:
            token_ids: int64 [num_reqs, width], of the target's vocabulary.
            parents: int64 [num_reqs, width], index within the level read before
                (0 for the level right below the root).

        Returns:
            [num_reqs, width, draft_vocab_size].

        """


class BlockDraftModel(DraftModel, Protocol):
    """A draft model that has read all levels; what it adds for a token is a sum."""

    @property
    def level_logits(self) -> Tensor:
        """Logits of all levels, [num_reqs, depth, draft_vocab_size].

        The first are those below the root. The others gain ``edges``.
        """

    @property
    def max_candidates(self) -> int:
        """How many tokens of a level may be drafted: those of the highest logits."""

    def edges(self, columns: Tensor, token_ids: Tensor) -> Tensor | None:
        """What the logits of candidates gain below each candidate of the level above.

        Args:
            columns: int64 [num_reqs, depth, count], of the draft vocabulary.
            token_ids: the same as tokens of the target's.

        Returns:
            [num_reqs, depth - 1, count above, count]; None: nothing.

        """


class ModelSource(ABC):
    """A draft model or a head, from which proposers draft level by level.

    In each step the decoder calls ``keep`` or ``read`` (only sources that read every
    token), then ``begin`` if any request drafts. What a source has no use for does
    nothing.
    """

    # what the source must be given
    reads: Reads

    def keep(self, slots: np.ndarray, features: dict[int, Tensor]) -> None:
        """Keep the features of the tokens that the target computed in this step.

        It is called for sources that read features and catch up, in every step, also
        when no tree is drawn. What is kept must lie where the tokens' KV does, as with
        ``read``.

        Args:
            slots: int64 [n], the KV slot of each token that was committed.
            features: layer -> [n, hidden_size], which the engine may overwrite later.

        """

    def drafts_unread(self, slots: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """Which requests it drafts for without reading what was committed since.

        They read it before they draft in another way.

        Args:
            slots: int64 [n].
            accepted: int64 [n], see ``Roots``.

        Returns:
            bool [n].

        """
        return np.zeros(len(slots), dtype=bool)

    def read(self, committed: CommittedTokens) -> None:
        """Read committed tokens, each once and in order.

        A source that may catch up is called when trees are drawn; any other in every
        step, with all tokens that the target computed in it. Tokens that a request
        found in the prefix cache are not handed over: they were read when they were
        computed, for another request. So what is kept of a token must lie where its KV
        does. After preemption, tokens that are computed again are read again.
        """

    @abstractmethod
    def begin(self, roots: Roots) -> DraftModel:
        """Begin the trees of a step; return what its proposer draws from."""

    def finish_requests(self, slots: np.ndarray) -> None:
        """Drop what is kept of requests that ended, by their slots, int64 [n]."""


class GraphSource(ModelSource):
    """A source whose trees grow from a few tensors by the device's work alone.

    So a CUDA graph can hold how they grow.
    """

    @abstractmethod
    def blank_start(self, num_trees: int, max_blocks: int) -> dict[str, Tensor]:
        """What ``start`` gives, for trees without a context.

        Args:
            num_trees: how many.
            max_blocks: columns of the block table.

        """

    @abstractmethod
    def start(self, roots: Roots) -> dict[str, Tensor]:
        """What the trees of a step grow from, by name, each [num_reqs, ...]."""

    @abstractmethod
    def grow(
        self, start: Mapping[str, Tensor], root_token_ids: Tensor, depth: int
    ) -> DraftModel:
        """Begin trees.

        Args:
            start: see ``start``, [num_trees, ...].
            root_token_ids: int64 [num_trees].
            depth: levels of the trees, at most.

        """

    def begin(self, roots: Roots) -> DraftModel:
        """Begin the trees of a step; return what its proposer draws from."""
        return self.grow(self.start(roots), roots.root_token_ids, roots.depth)


class DeviceSource(GraphSource):
    """A source that reads a step by the device's work alone, too.

    So trees can be drawn before the host knows what they grow from.
    """

    @abstractmethod
    def start_unseen(self, sampled: SampledTokens) -> dict[str, Tensor]:
        """Read what a step committed, and return the same as ``start``.

        It takes the place of ``read``. All that came before was read.
        """


class TextSource(ABC):
    """A source that looks up what may follow a text, such as a suffix index."""

    def note_texts(self, slots: np.ndarray, texts: Sequence[np.ndarray]) -> None:
        """Note what requests that may draft have put out, in every step.

        Args:
            slots: int64 [n].
            texts: of each request int [length], its committed tokens, root included;
                the engine may overwrite them later.

        """

    @abstractmethod
    def look_up(self, texts: Sequence[np.ndarray]) -> Continuations:
        """Look up what may follow the texts of the requests that draft.

        Args:
            texts: of each request int [length], its committed tokens, root included.

        """

    def finish_requests(self, slots: np.ndarray) -> None:
        """Drop what is kept of requests that ended, by their slots, int64 [n]."""


@dataclass(frozen=True)
class Sources:
    """What a method drafts from."""

    # in the order in which its proposers expect them
    models: Sequence[ModelSource] = ()
    # None: it has none
    text: TextSource | None = None

    def finish_requests(self, slots: np.ndarray) -> None:
        """Drop what is kept of requests that ended, by their slots, int64 [n]."""
        for model in self.models:
            model.finish_requests(slots)
        if self.text is not None:
            self.text.finish_requests(slots)
