"""Trees that CUDA graphs draw: equal to those drawn without, and the device's alone."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fast.no_waiting import WAITING
from tests.v2.engines import Engine, engine
from tests.v2.operations import TRITON
from tests.v2.prompts import PARAMS
from tests.v2.test_graphs import WITH_GRAPHS
from tests.v2.test_trees import DRAWN, HYBRID, RANKED, SHORT, spec_of
from vllm_treespec.engine.eagle_head import PagedEagleHead
from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.sampling import draws, laws
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.scorers import ScorerOutput, TargetLogits
from vllm_treespec.step import captured
from vllm_treespec.step.captured import CapturedTrees, Sampling, TreeShape
from vllm_treespec.step.captured_scores import CapturedScores, ScoreShape
from vllm_treespec.step.drafting import Start
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.source import Source
from vllm_treespec.trees.tree import TreeBatch

# tokens of an answer
FEW = 6
# waits for no number of repeats
BY_A_NUMBER = torch.ops.aten.repeat_interleave.self_int
METHODS = {
    # an index that drafts deeper than the model
    "hybrid": ("draft model", {**HYBRID, "depth": 9, "model_depth": 3}),
    **{
        method: RANKED[method]
        for method in ("eagle_tree", "dflash_tree", "redrafter", "medusa_tree")
    },
    **{method: DRAWN[method] for method in ("rsd_s", "specinfer")},
}


@contextmanager
def with_graphs(method: str, pair: tuple[str, str], folder: Path) -> Iterator[Engine]:
    """An engine whose trees of a model are drawn in graphs."""
    spec = spec_of(method, *METHODS[method], pair, folder)
    # of four trees, of which two or three are unused
    with (
        patch.object(captured, "BATCH_SIZES", (4,)),
        patch.object(ListedSchedule, "cuts_levels", method == "eagle_tree"),
        engine(pair[0], spec, max_num_seqs=4, **WITH_GRAPHS) as running,
    ):
        yield running


def other_plan(inputs: ProposerInputs, max_levels: int) -> ProposerInputs:
    """The same step under a plan that leaves levels, rows and unlikely drafts out."""
    num_reqs = len(inputs.root_token_ids)
    plan = replace(
        inputs.plan,
        prunes=True,
        row_cost=0.01,
        kept={Source.MODEL: [1.0] * num_reqs},
        max_rows=3 * num_reqs,
        max_levels=max_levels,
    )
    return replace(inputs, plan=plan)


def same(drawn: Draft, expected: Draft) -> bool:
    """Whether two drafts are equal; claims may differ in the last bits."""
    parts = ["token_ids", "parents", "depths", "num_nodes"]
    trees = drawn.tree, expected.tree
    assert (drawn.claims is None) == (expected.claims is None)
    if drawn.claims is not None and expected.claims is not None:
        torch.testing.assert_close(drawn.claims, expected.claims, rtol=1e-4, atol=1e-6)
    pairs = [[getattr(tree, part) for tree in trees] for part in parts]
    own, other = (tree.draws for tree in trees)
    assert (own is None) == (other is None)
    if own is not None and other is not None:
        torch.testing.assert_close(own.probs, other.probs, rtol=1e-4, atol=1e-6)
        parts = ["nodes", "rows", "without_replacement"]
        pairs += [[getattr(each, part) for each in (own, other)] for part in parts]
    return drawn.levels == expected.levels and all(torch.equal(*pair) for pair in pairs)


class Launches(TorchDispatchMode):
    """Notes what a graph would hold of operations: all but the values of tensors.

    Operations inside of kernels, which Triton's interpreter runs, are not noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []
        # kept, so that no address is used twice
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not in_a_kernel():
            is_waiting = func.overloadpacket.__name__ in WAITING
            assert not is_waiting or func == BY_A_NUMBER, f"{func} is the host's work"
            leaves = pytree.tree_leaves((args, kwargs))
            self.found.append((str(func), *map(self.noted, leaves)))
            for made in pytree.tree_leaves(output):
                if isinstance(made, Tensor):
                    self.made.setdefault(address(made), made)
        return output

    def noted(self, leaf: Any) -> Any:
        """What of an argument is in a graph: of older tensors their addresses, too."""
        if not isinstance(leaf, Tensor):
            return leaf
        known = address(leaf) in self.made
        shape = leaf.shape, leaf.stride(), leaf.dtype
        return (*shape, None if known else leaf.data_ptr())


def address(tensor: Tensor) -> int:
    """Where a tensor's storage lies."""
    return tensor.untyped_storage().data_ptr()


