"""Chi-square tests of what is emitted: the laws, and one level of drafts."""

from __future__ import annotations

import itertools

import torch
from scipy.stats import chi2, chisquare
from torch import Tensor

from tests.fast.enumeration import Scorer
from tests.fast.languages import plain_sampling
from vllm_treespec.sampling.draws import draw_without_replacement
from vllm_treespec.scorers import TargetLogits
from vllm_treespec.testing import toy_models
from vllm_treespec.trees.builders import from_draws, from_levels
from vllm_treespec.trees.tree import TreeBatch


def drawn_level(draft: Tensor, uniforms: Tensor, with_replacement: bool) -> TreeBatch:
    """A tree of one level for each row of uniforms.

    Args:
        draft: float32 [vocab_size].
        uniforms: float64 [num_reqs, num_draws].
        with_replacement: whether the draws are independent.

    """
    num_reqs = len(uniforms)
    roots = torch.zeros(num_reqs, dtype=torch.int64)
    above = torch.zeros_like(uniforms, dtype=torch.int64)
    probs = draft.expand(num_reqs, 1, -1)
    if with_replacement:
        cumulative = draft.double().cumsum(0)
        tokens = torch.searchsorted(cumulative, uniforms * cumulative[-1], right=True)
        return from_draws(roots, [tokens], [above], [above], probs)
    tokens, valid = draw_without_replacement(draft.expand(num_reqs, -1), uniforms)
    return from_levels(roots, [tokens], [above], [valid], probs).tree


def first_tokens(
    rule: Scorer, tree: TreeBatch, target: Tensor, uniforms: Tensor
) -> Tensor:
    """First emitted token of each request, int64 [num_reqs].

    Args:
        rule: the scorer.
        tree: one level.
        target: float32 [vocab_size], the same after every node.
        uniforms: float64 [num_reqs, 1 + max_draws].

    """
    logits = TargetLogits(
        target.expand(tree.max_nodes, -1),
        torch.zeros(tree.num_reqs, dtype=torch.int64),
        plain_sampling(tree.num_reqs),
    )
    return rule(tree, logits, uniforms).emitted(tree)[:, 0]


def text_law(
    language: toy_models.Language, prompt: list[int], num_tokens: int
) -> Tensor:
    """Probability of every text of so many tokens after a prompt, float32."""
    probabilities = []
    for text in itertools.product(range(toy_models.VOCAB_SIZE), repeat=num_tokens):
        so_far, product = list(prompt), torch.ones(())
        for token in text:
            product = (
                product * toy_models.after(language.target, so_far).softmax(0)[token]
            )
            so_far.append(token)
        probabilities.append(product)
    return torch.stack(probabilities)


def p_value(tokens: Tensor, target: Tensor) -> float:
    """Chi-square p-value of tokens; those expected less than 5 times are one bin."""
    expected = target.double() * len(tokens)
    found = tokens.bincount(minlength=len(target)).double()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    found = torch.cat([found[~rare], found[rare].sum()[None]])
    kept = expected > 0
    if bool((found[~kept] > 0).any()):
        return 0.0
    expected = expected[kept] * (found.sum() / expected[kept].sum())
    return float(chisquare(found[kept].numpy(), expected.numpy()).pvalue)


def goodness_of_fit(counts: Tensor, law: Tensor) -> float:
    """p-value of counts under a law; cells that expect under 10 are one cell."""
    expected = law * counts.sum()
    rare = expected < 10
    observed = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected > 0
    assert bool((observed[~used] == 0).all())
    statistic = ((observed - expected).square() / expected)[used].sum()
    return float(chi2.sf(float(statistic), int(used.sum()) - 1))
