"""Hybrid trees: what both parts hold, their shares, their law, and a model unasked."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from tests.fast.enumeration import Weighted
from tests.fast.languages import (
    Language,
    LanguageDraft,
    plain_sampling,
    random_tables,
)
from tests.fast.test_dynamic_tree import log_law
from tests.fast.tiny_heads import token_paths
from tests.fast.toy_workloads import make_engine
from tests.fast.tree_bounds import CountingDraft, check_bounds
from tests.reference.proposers import Path, dynamic_tree_reference
from tests.tiers import cases
from vllm_treespec.proposers import Hybrid, ProposerInputs
from vllm_treespec.proposers.suffix import grow_tree
from vllm_treespec.schedule.base import StepOutcome
from vllm_treespec.schedule.shares import (
    FIRST_ACCEPTED,
    FIRST_NODES,
    LEAST_SHARE,
    Shares,
    count_by_source,
)
from vllm_treespec.sources.base import Roots
from vllm_treespec.sources.continuations import Continuation, Continuations
from vllm_treespec.sources.suffix_index import SuffixIndex
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import ToyDraftModel
from vllm_treespec.testing.workloads import HABITS, check_greedy, workload
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.source import Source
from vllm_treespec.trees.tree import TreeBatch

NOTICEABLE = 1e-3
HEADS = ("hybrid_head", "hybrid_pairs", "hybrid_chains")


def drafted(
    proposer: Hybrid,
    found: list[list[Continuation]],
    shares: list[float],
    draft: Language | None,
) -> Draft:
    """One tree for each request; without a draft the model is not asked."""
    num_reqs = len(found)
    return proposer.propose(
        ProposerInputs(
            root_token_ids=torch.zeros(num_reqs, dtype=torch.int64),
            sampling=plain_sampling(num_reqs),
            uniforms=torch.zeros(num_reqs, 0),
            draft_models=[] if draft is None else [LanguageDraft(draft, num_reqs)],
            continuations=[Continuations(found)],
            first_shares=np.array(shares),
        )
    )


def tree_of(
    proposer: Hybrid,
    found: list[list[Continuation]],
    shares: list[float],
    draft: Language | None,
) -> TreeBatch:
    """The same without claims and sources."""
    return drafted(proposer, found, shares, draft).tree


def found_paths(found: list[Continuation], num_drafts: int) -> list[Path]:
    """Paths of the index's tree."""
    paths: list[Path] = [()]
    for token, parent, *_ in grow_tree(found, num_drafts, num_drafts, 0.0):
        paths.append((*paths[parent], token))
    return paths[1:]


# What a tree holds

FOUND: list[Continuation] = [(5, [1, 2, 0]), (5, [1, 0]), (2, [2, 2]), (1, [0])]


@pytest.mark.parametrize(
    ("share", "num_found"), [(0.01, 1), (0.25, 2), (0.5, 4), (0.9, 7), (1.0, 7)]
)
def test_the_index_gets_its_share_and_the_model_the_rest(
    share: float, num_found: int
) -> None:
    """Red when a part gets other nodes than its best, or equal paths are two nodes."""
    draft, _ = random_tables("random", 3, 3)
    proposer = Hybrid(8, depth=3, top_k=3, model_depth=2, min_probability=0.0)
    made = drafted(proposer, [FOUND], [share], draft)
    index = found_paths(FOUND, num_found)
    assert len(index) == num_found
    left = 0 if share == 1 else 8 - num_found
    model = dynamic_tree_reference(log_law(draft), 3, 2, left) if left else []
    paths = token_paths(made.tree, 0)
    assert sorted(paths[1:]) == sorted({*index, *model})
    assert [path for path in paths[1:] if path in index] == index
    assert made.sources is not None
    assert made.sources[0, : len(paths)].tolist() == [0] + [
        Source.INDEX * (path in index) + Source.MODEL * (path in model)
        for path in paths[1:]
    ]
    assert made.tree.max_nodes == 9


def test_sources_overlap() -> None:
    """Red when the test above has no path that both parts hold."""
    draft, _ = random_tables("random", 3, 3)
    proposer = Hybrid(8, depth=3, top_k=3, model_depth=2, min_probability=0.0)
    sources = drafted(proposer, [FOUND], [0.5], draft).sources
    assert sources is not None
    assert bool((sources == Source.INDEX | Source.MODEL).any())
    assert count_by_source(sources[0].numpy()).tolist() == [4, 4]


