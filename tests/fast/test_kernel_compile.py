"""The kernels compiled for Hopper, without a card."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.thorough

TABLE = "vllm_treespec.kernels.compile_table"
TOO_FEW_WARPS = f"""
from vllm_treespec.kernels import tree_attention
from {TABLE} import Shape, attention_cases, compile_case

tree_attention.BLOCK_SHAPES[128] = (tree_attention.BlockShape(128, 64, 4, 3, 1),)
found = compile_case(next(attention_cases(iter([Shape(128, 128)]))))
print("fits" if found.fits else "spills")
"""


def compile_apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with Triton's real compiler, whatever this process does with it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_kernel_spills_on_hopper() -> None:
    """Red when a kernel does not compile, or a change costs registers it has not."""
    done = compile_apart("-m", TABLE, "--heaviest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 that spill" in done.stdout


def test_a_spill_is_noticed() -> None:
    """Red when the table would pass a kernel that spills."""
    done = compile_apart("-c", TOO_FEW_WARPS)
    assert done.stdout.strip() == "spills", done.stderr
