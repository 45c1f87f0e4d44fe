"""SD: the chain of ordinary speculative decoding."""

from __future__ import annotations

from vllm_treespec.proposers.base import register_proposer
from vllm_treespec.proposers.rsd_c import RsdC


@register_proposer("sd")
class Sd(RsdC):
    """Draws a chain (arXiv 2211.17192): RSD-C with one child per node."""

    def __init__(self, depth: int) -> None:
        """Take the number of draft tokens."""
        super().__init__((1,) * depth)
