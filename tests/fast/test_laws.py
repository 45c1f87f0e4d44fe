"""The matrix of laws: every rule, on trees of every proposer, in every form and cut.

Each cell enumerates all draft draws and all accept branches. Beside it stand the wrong
rule, the wrong proposer or the wrong cut that the same enumeration must notice.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest

from tests.fast.drafting import draws_of
from tests.fast.enumeration import (
    CLOSE,
    EXACT,
    NOTICEABLE,
    ROUGH,
    Scorer,
    Weighted,
    all_trees,
    as_if_drawn,
    certain,
    law_error,
)
from tests.fast.languages import (
    KINDS,
    Language,
    part_of,
    random_tables,
)
from tests.fast.law_trees import (
    DETERMINISTIC,
    TREES,
    WITHOUT_REPLACEMENT,
    drawn_trees,
    found_and_drafted,
    mixed_draws,
    side_by_side,
)
from tests.fast.rule_forms import FORMS, grid_law_error
from tests.fast.scheduled_trees import pruning_plan
from tests.fast.tree_cuts import (
    at_a_size,
    at_its_size,
    by_value,
    come_back,
    cut_by,
    keeps_draws,
)
from tests.fast.wrong_proposers import MODULES, WRONG_PROPOSERS
from tests.fast.wrong_rules import (
    K_SEQ_JUDGE,
    WRONG,
    WRONG_VOCABULARY,
    Wrong,
    in_reverse,
    judged,
    rest_is_target,
    rest_of_one_draw,
)
from tests.reference import optimal_transport as transport
from tests.reference.scorers import recursive_rejection_reference
from tests.tiers import cases
from vllm_treespec.proposers import (
    Proposer,
    RsdC,
    RsdS,
    SpecInfer,
    StochasticTree,
)
from vllm_treespec.schedule.plan import PLAIN_PLAN
from vllm_treespec.scorers.independent_draws import Judge
from vllm_treespec.trees.builders import from_parents

ALL_FORMS: dict[str, dict[str, Scorer]] = {
    **FORMS,
    "optimal_transport": {"reference": transport.optimal_transport},
}
JUDGES: dict[str, Judge] = {"k_seq": K_SEQ_JUDGE, "optimal_transport": transport.judge}
# Of rules that are slow to measure.
FEWER_KINDS = {
    "optimal_transport": ["random", "zeros", "equal", "disjoint"],
    "coupled_draw": ["random", "one_token"],
}
# One tree of each kind; the rest is thorough.
QUICK = {
    *("sd 2", "rsd_c 4", "rsd_c 2x2", "rsd_s 2"),
    *("stochastic 2, best 4", "likely rsd_c 2x1"),
    *("3 draws", "2 paths", "2 models, 2x2"),
    *("dynamic 2", "static 6", "redrafter 3"),
}


def error_of(
    rule: str,
    scorer: Scorer,
    drawn: Weighted,
    target: Language,
    width: float = CLOSE,
) -> float:
    """Error of what is emitted; coupled draw has a target of its own."""
    if rule == "coupled_draw":
        return grid_law_error(scorer, drawn)
    return law_error(scorer, drawn, target, JUDGES.get(rule), width)


@pytest.mark.parametrize(
    ("rule", "form", "name"),
    cases(
        all_cells := [
            (rule, form, name)
            for rule, trees in TREES.items()
            for form in ALL_FORMS[rule]
            for name in trees
        ],
        quick=[cell for cell in all_cells if cell[2] in QUICK],
    ),
)
def test_law_of_whole_trees(rule: str, form: str, name: str) -> None:
    """Red when a draw, its order, a threshold or a residual changes the law.

    Or when a form judges a node by what another node's draws leave.
    """
    for kind in FEWER_KINDS.get(rule, KINDS):
        drawn, target = drawn_trees(rule, name, kind)
        assert float(drawn.weights.sum()) == pytest.approx(1, abs=EXACT)
        assert error_of(rule, ALL_FORMS[rule][form], drawn, target) < EXACT, kind


@pytest.mark.parametrize("name", ["rsd_s 3", "stochastic 2, best 4"])
def test_law_of_other_beams(name: str) -> None:
    """Red when a beam's choice of nodes depends on tokens it must not look at."""
    for seed in (1, 2, 3, 4):
        vocab_size, proposer = WITHOUT_REPLACEMENT[name]
        draft, target = random_tables("random", vocab_size, 2)
        drawn = all_trees(proposer, draft, seed=seed)
        assert law_error(FORMS["recursive_rejection"]["walk"], drawn, target) < EXACT


@pytest.mark.parametrize("form", ["walk", "batched"])
@pytest.mark.parametrize("rule", ["recursive_rejection", "multi_round"])
def test_law_of_both_kinds_of_draws(rule: str, form: str) -> None:
    """Red when draws with and without replacement cannot meet at a node or in a batch.

    Then one request's kind of draws, or model, leaks into another's.
    """
    for kind in ("random", "two_tokens", "peaked"):
        (one, target), (other, _) = (random_tables(kind, 3, 2, s) for s in (0, 7))
        drawn = mixed_draws(one, other)
        assert law_error(FORMS[rule][form], drawn, target) < EXACT
    trees = all_trees(RsdC((2, 1)), one), all_trees(SpecInfer([(2, 1)]), one)
    assert law_error(FORMS[rule][form], side_by_side(*trees), target) < EXACT


