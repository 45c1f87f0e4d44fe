"""A draft model on vLLM's own loader and paged KV cache, growing trees by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.compilation.backends import set_model_tag
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.config.utils import replace
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_treespec.core.stats import StepStats
from vllm_treespec.engine.branches import ForkSpace, fork_block_table, fork_slot
from vllm_treespec.engine.kv_cache import BlockCopier


@dataclass(frozen=True)
class CommittedTokens:
    """The committed tokens that draft models read before they draft.

    For each reading request the tokens from ``first`` to ``end`` (exclusive): what
    the target has computed and the draft models have not read, and, for requests that
    draft, the new root.
    """

    # int64 [batch size, max_len], the requests' tokens by position
    token_ids: np.ndarray
    # int64 [num_reading], rows of ``token_ids``
    reqs: np.ndarray
    # int64 [num_reading]
    first: np.ndarray
    end: np.ndarray
    # int64 [num_drafting], which of the reading requests draft, ascending
    drafting: np.ndarray
    # int32 [num_reading, max_blocks] and the filled columns, int32 [num_reading]
    block_table: Tensor
    num_blocks: np.ndarray


class PagedDraftModel:
    """One draft model; implements ``proposers.DraftModel`` for a running step.

    Its layers' KV joins the target's cache: same blocks, same block table. The
    committed part is written once, with the target's or later. Nodes of a
    tree only ever live in fork blocks, one fork for each node of the level that is
    being read; their KV is written anew when their tokens are committed.
    """

    # Its logits are over the target's whole vocabulary.
    vocabulary = None

    def __init__(
        self, vllm_config: VllmConfig, model: str, prefix: str, stats: StepStats
    ) -> None:
        """Prepare to load ``model`` with its layers named under ``prefix``."""
        self.stats = stats
        target = vllm_config.model_config
        self.device = vllm_config.device_config.device
        self.prefix = prefix
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
        self.vllm_config = replace(
            vllm_config, model_config=self.model_config, quant_config=None
        )
        self.layer_names: list[str] = []

    def load(self) -> None:
        """Load the weights through vLLM's loader and note which layers are ours."""
        before = set(self._layers())
        load_config = replace(self.vllm_config.load_config, load_format="safetensors")
        with set_model_tag(self.prefix):
            self.model = get_model(
                vllm_config=self.vllm_config,
                model_config=self.model_config,
                prefix=self.prefix,
                load_config=load_config,
            )
        self.layer_names = [name for name in self._layers() if name not in before]

    def warm_up(self) -> None:
        """Run once without a KV cache, so that nothing compiles in a request's time."""
        zeros = torch.zeros(16, dtype=torch.int64, device=self.device)
        self._run(None, zeros.int(), zeros, None)

    def _layers(self) -> dict[str, AttentionLayerBase]:
        return get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)

    def bind(
        self,
        kv_caches: dict[str, Tensor],
        groups: Sequence[AttentionGroup],
        forks: ForkSpace,
    ) -> None:
        """Connect to the KV cache once it is allocated."""
        self.copier = BlockCopier(kv_caches[name] for name in self.layer_names)
        self.groups = [
            group for group in groups if set(group.layer_names) & set(self.layer_names)
        ]
        self.forks = forks

    def start(self, committed: CommittedTokens) -> None:
        """Read the committed tokens of the reading requests in one forward."""
        lens = committed.end - committed.first
        num_reqs, num_tokens = len(lens), int(lens.sum())
        reqs = np.repeat(np.arange(num_reqs), lens)
        starts = np.cumsum(lens) - lens
        positions = np.arange(num_tokens) - starts[reqs] + committed.first[reqs]
        self.host_roots = committed.end[committed.drafting] - 1
        roots = torch.from_numpy(self.host_roots)
        self.root_positions = roots.to(self.device)[:, None]
        self.trees = torch.arange(len(roots), device=self.device)[:, None]
        self.level = 0
        table = self._with_root_blocks(committed)
        place = torch.from_numpy(positions).to(self.device)
        rows = torch.from_numpy(reqs).to(self.device)
        block = table[rows, place // self.forks.block_size].long()
        hidden = self._forward(
            torch.from_numpy(committed.token_ids[committed.reqs[reqs], positions]).to(
                self.device
            ),
            place,
            block * self.forks.block_size + place % self.forks.block_size,
            np.concatenate([[0], np.cumsum(lens)]),
            committed.end,
            table,
        )
        last_rows = torch.from_numpy(np.cumsum(lens) - 1)[committed.drafting]
        self.root_hidden = hidden[last_rows.to(self.device)]
        self._begin_levels()

    def _with_root_blocks(self, committed: CommittedTokens) -> Tensor:
        """The block table, with a fork block where a root has no block yet.

        Also prepares what all levels of this step share: the blocks that hold the
        roots, and the block table of every fork that levels are read in.
        """
        forks = self.forks
        table = committed.block_table.clone()
        drafting = torch.from_numpy(committed.drafting).to(self.device)
        column = self.root_positions[:, 0] // forks.block_size
        num_blocks = torch.from_numpy(committed.num_blocks[committed.drafting])
        spare = forks.block(self.trees[:, 0], forks.forks_per_tree - 1, 0)
        self.root_blocks = torch.where(
            column < num_blocks.to(self.device), table[drafting, column].long(), spare
        )
        table[drafting, column] = self.root_blocks.to(table.dtype)
        forks_per_level = self._forks_per_level()
        rows = torch.arange(len(drafting) * forks_per_level, device=self.device)
        tree = rows // forks_per_level
        fork_tables = fork_block_table(
            table[drafting[tree]],
            rows,
            column[tree],
            tree,
            rows % forks_per_level,
            forks,
        )
        self.fork_tables = fork_tables.unflatten(0, (len(drafting), forks_per_level))
        return table

    def _forks_per_level(self) -> int:
        """Forks of a tree that levels are read in; the last fork is the root's."""
        return self.forks.forks_per_tree - 1

    def _begin_levels(self) -> None:
        """Prepare to read levels; the committed tokens are read."""

    def root_logits(self) -> Tensor:
        """Logits after the committed tokens, [num_drafting, vocab_size]."""
        with self.stats.stage("draft_forward"):
            return self.model.compute_logits(self.root_hidden)

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level; see ``proposers.DraftModel.extend``."""
        num_trees, width = token_ids.shape
        self.level += 1
        fork = torch.arange(width, device=self.device)
        index = torch.arange(self.forks.blocks_per_fork, device=self.device)
        if self.level == 1:
            targets = self.forks.block(self.trees, fork, 0)
            self.copier.copy(
                self.root_blocks.repeat_interleave(width), targets.flatten()
            )
        else:
            tree = self.trees[..., None]
            sources = self.forks.block(tree, parents[..., None], index)
            targets = self.forks.block(tree, fork[:, None], index)
            self.copier.copy(sources.flatten(), targets.flatten())
        positions = (self.root_positions + self.level).repeat(1, width).flatten()
        slots = fork_slot(self.root_positions, self.level, self.trees, fork, self.forks)
        hidden = self._forward(
            token_ids.flatten(),
            positions,
            slots.flatten(),
            np.arange(num_trees * width + 1),
            (self.host_roots + self.level + 1).repeat(width),
            self.fork_tables[:, :width].flatten(0, 1),
        )
        return self._level_logits(hidden, width)

    def _level_logits(self, hidden: Tensor, width: int) -> Tensor:
        """Logits of a level's rows, [num_trees, width, vocab_size]."""
        with self.stats.stage("draft_forward"):
            logits = self.model.compute_logits(hidden)
        return logits.unflatten(0, (-1, width))

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: Tensor,
    ) -> Tensor:
        """One forward over sequences of the cache; hidden states of all rows."""
        starts = torch.from_numpy(query_start_loc.astype(np.int32))
        lens = torch.from_numpy(seq_lens.astype(np.int32))
        metadata = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(self.device),
            seq_lens_cpu_upper_bound=lens,
            num_reqs=len(seq_lens),
            num_actual_tokens=len(token_ids),
            max_query_len=int(np.diff(query_start_loc).max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=block_table,
            slot_mapping=slots,
            positions=positions,
        )
        per_layer = {}
        for group in self.groups:
            built = group.get_metadata_builder().build(0, metadata)
            per_layer.update(dict.fromkeys(group.layer_names, built))
        with self.stats.stage("draft_forward"):
            return self._run(per_layer, token_ids.int(), positions, slots)

    def _run(
        self,
        attn_metadata: dict[str, Any] | None,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor | None,
    ) -> Tensor:
        """Run the model; without a KV cache metadata (by layer) and slots are None."""
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=len(token_ids),
            slot_mapping=self._slot_mapping(slots),
        ):
            return self.model(input_ids=token_ids, positions=positions)

    def _slot_mapping(self, slots: Tensor | None) -> dict[str, Tensor] | None:
        """Slots by layer, as vLLM wants them."""
        return None if slots is None else dict.fromkeys(self.layer_names, slots)
