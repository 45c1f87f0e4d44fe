"""Engine processes: forks of a process that has imported vLLM, one thread each.

Importing vLLM takes longer than starting a small engine, so one process imports it for
all. It starts no threads and no engine itself: a fork is as good as a new process.
For other variables at import there is another such process.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pkgutil
import resource
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Two engines run side by side on two cores.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
# Of vLLM only: what an engine would import when it starts.
PRELOAD = [
    "vllm.entrypoints.llm",
    "vllm.compilation.backends",
    "vllm.lora.request",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
]
TIMEOUT_S = 600.0


class EngineProcessError(RuntimeError):
    """A process that failed; the message ends with what it printed last."""


@dataclass(frozen=True)
class Usage:
    """What the engines of one process took."""

    engines: int
    seconds: float
    cpu_seconds: float = 0.0
    gib: float = 0.0


# Of the processes that ended since the last test's report; see conftest.py.
ended: list[dict[str, float]] = []


def call(
    function: str,
    *arguments: Any,
    log: Path,
    environment: Mapping[str, str] | None = None,
    at_import: Mapping[str, str] | None = None,
    engines: int = 1,
) -> Any:
    """Call a function in a fork; return what it returns.

    Args:
        function: ``module:name`` of the one that starts the engines.
        arguments: of the function.
        log: gets all that the process prints.
        environment: variables for the process, set after vLLM was imported.
        at_import: variables that must be there when vLLM is imported.
        engines: how many the function starts.

    Raises:
        EngineProcessError: the function failed, or took longer than ``TIMEOUT_S``.

    """
    start = time.perf_counter()
    cpu_seconds = gib = 0.0
    task = (function, arguments, log, dict(environment or {}))
    try:
        if at_import is None:
            result, cpu_seconds, gib = in_fork(*task)
        else:
            other = other_server(tuple(at_import.items()))
            result, cpu_seconds, gib = other.submit(in_fork, *task).result()
    finally:
        note(Usage(engines, time.perf_counter() - start, cpu_seconds, gib))
    return result


@cache
def other_server(variables: tuple[tuple[str, str], ...]) -> ProcessPoolExecutor:
    """Return a process whose fork server imports vLLM under other variables."""
    return ProcessPoolExecutor(
        1,
        mp_context=get_context("spawn"),
        initializer=set_variables,
        initargs=(dict(variables),),
    )


def set_variables(variables: dict[str, str]) -> None:
    """Set environment variables of this process."""
    os.environ.update(variables)


def in_fork(
    function: str, arguments: tuple[Any, ...], log: Path, environment: dict[str, str]
) -> tuple[Any, float, float]:
    """Call a function in a fork: its result, its CPU seconds, its most memory in GiB.

    Raises:
        EngineProcessError: the function failed, or took longer than ``TIMEOUT_S``.

    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with ProcessPoolExecutor(
        1, mp_context=context, initializer=prepare, initargs=(str(log), environment)
    ) as pool:
        try:
            return pool.submit(measured, function, *arguments).result()
        except Exception as error:
            output = log.read_text()[-4000:]
            raise EngineProcessError(f"{error!r}\n{output}") from error


def note(usage: Usage) -> None:
    """Count the engines of a process that has ended."""
    ended.append(asdict(usage))


def prepare(log: str, environment: dict[str, str]) -> None:
    """In the fork: print to the log, and end with tracebacks when out of time.

    What is imported stays: collecting garbage, as engines do when they start, would
    visit all of it and copy its pages.
    """
    gc.freeze()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    os.environ.update(environment)


def measured(function: str, *arguments: Any) -> tuple[Any, float, float]:
    """In the fork: a function's result, its CPU seconds, its most memory in GiB."""
    result = pkgutil.resolve_name(function)(*arguments)
    used = [
        resource.getrusage(who)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    cpu_seconds = sum(u.ru_utime + u.ru_stime for u in used)
    return result, cpu_seconds, max(u.ru_maxrss for u in used) / 2**20
