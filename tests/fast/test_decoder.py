"""Whole steps through the decoder, with a fake engine: no vLLM, every KV checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.fast.chi_square import p_value, text_law
from tests.fast.interpreted import interpreted
from tests.fast.toy_pairs import ToyPairHead
from tests.fast.toy_workloads import PROPOSERS, make_engine, make_method
from tests.tiers import cases, grid
from vllm_treespec.batch.matching import Proposal, RunningTrees
from vllm_treespec.batch.views import TargetInputs
from vllm_treespec.kernels import kv_move
from vllm_treespec.layouts.base import ForkSpace
from vllm_treespec.layouts.block_copies import BlockCopier
from vllm_treespec.layouts.branches import BranchLayout
from vllm_treespec.proposers import RsdS
from vllm_treespec.sources.base import Sources
from vllm_treespec.step.decoder import RanksDiffer, TreeDecoder
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import (
    VOCAB_SIZE,
    Language,
    ToyDraftModel,
    ToyHead,
    hidden_state,
)
from vllm_treespec.testing.workloads import HABITS, check_greedy, workload


@pytest.mark.parametrize(
    ("name", "habits", "seed"),
    grid(
        PROPOSERS,
        HABITS,
        range(2),
        # Others are in test_plain_draw.py, and in the test below.
        quick=lambda name, habits, seed: (
            seed == 0
            and (habits == "all" or name == "suffix_tree")
            and name
            in ("rsd_c", "sd", "stochastic_tree", "suffix_tree", "head", "pairs")
        ),
    ),
)
def test_greedy_answers_are_those_of_plain_decoding(
    name: str, habits: str, seed: int
) -> None:
    """Red when a step with trees emits other tokens, or leaves other KV behind."""
    engine = make_engine(name, HABITS[habits], seed)
    check_greedy(engine, workload(seed))
    assert sum(engine.num_trees) > 20


def test_habits_happen() -> None:
    """Red when the scheduler above no longer does what its habits say."""
    requests = workload(0)
    engine = make_engine("rsd_s", HABITS["few blocks"])
    check_greedy(engine, requests)
    assert any(r.num_preemptions for r in requests), "blocks never ran out"
    assert len(engine.slots) < len(requests), "no slot was taken again"
    engine = make_engine("rsd_s", HABITS["all"])
    check_greedy(engine, requests := workload(0))
    assert any(r.num_preemptions for r in requests)
    assert set(engine.accepted) == {0, 1, 2, 3}
    assert engine.scheduler.blocks.num_shared > 10, "no prefix was found in the cache"


def test_pairs_are_stale_only_behind_shared_blocks() -> None:
    """Red when a pair is read with another token, or not read again when committed."""
    for share in (True, False):
        engine = make_engine("pairs", replace(HABITS["all"], share=share))
        check_greedy(engine, workload(0))
        (source,) = engine.decoder.sources.models
        assert isinstance(source, ToyPairHead)
        assert bool(source.num_stale) == share


@pytest.fixture
def kernels_in_interpreter() -> Iterator[None]:
    """Run the KV move's kernel without a card."""
    with interpreted(kv_move):
        yield


@pytest.mark.usefixtures("kernels_in_interpreter")
@pytest.mark.parametrize(
    ("name", "habits"),
    grid(
        [
            *("rsd_s", "rsd_c", "suffix_tree", "pairs", "hybrid"),
            *("lyanna_replace", "lyanna_merge"),
        ],
        ["whole", "all"],
        # Others are in the tests below.
        quick=lambda name, habits: habits == "all" and name.startswith("lyanna"),
    ),
)
def test_masks_emit_the_same(name: str, habits: str) -> None:
    """Red when nodes under masks see, or commit, another path."""
    engine = make_engine(name, HABITS[habits], masks=True)
    check_greedy(engine, workload(3, num_reqs=5))


@pytest.mark.usefixtures("kernels_in_interpreter")
@pytest.mark.parametrize(
    ("name", "habits", "masks"),
    grid(
        ["rsd_s", "suffix_tree", "head", "pairs"],
        ["all", "few blocks"],
        [False, True],
        quick=lambda *case: (
            case in (("rsd_s", "few blocks", False), ("pairs", "all", True))
        ),
    ),
)
def test_several_kv_cache_groups(name: str, habits: str, masks: bool) -> None:
    """Red when a group's layers see, write or commit blocks of another.

    Or when blocks before a window are touched, which others own by then.
    """
    engine = make_engine(name, replace(HABITS[habits], num_groups=3), masks=masks)
    check_greedy(engine, workload(4))
    assert sum(engine.num_trees) > 20


