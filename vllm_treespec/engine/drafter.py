"""The object behind vLLM's ``custom_class`` method: proposer and draft models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.config import VllmConfig

from vllm_treespec.config import parse_spec_config
from vllm_treespec.engine.branches import ForkSpace
from vllm_treespec.engine.draft_model import CommittedTokens, PagedDraftModel
from vllm_treespec.engine.stats import StepStats
from vllm_treespec.proposers import ProposerInputs
from vllm_treespec.sampling import SamplingTensors
from vllm_treespec.tree import TreeBatch


@dataclass(frozen=True)
class Proposal:
    """The trees drawn in one step, and the drafts as the scheduler saw them."""

    tree: TreeBatch
    # request id -> row of the tree
    rows: dict[str, int]
    # per row, the tokens of the draft nodes
    drafts: list[list[int]]

    def find(self, req_id: str, scheduled: list[int]) -> int | None:
        """Row of the tree that the scheduled drafts are a prefix of, if any."""
        row = self.rows.get(req_id)
        if row is None or self.drafts[row][: len(scheduled)] != scheduled:
            return None
        return row


class TreeDrafter:
    """Draws the next draft trees; vLLM makes one per worker from its config."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Read our settings, which travel in vLLM's ``additional_config``."""
        self.config = parse_spec_config(vllm_config.additional_config["treespec"])
        self.proposer = self.config.proposer()
        self.stats = StepStats()
        self.draft_models = [
            PagedDraftModel(vllm_config, self.config.model, "draft_model", self.stats)
        ]

    @property
    def forks_per_tree(self) -> int:
        """Forks one tree may need, while it is drawn or while it is scored."""
        return max(self.proposer.max_width + 1, self.proposer.max_leaves - 1)

    def fork_space(self, first_block: int, block_size: int) -> ForkSpace:
        """Fork blocks for ``max_trees`` trees from ``first_block`` on."""
        return ForkSpace(
            first_block=first_block,
            forks_per_tree=self.forks_per_tree,
            blocks_per_fork=(block_size - 1 + self.proposer.max_depth) // block_size
            + 1,
            block_size=block_size,
        )

    def num_fork_blocks(self, block_size: int) -> int:
        """How many fork blocks the KV cache needs."""
        per_fork = self.fork_space(0, block_size).blocks_per_fork
        return self.config.max_trees * self.forks_per_tree * per_fork

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the draft models; vLLM calls this after it loaded the target."""
        for draft_model in self.draft_models:
            draft_model.load()

    def read(self, committed: CommittedTokens) -> None:
        """Let the draft models read the step's committed tokens."""
        for draft_model in self.draft_models:
            draft_model.start(committed)

    def propose(
        self,
        req_ids: list[str],
        root_token_ids: Tensor,
        sampling: SamplingTensors,
        uniforms: Tensor,
    ) -> Proposal:
        """Draw one tree for each request whose root was just read."""
        tree = self.proposer.propose(
            ProposerInputs(
                root_token_ids=root_token_ids,
                sampling=sampling,
                uniforms=uniforms,
                draft_models=self.draft_models,
            )
        )
        tokens, lens = tree.token_ids.tolist(), tree.num_nodes.tolist()
        drafts = [row[1:n] for row, n in zip(tokens, lens, strict=True)]
        return Proposal(tree, {r: i for i, r in enumerate(req_ids)}, drafts)
