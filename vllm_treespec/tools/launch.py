"""Engine processes: a task goes in on stdin, events come out as JSON lines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vllm_treespec.tools.openmp import intel_openmp

Event = dict[str, Any]
Send = Callable[..., None]

# A traceback's last line; where nothing follows the colon, the paragraph below it.
ERROR = re.compile(
    r"^(?:\([^)]*\) *)*((?:\w+\.)*\w*(?:Error|Exception): (?:.*\S.*|\n\n(?:.+\n)+))",
    re.MULTILINE,
)
LAUNCHED, READY = "launched", "ready"
NO_CAUSE = "Engine core initialization failed"


class EngineError(RuntimeError):
    """An engine process that did not finish its task; the message is one line."""


def events_of(
    module: str,
    task: BaseModel,
    log: Path,
    *,
    one_process: bool = True,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 3600.0,
) -> Generator[Event]:
    """Run ``python -m module`` in a process of its own; yield its events.

    The first event is ``launched``: the process has its task. The last one is ``done``.
    After an event ``ready`` the process waits until the next event is taken. Closing
    the generator ends the process and all it started.

    Args:
        module: calls :func:`reporting`; gets the task on stdin.
        task: what to do.
        log: receives all that the process prints beside its events.
        one_process: False: scheduler and worker get processes of their own.
        environment: more variables for the process.
        timeout_s: after so many seconds the process and all it started are ended.

    Raises:
        EngineError: one line that says why the task was not finished, and where the
            log is.

    """
    log.parent.mkdir(parents=True, exist_ok=True)
    done = False
    with (
        log.open("w", encoding="utf-8") as stream,
        subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env={**engine_environment(one_process), **(environment or {})},
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout_s, _kill_group, [process])
        timer.start()
        try:
            process.stdin.write(f"{task.model_dump_json()}\n")
            process.stdin.flush()
            yield {"event": LAUNCHED}
            for line in process.stdout:
                event = json.loads(line)
                done = event["event"] == "done"
                yield event
                if event["event"] == READY:
                    process.stdin.write("\n")
                    process.stdin.flush()
            # a process that ends by itself has a status that says why
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        except BrokenPipeError:
            done = False
            # what is left to write would make leaving the block fail, too
            with suppress(BrokenPipeError):
                process.stdin.close()
        finally:
            timed_out = not timer.is_alive()
            timer.cancel()
            if not done:
                _kill_group(process)
    if not done:
        late = f"no result within {timeout_s:.0f} s"
        reason = late if timed_out else failure(process.returncode, log)
        raise EngineError(f"{reason} (log: {log})")


def turn(events: Iterator[Event]) -> list[Event]:
    """Let a process work until it waits for its next turn."""
    return list(takewhile(lambda event: event["event"] != READY, events))


def _kill_group(process: subprocess.Popen[str]) -> None:
    """End the process and all it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def reporting() -> Iterator[Send]:
    """In an engine process: keep stdout for events, send all else to stderr.

    Yields a function that takes an event's name and its content; ``ready`` waits for
    the turn to come. ``done`` is sent at the end.
    """
    with os.fdopen(os.dup(1), "w") as events:
        os.dup2(2, 1)

        def send(event: str, **content: Any) -> None:
            print(json.dumps({"event": event, **content}), file=events, flush=True)
            if event == READY and not sys.stdin.readline():
                raise EOFError("whoever started this process has ended")

        yield send
        send("done")


def engine_environment(one_process: bool) -> dict[str, str]:
    """Environment of an engine process, the same for every side."""
    env = dict(os.environ)
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    env["VLLM_LOGGING_LEVEL"] = "WARNING"
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if one_process else "1"
    env["TOKENIZERS_PARALLELISM"] = "false"
    openmp = intel_openmp()
    if openmp is not None:
        earlier = [env["LD_PRELOAD"]] if env.get("LD_PRELOAD") else []
        env["LD_PRELOAD"] = ":".join([*earlier, str(openmp)])
    return env


def failure(returncode: int, log: Path) -> str:
    """Say in one line why an engine process ended without a result."""
    text = log.read_text(encoding="utf-8", errors="replace")
    found = [" ".join(error.split()) for error in ERROR.findall(text)]
    errors = [error for error in found if NO_CAUSE not in error]
    if errors:
        return errors[-1]
    if returncode == -signal.SIGKILL:
        return "the engine process was killed, perhaps for memory"
    return f"the engine process ended with status {returncode}"
