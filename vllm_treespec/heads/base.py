"""What all heads share: embedding, output layer, hot tokens, growing a tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor, nn

from vllm_treespec.heads.config import DecoderHeadConfig, HeadConfig, HeadError
from vllm_treespec.sources.base import DraftModel


class Head(nn.Module):
    """Small layers that draft from the target's hidden states.

    The *draft vocabulary* are the tokens that the head can draft: hot tokens, or the
    whole vocabulary of the target.

    Attributes:
        hot_token_ids: int64 [draft_vocab_size], ascending; None: all tokens.
        embedding: its weight is [vocab_size, hidden_size], the target's or our own.
        output: its weight is [draft_vocab_size, hidden_size], alike.

    """

    # whether its folder has its authors' form, not ours
    published = False
    hot_token_ids: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        """Make fresh layers; shared weights come with ``share``."""
        super().__init__()
        self.config = config
        hot = None
        if config.num_hot_tokens is not None:
            hot = torch.arange(config.num_hot_tokens)
        self.register_buffer("hot_token_ids", hot)
        size = config.hidden_size
        self.embedding = Weight(config.vocab_size, size, config.share_embedding)
        self.output = OutputLayer(config.draft_vocab_size, size, config.share_output)

    def share(self, embedding: Tensor | None, output: Tensor | None) -> None:
        """Take the target's weights where they are shared.

        Args:
            embedding: [at least vocab_size, hidden_size]; None: it is quantised.
            output: [at least vocab_size, hidden_size]; None: it is quantised.

        Raises:
            HeadError: naming a quantised layer that the head shares.

        """
        if self.config.share_embedding:
            weight = unquantised("embedding", embedding)
            self.embedding.weight = weight[: self.config.vocab_size]
        if self.config.share_output:
            self.output.weight = self.output_rows(unquantised("output layer", output))

    def output_rows(self, output: Tensor) -> Tensor:
        """Rows of the draft vocabulary out of the target's output layer."""
        if self.hot_token_ids is None:
            return output[: self.config.vocab_size]
        return output[self.hot_token_ids]

    def output_columns(self) -> Tensor | None:
        """Trained columns of ``output_weight``, behind those of the output layer."""
        return None

    def output_weight(self) -> Tensor:
        """All columns that training makes logits with, [draft_vocab_size, width]."""
        weight, columns = self.output.weight, self.output_columns()
        return weight if columns is None else torch.cat([weight, columns], dim=-1)

    def logits(self, features: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [..., draft_vocab_size]."""
        logits: Tensor = self.output(features)
        return logits


class DraftHead(Head, ABC):
    """A head that reads the target's last hidden state at the roots, and no context.

    Hidden states and embeddings are read at root mean square 1, so that one set of
    initial weights suits every target.
    """

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of tokens of the target's vocabulary, at root mean square 1."""
        return unit_rms(nn.functional.embedding(token_ids, self.embedding.weight))

    @abstractmethod
    def forward(self, hidden: Tensor, token_ids: Tensor, wanted: Tensor) -> Tensor:
        """Features at known tokens, for training.

        Args:
            hidden: [n, hidden_size], the target's after its final norm.
            token_ids: int64 [n, depth]: the token that was emitted from the hidden
                state (a tree's root), then those after it.
            wanted: bool [n, depth], after which tokens.

        Returns:
            [num_wanted, hidden_size], in row-major order of ``wanted``.

        """

    @abstractmethod
    def draft(self, hidden: Tensor, root_token_ids: Tensor) -> DraftModel:
        """Begin the trees of a step.

        Args:
            hidden: [num_reqs, hidden_size], the target's after its final norm, from
                which the roots were emitted.
            root_token_ids: int64 [num_reqs].

        """


class ContextHead(Head):
    """A head of published form, which keeps a context of its own."""

    published = True
    config: DecoderHeadConfig

    def share(self, embedding: Tensor | None, output: Tensor | None) -> None:
        """Take the target's weights where ours are missing, or equal to them.

        Published heads often hold a copy of the target's embedding; it is dropped.
        """
        config, size = self.config, self.config.hidden_size
        same = {
            "share_embedding": config.share_embedding
            or (
                embedding is not None
                and self.embedding.weight.equal(embedding[: config.vocab_size])
            ),
            "share_output": config.share_output
            or (
                output is not None
                and self.output.weight.equal(self.output_rows(output))
            ),
        }
        if same["share_embedding"]:
            self.embedding = Weight(0, size, shared=True)
        if same["share_output"]:
            self.output = OutputLayer(0, size, shared=True)
        self.config = config.model_copy(update=same)
        super().share(embedding, output)

    def restrict(self, hot_token_ids: Tensor) -> None:
        """Draft these tokens only.

        Args:
            hot_token_ids: int64, ascending; the head drafted all tokens before.

        """
        self.hot_token_ids = hot_token_ids
        own = not self.config.share_output
        rows = self.output_rows(self.output.weight) if own else None
        update = {"num_hot_tokens": len(hot_token_ids)}
        self.config = self.config.model_copy(update=update)
        if rows is not None:
            self.output = OutputLayer(0, self.config.hidden_size, shared=False)
            self.output.weight = nn.Parameter(rows.detach())


def unquantised(name: str, weight: Tensor | None) -> Tensor:
    """A weight of the target that a head shares, without its gradient.

    Raises:
        HeadError: there is none, for that layer of the target is quantised.

    """
    if weight is None:
        option = name.replace(" layer", "")
        raise HeadError(
            f"the head shares the target's {name}, which is quantised; train a head "
            f"with --own-{option}, use a target that leaves this layer as it is, or "
            f"remove speculative_config"
        )
    return weight.detach()


class Weight(nn.Module):
    """A weight matrix: trained and saved with the head, or the target's."""

    weight: Tensor

    def __init__(self, rows: int, size: int, shared: bool) -> None:
        """Make a matrix of zeros; an empty one if it is to be shared."""
        super().__init__()
        if shared:
            self.register_buffer("weight", torch.zeros(0, size), persistent=False)
        else:
            self.weight = nn.Parameter(torch.zeros(rows, size))


class OutputLayer(Weight):
    """Logits over the draft vocabulary."""

    bias = None

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """The layer of a weight, [draft_vocab_size, hidden_size]."""
        layer = cls(0, weight.shape[1], shared=True)
        layer.weight = weight
        return layer

    def forward(self, features: Tensor) -> Tensor:
        """Map [..., hidden_size] to [..., draft_vocab_size]."""
        return nn.functional.linear(features, self.weight)


class ResNetBlock(nn.Module):
    """x + silu(Linear(x)); starts as the identity."""

    def __init__(self, size: int) -> None:
        """Make a block of one linear layer."""
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to [..., size]."""
        return x + nn.functional.silu(self.linear(x))


def unit_rms(x: Tensor) -> Tensor:
    """Scale the last axis to root mean square 1."""
    return nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)
