"""Where a step's time goes, and what the target accepted."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from prometheus_client.mmap_dict import MmapedDict, mmap_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# In the order of a step. "draft_forward", also counted, is the part of "draft" that the
# draft models' or the head's forwards take.
STAGES = ("tree_build", "forward", "score", "commit", "draft")
DRAFT_FORWARD = "draft_forward"

# A file system in memory, so that no step waits for a disk.
SHARED_FOLDER = Path("/dev/shm")
# Room for about a thousand series, taken when the file is made: memory that runs out
# later would kill the process that writes.
_FILE_SIZE = 2**18
# LLM.get_metrics shows nothing else.
PREFIX = "vllm:treespec_"
# What the worker counts: label of its own if any, and help text.
COUNTERS = {
    "num_accepted_tokens_per_depth": (
        "depth",
        "Accepted draft tokens per depth of the tree, from 1.",
    ),
    "num_nodes_verified": (None, "Tree nodes the target scored, roots included."),
    "num_nodes_wasted": (
        None,
        "Tree nodes scored that are neither root nor accepted.",
    ),
    "num_beam_tokens": (
        None,
        "Tokens of all beams that draft trees were made from.",
    ),
    "num_beam_nodes": (
        None,
        "Draft nodes that beams were merged into, roots excluded.",
    ),
    "stage_seconds": (
        "stage",
        "Seconds of worker time per stage; draft_forward is a part of draft.",
    ),
    "num_steps": ("mode", "Steps per mode: the tree drafted with, or plain."),
}
logger = logging.getLogger("vllm.treespec")


def counter_file(vllm_config: VllmConfig) -> Path:
    """File in which an engine's first worker counts for the front-end.

    vLLM gives each launch an ``instance_id``, which its processes receive with the
    config. Where Prometheus gathers the files of several processes in a folder, as
    with several API servers, ours is one of them.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder:
        return Path(folder) / f"counter_treespec-{vllm_config.instance_id}.db"
    return SHARED_FOLDER / f"treespec_{vllm_config.instance_id}"


def make_counter_file(file: Path) -> BinaryIO:
    """Make an empty file, readable for this user only, and open it.

    Raises:
        OSError: there is such a file, or no room for it.

    """
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    opened = os.fdopen(descriptor, "r+b")
    try:
        os.posix_fallocate(descriptor, 0, _FILE_SIZE)
    except OSError:
        opened.close()
        file.unlink()
        raise
    return opened


class SharedCounters:
    """Counters in a file of Prometheus' own format, which other processes read.

    A reader may see a step half counted; it never sees half a number.
    """

    def __init__(self, file: Path, model_name: str, engine_index: int) -> None:
        """Open a file of ``make_counter_file``; what has no open labels starts at 0."""
        self._file = MmapedDict(str(file))
        self._labels = {"model_name": model_name, "engine": str(engine_index)}
        self._keys: dict[tuple[str, str], str] = {}
        self._values: defaultdict[str, float] = defaultdict(float)
        for counter, (label, _) in COUNTERS.items():
            if label is None:
                self.add(counter, 0)
        for stage in (*STAGES, DRAFT_FORWARD):
            self.add("stage_seconds", 0, stage)

    def add(self, counter: str, amount: float, value: str = "") -> None:
        """Add to a counter of ``COUNTERS``, at a value of its own label if any."""
        key = self._keys.get((counter, value))
        if key is None:
            label, text = COUNTERS[counter]
            labels = {**self._labels, **({label: value} if label else {})}
            name = PREFIX + counter
            key = mmap_key(name, f"{name}_total", [*labels], [*labels.values()], text)
            self._keys[counter, value] = key
        self._values[key] += amount
        self._file.write_value(key, self._values[key], 0.0)


class StepStats:
    """Running totals of one worker since it started or was last reset.

    Once shared, they are also added to counters that the front-end reads
    (:mod:`vllm_treespec.metrics`); those are never reset.
    """

    def __init__(self) -> None:
        self._shared: SharedCounters | None = None
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.modes: Counter[str] = Counter()
        self.trees = 0
        self.nodes = 0
        self.accepted: Counter[int] = Counter()
        # trees by how many nodes they had, roots included
        self.node_counts: Counter[int] = Counter()
        # tokens of the beams that trees were made of, and the trees' draft nodes
        self.beam_tokens = 0
        self.beam_nodes = 0

    @property
    def steps(self) -> int:
        """Steps, whatever their mode."""
        return self.modes.total()

    def share(self, vllm_config: VllmConfig) -> None:
        """Count for the front-end too, if it asked for it; only rank 0 does.

        Without metrics serving goes on: a file that cannot be opened is a warning.
        """
        parallel = vllm_config.parallel_config
        file = counter_file(vllm_config)
        if parallel.rank != 0 or not file.exists():
            return
        model_name = str(vllm_config.model_config.served_model_name)
        try:
            self._shared = SharedCounters(
                file, model_name, parallel.data_parallel_index
            )
            # The front-end has it open. Without a name nothing stays behind, whichever
            # process ends first and however.
            if file.parent == SHARED_FOLDER:
                file.unlink()
        except OSError as error:
            logger.warning("No metrics of draft trees: %s", error)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        start = time.perf_counter()
        yield
        self.spent(name, time.perf_counter() - start)

    def spent(self, stage: str, seconds: float) -> None:
        """Add time to a stage."""
        self.seconds[stage] += seconds
        if self._shared is not None:
            self._shared.add("stage_seconds", seconds, stage)

    def mode(self, name: str) -> None:
        """Count a step, by what it drafts with: a tree's name or "plain"."""
        self.modes[name] += 1
        if self._shared is not None:
            self._shared.add("num_steps", 1, name)

    def observe(self, num_nodes: list[int], num_accepted: list[int]) -> None:
        """Count the scored trees of a step."""
        self.trees += len(num_nodes)
        self.nodes += sum(num_nodes)
        self.node_counts.update(num_nodes)
        self.accepted.update(num_accepted)
        if self._shared is not None:
            num_wasted = sum(num_nodes) - len(num_nodes) - sum(num_accepted)
            self._shared.add("num_nodes_verified", sum(num_nodes))
            self._shared.add("num_nodes_wasted", num_wasted)
            for depth in range(1, max(num_accepted, default=0) + 1):
                reached = sum(count >= depth for count in num_accepted)
                self._shared.add("num_accepted_tokens_per_depth", reached, str(depth))

    def merged(self, num_beam_tokens: int, num_nodes: int) -> None:
        """Count tokens of beams and the draft nodes that they were merged into."""
        self.beam_tokens += num_beam_tokens
        self.beam_nodes += num_nodes
        if self._shared is not None:
            self._shared.add("num_beam_tokens", num_beam_tokens)
            self._shared.add("num_beam_nodes", num_nodes)

    def as_dict(self) -> dict[str, Any]:
        """Totals: seconds per stage, steps, modes, trees, nodes, accepted lengths,
        node counts of trees, tokens of beams and the nodes that these became."""
        return {
            "seconds": dict(self.seconds),
            "steps": self.steps,
            "modes": dict(self.modes),
            "trees": self.trees,
            "nodes": self.nodes,
            "accepted": dict(self.accepted),
            "node_counts": dict(self.node_counts),
            "beam_tokens": self.beam_tokens,
            "beam_nodes": self.beam_nodes,
        }
