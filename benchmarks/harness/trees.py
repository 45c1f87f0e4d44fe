"""One engine that draws several trees, one in each cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_treespec.config import parse_spec_config
from vllm_treespec.tools.sides import Side


def side_of_trees(
    name: str, spec: dict[str, Any], trees: Sequence[dict[str, Any]], **engine: Any
) -> Side:
    """Make a side whose schedule holds these trees; each cell forces one.

    Args:
        name: of the side.
        spec: its spec-config without a schedule.
        trees: keys that shape a tree; one may stand there twice.
        engine: further arguments of the engine.

    Raises:
        SpecConfigError: when the spec-config cannot work.

    """
    shapes = {str(tree): tree for tree in trees}.values()
    schedule = [{"batch_size": i, **shape} for i, shape in enumerate(shapes, 1)]
    spec = {**spec, "schedule": schedule}
    sizes = [tree.config.sizes for tree in parse_spec_config(spec).scheduled_trees()]
    return Side(
        name=name,
        family=spec["method"],
        engine={**engine, "speculative_config": spec},
        budget=max(size.max_nodes - 1 for size in sizes),
    )
