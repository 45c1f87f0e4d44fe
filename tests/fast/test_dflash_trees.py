"""Trees over a block: which nodes get children, and what levels cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import at_temperature, draft_of, same_trees
from tests.fast.test_dflash_head import HEADS, loaded
from tests.heads import llama, write_head
from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.checks import check_head, check_weights
from vllm_treespec.proposers import (
    DFlash,
    DrawnDFlash,
    DynamicTree,
    StochasticTree,
)
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.schedule.values import TreeOption
from vllm_treespec.trees.source import Source

DEPTH = 3


def test_levels_after_the_first_cost_nothing(tmp_path: Path) -> None:
    """Red when a one-pass head's tree ends where a level would cost a forward."""
    plan = StepPlan(
        tree=0,
        slots=[0],
        model=True,
        prunes=True,
        level_cost=100.0,
        kept={Source.MODEL: [1.0]},
        max_levels=1,
    )
    head = loaded(HEADS["dspark"], tmp_path)
    states, roots = torch.randn(1, DEPTH, 16, dtype=torch.float64), torch.tensor([3])
    levels, block = (
        draft_of(
            proposer,
            head.begin(states, roots),
            sampling=at_temperature(0.0),
            root_token_ids=roots,
            plan=plan,
            can_sync=True,
        )
        for proposer in (DynamicTree(3, DEPTH, 60), DFlash(3, DEPTH, 60))
    )
    assert int(levels.tree.depths.max()) == levels.levels == 1
    assert int(block.tree.depths.max()) == DEPTH
    assert block.levels == 1
    assert DFlash(3, DEPTH, 60).sizes.draft_forwards == 1
    drawn = DrawnDFlash(StochasticTree(3, DEPTH, 60))
    assert drawn.sizes.draft_forwards == 1


SAMPLING = {
    "greedy": at_temperature(0.0, 3),
    "cold": at_temperature(0.02, 3),
    "sampled": at_temperature(0.6, 3),
    "top-k": at_temperature(1.0, 3, top_k=3),
    "top-p": at_temperature(1.0, 3, top_p=0.8),
    "both": at_temperature(1.3, 3, top_k=6, top_p=0.7),
    "mixed": SamplingTensors(
        torch.tensor([0.0, 0.5, 1.2]),
        top_k=torch.tensor([40, 1, 40]),
        top_p=torch.tensor([1.0, 1.0, 0.5]),
    ),
}


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2", "specforge, causal"])
def test_all_levels_at_once_give_the_same_trees(name: str, tmp_path: Path) -> None:
    """Red when a tree over a block is not the dynamic tree of its logits."""
    for sampling in SAMPLING.values():
        torch.manual_seed(0)
        head = loaded(HEADS[name], tmp_path)
        roots = torch.tensor([3, 39, 17])
        states = 4 * torch.randn(3, DEPTH, 16, dtype=torch.float64)
        inputs: dict[str, Any] = {
            "num_reqs": 3,
            "root_token_ids": roots,
            "sampling": sampling,
            "noise_keys": torch.randint(1 << 40, (3, DEPTH)),
            "levels": torch.tensor([DEPTH, 2, DEPTH]),
            "num_drafts": torch.tensor([12, 9, 3]),
        }
        for min_probability in (0.0, 0.02):
            shape = 3, DEPTH, 12, min_probability
            wanted = draft_of(DynamicTree(*shape), head.begin(states, roots), **inputs)
            found = draft_of(DFlash(*shape), head.begin(states, roots), **inputs)
            assert same_trees(found.tree, wanted.tree)
            assert found.claims is not None
            assert wanted.claims is not None
            torch.testing.assert_close(
                found.claims, wanted.claims, rtol=1e-4, atol=1e-7
            )


