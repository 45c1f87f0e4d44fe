"""What is told about processors without a dtype's arithmetic."""

from __future__ import annotations

import pytest
import torch

from vllm_treespec.schedule.processor import slow_arithmetic

X86 = {"architecture": "x86_64"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_missing_arithmetic_is_told_with_a_remedy(dtype: torch.dtype) -> None:
    """Red when users of such a processor are not told why no tree pays."""
    told = slow_arithmetic(dtype, X86)
    assert told is not None
    assert str(dtype).removeprefix("torch.") in told
    assert "--dtype float32" in told


@pytest.mark.parametrize(
    ("dtype", "capabilities"),
    [
        (torch.bfloat16, {**X86, "avx512_bf16": True}),
        (torch.bfloat16, {**X86, "amx_bf16": True}),
        (torch.float16, {**X86, "avx512_fp16": True}),
        (torch.float32, X86),
        (torch.bfloat16, {"architecture": "arm64"}),
    ],
)
def test_nothing_is_told_where_all_is_well(
    dtype: torch.dtype, capabilities: dict[str, object]
) -> None:
    """Red when users of a fast processor are told to change their dtype."""
    assert slow_arithmetic(dtype, capabilities) is None


def test_this_processor_is_asked() -> None:
    """Red when torch names what it tells of a processor differently."""
    assert "architecture" in torch.cpu.get_capabilities()
    assert slow_arithmetic(torch.float32) is None