def test_each_request_has_a_share_of_its_own() -> None:
    """Red when a batch decides a request's tree."""
    draft, _ = random_tables("random", 3, 3)
    proposer = Hybrid(6, depth=3, top_k=2, model_depth=3, min_probability=0.0)
    found: list[list[Continuation]] = [FOUND, [], FOUND[2:], FOUND]
    shares = [0.5, 0.875, 0.125, 1.0]
    together = tree_of(proposer, found, shares, draft)
    for req in range(4):
        alone = tree_of(proposer, [found[req]], [shares[req]], draft)
        assert token_paths(alone, 0) == token_paths(together, req)


def test_each_source_claims_its_nodes() -> None:
    """Red when a node has another claim than its source's, or the index's if both."""
    draft, _ = random_tables("random", 3, 3)
    proposer = Hybrid(8, depth=3, top_k=3, model_depth=2, min_probability=0.0)
    made = drafted(proposer, [FOUND, []], [0.5, 0.5], draft)
    assert made.claims is not None
    assert made.levels == 2
    law = log_law(draft)
    by_index: dict[Path, float] = {}
    names: list[Path] = [()]
    for node in grow_tree(FOUND, 4, 4, 0.0):
        names.append((*names[node.parent], node.token))
        by_index[names[-1]] = node.probability
    for row, (left, found) in enumerate(((4, by_index), (8, dict[Path, float]()))):
        by_model = {
            path: math.exp(sum(law(path[:d])[path[d]] for d in range(len(path))))
            for path in dynamic_tree_reference(law, 3, 2, left)
        }
        expected = {(): 0.0} | by_model | found
        paths, claims = token_paths(made.tree, row), made.claims[row].tolist()
        assert claims[: len(paths)] == pytest.approx([expected[p] for p in paths])
        assert not any(claims[len(paths) :])


def test_what_the_index_does_not_find_is_the_models() -> None:
    """Red when places stay empty that the model could fill."""
    draft, _ = random_tables("random", 3, 3)
    proposer = Hybrid(6, depth=3, top_k=3, model_depth=2, min_probability=0.0)
    tree = tree_of(proposer, [[]], [0.9], draft)
    assert token_paths(tree, 0)[1:] == dynamic_tree_reference(log_law(draft), 3, 2, 6)


def test_without_a_model_the_tree_is_the_indexs() -> None:
    """Red when a tree without the model differs from one where it drafts nothing."""
    draft, _ = random_tables("random", 3, 3)
    proposer = Hybrid(8, depth=3, top_k=3, model_depth=2, min_probability=0.0)
    asked = drafted(proposer, [FOUND, []], [1.0, 1.0], draft)
    alone = drafted(proposer, [FOUND, []], [1.0, 1.0], None)
    for one, other in (
        (alone.sources, asked.sources),
        (alone.claims, asked.claims),
    ):
        assert one is not None
        assert other is not None
        assert one.equal(other)
    by_index = Hybrid(8, depth=3, top_k=3, model_depth=0, min_probability=0.0)
    never = tree_of(by_index, [FOUND, []], [0.5, 0.125], draft)
    for req in range(2):
        paths = token_paths(asked.tree, req)
        assert token_paths(alone.tree, req) == paths == token_paths(never, req)


# More leaves than any tree may have.
WIDE: list[Continuation] = [(9, [token, 0]) for token in range(24)]


def test_sizes_bound_the_trees() -> None:
    """Red when a tree, or a level that is read, outgrows what is announced."""
    draft, _ = random_tables("random", 3, 4)
    kept_drafts = (1, 2, 7, 12, 40)
    for kept, depth, top_k, levels in product(kept_drafts, (1, 4), (1, 3), (1, 3)):
        proposer = Hybrid(kept, depth, top_k, levels, min_probability=0.0)
        for share, found in product((0.1, 0.5, 0.9, 1.0), (FOUND, WIDE)):
            counting = CountingDraft(LanguageDraft(draft, 1))
            inputs = ProposerInputs(
                root_token_ids=torch.zeros(1, dtype=torch.int64),
                sampling=plain_sampling(1),
                uniforms=torch.zeros(1, 0),
                draft_models=[counting],
                continuations=[Continuations([found])],
                first_shares=np.array([share]),
            )
            drawn = proposer.propose(inputs).tree
            check_bounds(proposer.sizes, drawn, counting.widths)


# The law. Two levels, three tokens.


def weighted(tree: TreeBatch) -> Weighted:
    return Weighted(tree, torch.ones(1).double())


# Shares


def share_of(shares: Shares, slot: int, match: int = 0) -> float:
    return float(shares.first(np.array([slot]), np.array([match]))[0])


