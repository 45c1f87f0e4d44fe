"""Trees of a fixed shape and a fixed rate of acceptance, as vLLM's ``custom_class``.

What is generated with them is nonsense: drafts are random tokens, and how many of them
are accepted is decided by coins, not by the target. Only the time counts: it is that
of a step in which a drafter that costs nothing has its drafts accepted at that rate.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vllm_treespec.engine.drafter import TreeDrafter
from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.scorers import ScorerOutput
from vllm_treespec.step.decoder import TreeDecoder
from vllm_treespec.step.method import Method
from vllm_treespec.step.verifier import TreeVerifier
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import NO_NODE, TreeBatch


def fixed_parents(num_nodes: int, depth: int) -> list[int]:
    """Parents of the tree: levels as even as possible, wide ones first, every level
    spread evenly over the one above it; ValueError for an impossible depth."""
    if not min(1, num_nodes - 1) <= depth <= num_nodes - 1:
        raise ValueError(f"a tree of {num_nodes} nodes cannot have {depth} levels")
    each, more = divmod(num_nodes - 1, max(depth, 1))
    widths = [1] + [each + (level < more) for level in range(depth)]
    parents = [NO_NODE]
    first = 0
    for above, width in pairwise(widths):
        parents += [first + node * above // width for node in range(width)]
        first += above
    return parents


def last_path(parents: list[int]) -> list[int]:
    """Draft nodes from the top down to the last node, which lies in the last level."""
    path = [len(parents) - 1]
    while path[0] > 0:
        path.insert(0, parents[path[0]])
    return path[1:]


class OracleProposer(Proposer):
    """Draws random tokens into a tree of a fixed shape, in no time."""

    def __init__(self, num_nodes: int, depth: int, vocab_size: int) -> None:
        """Take the tree's nodes, root included, its levels, and what to draw from."""
        self.parents = fixed_parents(num_nodes, depth)
        self.tree = from_parents([[0] * num_nodes], [self.parents])
        self.vocab_size = vocab_size
        self.sizes = TreeSizes(
            max_nodes=num_nodes,
            max_depth=depth,
            max_width=int(self.tree.depths[0].bincount().max()),
            max_leaves=num_nodes - len(set(self.parents) - {NO_NODE}),
            num_uniforms=num_nodes - 1,
        )

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Make one tree per request; ``draws`` is None, as of deterministic drafts."""
        roots = inputs.root_token_ids
        tree = self.tree.select(torch.zeros(len(roots), dtype=torch.int64))
        drawn = (inputs.uniforms * self.vocab_size).long()
        tree = replace(
            tree,
            token_ids=torch.cat([roots[:, None], drawn], dim=1),
            parents=tree.parents.to(roots.device),
            depths=tree.depths.to(roots.device),
            num_nodes=tree.num_nodes.to(roots.device),
        )
        return Draft(tree)


def accept_by_coins(
    tree: TreeBatch,
    path: Tensor,
    acceptance: float,
    uniforms: Tensor,
    next_token_ids: Tensor,
) -> ScorerOutput:
    """Accept the nodes of a fixed path, each with probability ``acceptance``.

    Depth k is reached with probability ``acceptance ** k``, as far as the tree has
    not been cut above it. ``path`` holds draft nodes from the top, int64 [depth];
    ``uniforms`` has at least as many numbers in [0, 1) for every request.
    """
    heads = uniforms[:, : len(path)] < acceptance
    there = path < tree.num_nodes[:, None]
    accepted = (heads & there).long().cumprod(dim=1)
    return ScorerOutput(
        path=torch.where(accepted > 0, path, NO_NODE),
        num_accepted=accepted.sum(dim=1),
        next_token_ids=next_token_ids,
    )


class OracleVerifier(TreeVerifier):
    """Has drafts accepted by coins; the text is nonsense.

    All else is as in every method. The rule of the request is run, and what it accepts
    is replaced; a walk (on CPU) costs what it costs to reject random drafts.
    """

    def __init__(
        self, verifier: TreeVerifier, path: list[int], device: torch.device
    ) -> None:
        """Throw the same coins in every run.

        Args:
            verifier: of the method.
            path: nodes of the path that coins are thrown for.
            device: of the trees.

        """
        super().__init__(verifier.method, verifier.slots, verifier.sizes)
        # changed by ``use_acceptance``
        self.acceptance = 0.0
        self.path = torch.tensor(path, device=device)
        self.generator = torch.Generator(device).manual_seed(0)

    def verify(self, index: int, tree: TreeBatch, *others: Any) -> ScorerOutput:
        """Run the rule, then let coins decide what is accepted."""
        return self.by_coins(tree, super().verify(index, tree, *others))

    def by_coins(self, tree: TreeBatch, scored: ScorerOutput) -> ScorerOutput:
        """Replace what was accepted."""
        coins = torch.rand(
            (len(tree.num_nodes), len(self.path)),
            generator=self.generator,
            device=self.path.device,
        )
        return accept_by_coins(
            tree, self.path, self.acceptance, coins, scored.next_token_ids
        )


class OracleDrafter(TreeDrafter):
    """Drafts random tokens, in no time."""

    def make_method(self, batched: bool) -> Method:
        """Draw by the oracle; the size of its tree comes in ``additional_config``."""
        size = self.vllm_config.additional_config["oracle"]
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        oracle = OracleProposer(**size, vocab_size=vocab_size)
        return replace(super().make_method(batched), proposers=[oracle])

    def make_decoder(self, *args: Any) -> TreeDecoder:
        """Make the decoder and give it the oracle's path."""
        decoder = super().make_decoder(*args)
        (oracle,) = decoder.method.proposers
        assert isinstance(oracle, OracleProposer)
        path, device = last_path(oracle.parents), decoder.limits.device
        decoder.verifier = OracleVerifier(decoder.verifier, path, device)
        return decoder


def use_acceptance(worker: Any, acceptance: float) -> None:
    """Change the acceptance from now on, through ``LLM.collective_rpc``."""
    worker.model_runner.decoder.verifier.acceptance = acceptance
