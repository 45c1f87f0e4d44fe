"""A transformer's decoder layer whose attention is given to it, and what it needs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vllm_treespec.heads.config import DecoderHeadConfig

# Attention of one layer: number of the layer, queries [n, num_heads, head_size], keys
# and values [n, num_kv_heads, head_size], to [n, num_heads * head_size]. Serving reads
# the paged KV cache, training the rows of its batch.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """Scales to root mean square 1, then by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        """Make a norm that only scales."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to [..., size]."""
        weight = self.weight.to(x.dtype)
        return nn.functional.rms_norm(x, weight.shape, weight, self.eps)


class Rotary(nn.Module):
    """Rotary position embeddings of all kinds that transformers knows for Llama.

    Angles are tabulated in float32, up to ``prepare``'s number of positions.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderHeadConfig) -> None:
        """Tabulate as many positions as the head was made for."""
        super().__init__()
        self.config = LlamaConfig(
            hidden_size=config.num_heads * config.head_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_size,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rope),
        )
        self.prepare(config.max_positions)

    def prepare(self, num_positions: int) -> None:
        """Tabulate positions up to ``num_positions``, exclusive."""
        table = LlamaRotaryEmbedding(self.config)
        positions = torch.arange(num_positions)[None]
        cos, sin = table(torch.zeros((), dtype=torch.float32), positions)
        half = self.config.head_dim // 2
        self.register_buffer("cos", cos[0, :, :half].contiguous(), persistent=False)
        self.register_buffer("sin", sin[0, :, :half].contiguous(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Move to another device, but never to another dtype."""
        exact = self.cos, self.sin
        super()._apply(fn, recurse)
        self.cos, self.sin = (table.to(self.cos.device) for table in exact)
        return self

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position, float32 [n, 1, head_size / 2]."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn [n, heads, head_size] by ``Rotary.angles``."""
    cos, sin = angles
    exact = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(exact).chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


class DecoderLayer(nn.Module):
    """Attention and MLP of a Llama layer; the norm before attention is the caller's."""

    def __init__(self, config: DecoderHeadConfig, number: int, input_size: int) -> None:
        """Make a fresh layer.

        Args:
            config: of the head.
            number: of the layer, which its attention is told.
            input_size: width of what attention reads.

        """
        super().__init__()
        size, inner, bias = (
            config.hidden_size,
            config.intermediate_size,
            config.qkv_bias,
        )
        self.number = number
        self.head_size = config.head_size
        self.num_heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        width = sum(self.num_heads) * config.head_size
        self.qkv_proj = nn.Linear(input_size, width, bias=bias)
        self.o_proj = nn.Linear(
            config.num_heads * config.head_size, size, bias=config.o_bias
        )
        self.gate_up_proj = nn.Linear(size, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.post_attention_norm = RMSNorm(size, config.norm_eps)
        self.norms = config.qk_norm
        if self.norms:
            self.q_norm = RMSNorm(config.head_size, config.norm_eps)
            self.k_norm = RMSNorm(config.head_size, config.norm_eps)

    def forward(
        self, x: Tensor, residual: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Read one token a row.

        Args:
            x: [n, input_size], what attention reads.
            residual: [n, hidden_size], what its result is added to.
            angles: of the rows' positions.
            attend: attention over the context.

        Returns:
            [n, hidden_size].

        """
        y = residual + self.attention(x, angles, attend)
        out: Tensor = y + self.mlp(self.post_attention_norm(y))
        return out

    def attention(
        self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Attend, [n, input_size] to [n, hidden_size]."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_size))
        num_queries, num_keys, _ = self.num_heads
        turning, value = heads.tensor_split([num_queries + num_keys], dim=-2)
        if self.norms:
            query, key = turning.tensor_split([num_queries], dim=-2)
            turning = torch.cat([self.q_norm(query), self.k_norm(key)], dim=-2)
        query, key = rotate(turning, angles).tensor_split([num_queries], dim=-2)
        out: Tensor = self.o_proj(attend(self.number, query, key, value))
        return out

    def key_value(
        self, x: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Key and value alone, each [n, num_kv_heads, head_size]."""
        # with the queries: a packed weight has no rows to choose
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_size))
        _, key, value = heads.split(self.num_heads, dim=-2)
        return rotate(self.k_norm(key) if self.norms else key, angles), value

    def mlp(self, x: Tensor) -> Tensor:
        """Apply the MLP to [n, hidden_size]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return out
