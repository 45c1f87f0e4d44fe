"""Looks at the Ray nodes of an engine before vLLM starts workers there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.ray_utils import initialize_ray_cluster

from vllm_treespec.config import parse_spec_config
from vllm_treespec.plugin import below_traceback
from vllm_treespec.ray_nodes import (
    NodeFacts,
    RayNodeError,
    check_nodes,
    make_probe,
)

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


class CheckedRayExecutor(Executor):
    """Stands in the config for vLLM's own Ray executor, until the nodes are checked.

    A worker that fails on another node ends in a traceback of Ray's, after minutes of
    loading. So all nodes are asked before any worker starts.
    """

    uses_ray = True

    def __new__(cls, vllm_config: VllmConfig) -> Executor:
        """Check the nodes of the engine, then make vLLM's own executor.

        Raises:
            RayNodeError: naming a node that lacks something, and the remedy.

        """
        parallel_config = vllm_config.parallel_config
        # as the user wrote it: workers get the config, and compare
        parallel_config.distributed_executor_backend = "ray"
        initialize_ray_cluster(parallel_config, require_gpu_on_driver=False)
        probe = make_probe(drafter_folders(vllm_config))
        try:
            check_nodes(NodeFacts(**probe()), ask_nodes(probe, parallel_config))
        except RayNodeError as error:
            raise RayNodeError(below_traceback(str(error))) from None
        return Executor.get_class(vllm_config)(vllm_config)


def drafter_folders(vllm_config: VllmConfig) -> list[str]:
    """Folders of draft models or head; those named by a hub id are left out.

    Each worker gets those from the hub.
    """
    config = parse_spec_config(vllm_config.additional_config["treespec"])
    models = [*config.models, *([config.head] if config.head else [])]
    return [model for model in models if Path(model).is_dir()]


def ask_nodes(probe: object, parallel_config: ParallelConfig) -> dict[str, NodeFacts]:
    """Ask all nodes of the engine's placement group at once; by address and id."""
    import ray
    from ray.util import placement_group_table
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    table = placement_group_table(parallel_config.placement_group)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    task = ray.remote(probe)
    asked = {
        node: task.options(
            num_cpus=0,
            runtime_env=parallel_config.ray_runtime_env,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote()
        for node in sorted(set(table["bundles_to_node_id"].values()))
    }
    return {
        f"{addresses[node]} (id {node[:8]})": NodeFacts(**ray.get(answer))
        for node, answer in asked.items()
    }
