"""Which graphs there are, and that drawing trees in one is the device's work alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.fast.no_waiting import OnDevice
from tests.fast.test_proposers_on_a_device import (
    NUM_REQS,
    PROPOSERS,
    MetaModel,
    meta_block,
    num_models,
)
from tests.tiers import grid
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.heads.source import HeadSource
from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.sampling import laws
from vllm_treespec.sampling.coupling import noise_of
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.schedule.plan import StepPlan
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.scorers import RULES
from vllm_treespec.sources.base import DraftModel
from vllm_treespec.step.captured import CapturedTrees, Sampling, TreeShape
from vllm_treespec.step.method import Method

META = torch.device("meta")
ON_DEVICE = [name for name, each in PROPOSERS.items() if each.graph_part is each]


class MetaSource(HeadSource):
    """A head whose trees grow from hidden states without values."""

    def __init__(self, proposer: str) -> None:
        vocabulary = torch.empty(50, dtype=torch.int64, device=META)
        is_block = proposer == "dflash"
        self.model = meta_block(vocabulary) if is_block else MetaModel(vocabulary)

    def blank_start(self, num_trees: int, max_blocks: int) -> dict[str, Tensor]:
        return {"hidden": torch.zeros((num_trees, 8), device=META)}

    def grow(
        self, start: Mapping[str, Tensor], root_token_ids: Tensor, depth: int
    ) -> DraftModel:
        assert len(start["hidden"]) == len(root_token_ids) == NUM_REQS
        return self.model


def captured(name: str, max_trees: int = NUM_REQS) -> CapturedTrees:
    """Trees of one of the proposers."""
    rule = RULES["coupled_draw"]
    proposer: Proposer = PROPOSERS[name]
    schedule = AdaptiveScheduler((), max_trees)
    method = Method(schedule, [proposer], rule, True, max_trees)
    sources = [MetaSource(name)] * num_models(proposer)
    more = noise_of, META, StepStats()
    return CapturedTrees(method, 64, [proposer], sources, *more)


@pytest.mark.parametrize(
    ("name", "sampling"),
    grid(
        ON_DEVICE,
        Sampling,
        quick=lambda name, sampling: (
            sampling is Sampling.LIMITS or name in ("rsd_s", "dflash")
        ),
    ),
)
def test_drawing_is_the_devices_work(
    name: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when drawing waits for the device, or brings numbers from the host to it."""
    monkeypatch.setattr(laws, "is_on_cpu", lambda tensor: False)
    trees = captured(name)
    trees.allocate(max_blocks=4)
    depth = PROPOSERS[name].sizes.max_depth
    shape = TreeShape(0, NUM_REQS, depth, sampling)
    if PROPOSERS[name].reads_sampling:
        assert shape in trees.shapes()
    # moves what a proposer moves once, and makes what lasts
    trees.run(shape)
    with OnDevice():
        trees.run(shape)
    assert trees.drawn(shape, 2).tree.num_nodes.shape == (2,)


def test_numbers_of_the_host_are_found() -> None:
    """Red when a copy from the host would go unnoticed."""
    with OnDevice(), pytest.raises(RuntimeError, match="tensor of the host"):
        torch.tensor([1, 2]).to(META)


def step(num_reqs: int, max_levels: int | None, top_k: bool) -> ProposerInputs:
    """A sampled step."""
    limits = torch.ones(num_reqs, dtype=torch.int64, device=META) if top_k else None
    return ProposerInputs(
        torch.zeros(num_reqs, dtype=torch.int64, device=META),
        SamplingTensors(torch.ones(num_reqs, device=META), limits),
        torch.empty((num_reqs, 0), device=META),
        plan=StepPlan(max_levels=max_levels),
    )


@pytest.mark.parametrize(
    ("num_reqs", "max_levels", "top_k", "expected"),
    [
        (1, None, False, (1, 3, Sampling.TEMPERATURE)),
        (3, 2, False, (4, 2, Sampling.TEMPERATURE)),
        (4, 9, True, (4, 3, Sampling.LIMITS)),
        (5, 1, True, (6, 1, Sampling.LIMITS)),
    ],
)
def test_a_step_has_the_smallest_graph_that_fits(
    num_reqs: int,
    max_levels: int | None,
    top_k: bool,
    expected: tuple[int, int, Sampling],
) -> None:
    """Red when a step replays a graph that draws other trees, or needless ones."""
    trees = captured("dynamic_tree", max_trees=6)
    proposer = PROPOSERS["dynamic_tree"]
    shape = trees.shape_of(proposer, step(num_reqs, max_levels, top_k))
    assert shape == (0, *expected)
    assert shape in trees.shapes()


def test_large_batches_have_none() -> None:
    """Red when memory grows with the largest batch, or a batch finds no graph."""
    trees = captured("dynamic_tree", max_trees=256)
    proposer = PROPOSERS["dynamic_tree"]
    assert trees.shape_of(proposer, step(9, None, False)) is None
    assert len(trees.shapes()) == 4 * 3 * len(Sampling)
    # levels that no plan leaves out, drafts that do not depend on temperatures
    assert len(captured("dflash", 256).shapes()) == 4 * len(Sampling)
    assert len(captured("medusa_tree", 256).shapes()) == 4
