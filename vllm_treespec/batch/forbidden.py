"""Tokens that a request must not emit: not allowed ones, bad words, early stops.

What is forbidden after a node of a tree depends on the output up to that node: a bad
word on its last tokens, a stop on how many there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.matching import RunningTrees
from vllm_treespec.host_copies import on_device
from vllm_treespec.sampling.texts import TextView


@dataclass(frozen=True)
class Forbidden:
    """What one request must not emit."""

    # bool [vocab_size], on the logits' device: tokens that are never allowed
    not_allowed: Tensor | None = None
    # sequences of tokens that the output must not hold
    bad_words: Sequence[Sequence[int]] = ()
    # tokens that end the request: not before it has put out so many
    stop_tokens: Collection[int] = ()
    min_tokens: int = 0

    @cached_property
    def longest(self) -> int:
        """How many of the last tokens of an output say what may not follow."""
        return max((len(word) - 1 for word in self.bad_words), default=0)

    def is_over(self, num_output: int) -> bool:
        """Whether everything is allowed once an output has so many tokens."""
        lasting = self.not_allowed is not None or bool(self.bad_words)
        return not lasting and num_output >= self.min_tokens

    def after(self, last: Sequence[int], num_output: int) -> list[int]:
        """Tokens that may not follow an output; ``not_allowed`` ones are left out.

        Args:
            last: its last tokens, ``longest`` of them or all.
            num_output: how many tokens it has.

        """
        stops = self.stop_tokens if num_output < self.min_tokens else ()
        ends = [
            word[-1]
            for word in self.bad_words
            if [*last[len(last) - len(word) + 1 :]] == [*word[:-1]]
        ]
        return [*stops, *ends]


@dataclass(frozen=True)
class RequestRows:
    """The rows of the logits that belong to one request and its tree."""

    # place in the batch
    req: int
    forbidden: Forbidden
    # of the root; the nodes of its tree follow
    first_row: int
    # tokens and parents of the nodes below the root
    drafts: Sequence[int] = ()
    parents: Sequence[int] = ()

    @property
    def rows(self) -> slice:
        """Of the root and the nodes."""
        return slice(self.first_row, self.first_row + 1 + len(self.drafts))

    def forbidden_after(self, texts: TextView) -> Iterator[tuple[int, list[int]]]:
        """The row of each node, and what may not follow its path."""
        forbidden = self.forbidden
        output = texts.last_output(self.req, forbidden.longest)
        num_output = texts.num_output_tokens(self.req)
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.drafts, self.parents, strict=True):
            paths.append([*paths[parent], token])
        for row, path in enumerate(paths, start=self.first_row):
            yield row, forbidden.after([*output, *path], num_output + len(path))


def limited_rows(
    forbidden: Sequence[Forbidden | None],
    reqs: np.ndarray,
    first_rows: np.ndarray,
    texts: TextView,
    trees: RunningTrees | None = None,
) -> list[RequestRows]:
    """Rows of the requests that must not emit some tokens.

    Args:
        forbidden: of all these requests; None: a request may emit everything.
        reqs: int64 [n], their places in the batch.
        first_rows: int64 [n], rows of their roots.
        texts: of the batch.
        trees: of the requests; None: they have none.

    """
    found = []
    for place, limits in enumerate(forbidden):
        req = int(reqs[place])
        if limits is None or limits.is_over(texts.num_output_tokens(req)):
            continue
        drafts = () if trees is None else trees.drafts(place)
        found.append(RequestRows(req, limits, int(first_rows[place]), *drafts))
    return found


@contextmanager
def leaving_out(
    logits: Tensor, requests: Sequence[RequestRows], texts: TextView
) -> Iterator[None]:
    """Within it tokens that must not be emitted have no probability, as in vLLM.

    Afterwards the logits are as before: logprobs are of them.

    Args:
        logits: [num_rows, vocab_size].
        requests: that must not emit some tokens, with their rows.
        texts: of the batch.

    """
    if not requests:
        yield
        return
    masks = [
        (logits[request.rows], request.forbidden.not_allowed)
        for request in requests
        if request.forbidden.not_allowed is not None
    ]
    kept = [rows.clone() for rows, _ in masks]
    for rows, mask in masks:
        rows.masked_fill_(mask, -torch.inf)
    places = torch.tensor(
        [
            (row, token)
            for request in requests
            for row, tokens in request.forbidden_after(texts)
            for token in tokens
        ],
        dtype=torch.int64,
    ).reshape(-1, 2)
    at = tuple(on_device(places, logits.device).T)
    before = logits[at]
    logits[at] = -torch.inf
    yield
    logits[at] = before
    for (rows, _), old in zip(masks, kept, strict=True):
        rows.copy_(old)
