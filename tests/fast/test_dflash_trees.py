"""Trees over a block: which nodes get children, and what levels cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fast.drafting import draft_of
from tests.fast.languages import random_tables
from tests.heads import llama, write_head
from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.checks import check_head, check_weights
from vllm_treespec.proposers import DFlash, DynamicTree
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.schedule.values import TreeOption
from vllm_treespec.trees.source import Source

DEPTH = 4
LANGUAGE = random_tables("random", 6, DEPTH)[0]


def test_levels_after_the_first_cost_nothing() -> None:
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
    tree = DynamicTree(3, DEPTH, 60)
    levels = draft_of(tree, LANGUAGE, plan=plan, can_sync=True)
    assert int(levels.tree.depths.max()) == levels.levels == 1
    block = draft_of(DFlash(tree), LANGUAGE, plan=plan, can_sync=True)
    assert int(block.tree.depths.max()) == DEPTH
    assert block.levels == 1
    assert DFlash(tree).sizes.draft_forwards == 1


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
    says = f"'{key}' is 5, and the head .* drafts 4 levels; write '{key}' 4 or less"
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
