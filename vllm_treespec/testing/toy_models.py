"""Toy models for whole steps: tables of logits, and KV that names the text it holds.

A KV slot holds one number of the whole text up to its token. So a slot that was never
written, or that belongs to another path of a tree, shows at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.forbidden import Forbidden
from vllm_treespec.layouts.base import RootBlocks, TreeLayout
from vllm_treespec.layouts.block_copies import BlockCopier
from vllm_treespec.layouts.branches import BranchLayout
from vllm_treespec.layouts.masks import MaskLayout
from vllm_treespec.sources.base import CommittedTokens, ModelSource, Reads, Roots
from vllm_treespec.trees.tree import MAX_NODES

VOCAB_SIZE = 7
PERIOD = 5
BLOCK_SIZE = 4
# Penalties for repetition, frequency and presence that change nothing.
NO_PENALTY = (1.0, 0.0, 0.0)


def texts_so_far(token_ids: Sequence[int]) -> np.ndarray:
    """A number for every prefix of a text, int64 [len(token_ids)], to be read only."""
    return _texts_so_far(tuple(token_ids))


@lru_cache(maxsize=10_000)
def _texts_so_far(token_ids: tuple[int, ...]) -> np.ndarray:
    numbers, number = [], 1
    for token in token_ids:
        number = (number * 1_000_003 + token + 2) % (2**61 - 1)
        numbers.append(number)
    return np.array(numbers, dtype=np.int64)


def hidden_state(text: Sequence[int], layer: int = 0) -> list[float]:
    """The target's hidden state after a text: number of the text, layer, length, token.

    The number is cut to what a float64 holds exactly.
    """
    number = texts_so_far(text)[-1] % 2**40
    return [float(x) for x in (number, layer, len(text), text[-1])]


class Language:
    """Next-token logits that depend on a text's length and its last two tokens.

    Tables are float32 [PERIOD, V, V, V].
    """

    def __init__(self, seed: int, noise: float = 1.0) -> None:
        """Draw the target's table, and the draft's, which is like it."""
        generator = torch.Generator().manual_seed(seed)
        shape = (2, PERIOD, VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
        target, other = 2 * torch.randn(shape, generator=generator)
        self.target, self.draft = target, target + noise * other

    def greedy(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        penalties: Sequence[float] = NO_PENALTY,
        forbidden: Forbidden | None = None,
    ) -> list[int]:
        """What plain greedy decoding answers, token by token.

        See ``penalised`` and ``permitted``.
        """
        output: list[int] = []
        for _ in range(num_tokens):
            logits = after(self.target, [*prompt, *output])
            logits = penalised(logits, prompt, output, penalties)
            output.append(int(permitted(logits, output, forbidden).argmax()))
        return output


def after(table: Tensor, text: Sequence[int]) -> Tensor:
    """Logits after a text, [V]."""
    return table[len(text) % PERIOD, text[-2] if len(text) > 1 else 0, text[-1]]


def penalised(
    logits: Tensor, prompt: Sequence[int], output: Sequence[int], strength: Sequence
) -> Tensor:
    """Penalise one row token by token, float32 [vocab_size].

    Without a penalty it is left as it is.

    Args:
        logits: [vocab_size].
        prompt: of the request.
        output: of the request, so far.
        strength: penalties for repetition, frequency and presence.

    """
    if tuple(strength) == NO_PENALTY:
        return logits
    repetition, frequency, presence = np.asarray(strength, dtype=np.float32)
    row, counts = logits.float().clone(), Counter(output)
    for token in {*prompt, *output}:
        value = row[token]
        value *= 1 / repetition if value > 0 else repetition
        value -= frequency * counts[token]
        value -= presence * bool(counts[token])
    return row


def permitted(
    logits: Tensor, output: Sequence[int], forbidden: Forbidden | None
) -> Tensor:
    """Take out what a request must not emit, by looking at each output that may follow.

    Without limits the row is left as it is.

    Args:
        logits: [vocab_size].
        output: of the request, so far.
        forbidden: what it must not emit.

    """
    if forbidden is None:
        return logits
    row = logits.clone()
    for token in range(len(row)):
        following = [*output, token]
        bad = any(following[-len(word) :] == [*word] for word in forbidden.bad_words)
        early = token in forbidden.stop_tokens and len(output) < forbidden.min_tokens
        never = forbidden.not_allowed is not None and forbidden.not_allowed[token]
        if bad or early or never:
            row[token] = -torch.inf
    return row


class KvCache:
    """KV slots, each with the number of a text."""

    def __init__(self, num_blocks: int) -> None:
        """Allocate; nothing is written."""
        # heads and head size as kernels want them: one head with one key, one value
        self.cache = torch.zeros((num_blocks, 1, BLOCK_SIZE, 2), dtype=torch.int64)

        self.rows = self.cache.view(-1, 2).numpy()

    def write(self, slots: Sequence[int] | np.ndarray | Tensor, kv: np.ndarray) -> None:
        """Write the numbers ``kv`` int64 [n] into slots [n]."""
        self.rows[np.asarray(slots)] = kv[:, None]

    def read(self, slots: np.ndarray) -> np.ndarray:
        """The numbers in slots, int64 [n]; keys must be values."""
        keys, values = self.rows[slots].T
        assert np.array_equal(keys, values)
        return keys


def kv_slots(blocks: Sequence[int] | np.ndarray, positions: np.ndarray) -> np.ndarray:
    """KV slots of positions of one request, int64, same shape."""
    table = np.asarray(blocks, dtype=np.int64)
    return table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def seen_slots(
    layout: TreeLayout,
    query_start_loc: Sequence[int] | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
    block_table: Tensor,
) -> Iterator[tuple[int, np.ndarray]]:
    """What attention sees: each query row with its KV slots, those above it first."""
    for seq, seq_len in enumerate(seq_lens):
        first, stop = query_start_loc[seq], query_start_loc[seq + 1]
        for row in range(first, stop):
            positions = np.arange(seq_len - (stop - row) + 1)
            if isinstance(layout, MaskLayout) and layout.masks.node_masks[row]:
                bits = int(layout.masks.node_masks[row])
                root = int(layout.masks.tree_starts[seq])
                nodes = [root + i for i in range(64) if bits >> i & 1]
                positions = np.concatenate([np.arange(root), nodes])
            yield row, kv_slots(block_table[seq].numpy(), positions)


class ToyDraftModel(ModelSource):
    """A draft model with KV of its own, in the target's blocks, that catches up."""

    reads = Reads(own_kv=True, catches_up=True)
    vocabulary = None
    # how many slots before a token's own its KV lies
    lag = 0

    def __init__(self, language: Language) -> None:
        """Speak the language's draft."""
        self.table = language.draft
        self.num_read: list[int] = []

    def bind(self, num_blocks: int, layout: TreeLayout) -> None:
        """Allocate KV, fork blocks included."""
        self.kv, self.layout = KvCache(num_blocks), layout
        self.level_reader = layout.level_reader(BlockCopier([self.kv.cache]))

    def read(self, committed: CommittedTokens) -> None:
        """Read tokens and the roots of drafting requests, as real models do."""
        table = committed.block_table.clone()
        roots = self._roots(committed, table)
        end = committed.end.copy()
        end[committed.drafting] += 1
        self.num_read.append(int((end - committed.first).sum()))
        texts = []
        kv: list[np.ndarray] = []
        for i, req in enumerate(committed.reqs):
            text = committed.token_ids[req, : end[i]].tolist()
            slots = kv_slots(table[i].numpy(), np.arange(end[i]))
            first, numbers = committed.first[i], texts_so_far(text)
            self.kv.write(slots[first:], numbers[first:])
            kv += [numbers[: place + 1] for place in range(first, end[i])]
            texts.append(text)
        starts = np.concatenate([[0], np.cumsum(end - committed.first)])
        self._check(kv, starts, end, table)
        self.paths = [[texts[i]] for i in committed.drafting]
        self.level_reader.begin(roots)

    def _roots(self, committed: CommittedTokens, table: Tensor) -> RootBlocks:
        """Where the roots lie; one without a block lies in its tree's last fork."""
        forks, drafting = self.layout.forks, committed.drafting
        positions = committed.end[drafting]
        for tree, row in enumerate(drafting):
            column = positions[tree] // BLOCK_SIZE
            if column >= committed.num_blocks[row]:
                spare = torch.tensor(tree), forks.forks_per_tree - 1, 0
                table[row, column] = int(forks.block(*spare))
        blocks = table[drafting, positions // BLOCK_SIZE].long()
        on_device = torch.from_numpy(positions)
        return RootBlocks(on_device, blocks, table[drafting])

    def begin(self, roots: Roots) -> ToyDraftModel:
        """Draw from what was read."""
        last = [path[0][-1] for path in self.paths]
        assert last == roots.root_token_ids.tolist()
        assert [len(p[0]) - 1 for p in self.paths] == roots.positions.tolist()
        return self

    def root_logits(self) -> Tensor:
        """Logits below the roots."""
        return torch.stack([after(self.table, path) for (path,) in self.paths])

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read a level, and tell the logits below it."""
        paths = self.read_level(token_ids, parents)
        logits = torch.stack([after(self.table, path) for path in paths])
        return logits.unflatten(0, token_ids.shape)

    def read_level(self, token_ids: Tensor, parents: Tensor) -> list[list[int]]:
        """Read a level where the layout puts it; return its texts."""
        self.paths = [
            [paths[p] + [t] for p, t in zip(row_p, row_t, strict=True)]
            for paths, row_p, row_t in zip(
                self.paths, parents.tolist(), token_ids.tolist(), strict=True
            )
        ]
        level = self.level_reader.next_level(parents)
        flat = [path for paths in self.paths for path in paths]
        assert level.positions.tolist() == [len(path) - 1 - self.lag for path in flat]
        kv = [texts_so_far(path)[self.lag :] for path in flat]
        self.kv.write(level.slots, np.array([row[-1] for row in kv]))
        starts, lens = level.query_start_loc.numpy(), level.seq_lens.numpy()
        self._check(kv, starts, lens, level.block_table)
        self.level_reader.end_level()
        return flat

    def _check(
        self,
        kv: Sequence[np.ndarray],
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: Tensor,
    ) -> None:
        """Check that every row sees its own text; ``kv`` is what each should see."""
        if isinstance(self.layout, BranchLayout):
            plans = [shared.plan for shared in self.layout.shared_plans]
            assert not any(plans), "the target's plan is left"
        places = query_start_loc, seq_lens, block_table
        for row, slots in seen_slots(self.layout, *places):
            self._check_row(self.kv.read(slots), kv[row])

    def _check_row(self, seen: np.ndarray, own: np.ndarray) -> None:
        assert np.array_equal(seen, own), "another path"


class TableDraft:
    """Drafts by a language's table below the roots; a ``BlockDraftModel``.

    As a block it knows of a text its length and its last token.
    """

    vocabulary = None
    max_candidates = VOCAB_SIZE

    def __init__(
        self, table: Tensor, lengths: Tensor, above: Tensor, roots: Tensor
    ) -> None:
        """Take the texts: their lengths, last tokens but one, and last ones.

        All three int64 [num_reqs, 1].
        """
        self.table = table
        self.lengths, self.above, self.last = lengths, above, roots

    def root_logits(self) -> Tensor:
        """Logits below the roots."""
        return self._logits()[:, 0]

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Logits below a level."""
        self.lengths = self.lengths + 1
        self.above, self.last = self.last.gather(1, parents), token_ids
        return self._logits()

    @property
    def level_logits(self) -> Tensor:
        """Logits of all levels; below the first what a token adds is all there is."""
        logits = torch.zeros((len(self.last), MAX_NODES, VOCAB_SIZE))
        logits[:, 0] = self.root_logits()
        return logits

    def edges(self, columns: Tensor, token_ids: Tensor) -> Tensor:
        """What tokens add to the logits of columns below them."""
        above, below = columns[:, :-1, :, None], columns[:, 1:, None]
        levels = torch.arange(1, columns.shape[1])
        lengths = (self.lengths + levels)[..., None, None]
        return self.table[lengths % PERIOD, 0, above, below]

    def _logits(self) -> Tensor:
        return self.table[self.lengths % PERIOD, self.above, self.last]


class ToyHead(ModelSource):
    """A head: all it knows is the hidden state that a root was emitted from."""

    reads = Reads(root_hidden=True)

    def __init__(self, language: Language) -> None:
        """Speak the language's draft."""
        self.table = language.draft

    def begin(self, roots: Roots) -> TableDraft:
        """Begin below the roots; see ``hidden_state``."""
        assert roots.hidden is not None
        self.hidden = roots.hidden
        lengths, above = roots.hidden[:, -2:].long().split(1, dim=1)
        return TableDraft(self.table, lengths + 1, above, roots.root_token_ids[:, None])
