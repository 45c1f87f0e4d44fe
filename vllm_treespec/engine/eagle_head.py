"""EAGLE's head on vLLM's paged KV cache, growing trees by level."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_treespec.batch.reading import kv_slots, token_places
from vllm_treespec.batch.stats import DRAFT_FORWARD, KEEP_FEATURES, StepStats
from vllm_treespec.engine.paged_head import PagedHead
from vllm_treespec.engine.paged_source import LevelSource
from vllm_treespec.heads import EagleHead, EagleHeadConfig, load_eagle_head
from vllm_treespec.host_copies import on_device
from vllm_treespec.layouts.base import LevelInputs, TreeLayout
from vllm_treespec.sources.base import (
    CommittedTokens,
    DeviceSource,
    Reads,
    SampledTokens,
)
from vllm_treespec.sources.feature_store import FeatureStore, block_bytes


class PagedPairHead(PagedHead):
    """A head that reads pairs of a feature and a token into its KV.

    A pair is the target's feature of token i and token i + 1, at position i. Its KV
    lies in token i's slot. So all pairs of committed tokens, the root as the last one's
    second half, lie in blocks that the request has; the drafted nodes of level d follow
    at d positions behind the last pair.

    The target's features are kept in every step, for pairs are read when trees are
    drawn.
    """

    config: EagleHeadConfig
    head: EagleHead

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: str,
        hot_tokens: str | None,
        prefix: str,
        stats: StepStats,
    ) -> None:
        """Read the configuration of the head ``model``, a folder or a hub id."""
        super().__init__(vllm_config, model, prefix, stats)
        self.hot_tokens = hot_tokens
        layers = self.config.layers
        self.reads = Reads(features=layers, own_kv=True, catches_up=True)

    @property
    def vocabulary(self) -> Tensor | None:
        """Token of every column of the logits; see ``DraftModel``."""
        return self.head.hot_token_ids

    def feature_bytes(self, block_size: int) -> int:
        """Bytes that are kept beside the KV of each block."""
        return block_bytes(block_size, self.config.feature_size, self.dtype)

    def load_head(self) -> EagleHead:
        """Read the head's files."""
        hot_tokens = None if self.hot_tokens is None else Path(self.hot_tokens)
        return load_eagle_head(self.model, self.num_target_layers, hot_tokens)

    def bind(
        self,
        kv_caches: dict[str, Tensor],
        groups: Sequence[AttentionGroup],
        layout: TreeLayout,
    ) -> None:
        """Connect to the KV cache, and allocate a feature for each of its slots."""
        super().bind(kv_caches, groups, layout)
        self.store = FeatureStore(
            self.forks.first_block * self.forks.block_size,
            self.config.feature_size,
            self.dtype,
            self.device,
            self.head.features,
        )

    def warm_up(self) -> None:
        """Run once without a KV cache, as many tokens as one step may read."""
        zeros, features = self.features_of_a_step()
        self._run(None, features, zeros, zeros, None)

    def keep(self, slots: np.ndarray, features: dict[int, Tensor]) -> None:
        """Keep hidden states of committed tokens; see ``ModelSource``."""
        with self.stats.stage(KEEP_FEATURES):
            states = [features[layer] for layer in self.reads.features]
            self.store.keep(slots, torch.cat(states, dim=-1))

    def read(self, committed: CommittedTokens) -> None:
        """Read the pairs of committed tokens in one forward."""
        reqs, positions = token_places(committed.first, committed.end)
        slots = kv_slots(committed.host_table, reqs, positions, self.forks.block_size)
        places = np.stack([positions, slots])
        positions_there, slots_there = on_device(places, self.device)
        ends = np.cumsum(committed.end - committed.first)
        token_ids = committed.token_ids[committed.reqs[reqs], positions + 1]
        outputs = self._forward(
            self.store.read(slots_there),
            on_device(token_ids.astype(np.int64), self.device),
            LevelInputs.of_texts(
                positions=positions_there,
                slots=slots_there,
                query_start_loc=np.concatenate([[0], ends]),
                seq_lens=committed.end,
                block_table=committed.block_table,
            ),
        )
        last_pairs = on_device(ends[committed.drafting] - 1, self.device)
        # of the drafting requests: [num_trees, hidden_size], and where they lie
        self.last_states = outputs[last_pairs]
        self.last_roots = self.last_tokens(committed)

    def _forward(
        self, features: Tensor, token_ids: Tensor, inputs: LevelInputs
    ) -> Tensor:
        """One forward over sequences of the cache, [num_tokens, hidden_size]."""
        metadata = self.attention_metadata(inputs, len(token_ids))
        with self.stats.stage(DRAFT_FORWARD):
            return self._run(
                metadata, features, token_ids, inputs.positions, inputs.slots
            )

    def _run(
        self,
        attn_metadata: dict[str, AttentionMetadata] | None,
        features: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor | None,
    ) -> Tensor:
        """Run the head; without a KV cache metadata (by layer) and slots are None."""
        with self.forward_context(attn_metadata, len(token_ids), slots):
            return self.head.read(features, token_ids, positions, self.attend)


class PagedEagleHead(PagedPairHead, LevelSource, DeviceSource):
    """EAGLE's head: a source of drafts, and the ``DraftModel`` of a running step.

    A tree's node is read with what the head made of its parent's pair; once it is
    committed, its pair is read again with the target's own feature.
    """

    @property
    def hidden_size(self) -> int:
        """Width of what the head makes of a pair."""
        return self.config.hidden_size

    def start_unseen(self, sampled: SampledTokens) -> dict[str, Tensor]:
        """Read the step's pairs, whose features are at hand."""
        features = [sampled.features[layer] for layer in self.reads.features]
        states = torch.cat(features, dim=-1).flatten(0, 1)
        token_ids, first = sampled.next_token_ids, sampled.positions[:, 0]
        outputs = self._forward(
            self.head.features(states),
            token_ids.flatten(),
            LevelInputs.of_rows(
                positions=sampled.positions.flatten(),
                slots=sampled.slots(self.forks.block_size).flatten(),
                seq_lens=first + token_ids.shape[1],
                block_table=sampled.block_table,
                block_size=self.forks.block_size,
            ),
        )
        return {
            "states": sampled.last(outputs.unflatten(0, token_ids.shape)),
            **vars(self.blocks_at(sampled.end - 1, sampled.block_table)),
        }

    def root_logits(self) -> Tensor:
        """Logits below the roots, [num_drafting, draft_vocab_size]."""
        with self.stats.stage(DRAFT_FORWARD):
            return self.head.logits(self.states[:, 0])

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level; see ``DraftModel.extend``."""
        level = self.level_reader.next_level(parents)
        trees = torch.arange(len(parents), device=self.device)[:, None]
        features = self.states[trees, parents].flatten(0, 1)
        outputs = self._forward(features, token_ids.flatten(), level)
        self.level_reader.end_level()
        self.states = outputs.unflatten(0, token_ids.shape)
        with self.stats.stage(DRAFT_FORWARD):
            return self.head.logits(self.states)
