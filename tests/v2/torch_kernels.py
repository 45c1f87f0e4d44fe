"""Torch forms of stock kernels: two do not interpret, two are CUDA's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.v1.attention.backends import triton_attn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.sample import sampler, states
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

BITS = torch.arange(32, dtype=torch.int32)


def install() -> None:
    """Replace the kernels; let attention run in as few programs as it can.

    A card gets 16 programs for each head of a short batch, to be full. The interpreter
    runs them one after the other.
    """
    states.apply_top_k_top_p = sampler.apply_top_k_top_p = top_k_top_p
    StructuredOutputsWorker.apply_grammar_bitmask = apply_grammar_bitmask
    _custom_ops.rms_norm = rms_norm
    _custom_ops.rotary_embedding = rotary_embedding
    triton_attn.MIN_LAUNCH_GRID_SIZE_2D = 0


def top_k_top_p(
    logits: Tensor, k: Tensor | None, p: Tensor | None, **options: Any
) -> Tensor:
    """Mask logits outside of the top k and the top p."""
    if k is None and p is None:
        return logits
    return apply_top_k_top_p_pytorch(logits, k, p)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> None:
    """Write the norm of ``x`` to ``out``; weights may differ by its first axis."""
    size = weight.shape[-1]
    rows = weight if weight.dim() == 1 else weight.view(-1, *[1] * (x.dim() - 2), size)
    out.copy_(torch.nn.functional.rms_norm(x, (size,), eps=epsilon) * rows)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    """Turn [n, heads * head_size] in place, the halves of each head as pairs."""
    assert is_neox
    assert key is None
    heads = query.view(len(query), -1, head_size)
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    first, second = heads.clone().chunk(2, dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    heads.copy_(torch.cat(turned, dim=-1))


def apply_grammar_bitmask(
    self: StructuredOutputsWorker,
    logits: Tensor,
    input_batch: Any,
    grammar_req_ids: list[str],
    grammar_bitmask: np.ndarray,
) -> None:
    """Mask tokens that a grammar forbids.

    Args:
        self: has ``mask_stride`` rows of masks for each request.
        logits: [num_logits, vocab_size]; changed.
        input_batch: of this step.
        grammar_req_ids: of the requests with a grammar.
        grammar_bitmask: [len(grammar_req_ids) * mask_stride, words], int32.

    """
    ends = input_batch.cu_num_logits.tolist()
    for number, req_id in enumerate(grammar_req_ids):
        row = input_batch.req_ids.index(req_id)
        masks = torch.from_numpy(grammar_bitmask[number * self.mask_stride :])
        for mask, target in zip(masks, logits[ends[row] : ends[row + 1]], strict=False):
            allowed = ((mask[:, None] >> BITS) & 1).flatten()[: target.shape[0]]
            target.masked_fill_(allowed == 0, float("-inf"))
