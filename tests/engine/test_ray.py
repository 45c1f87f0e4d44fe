"""Two tensor-parallel ranks on two Ray nodes answer as one rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import Usage, call, note
from tests.engine.ray_cluster import METHODS, ROOT, environment, write_path
from tests.engine.test_tensor_parallel import (
    GREEDY,
    run_jobs,
    without_seconds,
    write_models,
)
from vllm_treespec import __version__

TIMEOUT_S = 300

pytestmark = [
    pytest.mark.skipif(
        find_spec("ray") is None,
        reason="Ray is not installed: pip install 'vllm-treespec[ray]'",
    ),
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models."""
    folder = tmp_path_factory.mktemp("ray")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def over_ray(folder: Path) -> dict[str, Any]:
    """What engines over two Ray nodes answered, and how others were refused."""
    began = time.perf_counter()
    log = folder / "log"
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine.ray_cluster", str(folder)],
            cwd=ROOT,
            env=environment(write_path(folder)),
            stdout=output,
            stderr=output,
            timeout=TIMEOUT_S,
        )
    note(Usage(len(METHODS), time.perf_counter() - began))
    assert done.returncode == 0, log.read_text()[-6000:]
    return json.loads((folder / "ray.json").read_text())


@pytest.mark.parametrize("method", METHODS)
def test_two_nodes_answer_as_one_rank(
    method: str, folder: Path, over_ray: dict[str, Any]
) -> None:
    """Red when trees depend on Ray, or on what a rank shares with its machine."""
    call(
        f"{run_jobs.__module__}:{run_jobs.__name__}",
        *(method, folder, 1),
        log=folder / f"{method}.log",
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    one = json.loads((folder / f"{method}-1.json").read_text())
    for job in GREEDY:
        assert over_ray[method][job] == one[job], job
    first, second = without_seconds(over_ray[method]["stats"])
    assert first == second
    assert sum(n for length, n in first["accepted"].items() if int(length)) > 2


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "no package",
            "vllm-treespec is not installed there; install vllm-treespec "
            f"{__version__}",
        ),
        (
            "other version",
            f"it has vllm-treespec 0.0.1, and this process has {__version__}; install",
        ),
        ("plugins", "VLLM_PLUGINS='ray' leaves treespec out; unset it, or set"),
    ],
)
def test_nodes_that_lack_something_are_refused(
    fault: str, says: str, over_ray: dict[str, Any]
) -> None:
    """Red when such a node is found in a traceback of a worker, or never."""
    assert over_ray[fault]["message"].startswith("Ray node ")
    assert says in over_ray[fault]["message"]
    assert over_ray[fault]["seconds"] < 60
