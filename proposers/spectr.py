"""SpecTr: independent paths, merged into a prefix tree."""

from __future__ import annotations

from vllm_treespec.proposers.base import register_proposer
from vllm_treespec.proposers.specinfer import SpecInfer


@register_proposer("spectr")
class SpecTr(SpecInfer):
    """Draws independent paths from one draft model (arXiv 2310.15141, section 4).

    Paths are draws with replacement: equal prefixes become one node, and every path
    stays a draw of its own. At temperature 0 they start with the most likely tokens
    and go on greedily.
    """

    def __init__(self, num_paths: int, depth: int) -> None:
        """Take the number of paths and their length."""
        self.num_paths = num_paths
        super().__init__([(num_paths,) + (1,) * (depth - 1)])
