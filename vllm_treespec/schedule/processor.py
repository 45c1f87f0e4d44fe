"""Whether this processor computes a dtype itself: the price of drafts depends on it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Instructions that multiply numbers of a dtype, as torch names them.
INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}


def slow_arithmetic(
    dtype: torch.dtype, capabilities: Mapping[str, object] | None = None
) -> str | None:
    """What to tell about a dtype that an x86 processor must compute in another one.

    Without such instructions every row of a step costs about as much as the first
    one. With them, and in float32, the first rows cost little more than reading the
    weights.

    Args:
        dtype: of the target's weights.
        capabilities: of the processor, as torch tells them; None: of this one.

    Returns:
        one sentence with a remedy; None where all is well.

    """
    found = torch.cpu.get_capabilities() if capabilities is None else capabilities
    needed = INSTRUCTIONS.get(dtype, ())
    if found["architecture"] != "x86_64" or not needed:
        return None
    if any(found.get(name) for name in needed):
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"this processor has no {name} arithmetic ({', '.join(needed)}): each draft "
        f"token costs about as much as a step, so that trees hardly pay; compare "
        f"--dtype float32, if the memory is there"
    )
