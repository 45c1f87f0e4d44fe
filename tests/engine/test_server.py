"""``vllm serve`` with a spec-config, over loopback."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.processes import Usage, note
from tests.monitoring import board_queries, metric_names, rules

START_SECONDS = 300
IDLE_SECONDS = 60
# How long running requests may take once the server is asked to stop.
DRAIN_SECONDS = 150


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def running(
    target: str, draft: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen, Path]]:
    """Start the real server; give its address, its process and its log."""
    port = free_port()
    log_file = tmp_path_factory.mktemp("server") / "log"
    spec = {"method": "rsd_s", "model": draft, "beam_width": 3, "depth": 3}
    spec["schedule"] = "fixed"
    command = [
        str(Path(sys.executable).with_name("vllm")),
        *("serve", target, "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", "smol", "--max-model-len", "512"),
        # bfloat16 takes several times as long on processors without its arithmetic
        *("--dtype", "float32"),
        *("--enforce-eager", "--kv-cache-memory-bytes", str(2**30)),
        *("--shutdown-timeout", str(DRAIN_SECONDS)),
        *("--per-request-spec-decode-metrics", "detailed"),
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
        yield url, process, log_file
    finally:
        process.terminate()
        process.wait(timeout=DRAIN_SECONDS)
        note(Usage(1, time.perf_counter() - start))


@pytest.fixture(scope="module")
def server(running: tuple[str, subprocess.Popen, Path]) -> str:
    """The server's address."""
    return running[0]


def test_the_log_says_that_trees_are_on(
    running: tuple[str, subprocess.Popen, Path],
) -> None:
    """Red when nobody can see in a server's log whether trees are on."""
    log = running[2].read_text()
    assert "Draft trees are on: rsd_s 3x3, schedule fixed, at most 16 requests" in log


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


def metric_lines(server: str) -> list[str]:
    """What the server says of itself to Prometheus."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as answer:
        return answer.read().decode().splitlines()


def total(lines: list[str], name: str) -> float:
    """The sum of a metric over its labels."""
    values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(name + "{")]
    return sum(map(float, values))


def streamed(server: str, num_tokens: int, num_pieces: int | None = None) -> bool:
    """Stream a completion, and hang up after so many pieces, if a number is given.

    Returns:
        Whether the whole answer came. A server that goes away sends no end.

    """
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=120)
    body = {**COMPLETION, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        pieces = 0
        for line in connection.getresponse():
            pieces += line.startswith(b"data: ")
            if line.startswith(b"data: [DONE]"):
                return True
            if pieces == num_pieces:
                return False
    finally:
        connection.close()
    return False


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
    lines = metric_lines(server)
    steps = [line for line in lines if "plain" not in line]
    trees = total(steps, "vllm:treespec_num_steps_total")
    values = {
        name: total(lines, f"vllm:spec_decode_{name}_total")
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    }
    assert values["num_draft_tokens"] == 9 * values["num_drafts"] > 0
    assert 0 < values["num_accepted_tokens"] < values["num_draft_tokens"]
    # One request at a time: its last tree may be drafted and never verified.
    assert 0 <= trees - values["num_drafts"] <= 8


def test_board_and_rules_find_their_metrics(server: str) -> None:
    """Turns red when a query of deploy/monitoring names a metric that is not served."""
    post(f"{server}/v1/completions", {**COMPLETION, "max_tokens": 32})
    served = {line.partition("{")[0] for line in metric_lines(server)}
    queries = [*board_queries(), *(rule["expr"] for rule in rules())]
    assert metric_names(" ".join(queries)) <= served


def drafted(server: str) -> tuple[float, float]:
    """Trees and draft tokens that the target has scored."""
    lines = metric_lines(server)
    names = ("num_drafts", "num_draft_tokens")
    trees, tokens = (total(lines, f"vllm:spec_decode_{name}_total") for name in names)
    return trees, tokens


def test_requests_say_what_they_draft(server: str) -> None:
    """Turns red when ``vllm_xargs`` do not reach the worker that drafts."""
    for said, size in (({"enabled": False}, 0), ({"max_drafts": 2}, 2)):
        before = drafted(server)
        xargs = {"treespec": json.dumps(said)}
        body = {**COMPLETION, "max_tokens": 24, "vllm_xargs": xargs}
        assert json.loads(post(f"{server}/v1/completions", body))["choices"][0]["text"]
        trees, tokens = (b - a for a, b in zip(before, drafted(server), strict=True))
        assert (trees > 0) == (size > 0)
        assert tokens == size * trees


@pytest.mark.parametrize("said", [{}, {"max_drafts": 2}, {"enabled": False}])
def test_metrics_of_a_request(server: str, said: dict) -> None:
    """Turns red when vLLM's numbers of one request are not those of its own trees."""
    before = drafted(server)
    xargs = {"treespec": json.dumps(said)}
    for url, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        body = {**body, "max_tokens": 24, "vllm_xargs": xargs}
        found = json.loads(post(f"{server}/v1/{url}", body))["metrics"]
        found = found["speculative_decoding"]
        after = drafted(server)
        counted = tuple(b - a for a, b in zip(before, after, strict=True))
        before = after
        assert (found["num_spec_steps"], found["num_draft_tokens"]) == counted
        steps = found["per_step_drafted"] or []
        assert steps == [said.get("max_drafts", 9)] * found["num_spec_steps"]
        accepted = found["per_step_accepted"] or []
        assert sum(accepted) == found["num_accepted_draft_tokens"]
        assert max(accepted, default=0) <= 3, "no path is longer than the tree is deep"
        assert bool(accepted) == said.get("enabled", True)


