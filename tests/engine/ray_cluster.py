"""Runs engines over Ray nodes of this machine: ``python -m tests.engine.ray_cluster``.

vLLM refuses Ray on its CPU platform. A platform plugin that exists for these tests only
lets it take each CPU for what Ray calls a GPU. Python's path says where the plugin is,
so the process and all Ray nodes must be started with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.test_tensor_parallel import EAGLE, GREEDY, RSD_S, answers, start
from vllm_treespec.ray_nodes import RayNodeError

ROOT = Path(__file__).parents[2]
METHODS = (RSD_S, EAGLE)
ENTRY_POINTS = "[vllm.platform_plugins]\nray = ray_cpu_platform:name\n"
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"

def name():
    return "ray_cpu_platform.RayCpuPlatform"
"""
# Python imports this by itself, before anything else.
SITE = """
from importlib import metadata

found = metadata.version

def version(name):
    if name == "vllm-treespec":
        {instead}
    return found(name)

metadata.version = version
"""


def write_path(folder: Path) -> Path:
    """Write the platform plugin; the folder that belongs on Python's path."""
    path = folder / "platform"
    info = path / "ray_cpu_platform-1.dist-info"
    info.mkdir(parents=True)
    about = "Metadata-Version: 2.1\nName: ray-cpu-platform\nVersion: 1\n"
    (info / "METADATA").write_text(about)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (path / "ray_cpu_platform.py").write_text(PLATFORM)
    return path


def environment(path: Path) -> dict[str, str]:
    """Environment variables of a process that runs engines over Ray."""
    paths = [str(path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": ":".join(filter(None, paths)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


class TwoNodes:
    """Two Ray nodes on this machine, with one place for a rank each."""

    def __init__(self) -> None:
        """Start the first one and connect to it."""
        import ray
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "num_gpus": 1, "include_dashboard": False},
        )
        ray.init(address=self.cluster.address, log_to_driver=True)

    @contextmanager
    def second(self, **variables: str) -> Iterator[None]:
        """Have a second node with these environment variables."""
        node = self.cluster.add_node(
            num_cpus=1, num_gpus=1, env_vars={**variables}, wait=True
        )
        try:
            yield
        finally:
            self.give_places_back()
            self.cluster.remove_node(node)

    def give_places_back(self) -> None:
        """Release what engines have reserved; vLLM leaves that to the process' end."""
        from ray._raylet import PlacementGroupID
        from ray.util import placement_group_table, remove_placement_group
        from ray.util.placement_group import PlacementGroup

        for name, group in placement_group_table().items():
            if group["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(name)))

    def stop(self) -> None:
        """Stop all nodes."""
        import ray

        ray.shutdown()
        self.cluster.shutdown()

    def run(self, name: str, folder: Path) -> dict[str, Any]:
        """What an engine of two ranks answers in the greedy jobs."""
        llm = start(name, folder, 2, "ray")
        found = answers(llm, name, GREEDY)
        llm.llm_engine.engine_core.shutdown()
        self.give_places_back()
        return found


def refused(folder: Path) -> dict[str, Any]:
    """The error of an engine that does not start, and the seconds it took."""
    began = time.perf_counter()
    try:
        start(RSD_S, folder, 2, "ray")
    except RayNodeError as error:
        message = " ".join(str(error).split())
        return {"message": message, "seconds": time.perf_counter() - began}
    raise AssertionError("the engine has started")


def bad_nodes(folder: Path) -> Mapping[str, dict[str, str]]:
    """Environment variables of nodes that cannot run draft trees, by their fault."""
    path = os.environ["PYTHONPATH"]
    faults = {
        "other version": 'return "0.0.1"',
        "no package": "raise metadata.PackageNotFoundError(name)",
    }
    nodes = {}
    for fault, instead in faults.items():
        site = folder / fault.replace(" ", "_")
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE.format(instead=instead))
        nodes[fault] = {"PYTHONPATH": f"{site}:{path}"}
    return {**nodes, "plugins": {"VLLM_PLUGINS": "ray"}}


def main() -> None:
    """Run all engines; write what they answered as JSON."""
    folder = Path(sys.argv[1])
    nodes = TwoNodes()
    result: dict[str, Any] = {}
    try:
        with nodes.second():
            for name in METHODS:
                result[name] = nodes.run(name, folder)
        for fault, variables in bad_nodes(folder).items():
            with nodes.second(**variables):
                result[fault] = refused(folder)
    finally:
        nodes.stop()
    (folder / "ray.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
