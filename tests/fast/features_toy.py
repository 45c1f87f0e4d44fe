"""A method of one's own: a source that reads features, and its proposer.

The source adds up the features of all committed tokens of a request. So a token whose
feature is missing, handed twice or a rejected node's changes every later draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.sources.base import CommittedTokens, ModelSource, Reads, Roots
from vllm_treespec.testing.toy_models import (
    BLOCK_SIZE,
    PERIOD,
    VOCAB_SIZE,
    Language,
    after,
    hidden_state,
    kv_slots,
)
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch

LAYERS = (1, 3)


def numbers(features: dict[int, Tensor]) -> Tensor:
    """One number a token, of its features of all layers, int64 [num_tokens]."""
    return sum(
        ((layer + 1) * features[layer][:, 0].long() for layer in LAYERS),
        start=torch.tensor(0),
    )


def true_sum(text: Sequence[int]) -> int:
    """What the sum over a text should be."""
    ends = range(1, len(text) + 1)
    features = {
        layer: torch.tensor(
            [hidden_state(text[:end], layer) for end in ends], dtype=torch.float64
        )
        for layer in LAYERS
    }
    return int(numbers(features).sum())


@dataclass(frozen=True)
class Handed:
    """What the source was handed for one request in one step."""

    slot: int
    first: int
    end: int
    # layer -> [end - first, hidden_size]
    features: dict[int, Tensor]


class FeatureSums(ModelSource):
    """Keeps the sum up to each token where its KV would lie, as EAGLE's keys do.

    With ``by_slot`` it keeps the sums in lists, by its requests' slots. Then it never
    hears of tokens that a request finds in the prefix cache.
    """

    def __init__(self, language: Language, by_slot: bool = False) -> None:
        """Speak the language's draft; the sum says which token is second."""
        self.reads = Reads(features=LAYERS, own_kv=not by_slot)
        self.table = language.draft
        self.by_slot: dict[int, Tensor] | None = {} if by_slot else None
        # of the latest step
        self.handed: list[Handed] = []

    def bind(self, num_blocks: int) -> None:
        """Allocate a sum for each KV slot."""
        self.sums = torch.zeros(num_blocks * BLOCK_SIZE, dtype=torch.int64)

    def read(self, committed: CommittedTokens) -> None:
        """Add up the features of tokens that were committed in this step."""
        lens = (committed.end - committed.first).tolist()
        features = {
            layer: rows.split(lens) for layer, rows in committed.features.items()
        }
        self.handed, sums = [], []
        for i, slot in enumerate(committed.slots.tolist()):
            first, end = int(committed.first[i]), int(committed.end[i])
            own = {layer: rows[i] for layer, rows in features.items()}
            self.handed.append(Handed(slot, first, end, own))
            blocks = committed.block_table[i].numpy()
            sums.append(self._add(slot, blocks, first, numbers(own)))
        self.drafting = [sums[i] for i in committed.drafting]

    def _add(self, slot: int, blocks: np.ndarray, first: int, new: Tensor) -> int:
        """Add a request's new numbers; return the sum."""
        if self.by_slot is not None:
            so_far = self.by_slot.get(slot, new[:0])[:first]
            assert len(so_far) == first, "tokens were left out"
            self.by_slot[slot] = torch.cat([so_far, new])
            return int(self.by_slot[slot].sum())
        slots = torch.from_numpy(kv_slots(blocks, np.arange(first + len(new))))
        before = self.sums[slots[first - 1]] if first else 0
        self.sums[slots[first:]] = before + new.cumsum(0)
        return int(self.sums[slots[-1]])

    def begin(self, roots: Roots) -> SumDraft:
        """Begin the trees below the roots."""
        assert len(roots.slots) == len(self.drafting)
        sums = torch.tensor(self.drafting)
        lengths = torch.from_numpy(roots.positions) + 1
        return SumDraft(self.table, sums, lengths, roots.root_token_ids)

    def finish_requests(self, slots: np.ndarray) -> None:
        """Forget the sums of ended requests."""
        if self.by_slot is not None:
            for slot in slots.tolist():
                self.by_slot.pop(slot, None)


@dataclass
class SumDraft:
    """The trees of a step; implements ``DraftModel``."""

    table: Tensor
    # int64 [num_reqs]
    sums: Tensor
    lengths: Tensor
    root_token_ids: Tensor
    vocabulary = None

    def root_logits(self) -> Tensor:
        """The sum's token is far ahead of all others."""
        return torch.nn.functional.one_hot(self.sums % VOCAB_SIZE, VOCAB_SIZE).float()

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Logits below the first level."""
        above = self.root_token_ids[:, None].expand_as(token_ids)
        return self.table[(self.lengths[:, None] + 1) % PERIOD, above, token_ids]


class SumTree(Proposer):
    """The sum's token and those after it, and a likely token below each."""

    def __init__(self, width: int) -> None:
        """Take the nodes a level; one is a chain."""
        self.width = width
        self.sizes = TreeSizes(
            max_nodes=1 + 2 * width, max_depth=2, max_width=width, max_leaves=width
        )

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draw one tree per request; ``draws`` is None."""
        (source,) = inputs.draft_models
        nodes = torch.arange(self.width)
        level = source.root_logits().argmax(1, keepdim=True) + nodes
        level %= VOCAB_SIZE
        below = source.extend(level, torch.zeros_like(level)).argmax(2)
        parents = torch.cat([torch.tensor([-1]), 0 * nodes, 1 + nodes])
        depths = torch.tensor([0, 1, 2]).repeat_interleave(
            torch.tensor([1, self.width, self.width])
        )
        tree = TreeBatch(
            token_ids=torch.cat([inputs.root_token_ids[:, None], level, below], 1),
            parents=parents.repeat(len(level), 1),
            depths=depths.repeat(len(level), 1),
            num_nodes=torch.full((len(level),), self.sizes.max_nodes),
        )
        return Draft(tree)


def true_drafts(language: Language, text: Sequence[int], width: int) -> list[int]:
    """The drafts below a text's last token, as they should be."""
    first = true_sum(text[:-1])
    level = [(first + i) % VOCAB_SIZE for i in range(width)]
    return level + [
        int(after(language.draft, [*text, token]).argmax()) for token in level
    ]
