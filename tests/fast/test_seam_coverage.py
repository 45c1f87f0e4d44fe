"""Nothing of vLLM that our code uses is missing in the seam table, and the reverse."""

import ast
import builtins
import copy
import hashlib
import importlib
import inspect
import itertools
import json
import logging
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import BinaryIO

import numpy as np
import prometheus_client
import torch
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.mmap_dict import MmapedDict
from pydantic import BaseModel
from transformers import AutoConfig, PretrainedConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import vllm_treespec
from tests.fingerprints import installed_sources
from vllm_treespec.config import parse_spec_config
from vllm_treespec.engine import vllm_types as worker_types
from vllm_treespec.engine.seams import SEAMS, Kind
from vllm_treespec.engine.seams.source_files import assigned_attributes
from vllm_treespec.engine.v1 import vllm_types
from vllm_treespec.engine.v2 import vllm_types as v2_types
from vllm_treespec.plugin import stock_arguments

ROOT = Path(vllm_treespec.__file__).parent
# Of our package, all that touches an engine from within.
FILES = [*sorted(ROOT.glob("engine/**/*.py")), ROOT / "plugin.py", ROOT / "metrics.py"]
# Where Ray is not installed it cannot be imported.
RAY_SERVE = ROOT / "ray_serve.py"
# only type checkers read them
VLLM_TYPES = {*ROOT.glob("engine/**/vllm_types.py")}
NAMES = {seam.name for seam in SEAMS}
# vLLM's classes that vllm_types.py describes
HOSTS: dict[type, tuple[str, ...]] = {
    vllm_types.Buffer: ("vllm.v1.utils.CpuGpuBuffer",),
    vllm_types.BlockTable: ("vllm.v1.worker.block_table.BlockTable",),
    vllm_types.InputBatch: ("vllm.v1.worker.gpu_input_batch.InputBatch",),
    vllm_types.V1Runner: ("vllm.v1.worker.gpu_model_runner.GPUModelRunner",),
    worker_types.StockWorker: (
        "vllm.v1.worker.worker_base.WorkerBase",
        "vllm.v1.worker.cpu_worker.CPUWorker",
        "vllm.v1.worker.gpu_worker.Worker",
    ),
    v2_types.V2Runner: ("vllm.v1.worker.gpu.model_runner.GPUModelRunner",),
    v2_types.InputBatch: ("vllm.v1.worker.gpu.input_batch.InputBatch",),
    v2_types.AsyncOutput: ("vllm.v1.worker.gpu.async_utils.AsyncOutput",),
    v2_types.ExecuteModelState: ("vllm.v1.worker.gpu.model_runner.ExecuteModelState",),
}
# Whose attributes our code uses besides vLLM's and our own.
LIBRARIES = (
    *(
        builtins,
        copy,
        hashlib,
        hashlib.sha256(),
        itertools.chain,
        json,
        logging,
        os,
        platform,
        tempfile,
        textwrap,
        time,
        Path,
    ),
    *(BinaryIO, logging.Logger),
    *(int, str, dict, list, set, np, np.ndarray, torch, torch.Tensor, torch.nn),
    *(
        torch.accelerator,
        torch.nn.functional,
        torch.nn.Module,
        BaseModel,
        AutoConfig,
        PretrainedConfig,
    ),
    *(prometheus_client, CounterMetricFamily, MmapedDict),
    torch.distributed.ReduceOp,
)
# Parameters of their functions, and a key of models' config files.
FOREIGN = {
    *(
        "break_long_words",
        "break_on_hyphens",
        "default_factory",
        "exist_ok",
        "exitpriority",
        "frozen",
        "missing_ok",
    ),
    "async_op",
    "strict",
    "non_blocking",
    "max_position_embeddings",
}


def module_of(file: Path) -> ModuleType:
    """Import a file of ours."""
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return importlib.import_module(".".join(p for p in parts if p != "__init__"))


@cache
def tree_of(file: Path) -> ast.Module:
    """The syntax tree of a file of ours."""
    return ast.parse(file.read_bytes())


def names_of(*kinds: Kind) -> set[str]:
    """Last names of the seams of these kinds, of all without any."""
    return {
        seam.attribute.rpartition(".")[2]
        for seam in SEAMS
        if not kinds or seam.kind in kinds
    }


