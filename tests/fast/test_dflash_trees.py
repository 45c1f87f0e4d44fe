"""Trees over a block: which nodes get children, and what levels cost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.fast.drafting import draft_of, propose, token_paths
from tests.fast.languages import random_tables
from tests.heads import write_head
from vllm_treespec.config import parse_spec_config
from vllm_treespec.proposers import DFlash, DynamicTree, Hybrid
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.trees.source import Source

DEPTH = 4
LANGUAGE = random_tables("random", 6, DEPTH)[0]


@pytest.mark.parametrize("num_parents", [1, 2, 3])
def test_so_many_nodes_of_a_level_get_children(num_parents: int) -> None:
    """Red when a tree of marginals branches below siblings, or others do not."""
    tree = propose(DFlash(DynamicTree(3, DEPTH, 60, 0.0, num_parents)), LANGUAGE)
    paths = token_paths(tree, 0)[1:]
    parents = Counter(len(parent) for parent in {path[:-1] for path in paths})
    assert parents == {0: 1, **dict.fromkeys(range(1, DEPTH), num_parents)}


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


@pytest.mark.parametrize(("markov_rank", "num_parents"), [(0, 1), (4, 3)])
def test_heads_say_how_trees_branch(
    markov_rank: int, num_parents: int, tmp_path: Path
) -> None:
    """Red when siblings of a head without edges get children, or of another do not."""
    form = "dspark" if markov_rank else "dflash"
    head = write_head(tmp_path, "dflash", form=form, markov_rank=markov_rank)
    keys = {"model": head, "top_k": 3, "depth": 2}
    own = parse_spec_config({"method": "dflash_tree", **keys}).proposer()
    assert isinstance(own, DFlash)
    hybrid = {"model": head, "top_k": 3, "model_depth": 2, "drafter": "dflash"}
    beside = parse_spec_config({"method": "hybrid", **hybrid}).proposer()
    assert isinstance(beside, Hybrid)
    assert isinstance(beside.model, DFlash)
    for proposer in (own, beside.model):
        assert isinstance(proposer.tree, DynamicTree)
        assert proposer.tree.num_parents == num_parents
