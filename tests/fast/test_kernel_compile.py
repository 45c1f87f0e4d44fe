"""The kernels compiled for Hopper, without a card."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from vllm_treespec.kernels import follow, gumbel, kv_move

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


@pytest.mark.thorough
def test_no_kernel_spills_on_hopper() -> None:
    """Red when a kernel does not compile, or a change costs registers it has not."""
    done = compile_apart("-m", TABLE, "--heaviest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 that spill" in done.stdout


@pytest.mark.thorough
def test_a_spill_is_noticed() -> None:
    """Red when the table would pass a kernel that spills."""
    done = compile_apart("-c", TOO_FEW_WARPS)
    assert done.stdout.strip() == "spills", done.stderr


@pytest.mark.parametrize("kernels", [follow, gumbel, kv_move])
def test_compile_cases_name_every_argument(kernels: ModuleType) -> None:
    """Red when an argument of a kernel is forgotten in the ahead-of-time table."""
    for _, kernel, signature, constants, _ in kernels.compile_cases():
        assert [*signature, *constants] == kernel.arg_names
