"""A draft model on vLLM's own loader and paged KV cache, growing trees by level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.compilation.backends import set_model_tag
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.config.utils import replace
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_treespec.core.stats import DRAFT_FORWARD, StepStats
from vllm_treespec.layouts.base import LevelInputs, RootBlocks, TreeLayout
from vllm_treespec.layouts.block_copies import BlockCopier
from vllm_treespec.sources.base import CommittedTokens, Reads, Roots


class PagedDraftModel:
    """One draft model: a source of drafts, and the ``DraftModel`` of a running step.

    Its layers' KV joins the target's cache: same blocks, same block table. KV of a
    committed token is written once, in the target's step or later. KV of a tree's nodes
    lies in fork blocks only, and is written again when their tokens are committed.
    """

    reads = Reads(own_kv=True, catches_up=True)
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
        """Run once without a KV cache, so that no request waits for compilation."""
        zeros = torch.zeros(16, dtype=torch.int64, device=self.device)
        self._run(None, zeros.int(), zeros, None)

    def _layers(self) -> dict[str, AttentionLayerBase]:
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

    def read(self, committed: CommittedTokens) -> None:
        """Read committed tokens, and the roots of drafting requests, in one forward."""
        end = committed.end.copy()
        end[committed.drafting] += 1
        lens = end - committed.first
        reqs = np.repeat(np.arange(len(lens)), lens)
        starts = np.cumsum(lens) - lens
        positions = np.arange(lens.sum()) - starts[reqs] + committed.first[reqs]
        table = committed.block_table.clone()
        roots = self._root_blocks(committed, table)
        place = torch.from_numpy(positions).to(self.device)
        rows = torch.from_numpy(reqs).to(self.device)
        block = table[rows, place // self.forks.block_size].long()
        token_ids = committed.token_ids[committed.reqs[reqs], positions]
        hidden = self._forward(
            torch.from_numpy(token_ids).to(self.device),
            LevelInputs(
                positions=place,
                slots=block * self.forks.block_size + place % self.forks.block_size,
                query_start_loc=np.concatenate([[0], np.cumsum(lens)]),
                seq_lens=end,
                block_table=table,
            ),
        )
        last_rows = torch.from_numpy(np.cumsum(lens) - 1)[committed.drafting]
        self.root_hidden = hidden[last_rows.to(self.device)]
        self.level_reader.begin(roots)

    def _root_blocks(self, committed: CommittedTokens, table: Tensor) -> RootBlocks:
        """Find the blocks of the roots; give a fork block to a root that has none.

        Args:
            committed: what is read.
            table: int32 [num_reading, max_blocks], changed in place.

        """
        forks = self.forks
        drafting = torch.from_numpy(committed.drafting).to(self.device)
        host_positions = committed.end[committed.drafting]
        positions = torch.from_numpy(host_positions).to(self.device)
        column = positions // forks.block_size
        num_blocks = torch.from_numpy(committed.num_blocks[committed.drafting])
        trees = torch.arange(len(drafting), device=self.device)
        spare = forks.block(trees, forks.forks_per_tree - 1, 0)
        has_block = column < num_blocks.to(self.device)
        blocks = torch.where(has_block, table[drafting, column].long(), spare)
        table[drafting, column] = blocks.to(table.dtype)
        return RootBlocks(host_positions, positions, blocks, table[drafting])

    def begin(self, roots: Roots) -> PagedDraftModel:
        """Begin the trees of a step: the roots were read last."""
        return self

    def finish_requests(self, slots: np.ndarray) -> None:
        """Do nothing: of a request only its blocks are kept."""

    def root_logits(self) -> Tensor:
        """Logits after the committed tokens, [num_drafting, vocab_size]."""
        with self.stats.stage(DRAFT_FORWARD):
            return self.model.compute_logits(self.root_hidden)

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level; see ``DraftModel.extend``."""
        level = self.level_reader.next_level(parents)
        hidden = self._forward(token_ids.flatten(), level)
        self.level_reader.end_level()
        with self.stats.stage(DRAFT_FORWARD):
            logits = self.model.compute_logits(hidden)
        return logits.unflatten(0, (-1, token_ids.shape[1]))

    def _forward(self, token_ids: Tensor, inputs: LevelInputs) -> Tensor:
        """One forward over sequences of the cache; hidden states of all rows."""
        starts = torch.from_numpy(inputs.query_start_loc.astype(np.int32))
        lens = torch.from_numpy(inputs.seq_lens.astype(np.int32))
        metadata = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(self.device),
            seq_lens_cpu_upper_bound=lens,
            num_reqs=len(inputs.seq_lens),
            num_actual_tokens=len(token_ids),
            max_query_len=int(np.diff(inputs.query_start_loc).max()),
            max_seq_len=int(inputs.seq_lens.max()),
            block_table_tensor=inputs.block_table,
            slot_mapping=inputs.slots,
            positions=inputs.positions,
        )
        per_layer = {}
        for group in self.groups:
            built = group.get_metadata_builder().build(0, metadata)
            per_layer.update(dict.fromkeys(group.layer_names, built))
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
