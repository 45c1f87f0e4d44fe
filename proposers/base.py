"""What every proposer is and gets; the registry the spec-config's method selects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from vllm_treespec.core.sampling import SamplingTensors
from vllm_treespec.core.sizes import TreeSizes
from vllm_treespec.core.tree import TreeBatch


class DraftModel(Protocol):
    """A draft model that grows the trees of a batch, one forward per level."""

    @property
    def vocabulary(self) -> Tensor | None:
        """Token of every column of the logits, int64 [draft_vocab_size], ascending.

        None stands for the target's whole vocabulary.
        """

    def root_logits(self) -> Tensor:
        """Logits after the committed tokens, [num_reqs, draft_vocab_size]."""

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level and return the logits after each of its nodes.

        Args:
            token_ids: int64 [num_reqs, width], of the target's vocabulary.
            parents: int64 [num_reqs, width], index within the level read before
                (0 for the level right below the root).

        Returns:
            [num_reqs, width, draft_vocab_size].

        """


def tokens_of(columns: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Tokens of the target's vocabulary that columns stand for, int64, same shape."""
    return columns if vocabulary is None else vocabulary.take(columns)


@dataclass(frozen=True)
class ProposerInputs:
    """Everything a proposer may draw from, for the requests that want drafts."""

    # int64 [num_reqs], the last committed token of each request
    root_token_ids: Tensor
    sampling: SamplingTensors
    # float64 [num_reqs, Proposer.sizes.num_uniforms] in [0, 1)
    uniforms: Tensor
    # as many as Proposer.num_draft_models
    draft_models: Sequence[DraftModel] = ()
    # committed tokens, root included, int64 [num_reqs, max_len], and how many of them
    # are filled, int64 [num_reqs]; only if the proposer asks
    token_ids: Tensor | None = None
    num_tokens: Tensor | None = None
    # who the requests are, the same name in every step
    req_ids: Sequence[str] | None = None


class Proposer(ABC):
    """Draws a draft tree for every request of a batch.

    Attributes:
        name: the spec-config's ``method``.
        num_draft_models: how many draft models it drives.
        needs_token_ids: whether it reads the committed tokens.
        sizes: how large its trees become.
        num_candidates: tokens that a tree is made of before equal ones are merged;
            None: its nodes are all there is.

    """

    name: ClassVar[str]
    num_draft_models: int = 1
    needs_token_ids: ClassVar[bool] = False
    num_candidates: int | None = None
    sizes: TreeSizes

    @abstractmethod
    def propose(self, inputs: ProposerInputs) -> TreeBatch:
        """Draw one tree per request."""

    def forget(self, req_ids: Iterable[str]) -> None:  # noqa: B027 a default
        """Learn that these requests are finished; unknown ones are no error."""


PROPOSERS: dict[str, type[Proposer]] = {}


def register_proposer(name: str) -> Callable[[type[Proposer]], type[Proposer]]:
    """Register a proposer under the name that users write as ``method``.

    Raises:
        ValueError: when the name is taken.

    """

    def add(cls: type[Proposer]) -> type[Proposer]:
        if name in PROPOSERS:
            raise ValueError(f"a proposer named {name!r} is already registered")
        cls.name = name
        PROPOSERS[name] = cls
        return cls

    return add