def in_a_kernel() -> bool:
    """Whether Triton's interpreter called."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if TRITON in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@contextmanager
def without_copies() -> Iterator[None]:
    """Refuse to bring numbers of the host to a device, except inside of kernels."""

    def refusing(name: str) -> Any:
        stock = getattr(torch, name)

        def make(*args: Any, **options: Any) -> Any:
            assert in_a_kernel(), f"torch.{name} copies what the host knows"
            return stock(*args, **options)

        return patch.object(torch, name, make)

    with refusing("tensor"), refusing("from_numpy"), refusing("as_tensor"):
        yield


@contextmanager
def noted_replays() -> Iterator[dict[TreeShape | ScoreShape, list[Any]]]:
    """What every replay of a graph would launch, by its shape."""
    found: dict[TreeShape | ScoreShape, list[Any]] = defaultdict(list)

    def noting(run: Callable[..., None]) -> Callable[..., None]:
        def noted_run(self: Any, shape: TreeShape | ScoreShape) -> None:
            with without_copies(), Launches() as noted:
                run(self, shape)
            found[shape].append(noted.found)

        return noted_run

    with (
        patch.object(CapturedTrees, "run", noting(CapturedTrees.run)),
        patch.object(CapturedScores, "run", noting(CapturedScores.run)),
    ):
        yield found


def compare(running: Engine) -> None:
    """Compare each tree that a graph draws with the one that is drawn without."""
    late, decoder = running.runner.speculator, running.runner.decoder
    sources = decoder.sources.models

    def compared(
        start: Start, proposer: Proposer, inputs: ProposerInputs
    ) -> Draft | None:
        steps = [inputs]
        if decoder.method.schedule.cuts_levels:
            levels = 1 + decoder.step % proposer.sizes.max_depth
            steps.insert(0, other_plan(inputs, levels))
        for step in steps:
            draft: Draft | None = late.replay(start, proposer, step)
            if draft is None:
                # it draws the model's part later
                assert proposer.graph_part is not proposer
                return None
            depth = proposer.sizes.draft_depth
            given = step.root_token_ids, depth
            models = [source.grow(start(source), *given) for source in sources]
            without = proposer.propose(replace(step, draft_models=models))
            assert same(draft, without)
        return draft

    decoder.drafter.replay_by(compared)
    verify = late.verify

    def verified(
        tree: TreeBatch, target: TargetLogits, keys: Any, positions: Tensor
    ) -> ScorerOutput | None:
        scored: ScorerOutput | None = verify(tree, target, keys, positions)
        if scored is not None:
            index = decoder.trees.tree_index
            without = decoder.verifier.verify(index, tree, target, keys, positions)
            for found, other in zip(
                vars(scored).values(), vars(without).values(), strict=True
            ):
                assert torch.equal(found, other)
        return scored

    late.verify = verified


@pytest.mark.parametrize("method", METHODS)
def test_graphs_draw_the_same_trees(
    method: str,
    pair: tuple[str, str],
    expected: dict[str, list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a graph misses an input of a step, or an unused tree changes others.

    Red, too, when drawing depends on what the host knows of a step, or waits for a
    value: a graph replays what it was captured with. Here it runs anew each time, so
    the operations, their numbers and the tensors they read must be the same.
    """
    for module in (laws, draws):
        monkeypatch.setattr(module, "is_on_cpu", lambda tensor: False)
    with with_graphs(method, pair, tmp_path) as running, noted_replays() as noted:
        compare(running)
        for kind in ("greedy", "sampled", "narrow"):
            answers = running.generate(SHORT, PARAMS[kind], FEW)
            if kind == "greedy" or method not in DRAWN:
                plain = [answer[:FEW] for answer in expected[kind][: len(SHORT)]]
                assert answers == plain
    drawing = [shape for shape in noted if isinstance(shape, TreeShape)]
    kinds = {Sampling.GREEDY} if method == "medusa_tree" else set(Sampling)
    assert {shape.sampling for shape in drawing} == kinds
    # the rule of the others follows vLLM's sampler
    assert (len(noted) > len(drawing)) == (method in DRAWN)
    for replays in noted.values():
        assert len(replays[0]) > 10
        assert all(replay == replays[0] for replay in replays)
    assert max(map(len, noted.values())) > 2


def test_tensors_of_a_step_are_found(pair: tuple[str, str], tmp_path: Path) -> None:
    """Red when a graph could read what another step left, and no test noticed."""
    grow, start_unseen = PagedEagleHead.grow, PagedEagleHead.start_unseen

    def keeping(self: PagedEagleHead, sampled: Any) -> Any:
        start = start_unseen(self, sampled)
        self.last_states = start["states"]
        return start

    def wrong(self: PagedEagleHead, start: Any, *others: Any) -> Any:
        states = torch.zeros_like(start["states"])
        states[: len(self.last_states)] = self.last_states
        return grow(self, {**start, "states": states}, *others)

    with (
        with_graphs("eagle_tree", pair, tmp_path) as running,
        patch.object(PagedEagleHead, "grow", wrong),
        patch.object(PagedEagleHead, "start_unseen", keeping),
        noted_replays() as noted,
    ):
        running.generate(SHORT, PARAMS["greedy"], FEW // 2)
    assert any(replay != all_[0] for all_ in noted.values() for replay in all_)
