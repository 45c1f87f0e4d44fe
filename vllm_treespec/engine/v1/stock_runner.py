"""Makes vLLM's V1 runner, which takes no custom logits processors beside drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.config import VllmConfig


@contextmanager
def without_processors(vllm_config: VllmConfig) -> Iterator[None]:
    """Keep custom logits processors from the stock runner, while it is made.

    Our runner adds them afterwards.
    """
    config = vllm_config.model_config
    custom, config.logits_processors = config.logits_processors, None
    try:
        yield
    finally:
        config.logits_processors = custom
