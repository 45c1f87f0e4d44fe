"""Small languages: one distribution of the next token for every prefix.

Prefixes are numbered like a complete tree with ``vocab_size`` children: the empty
prefix is 0, and prefix ``i`` followed by token ``t`` is ``i * vocab_size + 1 + t``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import TargetLogits
from vllm_treespec.trees.tree import TreeBatch

NUM_TOKENS = 3
KINDS = [
    "random",
    "zeros",
    "equal",
    "disjoint",
    "two_tokens",
    "one_token",
    "top_k",
    "peaked",
]


def prefix_tokens(prefix: int, vocab_size: int) -> list[int]:
    """The tokens of a prefix, by its number."""
    tokens: list[int] = []
    while prefix:
        prefix, token = divmod(prefix - 1, vocab_size)
        tokens.insert(0, token)
    return tokens


class PlainSampling(SamplingTensors):
    """Takes "logits" that are probabilities already, in whatever dtype they have."""

    def probs(self, logits: Tensor) -> Tensor:
        return logits

    def select(self, rows: Tensor) -> PlainSampling:
        return plain_sampling(len(rows))


def plain_sampling(num_reqs: int) -> PlainSampling:
    return PlainSampling(torch.ones(num_reqs), all_random=True)


@dataclass(frozen=True)
class Language:
    """Next-token distributions, or logits, of every prefix."""

    # [num_prefixes, vocab_size]
    table: Tensor

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    def no_mass(self) -> Tensor:
        """Zeros for every prefix of the table and the prefixes one token longer."""
        return torch.zeros(1 + self.table.numel(), dtype=torch.float64)

    def prefixes(self, tree: TreeBatch) -> Tensor:
        """Number of the prefix that each node ends, int64 [num_reqs, max_nodes]."""
        prefixes = torch.zeros_like(tree.token_ids)
        for node in range(1, tree.max_nodes):
            parent = tree.parents[:, node : node + 1].clamp(min=0)
            above = prefixes.gather(1, parent)[:, 0]
            prefixes[:, node] = above * self.vocab_size + 1 + tree.token_ids[:, node]
        return prefixes.masked_fill(tree.parents < 0, 0)

    def target_logits(self, tree: TreeBatch, sampling: SamplingTensors) -> TargetLogits:
        """What a target with this table says about the trees."""
        return TargetLogits(
            self.table[self.prefixes(tree).flatten()],
            torch.arange(tree.num_reqs) * tree.max_nodes,
            sampling,
        )

    def joint_law(self, reached: Tensor, num_tokens: int) -> Tensor:
        """Continue the given masses with this language up to ``num_tokens`` tokens.

        Args:
            reached: float64 [num_prefixes], mass at which an emission ended.
            num_tokens: the law's number of tokens.

        Returns:
            float64 [vocab_size ** num_tokens].

        """
        mass, start = reached.clone(), 0
        for depth in range(num_tokens):
            end = start + self.vocab_size**depth
            onward = (mass[start:end, None] * self.table[start:end]).flatten()
            mass[end : end + len(onward)] += onward
            start = end
        return mass[start : start + self.vocab_size**num_tokens]

    def true_law(self, num_tokens: int) -> Tensor:
        """The law of the first tokens, float64 [vocab_size ** num_tokens]."""
        reached = self.no_mass()
        reached[0] = 1
        return self.joint_law(reached, num_tokens)


class LanguageDraft:
    """A draft model that speaks a language, for ``num_reqs`` requests.

    With a vocabulary it knows the columns of these tokens alone.
    """

    def __init__(
        self, language: Language, num_reqs: int, vocabulary: Tensor | None = None
    ) -> None:
        self.language, self.vocabulary = language, vocabulary
        self.prefixes = torch.zeros((num_reqs, 1), dtype=torch.int64)

    def root_logits(self) -> Tensor:
        return self._columns(self.language.table[self.prefixes[:, 0]])

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        above = self.prefixes.gather(1, parents)
        self.prefixes = above * self.language.vocab_size + 1 + token_ids
        return self._columns(self.language.table[self.prefixes])

    def _columns(self, rows: Tensor) -> Tensor:
        return rows if self.vocabulary is None else rows[..., self.vocabulary]


class BigramDraft:
    """Draft logits from the last token and the request: a table and an offset."""

    vocabulary = None

    def __init__(self, table: Tensor, offsets: Tensor, roots: Tensor) -> None:
        self.table, self.offsets, self.roots = table, offsets, roots

    def root_logits(self) -> Tensor:
        return self.table[self.roots] + self.offsets

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        return self.table[token_ids] + self.offsets[:, None]


def random_tables(
    kind: str, vocab_size: int, depth: int, seed: int = 0
) -> tuple[Language, Language]:
    """A draft and a target language for prefixes of at most ``depth`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    depth = max(depth, NUM_TOKENS - 1)
    shape = (sum(vocab_size**d for d in range(depth + 1)), vocab_size)

    def rand() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def masked(mass: Tensor, keep: Tensor) -> Tensor:
        """Zero entries, but never the largest of a row."""
        keep = keep | (mass == mass.amax(1, keepdim=True))
        return mass * keep

    draft, target = rand() ** 2, rand() ** 2
    half = torch.arange(vocab_size) < (vocab_size + 1) // 2
    if kind == "equal":
        draft = target
    elif kind == "zeros":
        draft, target = masked(draft, rand() < 0.6), masked(target, rand() < 0.6)
    elif kind == "disjoint":
        draft, target = draft * half, target * ~half
    elif kind == "two_tokens":
        few = torch.arange(vocab_size) < 2
        draft, target = draft * few, target * few
    elif kind == "one_token":
        draft, target = masked(draft, rand() < 0), masked(target, rand() < 0.5)
    elif kind == "peaked":
        # What a low temperature makes of the draft: one token has nearly all mass.
        heavy = 10 ** (6 + 12 * rand()[:, :1])
        draft = torch.where(draft == draft.amax(1, keepdim=True), heavy, draft)
    elif kind == "top_k":
        draft, target = largest(draft, 2), largest(target, 2)
    else:
        assert kind == "random"
    return Language(draft / draft.sum(1, True)), Language(target / target.sum(1, True))


def part_of(
    kind: str, vocab_size: int, tokens: list[int]
) -> tuple[Language, Language, Tensor]:
    """A draft language of some tokens, a target of all, and the draft's vocabulary."""
    draft, target = random_tables(kind, vocab_size, 2)
    mass = torch.zeros_like(draft.table)
    mass[:, tokens] = draft.table[:, tokens]
    mass[mass.sum(1) == 0, tokens[0]] = 1
    return Language(mass / mass.sum(1, keepdim=True)), target, torch.tensor(tokens)


def largest(mass: Tensor, count: int) -> Tensor:
    return torch.zeros_like(mass).scatter(1, mass.topk(count).indices, 1.0) * mass


def naive_probs(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Top-k, keeping ties, and then top-p, row by row in float64.

    Args:
        logits: [rows, vocab_size], already divided by the temperature.
        top_k: how many tokens stay, None for all.
        top_p: the mass that the likeliest tokens must reach, None for all.

    """
    probs = logits.double().softmax(1)
    for row in probs:
        if top_k is not None:
            row[row < row.sort(descending=True).values[top_k - 1]] = 0
            row /= row.sum()
        if top_p is not None:
            order = row.argsort(descending=True)
            before = row[order].cumsum(0) - row[order]
            row[order[before >= top_p]] = 0
            row /= row.sum()
    return probs
