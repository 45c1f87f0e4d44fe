"""A suffix index as a source: what followed the last tokens earlier."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from vllm_treespec.sources.base import TextSource
from vllm_treespec.sources.continuations import Continuation, Continuations

# Occurrences that one tree is made of: the longest, and of those the latest. Frequent
# tokens occur so often that only the latest places are compared any further.
MAX_OCCURRENCES = 32
MAX_PLACES = 1024
END = -1
NO_PLACES = np.empty(0, dtype=np.int64)


class SuffixIndex(TextSource):
    """Finds what followed the last tokens earlier (after arXiv 2411.04975).

    Looked up are the request's prompt and output and, as far as they fit into
    ``max_cached_tokens``, the outputs of earlier requests, the latest first. Nothing is
    random, and nothing depends on the sampling parameters.
    """

    def __init__(self, depth: int, max_match: int, max_cached_tokens: int) -> None:
        """Take the tokens to follow, the longest match and the cache's size."""
        self.depth = depth
        self.max_match = max_match
        self.cache = OutputCache(max_cached_tokens)

    def look_up(self, texts: Sequence[np.ndarray]) -> Continuations:
        """Look up the last tokens of every drafting request."""
        return Continuations([self.continuations(text) for text in texts])

    def note_texts(self, slots: np.ndarray, texts: Sequence[np.ndarray]) -> None:
        """Note new output, which other requests will draft from."""
        if not self.cache.max_tokens:
            return
        for slot, text in zip(slots.tolist(), texts, strict=True):
            self.cache.read(slot, text)

    def finish_requests(self, slots: np.ndarray) -> None:
        """Let other requests draft from these requests' outputs from now on."""
        self.cache.finish(slots)

    def continuations(self, text: np.ndarray) -> list[Continuation]:
        """What followed the best occurrences of the last tokens, best first."""
        own_ends = 1 + np.flatnonzero(text[:-1] == text[-1])[-MAX_PLACES:]
        found = occurrences(text, own_ends, text, self.max_match, self.depth)
        ends = self.cache.ends(int(text[-1]))
        if len(ends):
            cached = self.cache.text
            found += occurrences(cached, ends, text, self.max_match, self.depth)
        # Of equally long matches the request's own come first: a sort keeps order.
        found.sort(key=lambda pair: -pair[0])
        return found[:MAX_OCCURRENCES]


def occurrences(
    corpus: np.ndarray,
    ends: np.ndarray,
    text: np.ndarray,
    max_match: int,
    depth: int,
) -> list[Continuation]:
    """Find where the last tokens of ``text`` stand in ``corpus``, and what follows.

    Args:
        corpus: int [corpus_len]; ``END`` matches nothing and ends what follows.
        ends: int64 [n] ascending, where the last token alone ends there, exclusive.
        text: int [text_len], not empty.
        max_match: longest match to look for.
        depth: tokens to follow at most.

    Returns:
        pairs of the length of the match and of the tokens after it; longest matches
        first, of equally long ones the latest first.

    """
    # of matches of 1, 2, ... tokens, where they end
    by_length = [ends]
    for length in range(1, min(max_match, len(text))):
        ends = ends[np.searchsorted(ends, length, side="right") :]
        ends = ends[corpus[ends - 1 - length] == text[-1 - length]]
        if not len(ends):
            break
        by_length.append(ends)
    longest: dict[int, int] = {}
    for length in range(len(by_length), 0, -1):
        for end in by_length[length - 1][: -MAX_OCCURRENCES - 1 : -1].tolist():
            longest.setdefault(end, length)
        if len(longest) >= MAX_OCCURRENCES:
            break
    found = []
    for end, length in longest.items():
        rest = corpus[end : end + depth].tolist()
        if END in rest:
            rest = rest[: rest.index(END)]
        found.append((length, rest))
    return found[:MAX_OCCURRENCES]


@dataclass
class RunningOutput:
    """What a running request has put out so far."""

    # of the request's tokens, prompt included
    num_read: int
    token_ids: list[int] = field(default_factory=list)


class OutputCache:
    """The latest outputs of finished requests, of bounded length.

    Attributes:
        text: int64 [at most max_tokens], output after output, each ended by ``END``.

    """

    def __init__(self, max_tokens: int) -> None:
        """Take the number of tokens to keep."""
        self.max_tokens = max_tokens
        self.text = np.empty(0, dtype=np.int64)
        self.running: dict[int, RunningOutput] = {}
        # tokens before ``text`` that were dropped
        self._num_dropped = 0
        # of each token its places, ascending; dropped tokens count
        self._places: defaultdict[int, array[int]] = defaultdict(partial(array, "q"))
        # how many of these places are of dropped tokens
        self._num_old = 0

    def read(self, slot: int, text: np.ndarray) -> None:
        """Note a running request's new output; its output begins at its first root."""
        output = self.running.setdefault(slot, RunningOutput(num_read=len(text) - 1))
        output.token_ids += text[output.num_read :].tolist()
        output.num_read = len(text)

    def finish(self, slots: np.ndarray) -> None:
        """Move the outputs of the ended requests in these slots into ``text``."""
        for slot in slots.tolist():
            output = self.running.pop(slot, None)
            if output is not None:
                self._append([*output.token_ids, END])

    def ends(self, token: int) -> np.ndarray:
        """Where a token ends in ``text``, exclusive, ascending, int64 [n].

        Of frequent ones only the latest places. To look a token up takes as long in a
        long text as in a short one.
        """
        if token not in self._places:
            return NO_PLACES
        places = np.frombuffer(self._places[token], np.int64)[-MAX_PLACES:]
        first = np.searchsorted(places, self._num_dropped)
        return places[first:] + (1 - self._num_dropped)

    def _append(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the text, and drop the oldest ones."""
        self._note_places(token_ids, self._num_dropped + len(self.text))
        text = np.concatenate([self.text, token_ids])
        dropped = max(0, len(text) - self.max_tokens)
        self.text = text[dropped:]
        self._num_dropped += dropped
        self._num_old += dropped
        if self._num_old > self.max_tokens:
            self._places.clear()
            self._num_old = 0
            self._note_places(self.text.tolist(), self._num_dropped)

    def _note_places(self, token_ids: Sequence[int], first: int) -> None:
        """Note where tokens stand, the first of them at this place."""
        for place, token in enumerate(token_ids, start=first):
            self._places[token].append(place)