class ManyTokens:
    """A block over a large vocabulary, in which one token calls for a rare one."""

    vocabulary = None

    def __init__(self, seed: int) -> None:
        """Make logits of 3 levels and 500 tokens."""
        generator = torch.Generator().manual_seed(seed)
        self.level_logits = 2 * torch.randn(1, 3, 500, generator=generator)
        self.added = torch.randn(500, 500, generator=generator)
        self.max_candidates = 500
        self.level_logits[:, 0] += self.added[0]
        self.level = 0

    def edges(self, columns: Tensor, token_ids: Tensor) -> Tensor:
        """What tokens add, by levels."""
        return self.added[columns[:, :-1, :, None], columns[:, 1:, None]]

    def root_logits(self) -> Tensor:
        """As ``DraftModel`` says."""
        return self.level_logits[:, 0]

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """As ``DraftModel`` says."""
        self.level += 1
        return self.level_logits[:, self.level, None] + self.added[token_ids]


@pytest.mark.parametrize(
    "sampling",
    [
        at_temperature(0.0),
        at_temperature(0.05),
        at_temperature(1.0, top_k=5),
        at_temperature(1.0, top_p=0.6),
    ],
)
def test_few_candidates_claim_what_all_tokens_would(sampling: SamplingTensors) -> None:
    """Red when what is left out of the candidates does not count in their claims."""
    for seed in range(20):
        inputs: dict[str, Any] = {
            "sampling": sampling,
            "root_token_ids": torch.tensor([0]),
        }
        wanted, found = (
            draft_of(proposer, ManyTokens(seed), **inputs)
            for proposer in (DynamicTree(4, 3, 12), DFlash(4, 3, 12))
        )
        assert found.claims is not None
        assert wanted.claims is not None
        at_most = wanted.claims.sum()
        assert 0.8 * at_most < found.claims.sum() < 1.2 * at_most


def test_one_level_has_no_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a tree of one level computes edges of no row: some kernels crash."""
    block = ManyTokens(0)
    monkeypatch.setattr(block, "edges", None)
    tree = draft_of(DFlash(4, 1, 4), block, sampling=at_temperature(0.0)).tree
    likeliest = block.level_logits[0, 0].topk(4).indices
    assert tree.token_ids[0, 1:].tolist() == likeliest.tolist()


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ({"method": "dflash_tree", "depth": 5}, "depth"),
        (
            {
                "method": "dflash_tree",
                "depth": 4,
                "schedule": [{"batch_size": 4, "depth": 5}, {"batch_size": 8}],
            },
            "depth",
        ),
        ({"method": "hybrid", "drafter": "dflash", "model_depth": 5}, "model_depth"),
    ],
)
def test_no_tree_is_deeper_than_the_head(
    spec: dict[str, Any], key: str, tmp_path: Path
) -> None:
    """Red when a tree of a schedule asks for a level that a block does not have."""
    head = write_head(tmp_path, "dflash", block_size=4)
    config = parse_spec_config({**spec, "model": head})
    target = llama(vocab_size=32, hidden_size=64, num_hidden_layers=3)
    says = f"drafts 4 levels, and trees would have 5; .* '{key}' 4 or less"
    with pytest.raises(SpecConfigError, match=says):
        check_head(config, target)


def test_a_head_is_no_draft_model(tmp_path: Path) -> None:
    """Red when a one-pass head is taken for an EAGLE head, or for a draft model."""
    head = write_head(tmp_path, "dflash")
    for spec, remedy in (
        ({"method": "sd"}, "method 'dflash_tree'"),
        ({"method": "hybrid"}, "'drafter' 'dflash'"),
    ):
        config = parse_spec_config({**spec, "model": head})
        with pytest.raises(SpecConfigError, match=f"a dflash head.*write {remedy}"):
            check_weights(config)


def test_all_levels_of_a_block_are_its_first_forwards() -> None:
    """Red when beside an index a block is drafted for the gain of one level alone."""
    keys = {"method": "hybrid", "model": "some/head", "model_depth": 4}
    trees = [
        parse_spec_config({**keys, "drafter": drafter}).scheduled_trees()[0]
        for drafter in ("dflash", "eagle")
    ]
    block, levels = (TreeOption.of_tree(0, tree) for tree in trees)
    assert (block.levels, block.depth, block.first_levels) == (1, 4, 4)
    assert (levels.levels, levels.depth, levels.first_levels) == (4, 4, 1)
