"""A draft model on vLLM's own loader and paged KV cache, growing trees by level."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from vllm.compilation.backends import set_model_tag
from vllm.config import ModelConfig, VllmConfig
from vllm.config.utils import replace
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.attention.backend import AttentionMetadata

from vllm_treespec.batch.reading import token_places
from vllm_treespec.batch.stats import DRAFT_FORWARD, StepStats
from vllm_treespec.engine.draft_weights import DraftModelLoader
from vllm_treespec.engine.head_source import PackedLinear, shared_weights
from vllm_treespec.engine.paged_source import LevelSource
from vllm_treespec.heads.base import OutputLayer
from vllm_treespec.heads.files import read_hot_tokens
from vllm_treespec.host_copies import on_device
from vllm_treespec.layouts.base import LevelInputs, RootBlocks
from vllm_treespec.sources.base import (
    CommittedTokens,
    DeviceSource,
    Reads,
    SampledTokens,
)


class PagedDraftModel(LevelSource, DeviceSource):
    """One draft model: a source of drafts, and the ``DraftModel`` of a running step."""

    reads = Reads(own_kv=True, catches_up=True)
    # Token of every column of the logits, int64; None: the target's whole vocabulary.
    # Rows that only the target or only the draft model has are padding.
    vocabulary: Tensor | None = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: str,
        hot_tokens: Path | None,
        prefix: str,
        stats: StepStats,
    ) -> None:
        """Prepare to load ``model`` with its layers named under ``prefix``.

        ``hot_tokens`` is a JSON list of the tokens that it drafts, None: all.
        """
        self.hot_tokens = hot_tokens
        target = vllm_config.model_config
        self.model_config = ModelConfig(
            model=model,
            runner="draft",
            tokenizer=target.tokenizer,
            tokenizer_mode=target.tokenizer_mode,
            trust_remote_code=target.trust_remote_code,
            dtype=target.dtype,
            seed=target.seed,
            max_model_len=target.max_model_len,
            enforce_eager=target.enforce_eager,
        )
        config = replace(
            vllm_config,
            model_config=self.model_config,
            cache_config=self.with_window(
                vllm_config.cache_config, window_of_all_layers(self.model_config)
            ),
            quant_config=None,
        )
        super().__init__(config, prefix, stats)
        self.dtype = self.model_config.dtype
        self.num_rows = self.model_config.get_vocab_size()
        self.num_shared = min(target.get_vocab_size(), self.num_rows)
        self.lacks_rows = self.num_shared < target.get_vocab_size()
        if self.lacks_rows:
            self.vocabulary = torch.arange(self.num_shared, device=self.device)

    @property
    def hidden_size(self) -> int:
        """Width of the states behind the last layer."""
        return self.model_config.get_hidden_size()

    @property
    def attention_shape(self) -> tuple[int, int]:
        """Query heads of this rank, and the size of a head."""
        parallel = self.vllm_config.parallel_config
        num_heads = self.model_config.get_num_attention_heads(parallel)
        return num_heads, self.model_config.get_head_size()

    def load(self, target_model: torch.nn.Module) -> None:
        """Load the weights through vLLM's loader and note which layers are ours.

        Raises:
            ValueError: they do not fit the model, or its output layer no hot tokens.

        """
        before = set(self.all_layers())
        load_config = replace(self.vllm_config.load_config, load_format="safetensors")
        with set_model_tag(self.prefix):
            self.model = DraftModelLoader(load_config).load_model(
                self.vllm_config, self.model_config, self.prefix
            )
        self.layer_names = [name for name in self.all_layers() if name not in before]
        self.output_layer: Callable[[Tensor], Tensor] = self._shared_logits
        if self.hot_tokens is not None:
            self._restrict(self.hot_tokens)

    def _shared_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the tokens that the target has, too."""
        logits: Tensor = self.model.compute_logits(hidden)
        return logits[..., : self.num_shared]

    def _restrict(self, hot_tokens: Path) -> None:
        """Compute the logits of hot tokens alone.

        Raises:
            ValueError: the file holds no list of tokens, or the model's logits are more
                than its output layer's rows, or that layer is quantised.

        """
        scaled = [
            layer
            for layer in self.model.modules()
            if isinstance(layer, LogitsProcessor)
            and (layer.scale != 1.0 or layer.soft_cap is not None)
        ]
        if scaled:
            raise ValueError(
                f"'hot_tokens': {self.model_config.model} scales or caps its logits, "
                f'which is not supported with hot tokens; write "all"'
            )
        tokens = read_hot_tokens(hot_tokens, self.num_shared)
        self.vocabulary = tokens.to(self.device)
        _, weight = shared_weights(self.model)
        if weight is None:
            raise ValueError(
                f"'hot_tokens': the output layer of {self.model_config.model} is "
                f'quantised, which is not supported with hot tokens; write "all"'
            )
        layer = OutputLayer.of(weight[self.vocabulary])
        on_cpu = self.device.type == "cpu"
        self.output_layer = PackedLinear(layer) if on_cpu else layer

    def warm_up(self) -> None:
        """Run once without a KV cache, so that no request waits for compilation."""
        self._run_zeros(16)

    def run_level(self, num_rows: int) -> None:
        """Run as for a level of so many nodes, without attention, to time it."""
        self.output_layer(self._run_zeros(num_rows))

    def _run_zeros(self, num_rows: int) -> Tensor:
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        return self._run(None, zeros.int(), zeros, None)

    def read(self, committed: CommittedTokens) -> None:
        """Read committed tokens, and the roots of drafting requests, in one forward."""
        end = committed.end.copy()
        end[committed.drafting] += 1
        reqs, positions = token_places(committed.first, end)
        query_start_loc = np.cumsum([0, *(end - committed.first)])
        drafting, table = committed.drafting, committed.block_table
        drafting_there = on_device(drafting, self.device)
        self.last_roots = self._root_blocks(
            on_device(committed.end[drafting], self.device),
            table[drafting_there],
            committed.num_blocks[drafting],
        )
        table = table.index_copy(0, drafting_there, self.last_roots.block_table)
        places = on_device(positions, self.device)
        rows = on_device(reqs, self.device)
        size = self.forks.block_size
        blocks = table[rows, places // size].long()
        token_ids = committed.token_ids[committed.reqs[reqs], positions]
        hidden = self._forward(
            on_device(token_ids, self.device),
            LevelInputs.of_texts(
                positions=places,
                slots=blocks * size + places % size,
                query_start_loc=query_start_loc,
                seq_lens=end,
                block_table=table,
            ),
        )
        last_rows = (query_start_loc[1:] - 1)[drafting]
        self.last_states = hidden[on_device(last_rows, self.device)]

    def start_unseen(self, sampled: SampledTokens) -> dict[str, Tensor]:
        """Read the step's tokens, and the roots behind them, in one forward."""
        table = sampled.block_table
        roots = self._root_blocks(sampled.end, table, sampled.num_blocks)
        token_ids, rows = sampled.with_roots(roots.block_table)
        size = self.forks.block_size
        hidden = self._forward(
            token_ids.flatten(),
            LevelInputs.of_rows(
                positions=rows.positions.flatten(),
                slots=rows.slots(size).flatten(),
                seq_lens=rows.positions[:, -1] + 1,
                block_table=rows.block_table,
                block_size=size,
            ),
        )
        states = rows.last(hidden.unflatten(0, token_ids.shape))
        return {"states": states, **vars(roots)}

    def _root_blocks(
        self, positions: Tensor, table: Tensor, num_blocks: np.ndarray
    ) -> RootBlocks:
        """Find the blocks of roots; give a fork block to a root that has none.

        Args:
            positions: int64 [num_trees], of the roots.
            table: int32 [num_trees, max_blocks], the requests' blocks.
            num_blocks: int [num_trees], filled columns of the table.

        """
        forks = self.forks
        column = (positions // forks.block_size)[:, None]
        trees = torch.arange(len(positions), device=self.device)[:, None]
        spare = forks.block(trees, forks.forks_per_tree - 1, 0)
        has_block = column < on_device(num_blocks, self.device)[:, None]
        blocks = torch.where(has_block, table.gather(1, column).long(), spare)
        with_roots = table.scatter(1, column, blocks.to(table.dtype))
        return RootBlocks(positions, blocks[:, 0], with_roots)

    def root_logits(self) -> Tensor:
        """Logits after the committed tokens, [num_drafting, vocab_size]."""
        with self.stats.stage(DRAFT_FORWARD):
            return self.output_layer(self.states[:, 0])

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level; see ``DraftModel.extend``."""
        level = self.level_reader.next_level(parents)
        hidden = self._forward(token_ids.flatten(), level)
        self.level_reader.end_level()
        with self.stats.stage(DRAFT_FORWARD):
            logits = self.output_layer(hidden)
        return logits.unflatten(0, (-1, token_ids.shape[1]))

    def _forward(self, token_ids: Tensor, inputs: LevelInputs) -> Tensor:
        """One forward over sequences of the cache; hidden states of all rows.

        A token that the draft model has no row for is read as its last one.
        """
        if self.lacks_rows:
            token_ids = token_ids.clamp(max=self.num_rows - 1)
        per_layer = self.attention_metadata(inputs, len(token_ids))
        with self.stats.stage(DRAFT_FORWARD):
            return self._run(per_layer, token_ids.int(), inputs.positions, inputs.slots)

    def _run(
        self,
        attn_metadata: dict[str, AttentionMetadata] | None,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor | None,
    ) -> Tensor:
        """Run the model; without a KV cache metadata (by layer) and slots are None."""
        with self.forward_context(attn_metadata, len(token_ids), slots):
            return self.model(input_ids=token_ids, positions=positions)


def window_of_all_layers(config: ModelConfig) -> int | None:
    """How many tokens every layer of a model sees; None: all, or layers differ.

    Where layers differ, the model says so to each of them.
    """
    kinds = config.hf_text_config.to_dict().get("layer_types") or ()
    if set(kinds) <= {"sliding_attention"}:
        return config.get_sliding_window()
    return None