def runtime_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a module of ours imports from vLLM when it runs: (module, name)."""
    for_types = {
        id(part)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for part in ast.walk(statement)
    }
    for part in ast.walk(tree):
        if not isinstance(part, ast.ImportFrom) or id(part) in for_types:
            continue
        module = part.module or ""
        if module == "vllm" or module.startswith("vllm."):
            yield from ((module, alias.name) for alias in part.names)


def missing_imports(tree: ast.Module) -> list[str]:
    """What a module of ours imports and the table does not have.

    The table has a class when it has the class itself, or anything in it.
    """
    missing = []
    for module, name in runtime_imports(tree):
        place = installed_sources().find(module, name)
        # None: only another release has it
        full = f"{place.module if place else module}.{name}"
        listed = f"{module}.{name}" in NAMES or full in NAMES
        if not listed and not any(row.startswith(f"{full}.") for row in NAMES):
            missing.append(full)
    return missing


def test_imports_are_in_the_table() -> None:
    """Red when we import something from vLLM that the table does not have."""
    for file in {*FILES, RAY_SERVE} - VLLM_TYPES:
        assert not missing_imports(tree_of(file)), file


def test_a_new_import_is_noticed() -> None:
    """Red when the test above would pass whatever we import."""
    tree = ast.parse("from vllm.v1.request import Request, StreamingUpdate")
    assert missing_imports(tree) == ["vllm.v1.request.StreamingUpdate"]


def our_classes() -> Iterator[type]:
    """All classes of ours that extend one of vLLM's."""
    for file in FILES:
        module = module_of(file)
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and any(stock_classes(cls)):
                yield cls


def stock_classes(cls: type) -> Iterator[type]:
    """The classes of vLLM that a class extends."""
    return (base for base in cls.__mro__ if base.__module__.startswith("vllm."))


def full_name(cls: type) -> str:
    """Module and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def test_what_we_extend_is_in_the_table() -> None:
    """Red when a class of ours extends one of vLLM's that the table does not have."""
    extended = {full_name(next(stock_classes(cls))) for cls in our_classes()}
    assert extended <= {s.name for s in SEAMS if s.kind is Kind.EXTENDS}


def missing_overrides(cls: type) -> list[str]:
    """What a class of ours replaces in vLLM's classes and the table does not have."""
    rows = {(seam.name, seam.kind) for seam in SEAMS}
    missing = []
    for ours in cls.__mro__:
        if ours.__module__.startswith("vllm.") or ours.__module__ == "builtins":
            continue
        for name, value in vars(ours).items():
            if name == "_abc_impl" or (name[:2] == "__" and not written(ours, value)):
                continue
            owner = next((c for c in stock_classes(cls) if name in vars(c)), None)
            if owner is None:
                continue
            is_code = hasattr(vars(owner)[name], "__get__")
            kind = Kind.OVERRIDES if is_code else Kind.WRITES
            full = f"{full_name(owner)}.{name}"
            if (full, kind) not in rows:
                missing.append(full)
    return missing


def written(cls: type, value: object) -> bool:
    """Whether a function stands in its class' file; dataclasses make others."""
    return (
        isinstance(value, FunctionType)
        and value.__code__.co_filename == sys.modules[cls.__module__].__file__
    )


def test_overrides_are_in_the_table() -> None:
    """Red when a method of ours replaces one that the table does not have."""
    classes = list(our_classes())
    assert len(classes) > 10
    assert not [name for cls in classes for name in missing_overrides(cls)]


def test_a_new_override_is_noticed() -> None:
    """Red when the test above would pass whatever we override."""

    class Changed(GPUModelRunner):
        """Overrides a method that we leave alone."""

        def execute_model(self) -> None:
            """Do nothing."""

    full = "vllm.v1.worker.gpu_model_runner.GPUModelRunner.execute_model"
    assert missing_overrides(Changed) == [full]


def test_overridden_functions_are_overridden() -> None:
    """Red when the table has an override that we gave up."""
    overridden = {
        f"{full_name(base)}.{name}"
        for cls in our_classes()
        for base in stock_classes(cls)
        for ours in cls.__mro__
        if ours.__module__.startswith("vllm_treespec.")
        for name in vars(ours)
    }
    assert {s.name for s in SEAMS if s.kind is Kind.OVERRIDES} <= overridden


def test_wrapped_functions_are_wrapped() -> None:
    """Red when a second function of vLLM is wrapped, or the row is lost."""
    (wrapped,) = (seam for seam in SEAMS if seam.kind is Kind.WRAPS)
    assert wrapped.attribute == "EngineArgs.create_engine_config"


