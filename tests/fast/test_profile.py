"""Trees are drawn and scored once before a GPU's memory is given to the KV cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.heads import HEADS, write_head
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.config import parse_spec_config
from vllm_treespec.heads import load_head
from vllm_treespec.heads.source import HeadSource
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.scorers import ScorerOutput
from vllm_treespec.sources.base import DraftModel, ModelSource, Reads, Roots, Sources
from vllm_treespec.sources.chain import ReusingSource
from vllm_treespec.step.decoder import TreeDecoder
from vllm_treespec.step.method import EngineLimits, Method
from vllm_treespec.step.profile import profile_trees
from vllm_treespec.step.verifier import TreeVerifier

NO_LAYOUT: Any = None
NUM_REQS, VOCAB_SIZE, HIDDEN_SIZE = 3, 32, 8
SPECS: dict[str, dict[str, Any]] = {
    "sd": {"method": "sd", "model": "some/model", "depth": 3},
    "rsd_s": {"method": "rsd_s", "model": "some/model", "beam_width": 3, "depth": 2},
    "specinfer": {
        "method": "specinfer",
        "drafts": [
            {"model": "some/model", "branching_factors": [2, 1]},
            {"model": "other/model", "branching_factors": [1, 1]},
        ],
    },
    "redrafter": {
        "method": "redrafter",
        "tree": "beams",
        "beam_width": 3,
        "length": 2,
    },
    "medusa_tree": {"method": "medusa_tree", "num_drafts": 5},
    "eagle_tree": {"method": "eagle_tree", "model": "some/head"},
    "dflash_tree": {"method": "dflash_tree", "model": "some/head"},
    "lyanna": {"method": "lyanna", "model": "some/head", "resample": "merge"},
    "hybrid": {"method": "hybrid", "model": "some/model"},
}


class Recorder(TreeVerifier):
    """Notes how many trees it verified, and their nodes."""

    def __init__(self, verifier: TreeVerifier) -> None:
        super().__init__(verifier.method, verifier.slots, verifier.sizes)
        self.verified: list[tuple[int, int]] = []

    def verify(self, index: int, tree: Any, *inputs: Any) -> ScorerOutput:
        self.verified.append((tree.num_reqs, tree.max_nodes))
        return super().verify(index, tree, *inputs)


def decoder_of(spec: dict[str, Any], sources: Sources) -> TreeDecoder:
    """A decoder of a spec-config's trees, as on a device."""
    config = parse_spec_config({**spec, "schedule": "fixed"})
    trees = config.scheduled_trees()
    method = Method(
        schedule=ListedSchedule(trees),
        proposers=[tree.config.proposer() for tree in trees],
        rule=config.rule,
        batched=True,
        max_trees=NUM_REQS,
    )
    limits = EngineLimits(torch.device("cpu"), 0, 0, 64, 64)
    return TreeDecoder(method, sources, NO_LAYOUT, limits, StepStats())


class PagedModel(ModelSource):
    """A draft model, or a head, whose KV cache is not made yet."""

    reads = Reads(own_kv=True, catches_up=True)

    def begin(self, roots: Roots) -> DraftModel:
        raise NotImplementedError


class PagedChains(ReusingSource, PagedModel):
    """The same, of chains."""


@pytest.mark.parametrize("method", SPECS)
def test_trees_of_full_size_are_scored(method: str, tmp_path: Path) -> None:
    """Red when trees are drawn, or scored, for the first time when requests come."""
    spec = SPECS[method]
    paged = PagedChains() if method == "lyanna" else PagedModel()
    models: list[ModelSource] = [paged] * len(spec.get("drafts", [spec]))
    if "model" not in spec and "drafts" not in spec:
        folder = write_head(tmp_path, HEADS[method])
        spec = {**spec, "model": folder}
        head = HeadSource(StepStats())
        head.head = load_head(Path(folder)).float()
        head.head.share(*[torch.randn(VOCAB_SIZE, HIDDEN_SIZE)] * 2)
        models = [head]
    index = parse_spec_config(spec).text_source()
    decoder = decoder_of(spec, Sources(models, index))
    decoder.verifier = recorder = Recorder(decoder.verifier)
    profile_trees(decoder, VOCAB_SIZE, torch.zeros(NUM_REQS, HIDDEN_SIZE))
    proposers = decoder.method.proposers
    assert recorder.verified == [(NUM_REQS, p.sizes.max_nodes) for p in proposers]