@pytest.mark.parametrize(
    ("xargs", "says"),
    [
        ({"treespec": '{"max_draft": 2}'}, "'max_draft' is not one of its keys"),
        ({"treespec": '{"max_drafts": -1}'}, "'max_drafts' is -1"),
        ({"treespec": "off"}, "'treespec' is 'off', which is not JSON"),
        ({"treespec": False}, "'treespec' is"),
        ({"treespec_enabled": 0}, "there is no 'treespec_enabled'"),
        ({"treespec": {"enabled": False}}, "vllm_xargs"),
    ],
)
def test_wrong_xargs_get_400(server: str, xargs: dict, says: str) -> None:
    """Turns red when wrong ``vllm_xargs`` are ignored, or stop the server."""
    for url, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        with pytest.raises(urllib.error.HTTPError) as error:
            post(f"{server}/v1/{url}", {**body, "vllm_xargs": xargs})
        assert error.value.code == 400
        assert says in json.loads(error.value.read())["error"]["message"]
    body = {**COMPLETION, "max_tokens": 2}
    assert json.loads(post(f"{server}/v1/completions", body))["choices"][0]["text"]


def test_cut_connections_lose_no_block(server: str) -> None:
    """Turns red when a request whose client hung up goes on, or keeps its KV."""
    url, body = f"{server}/v1/completions", {**COMPLETION, "max_tokens": 24}
    before = json.loads(post(url, body))["choices"]
    with ThreadPoolExecutor(64) as clients:
        cut = [clients.submit(streamed, server, 400, 1 + i % 4) for i in range(64)]
        whole = [one.result() for one in cut]
    assert not any(whole)
    deadline = time.monotonic() + IDLE_SECONDS
    busy = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(total(metric_lines(server), f"vllm:{name}") for name in busy):
        assert time.monotonic() < deadline, "blocks or requests are left"
        time.sleep(0.5)
    assert json.loads(post(url, body))["choices"] == before


def test_sigterm_under_load_ends_all_requests(
    running: tuple[str, subprocess.Popen, Path],
) -> None:
    """Turns red when requests hang, or are lost, while the server drains.

    It comes last: it ends the server.
    """
    server, process, _ = running
    with ThreadPoolExecutor(8) as clients:
        whole = [clients.submit(streamed, server, 150) for _ in range(8)]
        deadline = time.monotonic() + IDLE_SECONDS
        while total(metric_lines(server), "vllm:num_requests_running") < 8:
            assert time.monotonic() < deadline, "no load"
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert [one.result(timeout=DRAIN_SECONDS) for one in whole] == [True] * 8
    assert process.wait(timeout=DRAIN_SECONDS) == 0
