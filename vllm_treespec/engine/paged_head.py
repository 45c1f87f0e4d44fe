"""A head over the target's features, with KV of its own in vLLM's paged cache."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_treespec.batch.stats import StepStats
from vllm_treespec.engine.head_source import pack_layers, shared_weights
from vllm_treespec.engine.paged_source import PagedSource
from vllm_treespec.heads import DFlashHead, EagleHead, read_head_config
from vllm_treespec.heads.config import DecoderHeadConfig
from vllm_treespec.host_copies import on_device
from vllm_treespec.layouts.base import RootBlocks
from vllm_treespec.sources.base import FINAL_LAYER, CommittedTokens


class PagedHead(PagedSource):
    """Decoder layers over the target's features, with attention of vLLM's.

    Attributes:
        config: of the head.
        head: once it is loaded.

    """

    config: DecoderHeadConfig
    head: EagleHead | DFlashHead

    def __init__(
        self, vllm_config: VllmConfig, model: str, prefix: str, stats: StepStats
    ) -> None:
        """Read the configuration of the head ``model``, a folder or a hub id."""
        super().__init__(vllm_config, prefix, stats)
        target = vllm_config.model_config
        self.model = model
        self.dtype = target.dtype
        self.num_target_layers = target.get_total_num_hidden_layers()
        config = read_head_config(model, self.num_target_layers)
        assert isinstance(config, DecoderHeadConfig)
        self.config = config

    @property
    def attention_shape(self) -> tuple[int, int]:
        """Query heads, all of them on each rank, and the size of a head."""
        return self.config.num_heads, self.config.head_size

    @abstractmethod
    def load_head(self) -> EagleHead | DFlashHead:
        """Read the head's files."""

    def load(self, target_model: torch.nn.Module) -> None:
        """Load the head, let it share the target's weights, and make its attention.

        Raises:
            ValueError: the target does not hand out its layers' hidden states, or has
                no embedding or output layer to share.

        """
        if self.reads.features != (FINAL_LAYER,) and not supports_eagle3(target_model):
            raise ValueError(
                f"the head {self.model} reads hidden states of the layers "
                f"{list(self.reads.features)}, which vLLM does not hand out for "
                f"{type(target_model).__name__}; use a head that reads the final "
                f"hidden state (EAGLE-1), or remove speculative_config"
            )
        head = self.load_head()
        head.rotary.prepare(self.vllm_config.model_config.max_model_len)
        self.head = head.to(device=self.device, dtype=self.dtype)
        self.head.share(*shared_weights(target_model))
        if self.device.type == "cpu":
            pack_layers(self.head)
        with (
            set_current_vllm_config(self.vllm_config),
            set_default_torch_dtype(self.dtype),
            # for the scales that a layer makes
            self.device,
        ):
            self.layers = [
                self._attention(number) for number in range(self.config.num_layers)
            ]
        self.layer_names = [layer.layer_name for layer in self.layers]

    def _attention(self, number: int) -> Attention:
        window = self.config.window(number)
        layer = Attention(
            num_heads=self.config.num_heads,
            head_size=self.config.head_size,
            scale=self.config.head_size**-0.5,
            num_kv_heads=self.config.num_kv_heads,
            cache_config=self.with_window(self.vllm_config.cache_config, window),
            prefix=f"{self.prefix}.layers.{number}.attn",
        )
        # The window is the kernel's. The KV cache keeps all tokens of all layers, and
        # vLLM has no group for layers of different windows.
        layer.sliding_window = None
        return layer

    def features_of_a_step(self) -> tuple[Tensor, Tensor]:
        """As many zeros as a step has tokens, int64, and features of zeros."""
        num_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        width = self.config.target_hidden_size * len(self.reads.features)
        states = zeros.new_zeros((num_tokens, width), dtype=self.dtype)
        return zeros, self.head.features(states)

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one layer over the paged cache; see ``heads.decoder.Attend``."""
        attended: Tensor = self.layers[number](query, key, value)
        return attended

    def last_tokens(self, committed: CommittedTokens) -> RootBlocks:
        """Where the tokens before the drafting requests' roots lie."""
        drafting = on_device(committed.drafting, self.device)
        positions = on_device(committed.end[committed.drafting] - 1, self.device)
        return self.blocks_at(positions, committed.block_table[drafting])

    def blocks_at(self, positions: Tensor, table: Tensor) -> RootBlocks:
        """Where tokens lie, int64 [n], by their requests' blocks [n, max_blocks]."""
        column = (positions // self.forks.block_size)[:, None]
        return RootBlocks(positions, table.gather(1, column)[:, 0].long(), table)
