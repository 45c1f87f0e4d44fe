"""A one-pass head on vLLM's paged KV cache: one forward drafts all levels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadata

from vllm_treespec.batch.reading import kv_slots, token_places
from vllm_treespec.batch.stats import DRAFT_FORWARD, KEEP_FEATURES, StepStats
from vllm_treespec.engine.paged_head import PagedHead
from vllm_treespec.heads import DFlashHead, DFlashHeadConfig, load_dflash_head
from vllm_treespec.heads.dflash import BlockDraft
from vllm_treespec.layouts.base import LevelInputs, RootBlocks
from vllm_treespec.sources.base import (
    CommittedTokens,
    DeviceSource,
    Reads,
    Roots,
    SampledTokens,
)
from vllm_treespec.sources.feature_store import WaitingStates


class PagedDFlashHead(PagedHead, DeviceSource):
    """A head of DFlash's kind (arXiv 2602.06036) as a source of drafts.

    Of a committed token its layers have keys and values that are made of the target's
    features alone, in the token's slot. So nothing is read twice and no request ever is
    behind. A block, the root and mask tokens behind it, lies in a fork for one forward.

    Hidden states wait until a tree is drawn, or until they are many. A slot may have
    another owner by then, whose states wait behind them. That holds as long as all
    layers are in one KV cache group (``checks.head_joins_groups``).
    """

    config: DFlashHeadConfig
    head: DFlashHead
    committed: CommittedTokens

    def __init__(
        self, vllm_config: VllmConfig, model: str, prefix: str, stats: StepStats
    ) -> None:
        """Read the configuration of the head ``model``, a folder or a hub id."""
        super().__init__(vllm_config, model, prefix, stats)
        self.reads = Reads(features=self.config.layers, own_kv=True)
        # by slots and positions, int64 [2, n]
        self.waiting = WaitingStates()

    def load_head(self) -> DFlashHead:
        """Read the head's files."""
        return load_dflash_head(self.model, self.num_target_layers)

    def warm_up(self) -> None:
        """Run once without a KV cache: the context of a whole step, and a block."""
        zeros, features = self.features_of_a_step()
        self.head.context_kv(features, zeros)
        tokens = self.head.block_tokens(zeros[:1], self.config.num_levels)
        self._run(None, tokens, torch.zeros_like(tokens), None)

    def read(self, committed: CommittedTokens) -> None:
        """Take the hidden states of committed tokens; see ``ModelSource.read``."""
        # Its features would keep the engine's hidden states through the next forward.
        self.committed = replace(committed, features={})
        reqs, positions = token_places(committed.first, committed.end)
        slots = kv_slots(committed.host_table, reqs, positions, self.forks.block_size)
        with self.stats.stage(KEEP_FEATURES):
            states = [committed.features[layer] for layer in self.reads.features]
            self.waiting.add(np.stack([slots, positions]), torch.cat(states, dim=-1))
            if self.waiting.is_full:
                self.write()

    def write(self) -> None:
        """Write keys and values of the tokens that wait."""
        if not self.waiting.num_tokens:
            return
        (slots, positions), states = self.waiting.take()
        self._write(slots, positions, states)

    def _write(self, slots: Tensor, positions: Tensor, states: Tensor) -> None:
        """Write keys and values of tokens, int64 [n] and [n, -1]; slot -1: none."""
        of_layers = self.head.context_kv(self.head.features(states), positions)
        for layer, (key, value) in zip(self.layers, of_layers, strict=True):
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)

    def blank_start(self, num_trees: int, max_blocks: int) -> dict[str, Tensor]:
        """Roots without a context."""
        return {**vars(RootBlocks.blank(num_trees, max_blocks, self.device))}

    def start(self, roots: Roots) -> dict[str, Tensor]:
        """Where the tokens before the roots lie; all keys and values are written."""
        with self.stats.stage(KEEP_FEATURES):
            self.write()
        return {**vars(self.last_tokens(self.committed))}

    def start_unseen(self, sampled: SampledTokens) -> dict[str, Tensor]:
        """Write the step's keys and values, behind those that wait."""
        features = [sampled.features[layer] for layer in self.reads.features]
        with self.stats.stage(KEEP_FEATURES):
            self.write()
            self._write(
                sampled.slots(self.forks.block_size).flatten(),
                sampled.positions.flatten(),
                torch.cat(features, dim=-1).flatten(0, 1),
            )
        return {**vars(self.blocks_at(sampled.end - 1, sampled.block_table))}

    def grow(
        self, start: Mapping[str, Tensor], root_token_ids: Tensor, depth: int
    ) -> BlockDraft:
        """Read the blocks of trees."""
        self.level_reader.begin(RootBlocks(**start))
        depth = min(depth, self.config.num_levels)
        tokens = self.head.block_tokens(root_token_ids, depth)
        inputs = self.level_reader.block(tokens.shape[1])
        metadata = self._metadata_by_layer(inputs)
        positions = inputs.positions.view_as(tokens)
        with self.stats.stage(DRAFT_FORWARD):
            states = self._run(metadata, tokens, positions, inputs)
            self.level_reader.end_level()
            return self.head.begin(states, root_token_ids)

    def _metadata_by_layer(self, block: LevelInputs) -> dict[str, AttentionMetadata]:
        """What each layer of the head needs to know about a block."""
        by_layer, causality = {}, self.config.causality
        for causal in set(causality):
            shown = self.level_reader.show(block, causal)
            built = self.attention_metadata(shown, len(block.positions))
            for name, own in zip(self.layer_names, causality, strict=True):
                if own == causal:
                    by_layer[name] = built[name]
        return by_layer

    def _run(
        self,
        attn_metadata: dict[str, AttentionMetadata] | None,
        token_ids: Tensor,
        positions: Tensor,
        block: LevelInputs | None,
    ) -> Tensor:
        """Run the head; without a KV cache metadata (by layer) and block are None."""
        causality = self.config.causality
        mixed = len(set(causality)) > 1

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if mixed and block is not None:
                # masks are in one place for all layers
                self.level_reader.show(block, causality[number])
            return self.attend(number, query, key, value)

        slots = None if block is None else block.slots
        with self.forward_context(attn_metadata, token_ids.numel(), slots):
            return self.head.read_block(token_ids, positions, attend)
