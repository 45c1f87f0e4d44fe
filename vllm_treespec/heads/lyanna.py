"""Lyanna's head: a chain of hidden states that reads no drafted token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_treespec.heads.config import LyannaHeadConfig
from vllm_treespec.heads.decoder import Attend
from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.heads.token_info import TokenInfo


class LyannaHead(EagleHead):
    """The drafter of arXiv 2602.21224. Letters there: hidden state h, token t::

        h1 = Layer(fc([E[t], h0]));  h2 = Layer(h1);  h3 = Layer(h2);  ...
        logits below a node of level i that drafted t = h(i+1) W + info(t)

    So a chain hangs on no drafted token: all its levels are there before the tree is.
    A pair is read as EAGLE-1 reads it. Every state is normed before it is fed back.
    """

    published = False
    config: LyannaHeadConfig

    def __init__(self, config: LyannaHeadConfig) -> None:
        """Make a fresh head."""
        super().__init__(config)
        self.context = config.context
        if not config.first_token:
            self.fuse, self.embedding_norm = nn.Identity(), nn.Identity()
        self.info = TokenInfo(config) if config.token_info_rank else None

    def share(self, embedding: Tensor | None, output: Tensor | None) -> None:
        """Take the target's weights where they are shared, then tabulate the info.

        It is that of the weights as they are: call it again once they have changed.
        """
        super().share(embedding, output)
        if self.info is not None:
            self.info.prepare(self.embedding.weight, self.hot_token_ids)

    def read(
        self,
        features: Tensor,
        token_ids: Tensor | None,
        positions: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Read pairs, or the next step of chains.

        Args:
            features: [n, hidden_size], of tokens of the target; for a later step what
                this returned for the one before.
            token_ids: int64 [n], the tokens after those; None: a later step.
            positions: int64 [n], of the features' tokens.
            attend: attention over the context and the chain's earlier steps.

        Returns:
            [n, hidden_size], for ``logits``, and the features of the next step.

        """
        if token_ids is not None and self.config.first_token:
            return super().read(features, token_ids, positions, attend)
        return self.decode(self.fused_norm(features), features, positions, attend)

    def read_drafted(
        self, states: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """The next step of chains, whatever was drafted."""
        return self.read(states, None, positions, attend)

    def info_logits(self, token_ids: Tensor) -> Tensor:
        """What tokens add to the logits of their children.

        Args:
            token_ids: int64 [...].

        Returns:
            [..., draft_vocab_size]; a view of one zero if the head has no token info.

        """
        if self.info is None:
            zero = self.output.weight.new_zeros(())
            return zero.expand(*token_ids.shape, self.config.draft_vocab_size)
        info: Tensor = self.info(token_ids)
        return info

    def output_inputs_after(self, features: Tensor, token_ids: Tensor) -> Tensor:
        """States, and beside them the codes of the tokens before, for training."""
        states = self.output_inputs(features)
        if self.info is None:
            return states
        weight = self.embedding.weight
        codes = self.info.codes(token_ids, weight, self.hot_token_ids)
        return torch.cat([states, codes.to(states.dtype)], dim=-1)

    def output_columns(self) -> Tensor | None:
        """Columns of the token info, for training."""
        return None if self.info is None else self.info.columns()