def test_shares_follow_what_each_part_brought() -> None:
    """Red when a request's share does not move to the part of which more is accepted.

    Whatever happens each part keeps a share, and other requests keep theirs.
    """
    shares = Shares(None)
    assert share_of(shares, 3) == 0.5
    steps = []
    for _ in range(30):
        shares.observe(3, np.array([8, 8]), np.array([6, 1]))
        steps.append(share_of(shares, 3))
    assert steps[0] > 0.5
    assert steps == sorted(steps)
    assert 0.75 < steps[-1] <= 1 - LEAST_SHARE
    for _ in range(30):
        shares.observe(3, np.array([8, 8]), np.array([0, 4]))
    assert share_of(shares, 3) == LEAST_SHARE
    assert share_of(shares, 4) == 0.5


def test_a_part_that_drafts_nothing_goes_back_to_the_start() -> None:
    """Red when a part that found nothing is judged for ever by what was long ago."""
    shares = Shares(None)
    for _ in range(10):
        shares.observe(0, np.array([8, 0]), np.array([0, 0]))
    low = share_of(shares, 0)
    for _ in range(50):
        shares.observe(0, np.array([0, 0]), np.array([0, 0]))
    assert low < 0.3
    assert share_of(shares, 0) == pytest.approx(0.5, abs=1e-3)


def test_shares_are_forgotten() -> None:
    """Red when a new request starts with the counts of the one before in its slot."""
    shares = Shares(4)
    for slot in (0, 1):
        shares.observe(slot, np.array([8, 8]), np.array([8, 0]))
    shares.finish_requests(np.array([0, 7]))
    assert share_of(shares, 0) == 0.5
    assert share_of(shares, 1) > 0.5


def test_an_index_is_sure_where_it_was_right_and_finds_much() -> None:
    """Red when a long match alone, or the past alone, silences the model."""
    shares = Shares(4)
    assert share_of(shares, 0, match=9) == 0.5
    for _ in range(3):
        shares.observe(0, np.array([8, 8]), np.array([7, 2]))
    assert [share_of(shares, 0, match) for match in (4, 9)] == [1, 1]
    assert 0.5 < share_of(shares, 0, match=3) < 1
    never = Shares(None)
    for _ in range(3):
        never.observe(0, np.array([8, 8]), np.array([8, 0]))
    assert share_of(never, 0, match=16) < 1
    assert FIRST_ACCEPTED / FIRST_NODES < 0.5, "a new request would be sure"


# Whole steps


def model_of(engine: FakeEngine) -> ToyDraftModel:
    source = engine.decoder.sources[0]
    assert isinstance(source, ToyDraftModel)
    return source


@pytest.mark.parametrize("habits", cases(["whole", "all"], quick=["all"]))
@pytest.mark.parametrize("name", HEADS)
def test_heads_beside_an_index(name: str, habits: str) -> None:
    """Red when a head beside an index reads another request's text or states."""
    engine = make_engine(name, HABITS[habits])
    check_greedy(engine, workload(0))
    counted = engine.decoder.stats.as_dict()
    assert all(counted["source_accepted"].values())


# A greedy toy goes round in a circle sooner or later.
LONG = Request("a", [1, 2, 3], 150)
ROOMY = Habits(max_model_len=200, num_blocks=200)


def run_long(engine: FakeEngine) -> tuple[int, int]:
    """Steps in which the model read, and trees that were drawn, of a long answer."""
    request = replace(LONG, token_ids=list(LONG.token_ids))
    check_greedy(engine, [request])
    model = model_of(engine)
    return len(model.num_read), sum(index is not None for _, index in engine.drawn)


@pytest.mark.parametrize("name", ["hybrid", "hybrid_pairs"])
def test_the_model_is_not_asked_where_the_index_is_sure(name: str) -> None:
    """Red when a forward of the model runs whose tokens nobody wants.

    The toy model checks that it reads later what it has missed.
    """
    engine = make_engine(name, ROOMY)
    num_read, num_drawn = run_long(engine)
    assert num_read < 0.8 * num_drawn
    engine = make_engine(name, ROOMY)
    assert engine.decoder.method.shares is not None
    engine.decoder.method.shares.sure_match = None
    num_read, num_drawn = run_long(engine)
    assert num_read >= num_drawn


def counted_lookups(engine: FakeEngine) -> list[int]:
    """Let an engine's index write down how many requests it looks up each time."""
    index = engine.decoder.sources[1]
    assert isinstance(index, SuffixIndex)
    look_up, counts = index.begin, []

    def begin(roots: Roots) -> Continuations:
        counts.append(len(roots.slots))
        return look_up(roots)

    index.begin = begin  # type: ignore[method-assign]
    return counts


