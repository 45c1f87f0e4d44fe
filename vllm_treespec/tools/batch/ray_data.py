"""Answers rows with several engines on the machines of a Ray cluster."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from vllm_treespec.config.base import MethodConfig
from vllm_treespec.ray_nodes import check_ray_nodes
from vllm_treespec.tools.batch.engine import VllmAnswerer, one_line
from vllm_treespec.tools.batch.rows import BatchError, Finished, Row, finished_of

# Rows that an engine takes at a time, and loses when the command is killed.
MAX_PORTION = 512
# Portions for each engine, so that none waits long for the last one.
MIN_PORTIONS = 4
FAILED = "failed"
# Until a cluster counts as gone; Ray itself waits for a minute.
CONNECT_S = 5.0


@dataclass(frozen=True)
class Engines:
    """How many engines run, and what each takes."""

    count: int
    # cards of each, or CPUs where the cluster has no cards
    cards: int


@dataclass(frozen=True)
class RayAnswerer:
    """Spreads portions of the rows over engines; see ``run.Answerer``.

    Ray keeps all rows, and gives a portion to an engine when it has answered the last
    one. A portion comes back as a whole. So if a machine is lost, its portion is
    answered again, and no row comes back twice.
    """

    # of the command line of ``vllm serve``, ``--model`` among them
    arguments: Sequence[str]
    # of rows that say nothing else
    sampling_params: dict[str, Any]
    # a prompt is a user's message
    chat: bool
    engines: Engines
    # what draws the trees, None without trees
    config: MethodConfig | None

    def __call__(self, rows: Iterator[Row]) -> Iterator[list[Finished]]:
        """Answer the rows.

        Raises:
            BatchError: the cluster does not answer or is too small, or an engine fails.
            RayNodeError: a machine lacks something.

        """
        from ray.exceptions import RayError

        try:
            connect()
            for batch in self._data(rows).iter_batches(
                batch_size=None, prefetch_batches=0
            ):
                yield records_of(batch["finished"])
        except RayError as error:
            said = f"Ray failed with {type(error).__name__}: {one_line(error)}"
            raise BatchError(said) from error

    def _data(self, rows: Iterator[Row]) -> Any:
        """The finished rows as Ray Data gives them; they are answered when read."""
        import ray
        from ray.data import ActorPoolStrategy, DataContext

        kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        check_size(self.engines, kind, ray.cluster_resources().get(kind, 0))
        alive = [node for node in ray.nodes() if node["Alive"]]
        nodes = [node["NodeID"] for node in alive if kind in node["Resources"]]
        check_ray_nodes(nodes, self.config)
        items = [{"row": json.dumps(asdict(row))} for row in rows]
        DataContext.get_current().enable_progress_bars = False
        return ray.data.from_items(
            items, override_num_blocks=num_portions(len(items), self.engines.count)
        ).map_batches(
            Engine,
            fn_constructor_args=(self.arguments, self.sampling_params, self.chat),
            batch_size=None,
            compute=ActorPoolStrategy(size=self.engines.count),
            **{f"num_{kind.lower()}s": self.engines.cards},
        )


def connect() -> None:
    """Connect to the Ray cluster; where there is none, start one on this machine.

    Raises:
        BatchError: the cluster does not answer.

    """
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    # A Ray client's address ("ray://") has a timeout of its own.
    if "://" not in os.environ.get("RAY_ADDRESS", ""):
        address = canonicalize_bootstrap_address(None)
        if address is not None:
            check_cluster(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, ignore_reinit_error=True)
    except SystemExit:
        # Ray's own handler exits with the signal's number
        raise SystemExit(128 + signal.SIGTERM) from None
    signal.signal(signal.SIGTERM, on_sigterm)


def check_cluster(address: str) -> None:
    """Refuse a cluster that is gone: Ray would wait for it, and hear no signal.

    Raises:
        BatchError: naming the remedy.

    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise BatchError(
            f"the Ray cluster at {address} does not answer ({error}); if it has ended, "
            f"run `ray stop`, which forgets it, and unset RAY_ADDRESS; if it runs "
            f"elsewhere, set RAY_ADDRESS to its host and port; RAY_ADDRESS=local "
            f"starts Ray on this machine"
        ) from None


class Engine:
    """An engine on a machine of the cluster."""

    def __init__(self, *settings: Any) -> None:
        """Remember what to start; see ``VllmAnswerer``."""
        self.answerer = VllmAnswerer(*settings)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Answer a portion of the rows.

        What an engine says when it fails is handed over like an answer: Ray would put
        it behind tracebacks.
        """
        rows = (Row(**json.loads(text)) for text in batch["row"])
        try:
            answered = [record for group in self.answerer(rows) for record in group]
        except (OSError, RuntimeError, ValueError) as error:
            return {"finished": [json.dumps({FAILED: one_line(error)})]}
        return {"finished": [json.dumps(asdict(record)) for record in answered]}


def records_of(portion: Iterable[str]) -> list[Finished]:
    """The finished rows of a portion.

    Raises:
        BatchError: the engine failed.

    """
    found = list(portion)
    for text in found:
        if FAILED in (fields := json.loads(text)):
            raise BatchError(fields[FAILED])
    return [finished_of(text) for text in found]


def engines_of(count: int, options: Mapping[str, str]) -> Engines:
    """How many engines run, of which size, by vLLM's options.

    Raises:
        BatchError: Ray is not installed, or an option does not go with it.

    """
    if find_spec("ray") is None:
        raise BatchError("--ray needs Ray: pip install 'vllm-treespec[ray]'")
    if options.get("distributed-executor-backend") == "ray":
        raise BatchError(
            "--ray gives each engine the cards of one machine; "
            "remove --distributed-executor-backend"
        )
    size = options.get("tensor-parallel-size", "1")
    if not size.isdecimal():
        raise BatchError(f"--tensor-parallel-size is {size!r}; write a number")
    return Engines(count, int(size))


def num_portions(num_rows: int, engines: int) -> int:
    """In how many portions rows are given to engines."""
    return min(num_rows, max(math.ceil(num_rows / MAX_PORTION), MIN_PORTIONS * engines))


def check_size(engines: Engines, kind: str, available: float) -> None:
    """Refuse more engines than the cluster can run at the same time.

    Args:
        engines: how many, and of which size.
        kind: of what they take, ``"GPU"`` or ``"CPU"``.
        available: how many of those the cluster has.

    Raises:
        BatchError: naming both numbers.

    """
    needed = engines.count * engines.cards
    if needed > available:
        raise BatchError(
            f"--ray {engines.count} takes {needed} {kind}s (--tensor-parallel-size is "
            f"{engines.cards}), and the Ray cluster has {available:.0f}; ask for fewer "
            f"engines, or start Ray on more machines"
        )
