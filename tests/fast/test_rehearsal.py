"""Trees are drawn and scored once before a GPU's memory is given to the KV cache."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.heads import HEADS, write_head
from vllm_treespec.config import parse_spec_config
from vllm_treespec.engine.rehearsal import rehearse
from vllm_treespec.heads import load_head
from vllm_treespec.scorers import RULES, TreeShape, score

NUM_REQS, VOCAB_SIZE, HIDDEN_SIZE = 3, 32, 8
SPECS: dict[str, dict[str, Any]] = {
    "sd": {"method": "sd", "model": "some/model", "depth": 3},
    "rsd_s": {"method": "rsd_s", "model": "some/model", "beam_width": 3, "depth": 2},
    "specinfer": {
        "method": "specinfer",
        "drafts": [
            {"model": "some/model", "branching_factors": [2, 1]},
            {"model": "other/model", "branching_factors": [1, 1]},
        ],
    },
    "redrafter": {"method": "redrafter", "beam_width": 3, "length": 2},
    "medusa_tree": {"method": "medusa_tree", "num_drafts": 5},
}


class Recorder:
    """A drafter that notes the largest batch of trees it scored."""

    def __init__(self, spec: dict[str, Any], head: Any) -> None:
        config = parse_spec_config({**spec, "schedule": "fixed"})
        self.rule = RULES[config.rule]
        self.proposers = [tree.config.proposer() for tree in config.scheduled()]
        self.max_draws = max(p.sizes.max_draws for p in self.proposers)
        self.head = head and SimpleNamespace(head=head)
        self.scored: list[tuple[int, int]] = []

    def score(self, scheduled: int, tree: Any, target: Any, uniforms: Any) -> None:
        self.scored.append((tree.num_reqs, tree.max_nodes))
        p = self.proposers[scheduled]
        shape = TreeShape(p.sizes.max_depth, p.sizes.max_siblings, p.sizes.max_parents)
        score_at_once(tree, target, uniforms, self.rule, shape)


@pytest.mark.parametrize("method", SPECS)
def test_trees_of_full_size_are_scored(method: str, tmp_path: Path) -> None:
    """Red when trees are drawn, or scored, for the first time when requests come."""
    spec, head = SPECS[method], None
    if method in HEADS:
        folder = write_head(tmp_path, HEADS[method])
        spec = {**spec, "model": folder}
        head = load_head(Path(folder))
        head.share(*[torch.randn(VOCAB_SIZE, HIDDEN_SIZE)] * 2)
    drafter: Any = Recorder(spec, head)
    rehearse(drafter, NUM_REQS, VOCAB_SIZE, torch.zeros(NUM_REQS, HIDDEN_SIZE))
    assert drafter.scored == [(NUM_REQS, p.sizes.max_nodes) for p in drafter.proposers]
