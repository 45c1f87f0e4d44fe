"""Looks at the Ray nodes of an engine before vLLM starts workers there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.ray_utils import initialize_ray_cluster

from vllm_treespec.config import parse_spec_config
from vllm_treespec.engine.refusals import below_traceback
from vllm_treespec.ray_nodes import RayNodeError, check_ray_nodes

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
        from ray.util import placement_group_table

        parallel_config = vllm_config.parallel_config
        # as the user wrote it: workers get the config, and compare
        parallel_config.distributed_executor_backend = "ray"
        initialize_ray_cluster(parallel_config, require_gpu_on_driver=False)
        config = parse_spec_config(vllm_config.additional_config["treespec"])
        placed = placement_group_table(parallel_config.placement_group)
        nodes = sorted(set(placed["bundles_to_node_id"].values()))
        try:
            check_ray_nodes(nodes, config, parallel_config.ray_runtime_env)
        except RayNodeError as error:
            raise RayNodeError(below_traceback(str(error))) from None
        return Executor.get_class(vllm_config)(vllm_config)
