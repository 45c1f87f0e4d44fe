"""The noise of vLLM's V2 sampler for some tokens, in one launch.

vLLM adds Gumbel noise to logits: a MurmurHash3 of the request's seed, the position and
the token (``vllm/v1/worker/gpu/sample/gumbel.py``). ``sampling/gumbel.py`` has hashed
the first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
NUM_WARPS = 1


@triton.jit
def mixed(state, part):
    """Mix 32 more bits into a state of MurmurHash3, uint32 both."""
    part = part * 0xCC9E2D51
    part = ((part << 15) | (part >> 17)) * 0x1B873593
    state ^= part
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit(
    do_not_specialize=["total"],
    do_not_specialize_on_alignment=["keys", "token_ids", "noise"],
)
def gumbel_kernel(
    keys,  # int64 [total], the hash of a seed and a position, 32 bits each
    token_ids,  # int64 [total]
    noise,  # float64 [total]
    total,
    BLOCK: tl.constexpr,
):
    """Mix a position and a token into each hash, and finish it."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    key = tl.load(keys + place, mask=inside, other=0)
    token = tl.load(token_ids + place, mask=inside, other=0)
    state = mixed((key >> 32).to(tl.uint32), key.to(tl.uint32))
    state = mixed(state, token.to(tl.uint32))
    state ^= 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    state ^= state >> 16
    uniform = (state.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    tl.store(noise + place, -tl.log(1 - uniform), mask=inside)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise of tokens, float64: the token of the highest probability / noise is drawn.

    It is standard exponential; vLLM's Gumbel noise is the negative of its logarithm.

    Args:
        keys: int64, see ``sampling.gumbel.gumbel_keys``; shapes are broadcast.
        token_ids: int64.

    """
    keys, token_ids = torch.broadcast_tensors(keys, token_ids)
    noise = torch.empty(keys.shape, dtype=torch.float64, device=keys.device)
    total = noise.numel()
    gumbel_kernel[(triton.cdiv(total, BLOCK),)](
        keys.contiguous(),
        token_ids.contiguous(),
        noise,
        total,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return noise


def warm_up(device: torch.device) -> None:
    """Hash one token, so that no request waits for the kernel's compiler."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    gumbel_noise(zero, zero)


def compile_cases() -> list[tuple[str, Any, dict[str, str], dict[str, int], int]]:
    """The kernel's one form, to be compiled ahead of time.

    Returns:
        name, kernel, types of its arguments, values of its constants, and warps.

    """
    signature = {
        "keys": "*i64",
        "token_ids": "*i64",
        "noise": "*fp64",
        "total": "i32",
    }
    return [("gumbel", gumbel_kernel, signature, {"BLOCK": BLOCK}, NUM_WARPS)]
