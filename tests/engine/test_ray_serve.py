"""Ray Serve LLM with draft trees: HTTP in, streamed text out, metrics at Ray's port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.processes import Usage, note
from tests.engine.test_server import chunks, free_port, post
from tests.engine.tiny_models import write_pair, write_tokenizer
from vllm_treespec.metrics import COUNTERS

ROOT = Path(__file__).parents[2]
LLM = ROOT / "deploy" / "ray-serve" / "llm.yaml"
START_S = 240
METRICS_S = 40

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None,
    reason="Ray is not installed: pip install 'vllm-treespec[ray]'",
)


def write_config(folder: Path) -> Path:
    """Write deploy's ``llm.yaml``, changed for two cores and a small model."""
    target, draft = write_pair(folder)
    write_tokenizer(Path(target))
    config = yaml.safe_load(LLM.read_text())
    config["model_loading_config"]["model_source"] = target
    config["accelerator_config"] = {"kind": "cpu"}
    config["deployment_config"]["autoscaling_config"]["max_replicas"] = 1
    spec = {"method": "rsd_s", "model": draft, "beam_width": 3, "depth": 3}
    config["engine_kwargs"] |= {
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**28,
        "speculative_config": {**spec, "schedule": "fixed"},
    }
    file = folder / "llm.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Addresses of the app and of Ray's metrics."""
    folder = tmp_path_factory.mktemp("ray_serve")
    config = write_config(folder)
    ports = free_port(), free_port()
    environment = {
        **os.environ,
        "LLM_CONFIG": str(config),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's figures for metrics, in milliseconds
        "RAY_metrics_report_interval_ms": "1000",
    }
    log = folder / "log"
    began = time.perf_counter()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.ray_serve", *map(str, ports)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            said = iter(process.stdout.readline, "")
            assert any(line == "serving\n" for line in said), log.read_text()[-6000:]
            assert time.perf_counter() - began < START_S
            yield f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        finally:
            process.stdin.close()
            process.wait(timeout=60)
            note(Usage(1, time.perf_counter() - began))


def body(**more: Any) -> dict[str, Any]:
    """A request."""
    prompt = " ".join(f"w{token}" for token in range(5, 25))
    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    return {"model": "coder", "prompt": prompt, **greedy, **more}


def test_streamed_answer_equals_whole(served: tuple[str, str]) -> None:
    """Red when an answer through Ray Serve loses or adds tokens."""
    url, _ = served
    whole = json.loads(post(f"{url}/v1/completions", body()))
    assert whole["usage"]["completion_tokens"] == 40
    stream = chunks(post(f"{url}/v1/completions", body(stream=True)))
    text = "".join(chunk["choices"][0]["text"] for chunk in stream)
    assert text == whole["choices"][0]["text"]


def ray_counters(url: str) -> dict[str, float]:
    """Our counters at Ray's metrics endpoint, summed over their labels."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("ray_vllm_"):
            name, _, value = line.partition("{")
            found[name] = found.get(name, 0.0) + float(value.rsplit(" ", 1)[1])
    return found


def test_our_counters_stand_at_rays_endpoint(served: tuple[str, str]) -> None:
    """Red when Ray's own metrics are all that its endpoint shows of an engine."""
    url, metrics = served
    post(f"{url}/v1/completions", body())
    deadline = time.monotonic() + METRICS_S
    while True:
        found = ray_counters(metrics)
        trees = found.get("ray_vllm_spec_decode_num_drafts_total", 0.0)
        nodes = found.get("ray_vllm_treespec_num_nodes_verified_total", 0.0)
        if nodes == 10 * trees > 0:
            break
        assert time.monotonic() < deadline, found
        time.sleep(1)
    wasted = found["ray_vllm_treespec_num_nodes_wasted_total"]
    assert 0 < wasted < nodes
    shown = {name for name in COUNTERS if f"ray_vllm_treespec_{name}_total" in found}
    # those that are still 0 are not shown
    other_methods = ("leftover", "beam", "source")
    assert set(COUNTERS) - shown <= {
        name for name in COUNTERS if any(word in name for word in other_methods)
    }
