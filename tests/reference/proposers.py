"""Twins of proposers, as the papers write them.

RSD-S adds Gumbel noise to the whole vocabulary and takes the largest sums; the proposer
takes two uniform numbers a child instead. The dynamic and the static tree are plain
Python: one request, lists of paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm_treespec.proposers.base import DraftModel, tokens_of
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.builders import from_levels
from vllm_treespec.trees.tree import TreeBatch

# Tokens from the root's child down to a node.
Path = tuple[int, ...]
# Log probability of every token after a path.
LogLaw = Callable[[Path], Sequence[float]]


def likeliest(law: Sequence[float], count: int) -> list[int]:
    """The tokens of the highest log probability, the likeliest first."""
    return sorted(range(len(law)), key=lambda token: -law[token])[:count]


def dynamic_tree_reference(
    log_law: LogLaw, top_k: int, depth: int, num_drafts: int
) -> list[Path]:
    """Grow EAGLE-2's tree (arXiv 2406.16858, sections 4.1 and 4.2).

    Returns:
        the paths in level order, siblings side by side and the likeliest first. Among
        equally likely ones the earlier in this order is read, and kept.

    """
    value: dict[Path, float] = {(): 0.0}
    candidates: list[Path] = []
    layer: list[Path] = [()]
    for _ in range(depth):
        children = []
        for path in layer:
            law = log_law(path)
            for token in likeliest(law, top_k):
                value[(*path, token)] = value[path] + law[token]
                children.append((*path, token))
        candidates += children
        best = sorted(children, key=lambda path: -value[path])[:top_k]
        layer = [path for path in children if path in best]
    ranked = sorted(candidates, key=lambda path: -value[path])[:num_drafts]
    kept = {path for path in ranked if value[path] > -math.inf}
    return [path for path in candidates if path in kept]


def static_tree_reference(log_law: LogLaw, rank_paths: Sequence[Path]) -> list[Path]:
    """Fill a tree of rank paths with tokens, every node from its own law."""
    paths = []
    for ranks in rank_paths:
        path: Path = ()
        for rank in ranks:
            path = (*path, likeliest(log_law(path), rank + 1)[rank])
        paths.append(path)
    return paths


def gumbel(uniforms: Tensor) -> Tensor:
    """Standard Gumbel variables from uniforms in (0, 1), same shape."""
    return -torch.log(-torch.log(uniforms))


def gumbel_top_k(log_probs: Tensor, count: int, noise: Tensor) -> Tensor:
    """Draw tokens without replacement (arXiv 2402.14160, equation 7, algorithm 4).

    Args:
        log_probs: float64 [rows, vocab_size].
        count: tokens per row.
        noise: standard Gumbel variables, same shape as ``log_probs``.

    Returns:
        int64 [rows, count], in draw order.

    """
    return (log_probs + noise).topk(count, dim=-1).indices


def rsd_s_reference(
    draft_model: DraftModel,
    root_token_ids: Tensor,
    sampling: SamplingTensors,
    beam_width: int,
    noise: list[Tensor],
) -> TreeBatch:
    """Draw RSD-S trees by stochastic beam search (algorithms 8 and 9).

    Args:
        draft_model: as the proposers drive it.
        root_token_ids: int64 [num_reqs].
        sampling: the requests' sampling parameters, none of them greedy.
        beam_width: nodes per level.
        noise: standard Gumbel variables, float64 [num_reqs, width, vocab_size] per
            level, where width is 1 at the first level and then ``beam_width``.

    Returns:
        trees numbered as the proposer numbers them: level by level, siblings side
        by side and the highest perturbed log probability first.

    """
    num_reqs = root_token_ids.shape[0]
    logits = draft_model.root_logits()[:, None]
    sum_log_probs = torch.zeros((num_reqs, 1), dtype=torch.float64)
    truncated = torch.zeros_like(sum_log_probs)
    tokens, parents, valid, level_probs = [], [], [], []
    for level, level_noise in enumerate(noise):
        probs = sampling.probs(logits)
        level_probs.append(probs)
        vocab_size = probs.shape[-1]
        child_log_probs = sum_log_probs[..., None] + probs.double().log()
        perturbed = child_log_probs + level_noise
        bounded = truncate(truncated, perturbed).flatten(1)

        truncated, best = bounded.topk(beam_width, dim=1)
        # Only the numbering differs from the paper, which lists nodes by value
        # across the whole beam: here siblings lie side by side.
        parent, order = (best // vocab_size).sort(dim=1, stable=True)
        best, truncated = best.gather(1, order), truncated.gather(1, order)
        sum_log_probs = child_log_probs.flatten(1).gather(1, best)
        tokens.append(tokens_of(best % vocab_size, draft_model.vocabulary))
        parents.append(parent)
        valid.append(truncated > -torch.inf)
        if level + 1 < len(noise):
            logits = draft_model.extend(tokens[-1], parent)
    return from_levels(
        root_token_ids,
        tokens,
        parents,
        valid,
        torch.cat(level_probs, dim=1),
        draft_model.vocabulary,
    ).tree


def truncate(bound: Tensor, perturbed: Tensor) -> Tensor:
    """Shift perturbed values so that their maximum is ``bound`` (equation 10).

    The numerically stable form is that of arXiv 1903.06059, appendix B.3.

    Args:
        bound: float64 [num_reqs, width], psi of the level above; -inf marks a place
            of the beam that holds no sequence.
        perturbed: float64 [num_reqs, width, vocab_size].

    """
    bound = bound[..., None]
    below_max = perturbed - perturbed.amax(dim=-1, keepdim=True)
    shift = bound - perturbed + log1mexp(below_max)
    truncated = bound - shift.clamp(min=0) - torch.log1p(torch.exp(-shift.abs()))
    impossible = (bound == -torch.inf) | (perturbed == -torch.inf)
    return truncated.masked_fill(impossible, -torch.inf)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, without cancellation."""
    return torch.where(
        x > -0.6931471805599453, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x))
    )