def test_shared_fork_blocks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: red when groups could share fork blocks unnoticed."""
    monkeypatch.setattr(ForkSpace, "of_group", lambda space, *_: space)
    with pytest.raises(AssertionError):
        check_greedy(make_engine("rsd_s", Habits(num_groups=2)), workload(0))


@pytest.mark.parametrize(
    ("of", "method"),
    [(BranchLayout, "commit"), (BlockCopier, "copy_disjoint"), (BlockCopier, "copy")],
)
def test_a_broken_layout_is_noticed(
    of: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: red when wrong KV goes unnoticed by the fake engine."""
    monkeypatch.setattr(of, method, lambda *_: None)
    with pytest.raises(AssertionError):
        check_greedy(make_engine("rsd_s", Habits()), workload(0))


@pytest.mark.usefixtures("kernels_in_interpreter")
@pytest.mark.parametrize(
    ("name", "masks"),
    [("rsd_s", True), ("suffix_tree", True), ("head", False), ("lyanna_drawn", False)],
)
def test_mixed_batches(name: str, masks: bool) -> None:
    """Red when greedy answers change beside sampled ones and ones without drafts.

    The fake engine itself checks that requests draft only if they may.
    """
    requests = workload(5)
    for i, request in enumerate(requests):
        request.drafts = i % 3 > 0
        request.temperature = 0.9 * (i % 2)
    prompts = [list(r.token_ids) for r in requests]
    engine = make_engine(name, HABITS["all"], masks=masks)
    answers = engine.run(*requests)
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        assert len(answer) == request.max_tokens
        if not request.temperature:
            assert answer == engine.language.greedy(prompt, request.max_tokens)


@pytest.mark.parametrize("name", ["pairs", "hybrid"])
def test_more_requests_than_trees(name: str) -> None:
    """Red when requests beyond ``max_trees`` draft, or emit something else."""
    engine = make_engine(name, Habits(), max_trees=2)
    check_greedy(engine, workload(1))
    assert max(engine.num_trees) == 2


@pytest.mark.usefixtures("kernels_in_interpreter")
@pytest.mark.parametrize(
    ("name", "masks"),
    [
        *(("rsd_s", True), ("suffix_tree", False), ("head", False)),
        *(("pairs", True), ("lyanna_replace", False), ("hybrid", False)),
    ],
)
def test_near_the_longest_length(name: str, masks: bool) -> None:
    """Red when a tree or a draft model reaches past the longest request's blocks."""
    engine = make_engine(name, Habits(max_model_len=27), masks=masks)
    requests = [
        replace(request, max_tokens=27 - len(request.token_ids))
        for request in workload(2)
        if len(request.token_ids) < 27
    ]
    check_greedy(engine, requests)
    assert sum(engine.num_trees) > 20


def test_trees_of_a_schedule() -> None:
    """Red when the batch size does not choose the tree, or chooses other tokens."""
    language = Language(0)
    proposers = [RsdS(3, 3), RsdS(2, 2)]
    method = make_method(proposers, "recursive_rejection", batch_sizes=(2, 5))
    model = ToyDraftModel(language)
    engine = FakeEngine(language, method, Sources([model]), Habits(chunk=6))
    check_greedy(engine, workload(4))
    for batch_size, index in engine.drawn:
        assert index in (0 if batch_size <= 2 else 1 if batch_size <= 5 else None, None)
    assert {index for _, index in engine.drawn} == {0, 1, None}
    assert max(model.num_read) > 20, "nothing was left to catch up with"
    with_trees = [index for size, index in engine.drawn if size <= 5]
    assert len(model.num_read) <= len(with_trees), "it reads in plain steps"


def sampled(number: int, seed: int | None) -> Request:
    """A sampled request."""
    prompt = [number % VOCAB_SIZE, 3, number % 5]
    return Request(f"s{number}", prompt, 25, temperature=0.8, seed=seed)


