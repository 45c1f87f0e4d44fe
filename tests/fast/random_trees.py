"""Random draft trees of any shape, with drafts that a proposer could have drawn."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.fast.drafting import all_drawn
from vllm_treespec.sampling.draws import draw_without_replacement
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import TreeBatch


def random_parents(num_nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of a random tree in level order, -1 at the root."""
    parents = [-1]
    while len(parents) < num_nodes:
        latest = parents[-1]
        choices = range(max(latest, 0), len(parents))
        if latest >= 0 and float(torch.rand(1, generator=generator)) < 0.5:
            choices = range(latest, min(latest + 2, len(parents)))
        pick = int(torch.randint(len(choices), (1,), generator=generator))
        parents.append(choices[pick])
    return parents


def random_trees(
    num_reqs: int, max_nodes: int, vocab_size: int, generator: torch.Generator
) -> TreeBatch:
    """Trees of different sizes, siblings drawn without replacement.

    ``draws.probs`` is float64 [num_reqs, max_nodes, vocab_size], one row a node.
    """
    sizes = torch.randint(1, max_nodes + 1, (num_reqs,), generator=generator)
    sizes[0] = max_nodes
    parents = [random_parents(int(size), generator) for size in sizes]
    logits = 2 * torch.randn(
        (num_reqs, max_nodes, vocab_size), generator=generator, dtype=torch.float64
    )
    probs = logits.softmax(-1)
    # No node has more children than the vocabulary has tokens.
    for row in parents:
        for node in range(1, len(row)):
            if row[:node].count(row[node]) >= vocab_size:
                row[node] = node - 1
                row[node:] = [max(p, node - 1) for p in row[node:]]
    tree = from_parents(parents, parents)
    tokens = torch.zeros_like(tree.token_ids)
    for req, row in enumerate(parents):
        for node in set(row[1:]):
            children = [i for i, p in enumerate(row) if p == node]
            uniforms = torch.rand(
                (1, len(children)), generator=generator, dtype=torch.float64
            )
            drawn, valid = draw_without_replacement(probs[req, node][None], uniforms)
            assert bool(valid.all())
            tokens[req, children] = drawn[0]
    return all_drawn(replace(tree, token_ids=tokens), probs)
