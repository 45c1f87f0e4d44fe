"""SpecTr: independent paths, merged into a prefix tree."""

from __future__ import annotations

from vllm_treespec.proposers import specinfer
from vllm_treespec.trees.sizes import TreeSizes


def sizes(num_paths: int, depth: int) -> TreeSizes:
    """Sizes of trees of ``num_paths`` independent paths of ``depth`` tokens."""
    return specinfer.sizes([path_factors(num_paths, depth)])


def path_factors(num_paths: int, depth: int) -> tuple[int, ...]:
    """Draws per node of each level: the paths part at the root alone."""
    return (num_paths,) + (1,) * (depth - 1)


class SpecTr(specinfer.SpecInfer):
    """Draws independent paths from one draft model (arXiv 2310.15141, section 4).

    Paths are draws with replacement: equal prefixes become one node, and every path
    stays a draw of its own. At temperature 0 they start with the most likely tokens
    and go on greedily.
    """

    def __init__(self, num_paths: int, depth: int) -> None:
        """Take the number of paths and their length."""
        self.num_paths = num_paths
        super().__init__([path_factors(num_paths, depth)])
