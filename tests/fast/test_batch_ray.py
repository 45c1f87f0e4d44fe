"""What ``treespec batch --ray`` decides before Ray is asked."""

import json
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from tests.fast.batch_answers import FakeAnswerer, answer_of
from vllm_treespec.tools.batch import ray_data
from vllm_treespec.tools.batch.ray_data import (
    MAX_PORTION,
    Engine,
    Engines,
    check_cluster,
    check_size,
    connect,
    engines_of,
    num_portions,
    records_of,
)
from vllm_treespec.tools.batch.rows import BatchError, Finished, Row

ROWS = [
    Row(1, "a", "half \ud83d", {"seed": 1}, "as it stood"),
    Row(2, 2, [{"role": "user", "content": "hi"}], {}, "ü\u2028"),
    Row(3, 3, "too long", {}, "{}"),
]


def test_rows_come_back_as_without_ray() -> None:
    """Red when a row or an answer changes on its way over Ray."""
    engine = Engine([], {}, False)
    engine.answerer = FakeAnswerer()  # type: ignore[assignment]
    answered = engine({"row": [json.dumps(asdict(row)) for row in ROWS]})
    found = records_of(answered["finished"])
    assert sorted(found, key=lambda record: record.line) == [*map(answer_of, ROWS)]


@pytest.mark.parametrize(
    ("rows", "engines", "portions"),
    [(1, 4, 1), (5, 1, 4), (100, 2, 8), (100 * MAX_PORTION, 2, 100)],
)
def test_every_engine_gets_portions(rows: int, engines: int, portions: int) -> None:
    """Red when an engine of a short batch has nothing to do, or portions get large."""
    assert num_portions(rows, engines) == portions


def test_a_cluster_that_is_too_small_is_refused() -> None:
    """Red when the command waits for ever for cards that do not exist."""
    check_size(Engines(2, 4), "GPU", 8.0)
    with pytest.raises(BatchError) as error:
        check_size(Engines(3, 4), "GPU", 8.0)
    assert "--ray 3 takes 12 GPUs (--tensor-parallel-size is 4)" in str(error.value)
    assert "the Ray cluster has 8; ask for fewer engines" in str(error.value)


def test_size_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "find_spec", lambda name: object())
    assert engines_of(3, {"tensor-parallel-size": "2"}) == Engines(3, 2)
    assert engines_of(3, {}) == Engines(3, 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor-parallel-size": "two"}, "--tensor-parallel-size is 'two'; write"),
        (
            {"distributed-executor-backend": "ray"},
            "one machine; remove --distributed-executor-backend",
        ),
    ],
)
def test_options_that_do_not_go_with_it(
    options: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an engine that cannot start is found out on the cluster."""
    monkeypatch.setattr(ray_data, "find_spec", lambda name: object())
    with pytest.raises(BatchError, match=says):
        engines_of(2, options)


def test_without_ray_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "find_spec", lambda name: None)
    with pytest.raises(BatchError, match=r"pip install 'vllm-treespec\[ray\]'"):
        engines_of(2, {})


def test_an_engines_own_words_are_heard() -> None:
    """Red when a user reads Ray's tracebacks instead of the engine's message."""

    def fail(rows: Iterator[Row]) -> Iterator[list[Finished]]:
        raise BatchError(f"out of memory; lines in it: {next(rows).line}")

    engine = Engine([], {}, False)
    engine.answerer = fail  # type: ignore[assignment]
    answered = engine({"row": [json.dumps(asdict(row)) for row in ROWS]})
    with pytest.raises(BatchError, match=r"^out of memory; lines in it: 1$"):
        records_of(answered["finished"])


def test_a_cluster_that_is_gone_is_refused() -> None:
    """Red when Ray is left waiting for a cluster that was killed."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BatchError) as error:
            check_cluster(address)
        server.listen()
        check_cluster(address)
    assert f"the Ray cluster at {address} does not answer" in str(error.value)
    assert "`ray stop`" in str(error.value)
    assert "RAY_ADDRESS=local" in str(error.value)


@pytest.mark.parametrize("stopped", [False, True])
def test_ray_does_not_keep_sigterm(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """Red when SIGTERM ends the command with a status of Ray's, or not at all."""

    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        if stopped:
            signal.raise_signal(signal.SIGTERM)

    services = SimpleNamespace(canonicalize_bootstrap_address=lambda address: None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "ray._private", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray._private.services", services)
    before = signal.getsignal(signal.SIGTERM)
    try:
        if stopped:
            with pytest.raises(SystemExit) as end:
                connect()
            assert end.value.code == 143
        else:
            connect()
            assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)
