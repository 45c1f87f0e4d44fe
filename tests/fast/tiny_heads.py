"""Small heads with random weights, and the steps that drive them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fast.drafting import at_temperature, propose, token_paths
from tests.heads import KINDS
from vllm_treespec.heads import DraftHead, build_head
from vllm_treespec.proposers import Proposer
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.tree import TreeBatch

HIDDEN_SIZE = 16
VOCAB_SIZE = 60
NUM_HOT = 24
DEPTH = 4


def tiny_head(method: str, hot: bool = True, seed: int = 0) -> DraftHead:
    """A head of random weights; ``hot`` tokens are a random part of the vocabulary."""
    config = KINDS[method](
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
    sampling: SamplingTensors | None = None,
) -> TreeBatch:
    """One step's trees; greedy ones without sampling parameters."""
    return propose(
        proposer,
        head.draft(hidden, roots),
        sampling=sampling or at_temperature(0.0, len(roots)),
        num_reqs=len(roots),
        root_token_ids=roots,
    )


def check_alone(
    proposer: Proposer, head: DraftHead, sampling: SamplingTensors, num_reqs: int
) -> TreeBatch:
    """Fail where a request has another tree in a batch than alone."""
    hidden, roots = step_inputs(num_reqs)
    together = drafted(proposer, head, hidden, roots, sampling)
    for req in range(num_reqs):
        row = torch.tensor([req])
        alone = drafted(proposer, head, hidden[row], roots[row], sampling.select(row))
        assert token_paths(alone) == token_paths(together, req)
    return together


def check_hot(tree: TreeBatch, head: DraftHead) -> None:
    """Fail where a head with hot tokens drafts another one."""
    if head.hot_token_ids is not None:
        drafts = tree.token_ids[tree.depths > 0]
        assert bool(torch.isin(drafts, head.hot_token_ids).all())
