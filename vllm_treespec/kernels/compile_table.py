"""Compile the kernels for Hopper without a card, and show what they need there.

``python -m vllm_treespec.kernels.compile_table`` prints registers, spills and shared
memory of every specialisation that matters, and exits with 1 if one spills or does not
fit. Nothing runs: Triton and the assembler it brings along compile for sm_90 on any
machine. A kernel's file adds its cases to ``CASES``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_treespec.kernels import follow, gumbel, kv_move
from vllm_treespec.kernels.tree_attention import Inputs, Launch, Workspace

TARGET = GPUTarget("cuda", 90, 32)
# What one program may use on sm_90, in bytes.
SHARED_MEMORY = 227 * 1024
# Columns of the table, also where the output is a file.
WIDTH = 120
TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of a kernel."""

    name: str
    source: ASTSource
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Resources:
    """What a program of a compiled kernel needs."""

    registers: int
    # bytes a thread keeps in memory for want of registers
    spilled: int
    shared: int

    @property
    def fits(self) -> bool:
        """Whether nothing spills and the program fits a multiprocessor."""
        return not self.spilled and self.shared <= SHARED_MEMORY


def compile_case(case: CompileCase) -> Resources:
    """Compile for sm_90 and read the binary's resources."""
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(case.source, target=TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage"]
        report = subprocess.run(
            [*command, file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no registers: {report}")
    return Resources(int(found[1]), int(found[2]), compiled.metadata.shared)


def specialise(launch: Launch) -> ASTSource:
    """The specialisation that a launch makes: what Triton would derive at run time."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        aligned = special and not parameter.do_not_specialize_on_alignment
        kind = "constexpr"
        if isinstance(value, Tensor):
            kind = "*" + TYPE_NAMES[value.dtype]
        elif not parameter.is_constexpr and isinstance(value, float):
            kind = "fp32"
        elif not parameter.is_constexpr and value is not None:
            kind = "constexpr" if value == 1 and special else "i32"
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif aligned and (kind.startswith("*") or (kind == "i32" and value % 16 == 0)):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


@dataclass(frozen=True)
class Shape:
    """A call of tree attention, as far as compilation depends on it."""

    head_size: int
    # query rows × heads of a kv head, about
    rows: int
    group: int = 4
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    num_splits: int = 4
    # beside longer requests: q blocks look for their request
    mixed: bool = False

    @property
    def name(self) -> str:
        """The shape in words."""
        options = {
            f"window {self.window}": self.window,
            f"soft cap {self.soft_cap:g}": self.soft_cap,
            "sinks": self.sinks,
            "no splits": self.num_splits == 1,
            "mixed batch": self.mixed,
        }
        dtypes = TYPE_NAMES[self.dtype]
        if self.cache_dtype is not None:
            dtypes += f" + {TYPE_NAMES[self.cache_dtype]}"
        words = [
            f"head size {self.head_size}",
            f"{self.rows} rows",
            f"group {self.group}",
            f"page {self.page_size}",
            dtypes,
            *(text for text, chosen in options.items() if chosen),
        ]
        return ", ".join(words)

    def launches(self) -> list[Launch]:
        """The kernels of such a call, on tensors without memory."""
        kv_heads, num_reqs, meta = 2, 3, torch.device("meta")
        query_len = max(1, self.rows // self.group)
        num_tokens, num_heads = num_reqs * query_len, kv_heads * self.group
        cache = torch.empty(
            (1024, self.page_size, kv_heads, 2 * self.head_size),
            dtype=self.cache_dtype or self.dtype,
            device=meta,
        )
        keys, values = cache.split(self.head_size, -1)
        query = torch.empty(
            (num_tokens, num_heads, self.head_size), dtype=self.dtype, device=meta
        )
        scale = torch.empty(1, device=meta)
        counts = torch.empty(num_reqs + 1, dtype=torch.int32, device=meta)
        workspace = Workspace(
            num_tokens, num_heads, self.head_size, meta, self.num_splits
        )
        return Inputs(
            query,
            keys,
            values,
            query,
            counts,
            counts[1:],
            torch.empty((num_reqs, 4096), dtype=torch.int32, device=meta),
            torch.empty(num_tokens, dtype=torch.int64, device=meta),
            counts,
            1024 if self.mixed else query_len,
            self.head_size**-0.5,
            self.window,
            self.soft_cap,
            scale,
            scale,
            torch.empty(num_heads, dtype=self.dtype, device=meta)
            if self.sinks
            else None,
            workspace,
        ).launches()


def attention_shapes() -> Iterator[Shape]:
    """Calls whose kernels are worth a look: each option, and the heaviest mixtures."""
    for head_size in (64, 80, 96, 128, 256):
        for rows in (16, 32, 64, 128):
            yield Shape(head_size, rows)
            yield Shape(head_size, rows, group=7, page_size=64)
        yield Shape(head_size, 128, group=3, page_size=64, mixed=True)
        yield Shape(head_size, 128, group=8, mixed=True, num_splits=1)
        yield Shape(head_size, 128, dtype=torch.float16)
        yield Shape(head_size, 32, group=3, dtype=torch.float32)
        yield Shape(head_size, 32, group=3, dtype=torch.float32, mixed=True)
    for head_size in (64, 128, 256):
        for rows in (16, 32, 64, 128):
            for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
                yield Shape(head_size, rows, cache_dtype=fp8)
            yield Shape(head_size, rows, window=1024)
            yield Shape(head_size, rows, soft_cap=30.0, num_splits=1)
            yield Shape(head_size, rows, group=8, window=1024, sinks=True)
        yield Shape(head_size, 128, window=1024, soft_cap=30.0, mixed=True)


def heaviest_shapes() -> Iterator[Shape]:
    """Calls whose kernels need most registers, of each head size's padding."""
    fp8 = torch.float8_e4m3fn
    for head_size in (64, 128, 256):
        yield Shape(head_size, 128, group=3, page_size=64, mixed=True)
        yield Shape(head_size, 64, group=7, page_size=64)
        yield Shape(head_size, 64, cache_dtype=fp8, num_splits=1)
        yield Shape(head_size, 128, window=1024, soft_cap=30.0, mixed=True)
        yield Shape(head_size, 128, group=8, window=1024, sinks=True, mixed=True)
        yield Shape(head_size, 32, group=3, dtype=torch.float32)


def attention_cases(shapes: Iterator[Shape]) -> Iterator[CompileCase]:
    """The attention kernel of each shape, and each merge kernel once."""
    merged = set()
    for shape in shapes:
        for launch in shape.launches():
            name = shape.name
            if launch.kernel.__name__ == "merge_kernel":
                if (shape.head_size, shape.dtype) in merged:
                    continue
                merged.add((shape.head_size, shape.dtype))
                name = f"merge: head size {shape.head_size}, {TYPE_NAMES[shape.dtype]}"
            yield CompileCase(
                name, specialise(launch), launch.num_warps, launch.num_stages
            )


def small_cases() -> Iterator[CompileCase]:
    """The kernels that rank drafts, follow trees, and move keys and values."""
    cases = [
        *kv_move.compile_cases(),
        *follow.compile_cases(),
        *gumbel.compile_cases(),
    ]
    for name, kernel, types, constants, num_warps in cases:
        signature = types | dict.fromkeys(constants, "constexpr")
        yield CompileCase(name, ASTSource(kernel, signature, constants), num_warps, 1)


# Kernels in the table: families of cases, and for a quick look the heaviest of them.
CASES: tuple[Callable[[], Iterator[CompileCase]], ...] = (
    lambda: attention_cases(attention_shapes()),
    small_cases,
)
HEAVIEST: tuple[Callable[[], Iterator[CompileCase]], ...] = (
    lambda: attention_cases(heaviest_shapes()),
)


def main(arguments: Sequence[str]) -> int:
    """Compile the cases, print the table, return the exit status."""
    parser = argparse.ArgumentParser(description="Compile the kernels for sm_90.")
    text = "only attention shapes that are short of registers"
    parser.add_argument("--heaviest", action="store_true", help=text)
    heaviest = parser.parse_args(arguments).heaviest
    if triton.knobs.runtime.interpret:
        sys.exit("nothing to compile for the interpreter; unset TRITON_INTERPRET")
    table = Table("kernel", "warps", "stages", "registers", "spilled", "shared memory")
    console, unfit, number = Console(width=WIDTH), 0, 0
    for cases in HEAVIEST if heaviest else CASES:
        for case in cases():
            found = compile_case(case)
            number, unfit = number + 1, unfit + (not found.fits)
            counts = (case.num_warps, case.num_stages, found.registers, found.spilled)
            style = None if found.fits else "bold red"
            table.add_row(case.name, *map(str, counts), str(found.shared), style=style)
    console.print(table)
    console.print(f"{number} kernels for sm_90, {unfit} that spill or do not fit")
    return min(unfit, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
