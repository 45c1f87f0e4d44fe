"""How the rows of the support matrix are tested."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MAX_MODEL_LEN = 320
DEPTH = 4
HERE = "tests/engine/test_support_matrix.py"


class Outcome(Enum):
    """What happens when somebody uses a feature and draft trees together."""

    TREE = "drafts trees"
    PLAIN = "decodes plainly"
    REFUSED = "refused at start-up"
    REFUSED_BY_VLLM = "refused by vLLM"
    REFUSED_REQUEST = "refused for the request"


@dataclass(frozen=True)
class Same:
    """Greedy requests that must answer as without trees, token for token.

    ``params`` holds one dict per request, beside ``BASE``; ``texts`` their prompts, a
    text or a number of tokens. ``job`` goes to the engine's process (see child.py);
    a row with ``alone`` does not share its batches with other rows.
    """

    params: tuple[dict[str, Any], ...]
    texts: tuple[str | int, ...] = ()
    job: dict[str, Any] = field(default_factory=dict)
    engine: str = "usual"
    alone: bool = False
    compare: tuple[str, ...] = ("token_ids", "text", "finish_reason", "stop_reason")


@dataclass(frozen=True)
class Own:
    """A row with a test of its own, ``path::name``."""

    test: str


@dataclass(frozen=True)
class Arguments:
    """Arguments of ``vllm serve`` that are refused with a message that says so."""

    arguments: dict[str, Any]
    says: str


@dataclass(frozen=True)
class Model:
    """A target, given by its config.json, that is refused at start-up."""

    config: dict[str, Any]
    says: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A request that vLLM itself refuses under any speculative decoding."""

    params: dict[str, Any]
    says: str


@dataclass(frozen=True)
class Row:
    """One feature; ``outcome`` is that on a CPU, ``gpu`` says what differs on a GPU."""

    feature: str
    outcome: Outcome
    check: Same | Own | Arguments | Model | Request
    note: str = ""
    gpu: str = "same"


BASE: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}
LONG_TEXT = 20 * (
    "The ferry left the harbour before sunrise with eleven passengers on board. "
    "Its captain noted the wind, the tide and the names of all who had paid. "
)
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1 2 3 4 5 6 7 8",
)
