"""The soak in its short form, beside a process that keeps a core busy."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.processes import Usage, note
from vllm_treespec.tools.assets import shipped_drafter
from vllm_treespec.tools.prompts import SHIPPED, load_prompts
from vllm_treespec.tools.soak import run
from vllm_treespec.tools.soak.requests import make_requests

# Tokens that the target's attention sees; half of the prompts are longer.
WINDOW = 96
TREE = {
    "method": "hybrid",
    "num_drafts": 10,
    "depth": 6,
    "schedule": "fixed",
}


def write_windowed(source: str, folder: Path) -> str:
    """Copy a Llama and give it a sliding window; its folder."""
    shutil.copytree(source, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": WINDOW,
    }
    file.write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def busy_core() -> Iterator[None]:
    """Run a process that computes all the time."""
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    assert hog.poll() is None, "the core was not kept busy"
    hog.kill()
    hog.wait()


@pytest.mark.usefixtures("busy_core")
def test_short_soak_passes(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when trees lose a request, change an answer or keep a KV block.

    The target has a sliding window; two sources draft its trees, which some requests
    limit. Red, too, when this is so only with as many threads as vLLM takes by itself,
    of which another process slows one down: the other engines have one.
    """
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name)
    settings = run.Settings(
        target=write_windowed(target, tmp_path / "target"),
        spec={**TREE, "model": shipped_drafter()},
        requests=32,
        kv_blocks=16,
    )
    length = settings.max_model_len
    material = run.material(settings.target, load_prompts(SHIPPED), length)
    requests = make_requests(settings.requests, settings.seed, material, length)
    start = time.perf_counter()
    report = run.soak(settings, requests, tmp_path, lambda side, event: None)
    note(Usage(2, time.perf_counter() - start))
    assert not report.problems
    assert report.passed
    assert report.sampled_compared > 5
    for side in (report.plain, report.trees):
        assert side.aborted > 0
        assert side.end.prefix_hits > 0
    assert report.trees.end.acceptance_length is not None
    assert report.trees.end.acceptance_length > 1.2
