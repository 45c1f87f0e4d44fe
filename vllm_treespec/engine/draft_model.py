"""A draft model on vLLM's own loader and paged KV cache, growing trees by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.config.utils import replace
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_treespec.engine.branches import ForkSpace, fork_block_table
from vllm_treespec.engine.kv_cache import BlockCopier


@dataclass(frozen=True)
class CommittedTokens:
    """The committed tokens that a draft model reads at the start of a step.

    For every request the tokens from ``first`` to ``end`` (exclusive): those whose
    KV the target computed in this step, and, for requests that draft, the new root.
    """

    # int64 [num_reqs, max_len], the requests' tokens by position
    token_ids: np.ndarray
    # int64 [num_reqs]
    first: np.ndarray
    end: np.ndarray
    # int64 [num_drafting], the requests that draft, ascending
    drafting: np.ndarray
    # int32 [num_reqs, max_blocks] and the filled columns, int32 [num_reqs]
    block_table: Tensor
    num_blocks: np.ndarray


class PagedDraftModel:
    """One draft model; implements ``proposers.DraftModel`` for a running step.

    Its layers' KV joins the target's cache: same blocks, same block table. The
    committed part is written once, chunk by chunk, with the target's. Nodes of a
    tree only ever live in fork blocks, one fork for each node of the level that is
    being read; their KV is written anew when their tokens are committed.
    """

    def __init__(self, vllm_config: VllmConfig, model: str, prefix: str) -> None:
        """Prepare to load ``model`` with its layers named under ``prefix``."""
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
        self.model = get_model(
            vllm_config=self.vllm_config,
            model_config=self.model_config,
            prefix=self.prefix,
            load_config=replace(
                self.vllm_config.load_config, load_format="safetensors"
            ),
        )
        self.layer_names = [name for name in self._layers() if name not in before]

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
        """Read the committed tokens of all requests in one forward."""
        lens = committed.end - committed.first
        num_reqs, num_tokens = len(lens), int(lens.sum())
        reqs = np.repeat(np.arange(num_reqs), lens)
        starts = np.cumsum(lens) - lens
        positions = np.arange(num_tokens) - starts[reqs] + committed.first[reqs]
        self.drafting = torch.from_numpy(committed.drafting).to(self.device)
        self.root_positions = torch.from_numpy(
            committed.end[committed.drafting] - 1
        ).to(self.device)
        self.block_table = self._with_root_blocks(committed)
        self.level = 0
        last_rows = torch.from_numpy(np.cumsum(lens) - 1)[committed.drafting]
        place = torch.from_numpy(positions).to(self.device)
        rows = torch.from_numpy(reqs).to(self.device)
        hidden = self._forward(
            torch.from_numpy(committed.token_ids[reqs, positions]).to(self.device),
            place,
            self._slots(self.block_table[rows], place),
            np.concatenate([[0], np.cumsum(lens)]),
            torch.from_numpy(committed.end).to(self.device),
            self.block_table,
        )
        self.root_hidden = hidden[last_rows.to(self.device)]

    def _with_root_blocks(self, committed: CommittedTokens) -> Tensor:
        """The block table, with a fork block where a root has no block yet."""
        table = committed.block_table.clone()
        column = self.root_positions // self.forks.block_size
        has_block = torch.from_numpy(
            committed.num_blocks[committed.drafting].astype(np.int64)
        ).to(self.device)
        tree = torch.arange(len(column), device=self.device)
        spare = self.forks.block(tree, self.forks.forks_per_tree - 1, 0)
        own = table[self.drafting, column]
        table[self.drafting, column] = torch.where(
            column < has_block, own, spare.to(table.dtype)
        )
        return table

    def root_logits(self) -> Tensor:
        """Logits after the committed tokens, [num_drafting, vocab_size]."""
        return self.model.compute_logits(self.root_hidden)

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level; see ``proposers.DraftModel.extend``."""
        num_trees, width = token_ids.shape
        forks, block_size = self.forks, self.forks.block_size
        self.level += 1
        tree = torch.arange(num_trees, device=self.device)[:, None, None]
        fork = torch.arange(width, device=self.device)[None, :, None]
        index = torch.arange(forks.blocks_per_fork, device=self.device)
        targets = forks.block(tree, fork, index)
        column = self.root_positions // block_size
        if self.level == 1:
            root_blocks = self.block_table[self.drafting, column].long()
            self.copier.copy(
                root_blocks.repeat_interleave(width), targets[..., 0].flatten()
            )
        else:
            sources = forks.block(tree, parents[..., None], index)
            self.copier.copy(sources.flatten(), targets.flatten())
        positions = (self.root_positions + self.level).repeat_interleave(width)
        rows = torch.arange(num_trees * width, device=self.device)
        table = fork_block_table(
            self.block_table[self.drafting].repeat_interleave(width, dim=0),
            rows,
            column.repeat_interleave(width),
            rows // width,
            rows % width,
            forks,
        )
        hidden = self._forward(
            token_ids.flatten(),
            positions,
            self._slots(table, positions),
            np.arange(num_trees * width + 1),
            positions + 1,
            table,
        )
        return self.model.compute_logits(hidden).unflatten(0, (num_trees, width))

    def _slots(self, table: Tensor, positions: Tensor) -> Tensor:
        """Slot of each position in its row of the block table, int64."""
        column = (positions // self.forks.block_size)[:, None]
        block = table.gather(1, column)[:, 0].long()
        return block * self.forks.block_size + positions % self.forks.block_size

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        query_start_loc: np.ndarray,
        seq_lens: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        """One forward over ordinary causal sequences; hidden states of all rows."""
        starts = torch.from_numpy(query_start_loc.astype(np.int32))
        seq_lens = seq_lens.int()
        metadata = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.cpu(),
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
        with set_forward_context(
            per_layer,
            self.vllm_config,
            num_tokens=len(token_ids),
            slot_mapping=dict.fromkeys(self.layer_names, slots),
        ):
            return self.model(input_ids=token_ids, positions=positions)
