"""What a spec-config's drafters take on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.checks import check_head, check_hot_tokens
from vllm_treespec.config.eagle_tree import EagleTreeConfig
from vllm_treespec.heads import (
    DFlashHead,
    EagleHead,
    EagleHeadConfig,
    Head,
    LyannaHeadConfig,
    read_head_config,
)
from vllm_treespec.heads.config import AnyHeadConfig, DecoderHeadConfig
from vllm_treespec.heads.files import build_head, read_heads_hot_tokens, read_hot_tokens
from vllm_treespec.tools.plan.models import Model, padded, read_model


@dataclass(frozen=True)
class DraftModel:
    """A draft model, which ranks share like the target; sizes are those of a rank."""

    model: Model
    # of its own list; 0: it drafts all tokens
    num_hot_tokens: int

    @property
    def feature_size(self) -> int:
        """Nothing is kept of a token but its KV."""
        return 0

    @property
    def note(self) -> str:
        """What it is, and how ranks hold it."""
        return f"draft model {self.model.name}, divided over the ranks"

    def weight_bytes(self, num_ranks: int, dtype: torch.dtype) -> int:
        """Its own weights."""
        return self.model.num_parameters(num_ranks) * dtype.itemsize

    def copied_bytes(self, num_ranks: int, dtype: torch.dtype) -> int:
        """The output layer's rows of hot tokens."""
        return self.num_hot_tokens * self.model.hidden_size * dtype.itemsize

    def kv_heads(self, num_ranks: int) -> list[tuple[int, int]]:
        """Key-value heads and their size, of every layer."""
        return self.model.kv_heads(num_ranks)

    def attention(self, num_ranks: int) -> tuple[int, int]:
        """Query heads and their size."""
        return self.model.num_heads // num_ranks, self.model.head_size

    def widths(self, num_ranks: int) -> tuple[int, int]:
        """Numbers of a token's hidden states, and of its MLP."""
        return self.model.hidden_size, self.model.inner_size // num_ranks


@dataclass(frozen=True)
class PlannedHead:
    """A head, of which each rank holds all.

    Attributes:
        name: as the user wrote it.
        config: of the head, restricted to hot tokens.
        target: what it shares weights with.
        max_model_len: positions that are tabulated.

    """

    name: str
    config: AnyHeadConfig
    target: Model
    max_model_len: int

    @property
    def note(self) -> str:
        """What it is, and how ranks hold it."""
        return f"head {self.name}, whole on every rank"

    @property
    def feature_size(self) -> int:
        """Numbers that are kept of every token."""
        config = self.with_context
        return config.feature_size if isinstance(config, EagleHeadConfig) else 0

    @property
    def with_context(self) -> DecoderHeadConfig | None:
        """The configuration of a head that reads every token; None for others."""
        config = self.config
        if isinstance(config, LyannaHeadConfig) and not config.context:
            return None
        return config if isinstance(config, DecoderHeadConfig) else None

    @cached_property
    def head(self) -> Head:
        """The head without memory."""
        with torch.device("meta"):
            head = build_head(self.config)
            if isinstance(head, EagleHead | DFlashHead):
                head.rotary.prepare(self.max_model_len)
            return head

    def weight_bytes(self, num_ranks: int, dtype: torch.dtype) -> int:
        """Its own weights, and tables."""
        numbers = sum(p.numel() for p in self.head.parameters())
        if isinstance(self.config, LyannaHeadConfig):
            # what every token tells its children, tabulated when the head is loaded
            tokens = self.config.vocab_size + self.config.draft_vocab_size
            numbers += tokens * self.config.token_info_rank
        return numbers * dtype.itemsize + sum(b.nbytes for b in self.head.buffers())

    def copied_bytes(self, num_ranks: int, dtype: torch.dtype) -> int:
        """Whole copies where ranks hold parts, and the rows of hot tokens."""
        config, vocab = self.config, padded(self.target.vocab_size)
        parts = num_ranks > 1
        rows = vocab if parts and config.share_embedding else 0
        if config.share_output and config.num_hot_tokens is not None:
            rows += config.num_hot_tokens
        elif config.share_output and parts:
            tied = self.target.config.tie_word_embeddings and config.share_embedding
            rows += 0 if tied else vocab
        return rows * config.hidden_size * dtype.itemsize

    def kv_heads(self, num_ranks: int) -> list[tuple[int, int]]:
        """Key-value heads and their size, of every layer."""
        config = self.with_context
        if config is None:
            return []
        return [(config.num_kv_heads, config.head_size)] * config.num_layers

    def attention(self, num_ranks: int) -> tuple[int, int] | None:
        """Query heads and their size; None without attention."""
        config = self.with_context
        return None if config is None else (config.num_heads, config.head_size)

    def widths(self, num_ranks: int) -> tuple[int, int]:
        """Numbers of a token's hidden states, and of its MLP."""
        config = self.with_context
        if config is None:
            return 0, 0
        states = config.target_hidden_size * config.num_target_layers
        return config.hidden_size + states, config.intermediate_size


Drafter = DraftModel | PlannedHead


def read_drafters(
    config: MethodConfig, target: Model, max_model_len: int
) -> list[Drafter]:
    """Read the draft models or the head of a spec-config.

    Raises:
        SpecConfigError: one is missing, or does not fit the target.

    """
    check_head(config, target.config)
    drafters: list[Drafter] = []
    models = [read_model("speculative_config 'model'", name) for name in config.models]
    shared = min([target.vocab_size, *(model.vocab_size for model in models)])
    check_hot_tokens(config, shared)
    for model, hot_tokens in zip(models, config.hot_token_files, strict=True):
        num_hot = 0
        if hot_tokens is not None:
            num_hot = len(read_hot_tokens(hot_tokens, shared))
        drafters.append(DraftModel(model, num_hot))
    if config.head is not None:
        head = read_head_config(config.head, target.num_layers)
        if isinstance(config, EagleTreeConfig) and config.hot_tokens is not None:
            assert isinstance(head, EagleHeadConfig)
            hot = read_heads_hot_tokens(Path(config.hot_tokens), head)
            head = head.model_copy(update={"num_hot_tokens": len(hot)})
        drafters.append(PlannedHead(config.head, head, target, max_model_len))
    return drafters
