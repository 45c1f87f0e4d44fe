"""A draft source with KV of its own in the target's blocks, and what it reads there."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor
from vllm.config import CacheConfig, VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_treespec.batch.stats import StepStats
from vllm_treespec.layouts.base import LevelInputs, RootBlocks, TreeLayout
from vllm_treespec.layouts.block_copies import BlockCopier
from vllm_treespec.sources.base import DraftModel, GraphSource, ModelSource, Roots


class PagedSource(ModelSource):
    """Attention layers whose KV joins the target's cache: same blocks, same table.

    KV of a committed token is written once, in the target's step or later. KV of a
    tree's nodes lies in fork blocks only, and is written again when their tokens are
    committed.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str, stats: StepStats) -> None:
        """Name the layers under ``prefix``."""
        self.vllm_config = vllm_config
        self.device = vllm_config.device_config.device
        self.prefix = prefix
        self.stats = stats
        self.layer_names: list[str] = []

    @abstractmethod
    def load(self, target_model: torch.nn.Module) -> None:
        """Load the weights; the target was loaded before."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run once without a KV cache, so that no request waits for compilation."""

    @property
    @abstractmethod
    def attention_shape(self) -> tuple[int, int]:
        """Query heads of this rank, and the size of a head."""

    def feature_bytes(self, block_size: int) -> int:
        """Bytes that are kept beside the KV of each block."""
        return 0

    def all_layers(self) -> dict[str, AttentionLayerBase]:
        """All attention layers of the engine, by name."""
        return get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)

    def bind(
        self,
        kv_caches: dict[str, Tensor],
        groups: Sequence[AttentionGroup],
        layout: TreeLayout,
    ) -> None:
        """Connect to the KV cache once it is allocated and the layout knows it."""
        self.groups = [
            group for group in groups if set(group.layer_names) & set(self.layer_names)
        ]
        self.forks = layout.forks
        copier = BlockCopier(kv_caches[name] for name in self.layer_names)
        self.level_reader = layout.level_reader(copier)

    @staticmethod
    def with_window(cache_config: CacheConfig, window: int | None) -> CacheConfig:
        """The engine's cache config, for layers that see so many tokens; None: all.

        vLLM builds layers with the target's window otherwise.
        """
        changed = copy.copy(cache_config)
        changed.sliding_window = window
        return changed

    def attention_metadata(
        self, inputs: LevelInputs, num_tokens: int
    ) -> dict[str, AttentionMetadata]:
        """What the layers need to know about a forward, by layer."""
        metadata = CommonAttentionMetadata(
            query_start_loc=inputs.query_start_loc,
            # builders of ours read these on a CPU alone
            query_start_loc_cpu=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            seq_lens_cpu_upper_bound=inputs.seq_lens,
            num_reqs=len(inputs.seq_lens),
            num_actual_tokens=num_tokens,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            block_table_tensor=inputs.block_table,
            slot_mapping=inputs.slots,
            positions=inputs.positions,
            causal=inputs.causal,
        )
        per_layer = {}
        for group in self.groups:
            built = group.get_metadata_builder().build(0, metadata)
            per_layer.update(dict.fromkeys(group.layer_names, built))
        return per_layer

    def forward_context(
        self,
        attn_metadata: dict[str, AttentionMetadata] | None,
        num_tokens: int,
        slots: Tensor | None,
        **graph: Any,
    ) -> AbstractContextManager[None]:
        """What vLLM's layers look up during a forward.

        Args:
            attn_metadata: by layer; None without a KV cache, or without attention.
            num_tokens: of the forward, padding included.
            slots: int64 [num_tokens]; None without a KV cache.
            graph: which CUDA graph runs.

        """
        by_layer = None if slots is None else dict.fromkeys(self.layer_names, slots)
        context: AbstractContextManager[None] = set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_tokens,
            slot_mapping=by_layer,
            **graph,
        )
        return context


class LevelSource(PagedSource, GraphSource, DraftModel):
    """A source that grows trees from what it made of the last committed tokens.

    Attributes:
        last_states: [num_trees, hidden_size], set when tokens were read.
        last_roots: where these tokens lie.
        states: [num_trees, width, hidden_size], of the level read last.

    """

    last_states: Tensor
    last_roots: RootBlocks
    states: Tensor
    dtype: torch.dtype

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Width of the states."""

    def blank_start(self, num_trees: int, max_blocks: int) -> dict[str, Tensor]:
        """States of zeros, at roots without a context."""
        blank = RootBlocks.blank(num_trees, max_blocks, self.device)
        size = num_trees, self.hidden_size
        states = torch.zeros(size, dtype=self.dtype, device=self.device)
        return {"states": states, **vars(blank)}

    def start(self, roots: Roots) -> dict[str, Tensor]:
        """What was made of the tokens that were read last."""
        return {"states": self.last_states, **vars(self.last_roots)}

    def grow(
        self, start: Mapping[str, Tensor], root_token_ids: Tensor, depth: int
    ) -> Self:
        """Begin trees below these tokens."""
        where = dict(start)
        self.states = where.pop("states")[:, None]
        self.level_reader.begin(RootBlocks(**where))
        return self
