"""Trees that are drawn before the host knows the tokens that they grow from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast.no_waiting import NoWaiting
from tests.v2.engines import Engine, engine
from tests.v2.prompts import NUM_TOKENS, PARAMS, PROMPTS
from tests.v2.test_draft_graphs import BY_A_NUMBER, in_a_kernel
from tests.v2.test_tensor_parallel import RANKS, TIMES
from tests.v2.test_trees import HYBRID, accepted, spec_of
from vllm_treespec.batch.matching import Proposal
from vllm_treespec.batch.unseen import StepTrees
from vllm_treespec.engine.v2.late import Emitted, StepInFlight
from vllm_treespec.engine.v2.unseen import UnseenDrafter, committed_at_most
from vllm_treespec.sampling import draws
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.step.decoder import TreeDecoder

# drawn at random, so that the text is another than stock vLLM's; one is a chain
DRAWN: dict[str, tuple[str, dict[str, Any]]] = {
    "sd": ("draft model", {"depth": 3}),
    "rsd_s": ("draft model", {"beam_width": 4, "depth": 2}),
    "specinfer": ("draft models", {"branching_factors": ([2, 1], [2])}),
}
# an index of the request's own text alone: the same trees in the same text
OWN_TEXT = {**HYBRID, "max_cached_tokens": 0}
# wide trees, of which something is accepted though weights are random
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa_tree": ("medusa", {"num_drafts": 15}),
    "redrafter": ("redrafter", {"beam_width": 8, "length": 2, "num_drafts": 15}),
    "eagle_tree": ("eagle", {"num_drafts": 15, "depth": 2}),
    "dflash_tree": ("dflash", {"num_drafts": 15, "depth": 2}),
    # the model's part
    "hybrid": ("draft model", OWN_TEXT),
    "hybrid of a head": ("eagle", {**OWN_TEXT, "drafter": "eagle"}),
    **DRAWN,
}
# of each request the position of a root, its tree's tokens and parents
Trees = list[list[tuple[int, list[int], list[int]]]]


@contextmanager
def running(
    method: str,
    pair: tuple[str, str],
    folder: Path,
    keys: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Engine]:
    """An engine with a head of random weights; ``keys`` of its spec-config."""
    named, needed = method.split()[0], METHODS[method]
    spec = {**spec_of(named, *needed, pair, folder), **(keys or {})}
    with engine(pair[0], spec, max_num_batched_tokens=96, **options) as started:
        yield started


@contextmanager
def counted_unseen() -> Iterator[list[StepInFlight]]:
    """Steps behind which trees were drawn before the host knew their tokens."""
    found: list[StepInFlight] = []
    draw = UnseenDrafter.draw

    def drawing(self: UnseenDrafter, plan: Any, step: StepInFlight) -> Any:
        found.append(step)
        return draw(self, plan, step)

    with patch.object(UnseenDrafter, "draw", drawing):
        yield found


def answers(started: Engine, kind: str) -> tuple[list[list[int]], Trees]:
    """Two answers, and the trees that were scored for them."""
    found: dict[str, list[tuple[int, list[int], list[int]]]] = {}
    seen, slots = StepTrees.seen, started.runner.decoder.slots

    def noting(self: StepTrees, batch: Any) -> Any:
        step = seen(self, batch)
        if step.trees is not None:
            for tree, slot in enumerate(step.trees.slots.tolist()):
                root = int(step.trees.root_positions[tree])
                drawn = root, *step.trees.drafts(tree)
                found.setdefault(slots.name(slot), []).append(drawn)
        return step

    with patch.object(StepTrees, "seen", noting):
        text = started.generate(PROMPTS[:2], PARAMS[kind], NUM_TOKENS)
    # the last trees of requests before are noted, too
    return text, [found[name] for name in sorted(found, key=number_of)[-2:]]


def number_of(name: str) -> int:
    """Which of an engine's requests it is."""
    return int(name.split("-")[0])


@contextmanager
def never_unseen() -> Iterator[None]:
    """Let every step wait for the one before it."""
    with patch.object(UnseenDrafter, "may_draw", lambda *given: False):
        yield