def test_written_attributes_are_in_the_table() -> None:
    """Red when we assign an attribute of vLLM's that the table does not have."""
    writes = names_of(Kind.WRITES, Kind.WRAPS)
    for cls in our_classes():
        (stock, *_) = stock_classes(cls)
        for ours in cls.__mro__:
            if not ours.__module__.startswith("vllm_treespec."):
                continue
            tree = ast.parse(textwrap.dedent(inspect.getsource(ours)))
            for name in assigned_attributes(tree, "self") - writes:
                attribute = f"{stock.__qualname__}.{name}"
                assert not installed_sources().has(stock.__module__, attribute), (
                    attribute
                )
    # of other objects: vLLM's, or declared in a class of ours
    declared = {
        part.target.id
        for file in FILES
        for part in ast.walk(tree_of(file))
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    for file in FILES:
        tree = tree_of(file)
        others = assigned_attributes(tree) - assigned_attributes(tree, "self")
        # the row is of the object: CPUWorker.model_runner
        assert others - writes - declared <= {"__class__"}, file


def test_stock_arguments_are_in_the_table() -> None:
    """Red when a spec-config stands for an argument that the table does not have."""
    config = parse_spec_config({"method": "suffix_tree", "num_drafts": 8, "depth": 4})
    for device in ("cpu", "cuda"):
        for argument in stock_arguments(config, None, device):
            assert f"vllm.engine.arg_utils.EngineArgs.{argument}" in NAMES


def test_table_and_types_agree() -> None:
    """Red when the typed listing of runner and worker has what the table has not."""
    for cls, hosts in HOSTS.items():
        rows = {
            seam.attribute.rpartition(".")[2]: seam.kind
            for seam in SEAMS
            if seam.name.rpartition(".")[0] in hosts
        }
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType):
                assert rows[name] in (Kind.OVERRIDES, Kind.CALLS), (cls, name)
        for name in inspect.get_annotations(cls):
            assert rows[name] in (Kind.READS, Kind.WRITES), (cls, name)


def test_types_are_complete() -> None:
    """Red when the table has what the typed listing of runner and batch has not."""
    for cls in set(HOSTS) - {worker_types.StockWorker}:
        used = {
            seam.attribute.rpartition(".")[2]
            for seam in SEAMS
            if seam.on_instances and seam.name.rpartition(".")[0] in HOSTS[cls]
        }
        assert used == set(inspect.get_annotations(cls))


def test_every_typed_class_is_compared() -> None:
    """Red when vllm_types.py describes a class that the tests above leave out."""
    described = {
        cls
        for module in (vllm_types, v2_types, worker_types)
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__
    }
    assert described == set(HOSTS)


def used_names(tree: ast.Module) -> set[str]:
    """Names of the attributes and keyword arguments that a piece of code uses."""
    names = set()
    for part in ast.walk(tree):
        if isinstance(part, ast.Attribute):
            names.add(part.attr)
        elif isinstance(part, ast.keyword) and part.arg:
            names.add(part.arg)
    return names


def defined_names(tree: ast.Module) -> set[str]:
    """Names of all that a piece of code defines, parameters included."""
    names = assigned_attributes(tree)
    for part in ast.walk(tree):
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            names.add(part.name)
        elif isinstance(part, ast.arg):
            names.add(part.arg)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
        elif isinstance(part, ast.alias):
            names.add(part.asname or part.name.rpartition(".")[2])
    return names


@cache
def known_names() -> set[str]:
    """Names of the table, of parameters of its functions, and of all others' code."""
    known = names_of()
    for seam in SEAMS:
        place = installed_sources().find(seam.module, seam.attribute)
        if place is not None:
            known |= {p.arg for p in ast.walk(place.node) if isinstance(p, ast.arg)}
    # rglob follows no links
    linked = (ROOT / name for name in ("proposers", "scorers"))
    for file in itertools.chain(*(f.rglob("*.py") for f in (ROOT, *linked))):
        if file not in VLLM_TYPES:
            known |= defined_names(tree_of(file))
    for library in LIBRARIES:
        known |= set(dir(library))
    return known | FOREIGN


def test_attributes_are_in_the_table() -> None:
    """Red when we use an attribute that nobody defines but vLLM, without a row.

    A name that our code or a library defines, too, is not noticed here.
    """
    for file in FILES:
        if file.parent.name != "seams":
            assert used_names(tree_of(file)) <= known_names(), file


def test_a_new_attribute_is_noticed() -> None:
    """Red when the test above would pass whatever we read."""
    tree = ast.parse("runner.speculative_config, runner.num_accepted_tokens_event")
    assert used_names(tree) - known_names() == {"num_accepted_tokens_event"}


def test_every_row_is_used() -> None:
    """Red when the table has something that our code does not name any more."""
    named: set[str] = set()
    for file in (*FILES, RAY_SERVE):
        tree = tree_of(file)
        named |= used_names(tree) | defined_names(tree)
    unused = [
        seam.name
        for seam in SEAMS
        if seam.kind not in (Kind.RELIES, Kind.EXTENDS)
        and seam.attribute.rpartition(".")[2] not in {*named, "__getitem__"}
    ]
    assert not unused