# Cuts

CUT_TREES = {
    "recursive_rejection": ["rsd_c 2x2", "rsd_s 2", "stochastic 2, best 3"],
    "multi_round": ["2 paths", "2 models, 2x2"],
    "k_seq": ["2 paths"],
    "coupled_draw": ["dynamic 3", "static 6"],
}


@pytest.mark.parametrize("cut", ["room", "limits", "lost", "late"])
@pytest.mark.parametrize(
    ("rule", "form", "name"),
    [
        (rule, form, name)
        for rule, names in CUT_TREES.items()
        for form in FORMS[rule]
        for name in names
    ],
)
def test_law_of_cut_trees(rule: str, form: str, name: str, cut: str) -> None:
    """Red when what is left of a tree, or of a batch, depends on what was drawn.

    Or when a cut tree is judged as if it had all its draws.
    """
    drawn, target = drawn_trees(rule, name, "random")
    for left in cut_by(cut, drawn):
        assert error_of(rule, FORMS[rule][form], left, target) < EXACT


# What must not cut a tree, or make it lost or late.
WRONG_CUTS: dict[str, tuple[str, str, Callable[[Weighted], Weighted]]] = {
    "lost by value, 3 draws": ("multi_round", "3 draws", lambda d: by_value(d, 1)),
    "lost by value": ("recursive_rejection", "rsd_c 2x1", lambda d: by_value(d, 1)),
    "lost by value, 1 draw": ("k_seq", "2 paths", lambda d: by_value(d, 1)),
    "room by size": ("multi_round", "3 draws of 5", at_a_size),
    # The worker does not know why two drafts came: trees without more keep all draws.
    "sent by size": ("multi_round", "3 draws of 5", lambda d: come_back(d, sent=2)),
    # As a grammar's masks would, that end behind a tree's nodes.
    "at its own size": ("k_seq", "2 paths", at_its_size),
    "stochastic tree": ("recursive_rejection", "stochastic 2, best 3", keeps_draws),
}


@pytest.mark.parametrize("name", WRONG_CUTS)
def test_wrong_cuts_are_noticed(name: str) -> None:
    """Red when a cut that depends on the drawn tokens would pass."""
    rule, trees, cut = WRONG_CUTS[name]
    drawn, target = drawn_trees(rule, trees, "random")
    scorer = FORMS[rule]["walk"]
    assert error_of(rule, scorer, cut(drawn), target, ROUGH) > NOTICEABLE


@pytest.mark.parametrize(("lost", "form"), [(1, "walk"), (2, "batched")])
def test_coupled_draw_may_be_cut_by_value(lost: int, form: str) -> None:
    """Red when the rule starts to depend on how the tree came about."""
    drawn, _ = drawn_trees("coupled_draw", "2 paths", "random")
    assert grid_law_error(FORMS["coupled_draw"][form], by_value(drawn, lost)) < EXACT


# Wrong rules

WRONG_TREES = {
    "recursive_rejection": "rsd_c 2x1",
    "multi_round": "2 models, 3 draws",
    "k_seq": "2 paths",
    "coupled_draw": "dynamic 2",
}
CHAIN = ("inverse ratio", "bonus from draft", "residual is the target")
TRANSPORT: dict[str, Wrong] = {
    "recovered from target": judged(rest_is_target(transport.judge)),
    "residual of one draw": judged(rest_of_one_draw(transport.judge)),
    "draws judged in reverse": judged(in_reverse(transport.judge)),
}


@pytest.mark.parametrize(
    ("rule", "form", "tree", "wrong"),
    [
        *(
            (rule, form, tree, wrong)
            for rule, tree in WRONG_TREES.items()
            for form in FORMS[rule]
            for wrong in WRONG[rule]
        ),
        *(("recursive_rejection", "walk", "sd 2", wrong) for wrong in CHAIN),
        *(("optimal_transport", "reference", "2 paths", name) for name in TRANSPORT),
    ],
)
def test_wrong_rules_are_noticed(rule: str, form: str, tree: str, wrong: str) -> None:
    """Red when the matrix could no longer see a lossy rule."""
    drawn, target = drawn_trees(rule, tree, "random")
    scorer = {**WRONG, "optimal_transport": TRANSPORT}[rule][wrong](
        ALL_FORMS[rule][form]
    )
    assert error_of(rule, scorer, drawn, target, ROUGH) > NOTICEABLE


# Wrong proposers


