"""Draws and scores trees once before requests come, so that their memory is measured.

An engine gives to the KV cache what its own profiling run leaves over. Distributions
over a large vocabulary, one a node, would not fit any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.proposers import ProposerInputs
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import TargetLogits
from vllm_treespec.sources.base import DraftModel, ModelSource, Roots
from vllm_treespec.sources.chain import ChainDraft, ReusingSource
from vllm_treespec.sources.continuations import Continuations
from vllm_treespec.step.decoder import TreeDecoder


@dataclass(frozen=True)
class UniformDraftModel:
    """A draft model with equal logits for all tokens; a ``BlockDraftModel``."""

    num_reqs: int
    depth: int
    vocab_size: int
    device: torch.device
    vocabulary: None = None

    @property
    def level_logits(self) -> Tensor:
        """Logits of all levels, [num_reqs, depth, vocab_size]."""
        shape = self.num_reqs, self.depth, self.vocab_size
        return torch.zeros(shape, device=self.device)

    @property
    def max_candidates(self) -> int:
        """All tokens."""
        return self.vocab_size

    def edges(self, columns: Tensor, token_ids: Tensor) -> Tensor:
        """What a token adds, [num_reqs, depth - 1, count, count]."""
        num_reqs, depth, count = columns.shape
        shape = num_reqs, depth - 1, count, count
        return torch.zeros(shape, device=self.device)

    def root_logits(self) -> Tensor:
        """Logits below the roots, [num_reqs, vocab_size]."""
        return torch.zeros((self.num_reqs, self.vocab_size), device=self.device)

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Logits below a level, [num_reqs, width, vocab_size]."""
        shape = (*token_ids.shape, self.vocab_size)
        return torch.zeros(shape, device=self.device)


@torch.inference_mode()
def profile_trees(decoder: TreeDecoder, vocab_size: int, hidden: Tensor) -> None:
    """Draw and score every tree of the schedule for as many requests as may draft.

    Trees of a suffix index take no memory of the device: it finds nothing, and where
    nothing else drafts, nothing is done.

    Args:
        decoder: with its heads loaded.
        vocab_size: the target's.
        hidden: [num_reqs, hidden_size], what a head would draft from.

    """
    models = decoder.sources.models
    if not models:
        return
    num_reqs, device = len(hidden), hidden.device
    nothing = Continuations([[] for _ in range(num_reqs)])
    # top-p sorts, which takes the most memory
    sampling = SamplingTensors(
        torch.ones(num_reqs, device=device),
        top_p=torch.full((num_reqs,), 0.9, device=device),
        all_random=True,
    )
    for index, proposer in enumerate(decoder.method.proposers):
        roots = Roots(
            slots=np.arange(num_reqs),
            positions=np.zeros(num_reqs, dtype=np.int64),
            root_token_ids=torch.zeros(num_reqs, dtype=torch.int64, device=device),
            accepted=np.full(num_reqs, -1),
            depth=proposer.sizes.draft_depth,
            hidden=hidden,
        )
        uniforms = torch.rand(
            (num_reqs, proposer.sizes.num_uniforms), dtype=torch.float64, device=device
        )
        # keys and positions of no request
        keys = roots.slots, roots.root_token_ids
        noise: Tensor | None = None
        if decoder.method.rule.follows_noise:
            noise = decoder.verifier.numbers(*keys)
        inputs = ProposerInputs(
            roots.root_token_ids,
            sampling,
            uniforms,
            [draft_model_of(source, roots, vocab_size) for source in models],
            noise_keys=noise,
            continuations=() if decoder.sources.text is None else [nothing],
        )
        tree = proposer.propose(inputs).tree
        logits = torch.zeros((num_reqs * tree.max_nodes, vocab_size), device=device)
        root_rows = torch.arange(num_reqs, device=device) * tree.max_nodes
        target = TargetLogits(logits, root_rows, sampling)
        decoder.verifier.verify(index, tree, target, *keys)


def draft_model_of(source: ModelSource, roots: Roots, vocab_size: int) -> DraftModel:
    """What a source drafts with; a replacement where that needs a KV cache, or a past.

    Chains come with those of a step before, of which nothing was used.
    """
    if isinstance(source, ReusingSource):
        leftover = uniform_chain(roots, vocab_size)
        return uniform_chain(roots, vocab_size, leftover)
    if source.reads.own_kv:
        device = roots.root_token_ids.device
        return UniformDraftModel(len(roots.slots), roots.depth, vocab_size, device)
    return source.begin(roots)


def uniform_chain(
    roots: Roots, vocab_size: int, leftover: ChainDraft | None = None
) -> ChainDraft:
    """Chains with equal logits for all tokens."""
    zero = torch.zeros((), device=roots.root_token_ids.device)

    def info(token_ids: Tensor) -> Tensor:
        return zero.expand(*token_ids.shape, vocab_size)

    logits = zero.expand(len(roots.slots), roots.depth, vocab_size)
    return ChainDraft(logits, info, roots.root_token_ids, leftover=leftover)
