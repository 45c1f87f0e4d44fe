"""A toy head that reads pairs as EAGLE's does: a token's feature, the next token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.layouts.base import RootBlocks, TreeLayout
from vllm_treespec.sources.base import FINAL_LAYER, CommittedTokens, Reads
from vllm_treespec.sources.feature_store import FeatureStore
from vllm_treespec.testing.toy_models import (
    BLOCK_SIZE,
    Language,
    ToyDraftModel,
    hidden_state,
    kv_slots,
    texts_so_far,
)

LAYERS = (2, FINAL_LAYER)


class ToyPairHead(ToyDraftModel):
    """Pair i lies in the slot of token i; features are kept until it is read.

    The last pair of a block depends on the first token of the next one. A request that
    finds the block in the prefix cache, and goes on with another token, sees a *stale*
    pair there.
    """

    reads = Reads(features=LAYERS, own_kv=True, catches_up=True)
    lag = 1

    def __init__(self, language: Language) -> None:
        """Speak the language's draft."""
        super().__init__(language)
        self.num_stale = 0

    def bind(self, num_blocks: int, layout: TreeLayout) -> None:
        """Allocate KV, fork blocks included, and features."""
        super().bind(num_blocks, layout)
        num_slots = layout.forks.first_block * BLOCK_SIZE
        device = torch.device("cpu")
        size = 4 * len(LAYERS)
        self.store = FeatureStore(num_slots, size, torch.float64, device, torch.clone)

    def keep(self, slots: np.ndarray, features: dict[int, Tensor]) -> None:
        """Keep the features of this step."""
        self.store.keep(slots, torch.cat([features[i] for i in LAYERS], dim=1))

    def read(self, committed: CommittedTokens) -> None:
        """Read pairs, each with the feature that was kept."""
        assert not committed.features
        table, end = committed.block_table, committed.end
        self.num_read.append(int((end - committed.first).sum()))
        texts = []
        kv: list[np.ndarray] = []
        for i, req in enumerate(committed.reqs):
            text = committed.token_ids[req, : end[i] + 1].tolist()
            first, numbers = committed.first[i], texts_so_far(text)[1:]
            slots = kv_slots(table[i].numpy(), np.arange(first, end[i]))
            self._check_features(text, first, self.store.read(torch.from_numpy(slots)))
            self.kv.write(slots, numbers[first:])
            kv += [numbers[: place + 1] for place in range(first, end[i])]
            texts.append(text)
        starts = np.concatenate([[0], np.cumsum(end - committed.first)])
        self._check(kv, starts, end, table)
        self.paths = [[texts[i]] for i in committed.drafting]
        self.level_reader.begin(self._last_pairs(committed))

    def _check_features(self, text: list[int], first: int, features: Tensor) -> None:
        wanted = [
            [number for layer in LAYERS for number in hidden_state(text[:end], layer)]
            for end in range(first + 1, len(text))
        ]
        assert features.tolist() == wanted, "a feature is another token's"

    def _last_pairs(self, committed: CommittedTokens) -> RootBlocks:
        positions = committed.end[committed.drafting] - 1
        table = committed.block_table[committed.drafting]
        on_device = torch.from_numpy(positions)
        blocks = table.gather(1, on_device[:, None] // BLOCK_SIZE)[:, 0].long()
        return RootBlocks(on_device, blocks, table)

    def _check_row(self, seen: np.ndarray, own: np.ndarray) -> None:
        stale = seen != own
        assert (np.flatnonzero(stale) % BLOCK_SIZE == BLOCK_SIZE - 1).all()
        self.num_stale += int(stale.sum())
