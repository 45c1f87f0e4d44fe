"""Penalties for tokens that a request's text holds already, after every node of a tree.

A node's distribution looks at the text up to that node: prompt, output and the drafts
on the node's path. So siblings may have different penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.host_copies import on_device
from vllm_treespec.sampling.texts import TextView


@dataclass(frozen=True)
class PenaltyView:
    """Penalties of the requests of a batch, and their texts, on the host."""

    # float32 [num_reqs]; 1 changes nothing
    repetition: np.ndarray
    # float32 [num_reqs] each; 0 changes nothing
    frequency: np.ndarray
    presence: np.ndarray
    texts: TextView

    def penalised(self, req: int) -> bool:
        """Whether a request has any penalty."""
        return bool(
            self.repetition[req] != 1 or self.frequency[req] or self.presence[req]
        )


class SeenTokens:
    """The tokens of one text, each once, and how often the output holds each."""

    def __init__(self, prompt: np.ndarray) -> None:
        """Begin with a prompt, int [n], and no output."""
        self.num_noted = len(prompt)
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

    def count(self, token: int) -> int:
        """How often the output holds a token."""
        place = self._places.get(token)
        return 0 if place is None else int(self._counts[place])

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
    # int64 [num_reqs, max_nodes], the tokens of each tree's nodes, and how often the
    # output holds each; the root alone without trees
    node_tokens: Tensor
    node_counts: Tensor
    # int64 [num_reqs, max_nodes], see ``ancestor_bits``
    ancestors: Tensor

    def select(self, rows: Tensor) -> Penalties:
        """Return the penalties of the given requests, ``rows`` int64 [n]."""
        return Penalties(*(value[rows] for value in vars(self).values()))

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
        path, path_counts = of_rows.paths(nodes)
        of_path = of_rows.penalise(logits.gather(1, path), path_counts)
        logits.scatter_(1, tokens, of_rows.penalise(logits.gather(1, tokens), counts))
        return logits.scatter_(1, path, of_path)

    def paths(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens on the paths to one node of each request, int64 [num_reqs].

        Returns:
            int64 [num_reqs, max_nodes] both: a token for each node, that of the root
            where a node is not a draft on the path; and how often output and path
            hold that token.

        """
        columns = torch.arange(self.node_tokens.shape[1], device=nodes.device)
        bits = self.ancestors.gather(1, nodes[:, None])
        is_draft = ((bits >> columns) & 1).bool() & (columns > 0)
        path = torch.where(is_draft, self.node_tokens, self.node_tokens[:, :1])
        in_text = torch.where(is_draft, self.node_counts, self.node_counts[:, :1])
        same = (path[:, :, None] == path[:, None]) & is_draft[:, None]
        return path, in_text + same.sum(dim=2)

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
        drafts: np.ndarray,
        ancestors: Tensor,
    ) -> Penalties | None:
        """Penalties of some requests after every node; None if they have none.

        Args:
            view: of the batch; None: no request has any.
            reqs: int64 [n], places in the batch.
            slots: int64 [n], slots of the same requests.
            drafts: int64 [n, max_nodes - 1], tokens of the nodes below the roots.
            ancestors: int64 [n, max_nodes] on the device, see ``ancestor_bits``.

        """
        if view is None or not any(map(view.penalised, reqs.tolist())):
            return None
        pairs = zip(reqs.tolist(), slots.tolist(), strict=True)
        seen = [self._note(view, req, slot) for req, slot in pairs]
        roots = view.texts.token_ids[reqs, view.texts.num_tokens[reqs] - 1]
        nodes = np.column_stack([roots, drafts]).astype(np.int64)
        node_counts = [
            [text.count(token) for token in row]
            for text, row in zip(seen, nodes.tolist(), strict=True)
        ]

        device = ancestors.device
        return Penalties(
            repetition=on_device(view.repetition[reqs], device),
            frequency=on_device(view.frequency[reqs], device),
            presence=on_device(view.presence[reqs], device),
            tokens=on_device(padded([text.tokens for text in seen]), device),
            counts=on_device(padded([text.counts for text in seen]), device),
            node_tokens=on_device(nodes, device),
            node_counts=on_device(np.array(node_counts), device),
            ancestors=ancestors,
        )

    def _note(self, view: PenaltyView, req: int, slot: int) -> SeenTokens:
        """Bring what was seen of a text up to date; nothing without penalties."""
        if not view.penalised(req):
            return NOTHING_SEEN
        text, num_prompt_tokens = (
            view.texts.text(req),
            view.texts.num_prompt_tokens[req],
        )
        seen = self._seen.get(slot)
        if seen is None:
            seen = self._seen[slot] = SeenTokens(text[:num_prompt_tokens])
        seen.note(text)
        return seen


def no_drafts(reqs: Tensor) -> tuple[np.ndarray, Tensor]:
    """Drafts and ancestors of requests without trees, int64 [n], see ``penalties``."""
    drafts = np.empty((len(reqs), 0), dtype=np.int64)
    return drafts, torch.ones_like(reqs)[:, None]


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stack rows of at least one number; shorter ones repeat their first number."""
    width = max(map(len, rows))
    return np.stack(
        [np.append(row, np.repeat(row[:1], width - len(row))) for row in rows]
    )


# Without a penalty it does not matter what is penalised.
NOTHING_SEEN = SeenTokens(np.zeros(1, dtype=np.int64))
