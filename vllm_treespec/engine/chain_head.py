"""Lyanna's head beside vLLM's target: chains over the paged KV cache, or without."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig

from vllm_treespec.batch.stats import DRAFT_FORWARD, StepStats
from vllm_treespec.engine.eagle_head import PagedPairHead
from vllm_treespec.engine.head_source import pack_layers, shared_weights
from vllm_treespec.heads import LyannaHead, load_lyanna_head
from vllm_treespec.heads.chain_source import ChainSource
from vllm_treespec.layouts.base import LevelInputs
from vllm_treespec.sources.base import Roots
from vllm_treespec.sources.chain import ChainDraft, ChainMemory, ReusingSource


class ChainHead(ReusingSource, PagedPairHead):
    """A head that reads pairs as EAGLE's, and then no drafted token.

    A chain's later steps lie behind the last pair as a level of one node each. All
    levels of all requests pass the output layer at once.
    """

    head: LyannaHead

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: str,
        prefix: str,
        memory: ChainMemory,
        stats: StepStats,
    ) -> None:
        """Read the configuration of the head ``model``, a folder or a hub id."""
        super().__init__(vllm_config, model, None, prefix, stats)
        self.memory = memory

    def load_head(self) -> LyannaHead:
        """Read the head's files."""
        return load_lyanna_head(self.model)

    def begin(self, roots: Roots) -> ChainDraft:
        """Run the chains of a step, where none is left over."""

        def run(fresh: np.ndarray) -> Tensor:
            assert len(fresh) == len(self.last_states), "others were read"
            return self.run_chains(roots.depth)

        return self.memory.begin(roots, run, self.head.info_logits, self.vocabulary)

    def run_chains(self, depth: int) -> Tensor:
        """Logits of the chains below the pairs that were read last.

        Returns:
            [num_drafting, depth, draft_vocab_size].

        """
        self.level_reader.begin(self.last_roots)
        state = self.last_states
        parents = torch.zeros((len(state), 1), dtype=torch.int64, device=state.device)
        states = [state]
        for _ in range(depth - 1):
            level = self.level_reader.next_level(parents)
            state = self._next_step(state, level)
            self.level_reader.end_level()
            states.append(state)
        with self.stats.stage(DRAFT_FORWARD):
            return self.head.logits(torch.stack(states, dim=1))

    def _next_step(self, state: Tensor, inputs: LevelInputs) -> Tensor:
        """One more step of all chains, [num_drafting, hidden_size]."""
        metadata = self.attention_metadata(inputs, len(state))
        with (
            self.stats.stage(DRAFT_FORWARD),
            self.forward_context(metadata, len(state), inputs.slots),
        ):
            return self.head.read(state, None, inputs.positions, self.attend)


class EngineChainSource(ChainSource):
    """A head without context that shares weights of the loaded target."""

    def __init__(
        self, vllm_config: VllmConfig, model: str, memory: ChainMemory, stats: StepStats
    ) -> None:
        """Prepare to load the head ``model``, a folder or a hub id."""
        super().__init__(memory, stats)
        self.model = model
        self.vllm_config = vllm_config

    def load(self, target_model: torch.nn.Module) -> None:
        """Load the head and let it share weights of the loaded target.

        Raises:
            ValueError: the target's embedding or output layer is not found.

        """
        device = self.vllm_config.device_config.device
        config = self.vllm_config.model_config
        head = load_lyanna_head(self.model)
        head.rotary.prepare(config.max_model_len)
        self.head = head.to(device=device, dtype=config.dtype)
        self.head.share(*shared_weights(target_model))
        if device.type == "cpu":
            pack_layers(self.head)
