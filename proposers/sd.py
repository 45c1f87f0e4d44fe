"""SD: the chain of ordinary speculative decoding."""

from __future__ import annotations

from vllm_treespec.proposers import rsd_c
from vllm_treespec.trees.sizes import TreeSizes


def sizes(depth: int) -> TreeSizes:
    """Sizes of a chain of ``depth`` draft tokens."""
    return rsd_c.sizes((1,) * depth)


class Sd(rsd_c.RsdC):
    """Draws a chain (arXiv 2211.17192): RSD-C with one child per node."""

    def __init__(self, depth: int, min_probability: float = 0.0) -> None:
        """Take the number of draft tokens."""
        super().__init__((1,) * depth, min_probability)
