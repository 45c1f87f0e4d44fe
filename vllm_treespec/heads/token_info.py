"""What a token says about the one after it: a matrix of low rank, added to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_treespec.heads.base import OutputLayer, unit_rms
from vllm_treespec.heads.config import LyannaHeadConfig

# A gain of 1 would swamp the logits of a fresh head.
_FIRST_GAIN = 0.1


class TokenInfo(nn.Module):
    """The token-info embedding of arXiv 2602.21224, section 5.1, without its table.

    There E is the target's embedding, and a token t adds RMSNorm(E[t] W1 W2) to the
    logits of its children; the norm runs over the draft vocabulary, and its weight is
    gamma. So the size of E[t] says nothing: it is read at root mean square 1. The
    table is never made::

        a = E[t] W1;  G = W2 W2';  mean square of E[t] W1 W2 = a G a' / draft_vocab_size
        code(t) = a / sqrt(mean square + eps);  info(t) = code(t) (W2 diag(gamma))

    Attributes:
        down: W1.
        up: [draft_vocab_size, rank], W2 transposed.
        gain: [draft_vocab_size], gamma.

    """

    table: Tensor

    def __init__(self, config: LyannaHeadConfig) -> None:
        """Make a fresh one; ``prepare`` comes before ``forward``."""
        super().__init__()
        rank, tokens = config.token_info_rank, config.draft_vocab_size
        self.eps = config.norm_eps
        self.hot_only = config.token_info == "hot"
        self.down = nn.Linear(config.hidden_size, rank, bias=False)
        self.up = nn.Parameter(torch.randn(tokens, rank) * rank**-0.5)
        self.gain = nn.Parameter(torch.full((tokens,), _FIRST_GAIN))
        self.register_buffer("table", torch.zeros(0, rank), persistent=False)
        self.scaled = OutputLayer(0, rank, shared=True)

    def codes(
        self, token_ids: Tensor, embedding: Tensor, hot_token_ids: Tensor | None
    ) -> Tensor:
        """Codes of tokens, computed.

        Args:
            token_ids: int64 [...].
            embedding: [vocab_size, hidden_size].
            hot_token_ids: int64, ascending, the draft vocabulary; None: all tokens.

        Returns:
            [..., rank], in float32 or better.

        """
        up, down = _precise(self.up), _precise(self.down.weight)
        embedded = nn.functional.embedding(token_ids, embedding)
        embedded = unit_rms(embedded.to(down.dtype))
        # training's autocast would round them
        with torch.autocast(up.device.type, enabled=False):
            found = embedded @ down.T
            mean_square = (found @ (up.T @ up) * found).sum(-1, keepdim=True) / len(up)
            codes = found * torch.rsqrt(mean_square + self.eps)
        if self.hot_only and hot_token_ids is not None:
            codes = codes * torch.isin(token_ids, hot_token_ids)[..., None]
        return codes

    def columns(self) -> Tensor:
        """W2 diag(gamma) transposed, [draft_vocab_size, rank]."""
        return self.up * self.gain[:, None]

    @torch.no_grad()
    def prepare(self, embedding: Tensor, hot_token_ids: Tensor | None) -> None:
        """Tabulate all tokens' codes and the columns, of the weights as they are.

        Args:
            embedding: [vocab_size, hidden_size].
            hot_token_ids: see ``codes``.

        """
        token_ids = torch.arange(len(embedding), device=embedding.device)
        parts = token_ids.split(8192)
        codes = [self.codes(part, embedding, hot_token_ids) for part in parts]
        self.table = torch.cat(codes).to(self.up.dtype)
        self.scaled.weight = self.columns()

    def forward(self, token_ids: Tensor) -> Tensor:
        """What tokens add to their children's logits, [..., draft_vocab_size]."""
        info: Tensor = self.scaled(nn.functional.embedding(token_ids, self.table))
        return info


def _precise(x: Tensor) -> Tensor:
    """At least float32: bfloat16 would round the norm."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
