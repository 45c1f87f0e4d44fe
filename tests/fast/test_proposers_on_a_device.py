"""Proposers on a device whose values the host cannot see."""

import pytest
import torch
from torch import Tensor

from tests.fast.enumeration import num_models
from tests.fast.no_waiting import NoWaiting, on_meta
from tests.tiers import grid
from vllm_treespec.heads import DFlashHead, DFlashHeadConfig
from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.proposers.dflash import DFlash, DrawnDFlash
from vllm_treespec.proposers.dynamic_tree import DynamicTree
from vllm_treespec.proposers.lyanna import Lyanna
from vllm_treespec.proposers.medusa import Medusa
from vllm_treespec.proposers.redrafter import ReDrafter
from vllm_treespec.proposers.rsd_c import RsdC
from vllm_treespec.proposers.rsd_s import RsdS
from vllm_treespec.proposers.sd import Sd
from vllm_treespec.proposers.specinfer import SpecInfer
from vllm_treespec.proposers.static_tree import StaticTree
from vllm_treespec.proposers.stochastic_tree import StochasticTree
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sources.base import DraftModel
from vllm_treespec.sources.chain import ChainDraft

NUM_REQS, VOCAB_SIZE = 3, 50
# All but suffix_tree and hybrid, which put their trees together on the host.
PROPOSERS: dict[str, Proposer] = {
    "sd": Sd(3),
    "rsd_c": RsdC((3, 2, 1)),
    "rsd_s": RsdS(4, 3),
    "specinfer": SpecInfer([(2, 1), (1, 1)]),
    "redrafter": ReDrafter(4, 3, 8),
    "dynamic_tree": DynamicTree(4, 3, 8),
    "dflash": DFlash(8, 3, 8),
    "dflash drawn": DrawnDFlash(StochasticTree(4, 3, 8)),
    "static_tree": StaticTree(4, 5, 25),
    "stochastic_tree": StochasticTree(4, 3, 8),
    "medusa_tree": Medusa(7, ((0.5, 0.2), (0.3, 0.1))),
    "lyanna": Lyanna(DynamicTree(4, 3, 8)),
    "lyanna drawn": Lyanna(StochasticTree(4, 3, 8)),
}


class MetaModel:
    """A draft model whose logits have no values."""

    def __init__(self, vocabulary: Tensor | None) -> None:
        self.vocabulary = vocabulary

    def root_logits(self) -> Tensor:
        return torch.empty((NUM_REQS, VOCAB_SIZE), device="meta")

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        return torch.empty((*token_ids.shape, VOCAB_SIZE), device="meta")


def meta_chain(vocabulary: Tensor | None) -> ChainDraft:
    """Chains whose logits have no values, some of which are used up."""
    numbers = torch.empty(NUM_REQS, dtype=torch.int64, device="meta")

    def info(token_ids: Tensor) -> Tensor:
        return torch.empty((*token_ids.shape, VOCAB_SIZE), device="meta")

    logits = torch.empty((NUM_REQS, 3, VOCAB_SIZE), device="meta")
    reused = numbers.bool()
    return ChainDraft(logits, info, numbers, vocabulary, numbers, reused)


def meta_block(vocabulary: Tensor | None) -> DraftModel:
    """All levels of a head that adds to the logits below a node by its token."""
    config = DFlashHeadConfig(
        hidden_size=8,
        target_hidden_size=8,
        vocab_size=VOCAB_SIZE,
        num_hot_tokens=None if vocabulary is None else VOCAB_SIZE,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        intermediate_size=8,
        norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 1e4},
        max_positions=16,
        target_layers=(0,),
        block_size=4,
        depth=3,
        mask_token_id=0,
        markov_rank=2,
    )
    head = DFlashHead(config)
    head.share(*[torch.zeros(VOCAB_SIZE, 8)] * 2)
    head.to("meta")
    states = torch.empty((NUM_REQS, 3, 8), device="meta")
    return head.begin(states, torch.empty(NUM_REQS, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize(
    ("temperature", "hot"),
    grid(
        ["greedy", "random", "mixed"],
        [False, True],
        quick=lambda *case: case == ("mixed", True),
    ),
)
@pytest.mark.parametrize("name", PROPOSERS)
def test_the_host_never_waits(name: str, hot: bool, temperature: str) -> None:
    """Red when a proposer waits for the device, or leaves a tensor behind."""
    proposer = PROPOSERS[name]
    vocabulary = torch.arange(VOCAB_SIZE, device="meta") if hot else None
    sampling = SamplingTensors(
        torch.ones(NUM_REQS),
        top_p=torch.full((NUM_REQS,), 0.9),
        all_greedy=temperature == "greedy",
        all_random=temperature == "random",
    )
    drafts: list[DraftModel] = [MetaModel(vocabulary)] * num_models(proposer)
    if isinstance(proposer, Lyanna):
        drafts = [meta_chain(vocabulary)]
    if name in ("dflash", "dflash drawn"):
        drafts = [meta_block(vocabulary)]
    inputs = ProposerInputs(
        root_token_ids=torch.zeros(NUM_REQS, dtype=torch.int64, device="meta"),
        sampling=on_meta(sampling),
        uniforms=torch.empty(
            (NUM_REQS, proposer.sizes.num_uniforms), dtype=torch.float64, device="meta"
        ),
        draft_models=drafts,
        noise_keys=torch.empty((NUM_REQS, 7), dtype=torch.int64, device="meta"),
    )
    if name in ("medusa_tree", "static_tree"):
        # moves what is moved once
        proposer.propose(inputs)
    with NoWaiting():
        tree = proposer.propose(inputs).tree
    for part in (tree.token_ids, tree.parents, tree.depths, tree.num_nodes):
        assert part.is_meta
    if temperature != "greedy" and tree.draws is not None:
        assert tree.draws.probs.is_meta
