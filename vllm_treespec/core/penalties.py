"""Penalties for tokens that a request's text holds already, after every node of a tree.

A node's distribution looks at the text up to that node: prompt, output and the drafts
on the node's path. So siblings may have different penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.core.tree import TreeBatch


@dataclass(frozen=True)
class PenaltyView:
    """Penalties of the requests of a batch, and their texts, all on the host."""

    # float32 [num_reqs]; 1 changes nothing
    repetition: np.ndarray
    # float32 [num_reqs] each; 0 changes nothing
    frequency: np.ndarray
    presence: np.ndarray
    # int [num_reqs, max_len], committed tokens by position
    token_ids: np.ndarray
    # int [num_reqs], how many of them are the prompt, and how many there are
    num_prompt_tokens: np.ndarray
    num_tokens: np.ndarray

    def penalised(self, req: int) -> bool:
        """Whether a request has any penalty."""
        return bool(
            self.repetition[req] != 1 or self.frequency[req] or self.presence[req]
        )


class SeenTokens:
    """The tokens of one text, each once, and how often the output holds each."""

    def __init__(self, prompt: np.ndarray) -> None:
        """Begin with a prompt, int [n], and no output."""
        self.num_prompt_tokens = self.num_noted = len(prompt)
        found = np.unique(prompt)
        self._places = {token: place for place, token in enumerate(found.tolist())}
        self._tokens = found.astype(np.int64)
        self._counts = np.zeros_like(self._tokens)

    def note(self, text: np.ndarray) -> None:
        """Count the tokens of the text, int [n], that came since the last call."""
        for token in text[self.num_noted :].tolist():
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._tokens):
                self._tokens = np.append(self._tokens, np.zeros(1 + place, np.int64))
                self._counts = np.append(self._counts, np.zeros(1 + place, np.int64))
            self._tokens[place] = token
            self._counts[place] += 1
        self.num_noted = len(text)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of the text, each once, int64 [n]."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """How often the output holds each of ``tokens``, int64 [n]."""
        return self._counts[: len(self._places)]


@dataclass(frozen=True)
class Penalties:
    """What the texts of some requests change in the target's logits."""

    # float32 [num_reqs]
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    # int64 [num_reqs, max_seen], the tokens of each text, the first one repeated
    tokens: Tensor
    # int64 [num_reqs, max_seen], how often the output holds each
    counts: Tensor
    # int64 [num_reqs, max_nodes, max_depth], drafts on the path to each node, and the
    # root's token behind them
    paths: Tensor
    # bool, same shape: which ones are drafts
    is_draft: Tensor

    def select(self, rows: Tensor) -> Penalties:
        """Return the penalties of the given requests, ``rows`` int64 [n]."""
        return Penalties(*(value[rows] for value in vars(self).values()))

    def below(self, tree: TreeBatch, max_depth: int) -> Penalties:
        """Return the penalties after every node of these requests' trees.

        Args:
            tree: of these requests.
            max_depth: levels below the root, or more.

        """
        node = torch.arange(tree.max_nodes, device=tree.parents.device)
        node = node.expand_as(tree.parents)
        tokens, is_draft = [], []
        for _ in range(max_depth):
            tokens.append(tree.token_ids.gather(1, node))
            is_draft.append(node > 0)
            node = tree.parents.gather(1, node).clamp(min=0)
        if not tokens:
            return self
        return replace(
            self, paths=torch.stack(tokens, -1), is_draft=torch.stack(is_draft, -1)
        )

    def apply(self, logits: Tensor, reqs: Tensor, nodes: Tensor) -> Tensor:
        """Penalise logits as vLLM does, in its order, in float32.

        Args:
            logits: [n, vocab_size]; those of dtype float32 are changed.
            reqs: int64 [n], the request of each row.
            nodes: int64 [n], the node after which each row predicts.

        Returns:
            float32 [n, vocab_size].

        """
        logits, of_rows = logits.to(torch.float32), self.select(reqs)
        tokens, counts = of_rows.tokens, of_rows.counts
        every = torch.arange(len(reqs), device=reqs.device)
        path, is_draft = of_rows.paths[every, nodes], of_rows.is_draft[every, nodes]
        same = path[:, :, None] == tokens[:, None]
        in_text = torch.where(same, counts[:, None], 0).amax(dim=2)
        same = (path[:, :, None] == path[:, None]) & is_draft[:, None]
        of_path = of_rows.penalise(logits.gather(1, path), in_text + same.sum(dim=2))
        logits.scatter_(1, tokens, of_rows.penalise(logits.gather(1, tokens), counts))
        return logits.scatter_(1, path, of_path)

    def penalise(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Penalise logits of tokens that the text holds.

        Args:
            logits: float32 [num_reqs, n].
            counts: int64 [num_reqs, n], how often the output holds each token.

        """
        repetition = self.repetition[:, None]
        logits = logits * torch.where(logits > 0, 1 / repetition, repetition)
        logits = logits - self.frequency[:, None] * counts
        return logits - self.presence[:, None] * (counts > 0)


class PenalisedTexts:
    """What was seen of the texts of requests that have penalties, by slot."""

    def __init__(self) -> None:
        """Begin without requests."""
        self._seen: dict[int, SeenTokens] = {}

    def finish_requests(self, slots: np.ndarray) -> None:
        """Forget requests that ended, by their released slots, int64 [n]."""
        for slot in slots.tolist():
            self._seen.pop(slot, None)

    def penalties(
        self,
        view: PenaltyView | None,
        reqs: np.ndarray,
        slots: np.ndarray,
        device: torch.device,
    ) -> Penalties | None:
        """Penalties of some requests after their last token; None if they have none.

        Args:
            view: of the batch; None: no request has any.
            reqs: int64 [n], places in the batch.
            slots: int64 [n], slots of the same requests.
            device: where the penalties are needed.

        """
        if view is None or not any(map(view.penalised, reqs.tolist())):
            return None
        pairs = zip(reqs.tolist(), slots.tolist(), strict=True)
        seen = [self._note(view, req, slot) for req, slot in pairs]
        repetition, frequency, presence = (
            torch.from_numpy(values[reqs]).to(device)
            for values in (view.repetition, view.frequency, view.presence)
        )
        none = torch.zeros((len(reqs), 1, 0), dtype=torch.int64, device=device)
        return Penalties(
            repetition,
            frequency,
            presence,
            tokens=torch.from_numpy(padded([s.tokens for s in seen])).to(device),
            counts=torch.from_numpy(padded([s.counts for s in seen])).to(device),
            paths=none,
            is_draft=none.bool(),
        )

    def _note(self, view: PenaltyView, req: int, slot: int) -> SeenTokens:
        """Bring what was seen of a text up to date; nothing without penalties."""
        if not view.penalised(req):
            return NOTHING_SEEN
        text = view.token_ids[req, : view.num_tokens[req]]
        num_prompt_tokens, seen = view.num_prompt_tokens[req], self._seen.get(slot)
        # A session's next prompt holds the output before it.
        if seen is None or seen.num_prompt_tokens != num_prompt_tokens:
            seen = self._seen[slot] = SeenTokens(text[:num_prompt_tokens])
        seen.note(text)
        return seen


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stack rows of at least one number; shorter ones repeat their first number."""
    width = max(map(len, rows))
    return np.stack(
        [np.append(row, np.repeat(row[:1], width - len(row))) for row in rows]
    )


# Without a penalty it does not matter what is penalised.
NOTHING_SEEN = SeenTokens(np.zeros(1, dtype=np.int64))