def test_an_index_is_looked_up_once_a_step() -> None:
    """Red when it is looked up to decide on the model, and again to draft."""
    engine = make_engine("hybrid", ROOMY)
    counts = counted_lookups(engine)
    _, num_drawn = run_long(engine)
    assert counts == [1] * num_drawn


@pytest.mark.parametrize("max_trees", [1, 2])
def test_others_draft_where_the_first_must_still_be_read(max_trees: int) -> None:
    """Red when a tree is drawn from what another request's index found."""
    engine = make_engine(
        "hybrid", replace(HABITS["all"], token_budget=8), max_trees=max_trees
    )
    counts = counted_lookups(engine)
    check_greedy(engine, workload(3))
    assert max(counts) == max_trees
    assert len(counts) > len([index for _, index in engine.drawn if index is not None])


def test_a_tree_of_the_index_alone_does_not_ask_the_model() -> None:
    """Red when a schedule cannot save the model's forwards."""
    engine = make_engine("hybrid_alone", ROOMY)
    num_read, num_drawn = run_long(engine)
    assert num_read == 0 < num_drawn
    counted = engine.decoder.stats.as_dict()
    assert counted["source_nodes"]["index"] == counted["nodes"] - counted["trees"] > 0
    assert counted["source_nodes"]["model"] == 0


def test_one_unsure_request_asks_the_model_for_all() -> None:
    """Red when a request drafts without the model because others are sure."""
    engine = make_engine("hybrid", ROOMY)
    engine.add(replace(LONG, token_ids=[1, 2, 3]))
    model = model_of(engine)
    before = -1
    while before != len(model.num_read):
        before = len(model.num_read)
        engine.step()
    engine.add(Request("new", [4, 5], 4))
    engine.step()
    assert len(model.num_read) == before + 1
    engine.run()


def test_seeded_answers_do_not_depend_on_the_batch() -> None:
    """Red when other requests decide a request's shares, or whether it is sure."""

    def engine() -> FakeEngine:
        made = make_engine("hybrid", replace(ROOMY, token_budget=200))
        index = made.decoder.sources[1]
        assert isinstance(index, SuffixIndex)
        index.cache.max_tokens = 0
        return made

    def request(number: int) -> Request:
        return Request(f"s{number}", [number, 3], 60, temperature=0.3, seed=number)

    alone = [engine().run(request(number))[0] for number in range(3)]
    together = engine()
    together.add(*workload(6, num_reqs=2))
    together.step()
    together.step()
    assert together.run(*map(request, range(3))) == alone


def test_nodes_are_counted_by_source() -> None:
    """Red when a node of both sources counts for one, or a scored one is forgotten."""
    engine = make_engine("hybrid", HABITS["all"])
    check_greedy(engine, workload(0))
    counted = engine.decoder.stats.as_dict()
    nodes, accepted = counted["source_nodes"], counted["source_accepted"]
    assert nodes.keys() == accepted.keys() == {"index", "model"}
    num_drafts = counted["nodes"] - counted["trees"]
    assert max(nodes.values()) < num_drafts < sum(nodes.values())
    num_accepted = sum(n * trees for n, trees in counted["accepted"].items())
    assert max(accepted.values()) < num_accepted < sum(accepted.values())
    assert counted["leftover_nodes"] == 0


def test_schedules_are_told_what_the_index_found() -> None:
    """Red when accepted tokens of an index count for the model, or are not reported.

    So too for what the model drafted, and had claimed.
    """
    engine = make_engine("hybrid", HABITS["all"])
    outcomes: list[StepOutcome] = []
    schedule = engine.decoder.method.schedule
    schedule.observe = outcomes.append  # type: ignore[method-assign, assignment]
    check_greedy(engine, workload(0))
    counted = engine.decoder.stats.as_dict()
    by_model = sum(sum(outcome.model_kept) for outcome in outcomes)
    assert by_model == counted["source_accepted"]["model"]
    assert sum(sum(outcome.model_promised) for outcome in outcomes) > by_model / 2
    found = sum(sum(outcome.num_found) for outcome in outcomes)
    accepted = sum(sum(outcome.num_accepted) for outcome in outcomes)
    assert found == counted["source_accepted"]["index"]
    assert 0 < found < accepted


def test_requests_that_end_are_forgotten() -> None:
    """Red when what a request brought stays behind in its slot."""
    engine = make_engine("hybrid", HABITS["all"])
    check_greedy(engine, workload(0))
    engine.step()
    shares = engine.decoder.method.shares
    assert shares is not None
    for slot in engine.slots:
        assert share_of(shares, slot) == 0.5