@pytest.mark.parametrize("name", cases(["rsd_s", "head"], quick=["head"]))
def test_seeded_answers_do_not_depend_on_the_batch(name: str) -> None:
    """Red when a seeded request is drawn with numbers that others use up.

    What a suffix index drafts depends on other requests, and is left out.
    """
    habits = Habits(token_budget=200)
    alone = [
        make_engine(name, habits).run(sampled(number, seed=number))[0]
        for number in range(3)
    ]
    engine = make_engine(name, habits)
    greedy = [replace(request, max_tokens=9) for request in workload(6, num_reqs=2)]
    engine.add(*greedy, *[sampled(number, seed=None) for number in range(3, 6)])
    engine.step()
    engine.step()
    together = engine.run(*[sampled(number, seed=number) for number in range(3)])
    assert together == alone
    assert len({tuple(answer) for answer in alone}) == 3


@pytest.mark.usefixtures("kernels_in_interpreter")
@pytest.mark.parametrize(
    ("name", "masks"),
    [("rsd_c", True), ("suffix_tree", True), ("pairs", False), ("hybrid", True)],
)
def test_smaller_trees_of_some_requests(name: str, masks: bool) -> None:
    """Red when a request's own limit is passed, or changes anyone's answer."""
    requests = workload(7)
    for i, request in enumerate(requests):
        request.max_drafts = (1, 2, 63)[i % 3]
    check_greedy(make_engine(name, HABITS["all"], masks=masks), requests)


def test_sampled_requests_get_no_useless_drafts() -> None:
    """Red when the target pays for drafts that cannot be accepted.

    A stochastic tree that is cut keeps no draws; greedy ones are not drawn.
    """
    engine = make_engine("stochastic_tree", Habits())
    limits = {"sampled": 3, "greedy": 3, "whole": 7}
    requests = [Request(n, [1, 2, 3], 20, max_drafts=k) for n, k in limits.items()]
    for request in (requests[0], requests[2]):
        request.temperature = 0.8
    engine.add(*requests)
    most = dict.fromkeys(limits, 0)
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
        for request in requests:
            most[request.name] = max(most[request.name], len(request.proposed))
    assert most == {"sampled": 0, "greedy": 3, "whole": 7}


def test_draft_distributions_end_with_their_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when an engine holds two steps' distributions while it verifies one."""
    commit, kept = TreeDecoder.commit, []

    def committing(self: TreeDecoder) -> None:
        commit(self)
        if self.trees is not None:
            assert isinstance(self.proposal, Proposal)
            kept.extend([self.trees.tree.draws, self.proposal.tree.draws])

    monkeypatch.setattr(TreeDecoder, "commit", committing)
    engine = make_engine("rsd_s", HABITS["whole"], 0)
    engine.run(Request("r", [1, 2, 3], max_tokens=20, temperature=1.0))
    assert kept
    assert set(kept) == {None}


def test_unseeded_requests_differ() -> None:
    """Red when requests without a seed share their numbers."""
    engine = make_engine("rsd_s", Habits())
    requests = [replace(sampled(0, None), name=str(i)) for i in range(4)]
    assert len({tuple(answer) for answer in engine.run(*requests)}) == 4


@pytest.mark.parametrize(
    ("name", "limits"),
    cases(
        [
            ("rsd_s", (63,)),
            ("rsd_c", (63,)),
            ("head", (63,)),
            ("lyanna_drawn", (63,)),
            ("lyanna_merge", (63,)),
            ("hybrid", (63,)),
            ("rsd_s", (1, 4, 63)),
            ("rsd_c", (2, 5)),
            ("lyanna_drawn", (3, 63)),
        ],
        quick=[("rsd_s", (1, 4, 63))],
    ),
)
def test_sampled_law(name: str, limits: tuple[int, ...]) -> None:
    """Red when emitted tokens do not follow the target's law over whole steps.

    Nor may they when requests in one batch limit their trees in different ways.
    """
    engine = make_engine(name, replace(HABITS["all"], token_budget=120, max_running=24))
    request = Request("", [1, 2], max_tokens=3, temperature=1.0)
    many = [replace(request, name=str(i), token_ids=[1, 2]) for i in range(600)]
    for i, one in enumerate(many):
        one.max_drafts = limits[i % len(limits)]
    places = VOCAB_SIZE ** torch.arange(2, -1, -1)
    found = (torch.tensor(engine.run(*many)) * places).sum(1)
    law = text_law(engine.language, [1, 2], 3)
    assert p_value(found, law) > 1e-4
    assert p_value(found, law.roll(1)) < 1e-4


