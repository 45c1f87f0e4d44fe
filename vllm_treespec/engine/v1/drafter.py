"""The object behind vLLM's ``custom_class`` method: proposers and draft models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from vllm.config import VllmConfig

from vllm_treespec.config import parse_spec_config
from vllm_treespec.core.schedule import AdaptiveSchedule
from vllm_treespec.core.stats import StepStats
from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.engine.branch_placement import BranchPlacement
from vllm_treespec.engine.branches import ForkSpace
from vllm_treespec.engine.draft_model import CommittedTokens, PagedDraftModel
from vllm_treespec.engine.head import EngineHead
from vllm_treespec.engine.tree_step import TreePlacement
from vllm_treespec.proposers import ProposerInputs
from vllm_treespec.scorers import (
    RULES,
    Rule,
    ScorerOutput,
    TargetLogits,
    TreeShape,
    TypicalAcceptance,
    score,
)


@dataclass(frozen=True)
class Proposal:
    """The trees drawn in one step, and the drafts as the scheduler saw them."""

    tree: TreeBatch
    # index of the schedule's tree they were drawn as
    scheduled: int
    # request id -> row of the tree
    rows: dict[str, int]
    # per row, tokens and parents of the draft nodes
    drafts: list[list[int]]
    draft_parents: list[list[int]]

    def find(self, req_id: str, scheduled: list[int]) -> int | None:
        """Row of the tree that the scheduled drafts are a prefix of, if any."""
        row = self.rows.get(req_id)
        if row is None or self.drafts[row][: len(scheduled)] != scheduled:
            return None
        return row

    def parents(self) -> dict[str, list[int]]:
        """Parents of each request's draft nodes."""
        return {req_id: self.draft_parents[row] for req_id, row in self.rows.items()}


class TreeDrafter:
    """Draws the next draft trees; vLLM makes one per worker from its config."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Read our settings, which travel in vLLM's ``additional_config``."""
        self.config = parse_spec_config(vllm_config.additional_config["treespec"])
        self.masked = self.uses_masks(vllm_config)
        trees = self.config.scheduled()
        self.schedule = AdaptiveSchedule(trees)
        self.proposers = [tree.config.proposer() for tree in trees]
        self.stats = StepStats()
        self.draft_models = [
            self.draft_model_class(
                vllm_config, model, f"draft_model_{index}", self.stats
            )
            for index, model in enumerate(self.config.models)
        ]
        self.head: EngineHead | None = None
        if self.config.head is not None:
            self.head = EngineHead(vllm_config, self.config.head, self.stats)
        sizes = [proposer.sizes for proposer in self.proposers]
        self.max_depth = max(s.max_depth for s in sizes)
        self.shapes = [
            TreeShape(s.max_depth, s.max_siblings, s.max_parents) for s in sizes
        ]
        self.max_nodes = max(s.max_nodes for s in sizes)
        self.max_draws = max(s.max_draws for s in sizes)
        grammars = vllm_config.structured_outputs_config
        self.reasons = bool(grammars.reasoning_parser)
        self.reasons &= not grammars.enable_in_reasoning
        self.branching = max(s.max_leaves for s in sizes) > 1

    @property
    def rule(self) -> Rule:
        """How sampled requests' trees are verified."""
        typical = self.config.lossy_typical_acceptance
        if typical is not None:
            return TypicalAcceptance(typical.epsilon, typical.delta).rule
        return RULES[self.config.rule]

    def score(
        self, scheduled: int, tree: TreeBatch, target: TargetLogits, uniforms: Tensor
    ) -> ScorerOutput:
        """Score trees that were drawn as the schedule's tree of this index.

        On a GPU in the rule's batched form, where it has one.
        """
        shape = self.shapes[scheduled] if self.masked else None
        return score(tree, target, uniforms, self.rule, shape)

    @staticmethod
    def uses_masks(vllm_config: VllmConfig) -> bool:
        """Whether attention sees trees by masks (GPU) or along branches (CPU)."""
        return vllm_config.device_config.device_type != "cpu"

    @property
    def draft_model_class(self) -> type[PagedDraftModel]:
        """How draft models read their levels."""
        if not self.masked:
            return PagedDraftModel
        # Needs Triton, which a CPU may not have.
        from vllm_treespec.engine.masked_draft_model import MaskedDraftModel

        return MaskedDraftModel

    def placement(self) -> TreePlacement:
        """How the runner places trees."""
        if not self.masked:
            return BranchPlacement()
        from vllm_treespec.engine.mask_placement import MaskPlacement

        return MaskPlacement()

    @property
    def forks_per_tree(self) -> int:
        """Forks one tree may need, while it is drawn or while it is scored."""
        if self.masked:
            return 1 if self.draft_models else 0
        forks = max(p.sizes.max_leaves for p in self.proposers) - 1
        if self.draft_models:
            forks = max(forks, *(p.sizes.max_width + 1 for p in self.proposers))
        return forks

    def fork_space(self, first_block: int, block_size: int) -> ForkSpace:
        """Fork blocks for ``max_trees`` trees from ``first_block`` on.

        A fork holds a path of a tree, or under masks all of its nodes.
        """
        last = self.max_nodes - 1 if self.masked else self.max_depth
        return ForkSpace(
            first_block=first_block,
            forks_per_tree=self.forks_per_tree,
            blocks_per_fork=(block_size - 1 + last) // block_size + 1,
            block_size=block_size,
        )

    def num_fork_blocks(self, block_size: int) -> int:
        """How many fork blocks the KV cache needs."""
        per_fork = self.fork_space(0, block_size).blocks_per_fork
        return self.config.max_trees * self.forks_per_tree * per_fork

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the draft models or the head; vLLM has just loaded the target."""
        for draft_model in self.draft_models:
            draft_model.load()
        if self.head is not None:
            self.head.load(target_model)

    def read(self, committed: CommittedTokens) -> None:
        """Let the draft models read committed tokens."""
        for draft_model in self.draft_models:
            draft_model.start(committed)

    def forget(self, req_ids: Iterable[str]) -> None:
        """Tell the proposers which requests are finished."""
        for proposer in self.proposers:
            proposer.forget(req_ids)

    def propose(
        self,
        scheduled: int,
        req_ids: list[str],
        inputs: ProposerInputs,
        hidden: Tensor | None,
    ) -> Proposal:
        """Draw one tree for each request whose root was just read.

        Args:
            scheduled: index of the schedule's tree to draw.
            req_ids: the requests.
            inputs: of the requests.
            hidden: [num_reqs, hidden_size] for a head: the target's hidden states from
                which the roots were emitted.

        """
        if self.head is not None:
            assert hidden is not None
            draft = self.head.draft(hidden, inputs.root_token_ids)
            inputs = replace(inputs, draft_models=(draft,))
        proposer = self.proposers[scheduled]
        tree = proposer.propose(inputs)
        # All in one, so that the host waits for the device once.
        width = tree.max_nodes
        together = [tree.token_ids, tree.parents, tree.num_nodes[:, None]]
        known = torch.cat(together, dim=1).tolist()
        drafts = [row[1 : row[-1]] for row in known]
        parents = [row[width + 1 : width + row[-1]] for row in known]
        if proposer.num_candidates is not None:
            num_beam_tokens = proposer.num_candidates * len(drafts)
            self.stats.merged(num_beam_tokens, sum(map(len, drafts)))
        rows = {req_id: row for row, req_id in enumerate(req_ids)}
        return Proposal(tree, scheduled, rows, drafts, parents)
