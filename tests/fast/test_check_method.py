"""``vllm_treespec.testing`` passes right methods and notices wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import pytest
import torch

from tests.fast.wrong_rules import WRONG_REJECTION
from tests.tiers import cases
from vllm_treespec.config.rsd_c import RsdCConfig
from vllm_treespec.config.suffix_tree import SuffixTreeConfig
from vllm_treespec.proposers import ProposerInputs, RsdC, Suffix
from vllm_treespec.scorers import RULES, Rule, recursive_rejection
from vllm_treespec.testing import check_method
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch

FOUND: dict[str, Any] = {
    "num_drafts": 8,
    "depth": 5,
    "min_probability": 0.0,
    "schedule": "fixed",
}
LISTED = [{"batch_size": 1}, {"batch_size": 4, "num_drafts": 3}]
MODEL: dict[str, Any] = {"model": "some/model", "schedule": "fixed"}
SMALL: dict[str, Any] = {**MODEL, "branching_factors": (2, 1)}


RIGHT: dict[str, dict[str, Any]] = {
    "hybrid": {**FOUND, **MODEL, "top_k": 3, "model_depth": 2},
    "rsd_s": MODEL,
    "specinfer": {"schedule": "fixed", "drafts": [{"model": "m"}] * 2},
    "spectr": MODEL,
    "eagle_tree": MODEL,
    "dflash_tree": MODEL,
    "redrafter": {**MODEL, "beam_search": "stochastic"},
}


@pytest.mark.parametrize("method", cases(RIGHT, quick=["hybrid"]))
def test_right_methods_pass(method: str) -> None:
    """Red when the check refuses what our own tests prove right."""
    checked = check_method({"method": method, **RIGHT[method]})
    assert checked.num_trees > 100
    assert checked.num_accepted > 50


class Wrong(Suffix):
    """Changes the trees of a suffix index."""

    change: Callable[[TreeBatch], TreeBatch]

    def propose(self, inputs: ProposerInputs) -> Draft:
        draft = super().propose(inputs)
        return replace(draft, tree=Wrong.change(draft.tree))


class WrongConfig(SuffixTreeConfig):
    """Spec-config of ``Wrong``."""

    method: Literal["wrong"]  # type: ignore[assignment]

    def proposer(self) -> Wrong:
        return Wrong(self.num_drafts, self.depth, self.min_probability)


def nothing(tree: TreeBatch) -> TreeBatch:
    """No drafts."""
    return tree.cut(torch.ones_like(tree.num_nodes))


def twins(tree: TreeBatch) -> TreeBatch:
    """All drafts below the root, with one token."""
    drafts = tree.is_node() & (tree.depths > 0)
    return replace(
        tree,
        token_ids=tree.token_ids.masked_fill(drafts, 2),
        parents=tree.parents.masked_fill(drafts, 0),
        depths=tree.depths.masked_fill(drafts, 1),
    )


def shallow(tree: TreeBatch) -> TreeBatch:
    """Depths that are none."""
    return replace(tree, depths=tree.depths.clamp(max=2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (nothing, "wrong drafts nothing"),
        (twins, "siblings have the same token"),
        (shallow, "depths do not follow parents"),
    ],
)
def test_wrong_trees_are_noticed(
    change: Callable[[TreeBatch], TreeBatch], says: str
) -> None:
    """Red when trees that would break an engine pass."""
    Wrong.change = staticmethod(change)
    with pytest.raises(AssertionError, match=says):
        check_method(WrongConfig(method="wrong", **FOUND))


class SmallConfig(WrongConfig):
    """Announces smaller trees than it draws."""

    @property
    def sizes(self) -> TreeSizes:
        return replace(super().sizes, max_leaves=2)


class SmallerConfig(WrongConfig):
    """Announces a smaller tree for a smaller shape alone."""

    @property
    def sizes(self) -> TreeSizes:
        sizes = super().sizes
        return sizes if self.num_drafts == 8 else replace(sizes, max_nodes=2)


class DrawnConfig(WrongConfig):
    """Has a rule for drawn drafts."""

    @property
    def rule(self) -> Rule:
        return RULES["recursive_rejection"]


class WideProposer(Suffix):
    """Draws larger trees than its sizes say."""

    def __init__(self, *limits: Any) -> None:
        super().__init__(*limits)
        self.sizes = replace(self.sizes, max_leaves=1)


class WideConfig(WrongConfig):
    """Spec-config of ``WideProposer``."""

    def proposer(self) -> Any:
        return WideProposer(self.num_drafts, self.depth, self.min_probability)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (SmallConfig, "max_leaves of the proposer's sizes is 8, the spec-config's"),
        (SmallerConfig, "max_nodes of the proposer's sizes is 4, the spec-config's"),
        (DrawnConfig, "the rule recursive_rejection needs draws, and these trees have"),
        (WideConfig, "nodes, levels, width and leaves of a tree are"),
    ],
)
def test_wrong_spec_configs_are_noticed(config: type[WrongConfig], says: str) -> None:
    """Red when a spec-config, or a tree of its schedule, would break an engine."""
    Wrong.change = staticmethod(lambda tree: tree)
    listed = {"schedule": LISTED} if config is SmallerConfig else {}
    with pytest.raises(AssertionError, match=says):
        check_method(config(method="wrong", **FOUND | listed))


class Sharpened(RsdC):
    """Says of its drafts that they came from a sharper distribution."""

    def propose(self, inputs: ProposerInputs) -> Draft:
        draft = super().propose(inputs)
        draws = draft.tree.draws
        if draws is None:
            return draft
        probs = draws.probs**2
        draws = replace(draws, probs=probs / probs.sum(-1, keepdim=True))
        return replace(draft, tree=replace(draft.tree, draws=draws))


class SharpenedConfig(RsdCConfig):
    """Spec-config of ``Sharpened``."""

    def proposer(self) -> Sharpened:
        return Sharpened(self.branching_factors)


class LossyConfig(RsdCConfig):
    """Has a rule that says it is lossless."""

    WALK: ClassVar[Any]

    @property
    def rule(self) -> Rule:
        return Rule("wrong", self.WALK)


def test_a_wrong_distribution_is_noticed() -> None:
    """Red when drafts that were drawn otherwise than they say pass."""
    with pytest.raises(AssertionError, match="law of emitted tokens is not the target"):
        check_method(SharpenedConfig(method="rsd_c", **SMALL))


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG_REJECTION)
def test_a_lossy_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a rule that changes the target's distribution passes."""
    walk = staticmethod(WRONG_REJECTION[name](recursive_rejection))
    monkeypatch.setattr(LossyConfig, "WALK", walk, raising=False)
    with pytest.raises(AssertionError, match="law of emitted tokens is not the target"):
        check_method(LossyConfig(method="rsd_c", **MODEL))


def other_form(*given: Any) -> Any:
    """A batched form that accepts nothing."""
    tree, target, numbers, _ = given
    return RULES["recursive_rejection"].walk(
        tree, target, torch.full_like(numbers, 1 - 2.0**-53)
    )


class FormsConfig(RsdCConfig):
    """Has a rule with two forms that differ."""

    @property
    def rule(self) -> Rule:
        return Rule("two_forms", RULES["recursive_rejection"].walk, other_form)


def test_forms_that_differ_are_noticed() -> None:
    """Red when a rule's batched form may emit something else."""
    with pytest.raises(AssertionError, match="the forms of the rule two_forms emit"):
        check_method(FormsConfig(method="rsd_c", **SMALL))
