"""What every Ray node must have before an engine with draft trees starts on it.

A node that lacks our package cannot run a function of ours by its name. So the function
that looks around there is made inside another one: Ray sends such functions as code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_treespec.config.base import MethodConfig

DISTRIBUTION = "vllm-treespec"
PLUGIN = "treespec"


class RayNodeError(RuntimeError):
    """A Ray node that cannot run draft trees; the message names it and the remedy."""


@dataclass(frozen=True)
class NodeFacts:
    """What was found on a node."""

    # of our package, None where it is not installed
    version: str | None
    # VLLM_PLUGINS, None where it is not set
    plugins: str | None
    # by folder: size in bytes of every file in it; none where there is no such folder
    files: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def check_ray_nodes(
    nodes: Iterable[str],
    config: MethodConfig | None,
    runtime_env: Mapping[str, Any] | None = None,
) -> None:
    """Check Ray nodes; this process is connected to Ray.

    Args:
        nodes: their ids.
        config: what draws the trees, None without trees.
        runtime_env: of the workers, as Ray takes it.

    Raises:
        RayNodeError: naming the first node that lacks something, and the remedy.

    """
    probe = make_probe([] if config is None else drafter_folders(config))
    check_nodes(NodeFacts(**probe()), ask_nodes(probe, nodes, runtime_env))


def drafter_folders(config: MethodConfig) -> list[str]:
    """Folders of draft models or head; those named by a hub id are left out.

    Each worker gets those from the hub.
    """
    models = [*config.models, *([config.head] if config.head else [])]
    return [model for model in models if Path(model).is_dir()]


def ask_nodes(
    probe: Callable[[], dict[str, Any]],
    nodes: Iterable[str],
    runtime_env: Mapping[str, Any] | None,
) -> dict[str, NodeFacts]:
    """Call a function on all nodes at once; what it gave, by address and id."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    task = ray.remote(probe)
    asked = {
        node: task.options(
            num_cpus=0,
            runtime_env=runtime_env,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote()
        for node in nodes
    }
    return {
        f"{addresses[node]} (id {node[:8]})": NodeFacts(**ray.get(answer))
        for node, answer in asked.items()
    }


def make_probe(folders: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """Make a function that gives the fields of ``NodeFacts``, wherever it is called.

    It needs nothing but Python's own library.
    """

    def probe() -> dict[str, Any]:
        import importlib.metadata
        import os

        try:
            version = importlib.metadata.version("vllm-treespec")
        except importlib.metadata.PackageNotFoundError:
            version = None
        files: dict[str, dict[str, int]] = {folder: {} for folder in folders}
        for folder, found in files.items():
            if os.path.isdir(folder):
                entries = [entry for entry in os.scandir(folder) if entry.is_file()]
                found.update((entry.name, entry.stat().st_size) for entry in entries)
        return {
            "version": version,
            "plugins": os.environ.get("VLLM_PLUGINS"),
            "files": files,
        }

    return probe


def check_nodes(here: NodeFacts, nodes: Mapping[str, NodeFacts]) -> None:
    """Compare what nodes have with what this process has.

    Args:
        here: of this process.
        nodes: by a name that a person knows the node by.

    Raises:
        RayNodeError: naming the first node that lacks something, and the remedy.

    """
    for node, there in nodes.items():
        found = (
            package_problem(here, there)
            or plugins_problem(there.plugins)
            or files_problem(here, there)
        )
        if found is not None:
            what, remedy = found
            raise RayNodeError(f"Ray node {node}: {what}; {remedy}")


def package_problem(here: NodeFacts, there: NodeFacts) -> tuple[str, str] | None:
    """What is wrong with our package on a node, and the remedy."""
    install = (
        f"install {DISTRIBUTION} {here.version} there with pip, in the environment of "
        f"`ray start` (PYTHONPATH and Ray's working_dir do not do)"
    )
    if there.version is None:
        return f"{DISTRIBUTION} is not installed there", install
    if there.version != here.version:
        return (
            f"it has {DISTRIBUTION} {there.version}, and this process has "
            f"{here.version}",
            install,
        )
    return None


def plugins_problem(plugins: str | None) -> tuple[str, str] | None:
    """What is wrong with a value of ``VLLM_PLUGINS``, and the remedy.

    It is a list of the plugins that vLLM may load.
    """
    if plugins is None or PLUGIN in plugins.split(","):
        return None
    longer = ",".join(filter(None, [plugins, PLUGIN]))
    return (
        f"VLLM_PLUGINS={plugins!r} leaves {PLUGIN} out",
        f"unset it, or set VLLM_PLUGINS={longer}",
    )


def files_problem(here: NodeFacts, there: NodeFacts) -> tuple[str, str] | None:
    """Which of the drafter's files a node lacks or has otherwise, and the remedy."""
    for folder, files in here.files.items():
        found = there.files[folder]
        for name, size in sorted(files.items()):
            path = os.path.join(folder, name)
            copy = f"copy the folder {folder} there, to the same absolute path"
            if name not in found:
                return f"the drafter's file {path} is missing there", copy
            if found[name] != size:
                sizes = f"{found[name]} bytes there and {size} bytes here"
                return f"the drafter's file {path} has {sizes}", copy
    return None