def test_head_reads_the_state_that_the_root_came_from() -> None:
    """Red when a head drafts from another node's hidden state."""
    engine = make_engine("head", HABITS["all"])
    (head,) = engine.decoder.sources.models
    assert isinstance(head, ToyHead)
    requests = {request.name: request for request in workload(0)}
    engine.add(*requests.values())
    num_checked = 0
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
        if engine.decoder.proposal is None:
            continue
        slots = engine.decoder.proposal.slots
        texts = [requests[engine.decoder.slots.name(s)].token_ids for s in slots]
        expected = [hidden_state(text[:-1]) for text in texts]
        assert head.hidden.tolist() == expected
        num_checked += len(texts)
    assert num_checked > 50


def run_to_tree(engine: FakeEngine) -> Request:
    """Make steps until a tree was proposed; return its request."""
    engine.step()
    while not engine.scheduler.running[0].proposed:
        engine.step()
    return engine.scheduler.running[0]


def test_a_slot_taken_at_once_has_no_tree() -> None:
    """Red when a new request gets the tree of the one that had its slot before."""
    engine = make_engine("rsd_s", Habits(max_running=1))
    engine.add(Request("old", [1, 2, 3], 12), Request("new", [4], 12))
    old = run_to_tree(engine)
    while "old" in [request.name for request in engine.scheduler.running]:
        engine.step()
    drafts = old.proposed
    assert drafts, "it must have proposed a tree in its last step"
    proposal = engine.decoder.proposal
    assert proposal is not None
    (slot,) = proposal.slots
    engine.scheduler.sends["new"] = drafts
    engine.step()
    assert engine.now.drafts == [drafts]
    assert engine.decoder.batch.slots.tolist() == [slot]
    assert engine.decoder.trees is None
    engine.run()


def test_chains_are_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when an index's chain takes the time of a tree, or a tree is not laid out."""
    laid_out: list[bool] = []
    prepare_inputs = BranchLayout.prepare_inputs

    def noted(layout: BranchLayout, trees: RunningTrees, inputs: TargetInputs) -> None:
        siblings = trees.tree.parents[..., 1:] == trees.tree.parents[..., :-1]
        laid_out.append(bool((siblings & (trees.tree.parents[..., 1:] >= 0)).any()))
        prepare_inputs(layout, trees, inputs)

    monkeypatch.setattr(BranchLayout, "prepare_inputs", noted)
    engine = make_engine("suffix_tree", Habits())
    for seed in range(3):
        check_greedy(engine, [Request("a", [seed, 2, 3], 60)])
    assert all(laid_out)
    assert 0 < len(laid_out) < sum(engine.num_trees)


def test_a_step_that_failed_leaves_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the layout of a step that was not committed stays for the next."""
    engine = make_engine("rsd_s", Habits())
    request = Request("a", [1, 2, 3], 12)
    engine.add(request)
    run_to_tree(engine)
    with monkeypatch.context() as patch:
        patch.delattr(TreeDecoder, "commit")
        with pytest.raises(AttributeError):
            engine.step()
    assert engine.num_trees[-1] == 1
    request.proposed = []
    engine.run()
    assert request.output == engine.language.greedy([1, 2, 3], 12)


def other(drafts: list[int]) -> list[int]:
    """Drafts of which the last one differs."""
    return [*drafts[:-1], (drafts[-1] + 1) % VOCAB_SIZE]


@pytest.mark.parametrize("rank", [0, 1])
def test_other_drafts_on_another_rank(rank: int) -> None:
    """Red when ranks that drew differently go on with different texts.

    Rank 0's drafts are those that come back, so it reads others as a chain: they
    were changed on their way.
    """
    engine = make_engine("rsd_s", Habits(), rank=rank)
    engine.add(Request("a", [1, 2, 3], 12))
    request = run_to_tree(engine)
    engine.scheduler.sends["a"] = other(request.proposed)
    if rank == 0:
        engine.step()
        assert engine.decoder.trees is None
        return
    with pytest.raises(RanksDiffer, match=r"rank 1 drew other drafts .* request a;"):
        engine.step()


@pytest.mark.parametrize("habits", ["cut", "late", "preempted"])
def test_ranks_agree_on_whatever_comes_back(habits: str) -> None:
    """Red when a cut, late or lost tree looks like another rank's drafts."""
    check_greedy(make_engine("rsd_s", HABITS[habits], rank=1), workload(0))
