"""Small heads with random weights, and the steps that drive them."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_treespec.heads import (
    DraftHead,
    MedusaHeadConfig,
    ReDrafterHeadConfig,
    build_head,
)
from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.tree import TreeBatch

HIDDEN_SIZE = 16
VOCAB_SIZE = 60
NUM_HOT = 24
DEPTH = 4


def tiny_head(method: str, hot: bool = True, seed: int = 0) -> DraftHead:
    """A head of random weights; ``hot`` tokens are a random part of the vocabulary."""
    kind = {"redrafter": ReDrafterHeadConfig, "medusa": MedusaHeadConfig}[method]
    config = kind(
        hidden_size=HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE,
        num_hot_tokens=NUM_HOT if hot else None,
        depth=DEPTH,
    )
    generator = torch.Generator().manual_seed(seed)
    head = build_head(config).requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(generator=generator).mul_(0.5)
    if hot:
        chosen = torch.randperm(VOCAB_SIZE, generator=generator)[:NUM_HOT]
        head.hot_token_ids = chosen.sort().values
    weights = torch.randn((2, VOCAB_SIZE, HIDDEN_SIZE), generator=generator)
    head.share(weights[0], weights[1])
    return head


def step_inputs(num_reqs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states and roots of some requests."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((num_reqs, HIDDEN_SIZE), generator=generator)
    return hidden, torch.randint(VOCAB_SIZE, (num_reqs,), generator=generator)


def drafted(
    proposer: Proposer,
    head: DraftHead,
    hidden: Tensor,
    roots: Tensor,
    sampling: SamplingTensors,
) -> TreeBatch:
    """One step's trees."""
    return proposer.propose(
        ProposerInputs(
            root_token_ids=roots,
            sampling=sampling,
            uniforms=torch.zeros((len(roots), proposer.sizes.num_uniforms)),
            draft_models=[head.draft(hidden, roots)],
        )
    ).tree


def greedy(num_reqs: int) -> SamplingTensors:
    return SamplingTensors(torch.zeros(num_reqs), all_greedy=True)


def token_paths(tree: TreeBatch, req: int) -> list[tuple[int, ...]]:
    """Tokens from the root's child down to each node, the root's () first."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.num_nodes[req])):
        above = paths[int(tree.parents[req, node])]
        paths.append((*above, int(tree.token_ids[req, node])))
        assert len(paths[-1]) == int(tree.depths[req, node])
    return paths
