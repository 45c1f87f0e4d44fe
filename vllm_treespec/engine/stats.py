"""Where a step's time goes, and what the target accepted."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np

# In the order of a step. "draft_forward", also counted, is the part of "draft" that the
# draft models' or the head's forwards take.
STAGES = ("tree_build", "forward", "score", "commit", "draft")
DRAFT_FORWARD = "draft_forward"

# A file system in memory, so that no step waits for a disk.
SHARED_FOLDER = Path("/dev/shm")
_NUM_ROWS = 64
_ROW = np.dtype([("name", "S56"), ("total", "f8")])


def shared_file(vllm_config: Any, engine_index: int) -> Path:
    """File of the totals that an engine's first worker shares with the front-end.

    vLLM gives each launch an ``instance_id``, which its processes receive with the
    config.
    """
    return SHARED_FOLDER / f"treespec_{vllm_config.instance_id}_{engine_index}"


class SharedTotals:
    """Named float64 totals in shared memory that one process adds to and one reads.

    Rows are taken in the order in which names are first seen and keep their place. A
    reader may see a step's totals half added; it never sees half a number.
    """

    def __init__(self, file: Path) -> None:
        """Open an existing file for reading."""
        mapped = np.memmap(file, dtype=_ROW, mode="r+", shape=(_NUM_ROWS,))
        # Plain arrays: a step indexes them several times, and memmap's is slow.
        self._rows = mapped.view(np.ndarray)
        self._totals = self._rows["total"]
        self._row_of: dict[str, int] = {}

    @classmethod
    def create(cls, file: Path) -> SharedTotals:
        """Make a file, readable for this user only, and open it for adding.

        Raises:
            FileExistsError: when there is such a file.

        """
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        os.ftruncate(descriptor, _NUM_ROWS * _ROW.itemsize)
        os.close(descriptor)
        return cls(file)

    def add(self, name: str, amount: float) -> None:
        """Add to a total; the name has at most 56 bytes."""
        row = self._row_of.get(name)
        if row is None:
            row = self._row_of[name] = len(self._row_of)
            self._rows["name"][row] = name.encode()
        self._totals[row] += amount

    def read(self) -> dict[str, float]:
        """All totals, by name."""
        totals = {}
        for name, total in self._rows.tolist():
            if not name:
                break
            totals[name.decode()] = total
        return totals


class StepStats:
    """Running totals of one worker since it started or was last reset.

    Once shared, seconds and modes are also added to totals that the front-end reads
    (:mod:`vllm_treespec.metrics`); those are never reset.
    """

    def __init__(self) -> None:
        self._shared: SharedTotals | None = None
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

    def share(self, vllm_config: Any) -> None:
        """Let the front-end read seconds and modes; does nothing but on rank 0."""
        parallel = vllm_config.parallel_config
        if parallel.rank != 0:
            return
        file = shared_file(vllm_config, parallel.data_parallel_index)
        self._shared = SharedTotals.create(file)
        # The reader removes the file when it has opened it; nobody may read it.
        Finalize(self, file.unlink, kwargs={"missing_ok": True}, exitpriority=0)

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
            self._shared.add(f"stage:{stage}", seconds)

    def mode(self, name: str) -> None:
        """Count a step, by what it drafts with: a tree's name or "plain"."""
        self.modes[name] += 1
        if self._shared is not None:
            self._shared.add(f"mode:{name}", 1)

    def observe(self, num_nodes: list[int], num_accepted: list[int]) -> None:
        """Count the scored trees of a step."""
        self.trees += len(num_nodes)
        self.nodes += sum(num_nodes)
        self.node_counts.update(num_nodes)
        self.accepted.update(num_accepted)

    def merged(self, num_beam_tokens: int, num_nodes: int) -> None:
        """Count tokens of beams and the draft nodes that they were merged into."""
        self.beam_tokens += num_beam_tokens
        self.beam_nodes += num_nodes
        if self._shared is not None:
            self._shared.add("beam:tokens", num_beam_tokens)
            self._shared.add("beam:nodes", num_nodes)

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