@pytest.mark.parametrize("method", METHODS)
def test_the_same_trees_are_drawn(
    method: str,
    pair: tuple[str, str],
    expected: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    """Red when a head reads other tokens or states where the host does not wait.

    Text cannot show that. Most steps must be drawn so.
    """
    with running(method, pair, tmp_path) as started:
        num_accepted = 0
        for kind in ("greedy", "sampled"):
            with counted_unseen() as unseen:
                text, trees = answers(started, kind)
            num_accepted += accepted(started)
            with never_unseen():
                late_text, late_trees = answers(started, kind)
            assert text == late_text
            if method not in DRAWN or kind == "greedy":
                assert text == expected[kind][:2]
            for drawn, late in zip(trees, late_trees, strict=True):
                # those of the last steps are noted later
                assert len(drawn) >= len(late) - 2
                assert drawn == late[: len(drawn)]
            assert len(unseen) > len(trees[0]) // 2
            for step in unseen:
                seen = step.trees.proposal
                if isinstance(seen, Proposal) and step.emitted.nodes is not None:
                    # no rows of deeper trees are read
                    assert committed_at_most(step) == 1 + seen.max_depth


def test_wrong_states_are_found(pair: tuple[str, str], tmp_path: Path) -> None:
    """Red when the test above would not see that a head reads other nodes' states."""
    draw = UnseenDrafter.draw

    def wrong(self: UnseenDrafter, plan: Any, step: StepInFlight) -> Any:
        tokens, num_tokens, _ = step.emitted
        step.emitted = Emitted(tokens, num_tokens, torch.ones_like(tokens))
        return draw(self, plan, step)

    with running("eagle_tree", pair, tmp_path) as started:
        with patch.object(UnseenDrafter, "draw", wrong):
            _, trees = answers(started, "greedy")
        with never_unseen():
            _, late_trees = answers(started, "greedy")
        assert trees[0] != late_trees[0][: len(trees[0])]


def test_reading_is_refused() -> None:
    """Red when the test below would not see that the host reads a tensor."""
    with nothing_is_read(), pytest.raises(AssertionError, match="waits"):
        torch.ones(1).tolist()
    with nothing_is_read(), pytest.raises(RuntimeError, match="wait"):
        torch.ones(1)[torch.ones(1) > 0]


class NoWaitingOutside(NoWaiting):
    """Refuses operations that wait, except inside of kernels."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if in_a_kernel() or func == BY_A_NUMBER:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def nothing_is_read() -> Iterator[None]:
    """Refuse to read tensors on the host, except inside of kernels."""
    with ExitStack() as stack, NoWaitingOutside():
        for name in ("tolist", "numpy", "item", "cpu", "__bool__", "__int__"):
            stack.enter_context(patch.object(Tensor, name, refusing(name)))
        yield


def refusing(name: str) -> Any:
    """Stand in for a method of a tensor."""
    stock = getattr(Tensor, name)

    def read(self: Tensor, *args: Any, **options: Any) -> Any:
        assert in_a_kernel(), f"the host waits in {name}"
        return stock(self, *args, **options)

    return read


# one of two heads that read a step alike
@pytest.mark.parametrize("method", [name for name in METHODS if name != "medusa_tree"])
def test_no_step_waits(method: str, pair: tuple[str, str], tmp_path: Path) -> None:
    """Red when a step with a head, or a draft model, waits for the device.

    From its beginning to the draft of the next one the host reads no tensor, and waits
    for no step but those before the last. Beside an index it waits after that draft.
    """
    waited: list[StepInFlight] = []
    num_drawn = 0
    draw = UnseenDrafter.draw

    def drawing(self: UnseenDrafter, plan: Any, step: StepInFlight) -> Any:
        nonlocal num_drawn
        assert step not in waited
        num_drawn += 1
        with nothing_is_read():
            return draw(self, plan, step)

    def reading_nothing(owner: type, name: str) -> Any:
        stock = getattr(owner, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            with nothing_is_read():
                return stock(self, *args, **options)

        return patch.object(owner, name, call)

    wait = StepInFlight.wait

    def waiting(self: StepInFlight) -> Any:
        waited.append(self)
        return wait(self)

    with running(method, pair, tmp_path) as started:
        runner = type(started.runner)
        with (
            patch.object(UnseenDrafter, "draw", drawing),
            patch.object(StepInFlight, "wait", waiting),
            # on a CPU it is faster to look
            patch.object(draws, "is_on_cpu", lambda tensor: False),
            reading_nothing(runner, "postprocess_sampled"),
            reading_nothing(TreeDecoder, "begin_step"),
            reading_nothing(runner.sampler_class, "follow"),
            reading_nothing(runner.sampler_class, "verify"),
            reading_nothing(runner.sampler_class, "put_together"),
        ):
            started.generate(PROMPTS[:2], PARAMS["sampled"], NUM_TOKENS)
    # drafts of some methods are accepted, so that there are fewer steps
    assert num_drawn > NUM_TOKENS // 3
    is_whole = not method.startswith("hybrid")
    assert any(step.followed for step in waited) == is_whole


@pytest.mark.parametrize(
    ("method", "schedule"),
    [
        ("eagle_tree", "fixed"),
        ("dflash_tree", "fixed"),
        ("rsd_s", "fixed"),
        ("redrafter", "measured"),
    ],
)
def test_requests_come_and_go(
    method: str,
    schedule: str,
    pair: tuple[str, str],
    expected: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    """Red when a step that the host has not seen leaves something to another request.

    Requests wait for rows, are preempted, find prefixes of others, and end in a tree.
    """
    keys = {"schedule": schedule, "schedule_cache": False}
    if method not in DRAWN:
        keys["num_drafts"] = 7
    options = {
        "num_gpu_blocks_override": 10,
        "max_model_len": 96,
        "enable_prefix_caching": True,
    }
    ends = [{"max_tokens": count} for count in (NUM_TOKENS, 5, 11, NUM_TOKENS)]
    with (
        running(method, pair, tmp_path, keys, **options) as started,
        counted_unseen() as unseen,
    ):
        for kind in ("greedy", "sampled"):
            params = [{**PARAMS[kind], **end} for end in ends]
            found = started.generate(PROMPTS, params)
            for answer, whole, end in zip(found, expected[kind], ends, strict=True):
                is_plain = answer == whole[: end["max_tokens"]]
                assert is_plain or (method in DRAWN and kind == "sampled")
        assert started.count("num_preemptions") > 0
        # the trees of the last step are counted when another begins
        started.generate(PROMPTS[:1], PARAMS["greedy"], 1)
        drafts = started.count("spec_decode_num_draft_tokens")
        stats = started.runner.decoder.stats.as_dict()
        assert drafts <= stats["nodes"] - stats["trees"]
    # a measured schedule may find that no tree pays
    if schedule == "fixed":
        assert len(unseen) > NUM_TOKENS
        assert drafts > 0


def test_two_ranks_draw_alike(
    pair: tuple[str, str], expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """Red when a rank draws other trees, or ranks are compared in another order."""
    with running("eagle_tree", pair, tmp_path, **RANKS) as started:
        text = started.generate(PROMPTS[:2], PARAMS["sampled"], NUM_TOKENS)
        assert text == expected["sampled"][:2]
        ranks = started.llm.collective_rpc("treespec_stats")
    first, second = (
        {name: count for name, count in stats.items() if name not in TIMES}
        for stats in ranks
    )
    assert first == second
    assert first["trees"] > 0


def test_plans_for_some_requests(
    pair: tuple[str, str], expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """Red when trees are drawn for requests that a plan leaves out."""
    plan = TreeDecoder.plan

    def for_one(self: TreeDecoder, *given: Any) -> StepPlan:
        planned = plan(self, *given)
        return replace(planned, slots=planned.slots[:1])

    with (
        running("redrafter", pair, tmp_path, {"num_drafts": 7}) as started,
        patch.object(TreeDecoder, "plan", for_one),
        counted_unseen() as unseen,
    ):
        text = started.generate(PROMPTS[:2], PARAMS["sampled"], NUM_TOKENS)
        assert text == expected["sampled"][:2]
    # that of a request without another beside it
    assert all(len(step.scheduled.slots) == 1 for step in unseen)
