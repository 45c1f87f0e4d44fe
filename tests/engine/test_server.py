"""``vllm serve`` with a spec-config, over loopback."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.processes import Usage, note
from tests.monitoring import board_queries, metric_names, rules

START_SECONDS = 300


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(
    target: str, draft: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Start the real server; give its address."""
    port = free_port()
    log_file = tmp_path_factory.mktemp("server") / "log"
    spec = {"method": "rsd_s", "model": draft, "beam_width": 3, "depth": 3}
    spec["schedule"] = "fixed"
    command = [
        str(Path(sys.executable).with_name("vllm")),
        *("serve", target, "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", "smol", "--max-model-len", "512"),
        *("--enforce-eager", "--kv-cache-memory-bytes", str(2**30)),
        *("--speculative-config", json.dumps(spec)),
    ]
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
    url = f"http://127.0.0.1:{port}"
    start = time.perf_counter()
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log_file.read_text()[-4000:]
            assert time.monotonic() < deadline, log_file.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except (urllib.error.URLError, TimeoutError):
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)
        note(Usage(1, time.perf_counter() - start))


def post(url: str, body: dict) -> str:
    """POST JSON, return the raw answer."""
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def chunks(stream: str) -> list[dict]:
    """The JSON events of a server-sent stream."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


COMPLETION = {"model": "smol", "prompt": "The capital of France is", "temperature": 0}
CHAT = {
    "model": "smol",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}


def test_completion(server: str) -> None:
    """Turns red when a request through the server loses or adds tokens."""
    answer = json.loads(
        post(f"{server}/v1/completions", {**COMPLETION, "max_tokens": 20})
    )
    assert answer["usage"]["completion_tokens"] <= 20
    assert answer["choices"][0]["text"]


def test_streamed_completion_equals_whole(server: str) -> None:
    """Turns red when streaming drops tokens of a step that emitted several."""
    body = {**COMPLETION, "max_tokens": 24}
    whole = json.loads(post(f"{server}/v1/completions", body))["choices"][0]["text"]
    stream = chunks(post(f"{server}/v1/completions", {**body, "stream": True}))
    assert "".join(c["choices"][0]["text"] for c in stream) == whole


def test_chat_and_streamed_chat(server: str) -> None:
    """Turns red when chat answers differ between streamed and whole."""
    body = {**CHAT, "max_tokens": 24}
    answer = json.loads(post(f"{server}/v1/chat/completions", body))
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text
    stream = chunks(post(f"{server}/v1/chat/completions", {**body, "stream": True}))
    parts = [c["choices"][0]["delta"].get("content") or "" for c in stream]
    assert "".join(parts) == text


def test_counters_are_truthful(server: str) -> None:
    """Turns red when vLLM's spec-decode counters stop seeing our drafts."""
    post(f"{server}/v1/completions", {**COMPLETION, "max_tokens": 32})
    metrics = urllib.request.urlopen(f"{server}/metrics", timeout=10).read().decode()
    trees = sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("vllm:treespec_num_steps_total") and "plain" not in line
    )
    values = {
        name: sum(
            float(line.rsplit(" ", 1)[1])
            for line in metrics.splitlines()
            if line.startswith(f"vllm:spec_decode_{name}_total")
        )
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    }
    assert values["num_draft_tokens"] == 9 * values["num_drafts"] > 0
    assert 0 < values["num_accepted_tokens"] < values["num_draft_tokens"]
    # One request at a time: its last tree may be drafted and never verified.
    assert 0 <= trees - values["num_drafts"] <= 8


def test_board_and_rules_find_their_metrics(server: str) -> None:
    """Turns red when a query of deploy/monitoring names a metric that is not served."""
    post(f"{server}/v1/completions", {**COMPLETION, "max_tokens": 32})
    metrics = urllib.request.urlopen(f"{server}/metrics", timeout=10).read().decode()
    served = {line.partition("{")[0] for line in metrics.splitlines()}
    queries = [*board_queries(), *(rule["expr"] for rule in rules())]
    assert metric_names(" ".join(queries)) <= served