@pytest.mark.parametrize("name", WRONG_PROPOSERS)
def test_wrong_proposers_are_noticed(name: str) -> None:
    """Red when trees chosen or ordered by their tokens would pass for drawn ones."""
    trees, wrong = WRONG_PROPOSERS[name]
    vocab_size, proposer = WITHOUT_REPLACEMENT[trees]
    draft, target = random_tables("random", vocab_size, 2)
    with wrong():
        drawn = all_trees(proposer, draft)
    rule = FORMS["recursive_rejection"]["walk"]
    assert law_error(rule, drawn, target, width=ROUGH) > NOTICEABLE


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_likeliest_tokens_judged_as_draws_are_noticed(name: str) -> None:
    """Red when a deterministic tree judged like a drawn one would pass.

    ReDrafter's paper judges its beams so, which is a hole in its section 2.
    """
    draft, target = random_tables("random", 3, 2)
    tree = as_if_drawn(all_trees(DETERMINISTIC[name][1], draft).tree, draft)
    rule = FORMS["recursive_rejection"]["walk"]
    assert law_error(rule, certain(tree), target, width=ROUGH) > NOTICEABLE


# Trees that no proposer above drafts

TOKENS_AND_PARENTS = {
    "root only": ([0], [-1]),
    "chain": ([0, 1, 0], [-1, 0, 1]),
    "unlikely first": ([0, 2, 0, 1, 2], [-1, 0, 0, 1, 2]),
    "all children": ([0, 0, 1, 2, 0, 1, 2, 1], [-1, 0, 0, 0, 1, 1, 1, 2]),
}
# Of an index and a model.
PLANS = {
    "halves": PLAIN_PLAN,
    "by claims": pruning_plan(row_cost=0.01),
    "likely alone": pruning_plan(row_cost=0.2),
}


@pytest.mark.parametrize("form", ["walk", "batched"])
@pytest.mark.parametrize("name", [*TOKENS_AND_PARENTS, *PLANS, "index alone"])
def test_law_of_any_tree_under_coupled_draw(name: str, form: str) -> None:
    """Red when order, number or origin of children changes what is emitted."""
    if name in TOKENS_AND_PARENTS:
        tokens, parents = TOKENS_AND_PARENTS[name]
        tree = from_parents([tokens], [parents])
    else:
        draft = random_tables("random", 3, 2)[0] if name in PLANS else None
        tree = found_and_drafted(PLANS.get(name, PLAIN_PLAN), draft)
    for num_nodes in range(1, int(tree.num_nodes) + 1):
        cut = certain(tree).cut(num_nodes)
        assert grid_law_error(FORMS["coupled_draw"][form], cut) < EXACT


# A part of the vocabulary


@pytest.mark.parametrize(
    ("rule", "proposer", "vocab_size", "tokens"),
    [
        ("recursive_rejection", RsdC((2, 1)), 4, [1, 3]),
        ("recursive_rejection", RsdS(2, 2), 3, [0, 2]),
        ("recursive_rejection", RsdS(2, 2), 4, [0, 2, 3]),
        ("recursive_rejection", StochasticTree(2, 2, 4), 4, [0, 2, 3]),
        ("multi_round", SpecInfer([(2, 1)]), 4, [0, 2, 3]),
        ("k_seq", SpecInfer([(2, 1)]), 4, [0, 2, 3]),
    ],
)
def test_law_of_a_part_of_the_vocabulary(
    rule: str, proposer: Proposer, vocab_size: int, tokens: list[int]
) -> None:
    """Red when columns and tokens are mixed up, or undraftable tokens gain mass.

    Or when the readable reference stops being a lossless walk.
    """
    forms = dict(FORMS[rule])
    if isinstance(proposer, RsdC):
        forms["reference"] = recursive_rejection_reference
    for kind in ("random", "zeros", "disjoint", "top_k"):
        draft, target, vocabulary = part_of(kind, vocab_size, tokens)
        drawn = all_trees(proposer, draft, vocabulary)
        assert draws_of(drawn.tree).probs.shape[2] == len(tokens)
        cut = drawn.cut(4) if not isinstance(proposer, StochasticTree) else drawn
        for scorer, trees in product(forms.values(), (drawn, cut)):
            assert law_error(scorer, trees, target, JUDGES.get(rule)) < EXACT


@pytest.mark.parametrize("name", WRONG_VOCABULARY)
def test_wrong_vocabularies_are_noticed(name: str) -> None:
    """Red when a rule could spoil a part of the vocabulary unseen."""
    draft, target, vocabulary = part_of("random", 4, [0, 2, 3])
    drawn = all_trees(RsdC((2, 1)), draft, vocabulary)
    for rule in FORMS["recursive_rejection"].values():
        wrong = WRONG_VOCABULARY[name](rule)
        assert law_error(wrong, drawn, target, width=ROUGH) > NOTICEABLE


def test_unmapped_columns_are_noticed() -> None:
    """Red when a proposer that hands columns on as tokens would pass."""
    draft, target, vocabulary = part_of("random", 4, [0, 2, 3])
    with patch.object(MODULES["rsd_s"], "tokens_of", lambda columns, _: columns):
        drawn = all_trees(RsdS(2, 2), draft, vocabulary)
    rule = FORMS["recursive_rejection"]["walk"]
    assert law_error(rule, drawn, target, width=ROUGH) > NOTICEABLE
