"""A head without context as a source: its chains see the roots alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_treespec.batch.stats import DRAFT_FORWARD, StepStats
from vllm_treespec.heads import LyannaHead
from vllm_treespec.host_copies import on_device
from vllm_treespec.sources.base import Reads, Roots
from vllm_treespec.sources.chain import ChainDraft, ChainMemory, ReusingSource


class ChainSource(ReusingSource):
    """The head of ``lyanna`` without context; it needs no KV cache."""

    reads = Reads(root_hidden=True)
    head: LyannaHead

    def __init__(self, memory: ChainMemory, stats: StepStats) -> None:
        """Count the head's time; ``head`` is set when it is loaded."""
        self.memory = memory
        self.stats = stats

    def begin(self, roots: Roots) -> ChainDraft:
        """Run the chains of a step, where none is left over."""

        def run(fresh: np.ndarray) -> Tensor:
            return self.run_chains(roots, fresh)

        head = self.head
        return self.memory.begin(roots, run, head.info_logits, head.hot_token_ids)

    def run_chains(self, roots: Roots, fresh: np.ndarray) -> Tensor:
        """Logits of fresh chains, [num_fresh, roots.depth, draft_vocab_size].

        Args:
            roots: the requests that draft.
            fresh: int64 [num_fresh], which of them, on the host.

        """
        assert roots.hidden is not None
        # A pair lies where its first token does: one before the root.
        host = np.stack([fresh, roots.positions[fresh] - 1])
        rows, positions = on_device(host, roots.root_token_ids.device)
        with self.stats.stage(DRAFT_FORWARD):
            state = self.head.features(roots.hidden[rows])
            token_ids: Tensor | None = roots.root_token_ids[rows]
            attend = ChainAttention()
            states = []
            for step in range(roots.depth):
                state = self.head.read(state, token_ids, positions + step, attend)
                states.append(state)
                token_ids = None
            return self.head.logits(torch.stack(states, dim=1))


class ChainAttention:
    """Attention of chains over their own steps; see ``heads.decoder.Attend``."""

    def __init__(self) -> None:
        """Begin without steps."""
        self.seen: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def __call__(
        self, number: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend to this step and those before; one row a chain."""
        keys, values = self.seen.setdefault(number, ([], []))
        keys.append(key)
        values.append(value)
        attended = scaled_dot_product_attention(
            query[:, :, None],
            torch.stack(keys, dim=2),
            torch.stack(values, dim=2),
            enable_gqa=True,
        )
        return attended[:, :, 0].flatten(1)
