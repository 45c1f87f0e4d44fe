"""Toy chains: random logits by level, and what a token says about its children."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.fast.languages import Language
from tests.fast.toy_pairs import ToyPairHead
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sources.base import Roots
from vllm_treespec.sources.chain import ChainDraft, ChainMemory, ReusingSource
from vllm_treespec.testing.toy_models import PERIOD, VOCAB_SIZE
from vllm_treespec.testing.toy_models import Language as ToyLanguage


class Softmax(SamplingTensors):
    """Temperature 1 in whatever dtype the logits have."""

    def probs(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


def softmax_sampling(num_reqs: int) -> Softmax:
    return Softmax(torch.ones(num_reqs), all_random=True)


@dataclass(frozen=True)
class ToyChain:
    """Logits of one chain, and of every token's children; float64."""

    # [num_levels, vocab_size]
    levels: Tensor
    # [vocab_size, vocab_size]
    table: Tensor

    @classmethod
    def random(cls, vocab_size: int, num_levels: int, seed: int = 0) -> ToyChain:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_levels + vocab_size, vocab_size)
        logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return cls(logits[:num_levels], logits[num_levels:])

    def info(self, token_ids: Tensor) -> Tensor:
        return self.table[token_ids]

    def left(self, used: int) -> ToyChain:
        """The chain without its first levels."""
        return ToyChain(self.levels[used:], self.table)

    def language(self, root: int) -> Language:
        """The distribution after every path below a root."""
        vocab_size = len(self.table)
        above = torch.tensor([root])
        rows = []
        for level in self.levels:
            rows.append((level + self.table[above]).softmax(-1))
            above = torch.arange(vocab_size).repeat(len(above))
        return Language(torch.cat(rows))

    def draft(self, root: int, num_reqs: int = 1) -> ChainDraft:
        """Begin equal trees."""
        logits = self.levels.expand(num_reqs, -1, -1)
        return ChainDraft(logits, self.info, torch.full((num_reqs,), root))


def base_logits(language: ToyLanguage) -> tuple[Tensor, Tensor]:
    """By length of the text, and by token: what a chain can know of a toy language."""
    by_length = language.draft.mean((1, 2))
    return by_length, language.draft.mean((0, 1))


class ToyChainHead(ReusingSource, ToyPairHead):
    """Reads pairs, and then chains; its logits name the request and the length.

    So a leftover of another request, or of another level, shows at once.
    """

    def __init__(self, language: ToyLanguage, memory: ChainMemory) -> None:
        """Speak as much of the language's draft as a chain can."""
        super().__init__(language)
        self.by_length, self.by_token = base_logits(language)
        self.memory = memory
        # requests that drafted, those of them that had not read, and levels left over
        self.num_drafted = self.num_unread = 0
        self.num_left: list[int] = []

    def begin(self, roots: Roots) -> ChainDraft:  # type: ignore[override]
        self.num_drafted += len(roots.slots)
        self.num_unread += len(roots.slots)
        slots = torch.from_numpy(roots.slots)
        lens = torch.from_numpy(roots.positions) + 1

        def run(fresh: np.ndarray) -> Tensor:
            self.num_unread -= len(fresh)
            ends = [path[0][-1] for path in self.paths]
            assert ends == roots.root_token_ids[fresh].tolist()
            assert [len(p[0]) for p in self.paths] == lens[fresh].tolist()
            parents = torch.zeros((len(fresh), 1), dtype=torch.int64)
            for step in range(roots.depth - 1):
                self.read_level(parents + VOCAB_SIZE + step, parents)
            return self.levels(lens[fresh], roots.depth, slots[fresh])

        draft = self.memory.begin(roots, run, lambda t: self.by_token[t], None)
        for chain in (draft, draft.leftover):
            if chain is not None:
                self.check(chain, lens, slots, roots.depth)
        return draft

    def levels(self, lens: Tensor, depth: int, slots: Tensor) -> Tensor:
        """Logits below texts of these lengths, one row a level."""
        rows = self.by_length[(lens[:, None] + torch.arange(depth)) % PERIOD]
        # the same number for all tokens changes no distribution
        return rows + slots[:, None, None]

    def check(self, draft: ChainDraft, lens: Tensor, slots: Tensor, depth: int) -> None:
        """Check that all levels that are left are the request's own, at their place."""
        num_levels = draft.logits.shape[1]
        left = torch.full_like(lens, num_levels)
        if draft.levels_left is not None:
            left = draft.levels_left
            reused = slice(None) if draft.reused is None else draft.reused
            self.num_left += left[reused].tolist()
        expected = self.levels(lens, num_levels, slots)
        for row, count in enumerate(left.tolist()):
            assert 0 <= count <= max(num_levels, depth)
            found = draft.logits[row, num_levels - count :]
            assert torch.equal(found, expected[row, :count]), "another level"
