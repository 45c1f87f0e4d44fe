"""A LoRA adapter on some of a batch's requests, with draft trees on the V2 runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from tests.engine.tiny_models import write_adapter
from tests.v2.engines import Engine, engine
from tests.v2.prompts import PARAMS, PROMPTS
from tests.v2.test_trees import INDEX, accepted

NUM_TOKENS = 8
# max_loras: vLLM's CPU kernels read the last slot for requests without an adapter
ARGUMENTS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def answers(running: Engine, adapter: LoRARequest) -> list[list[int]]:
    """Answer two prompts with the adapter and one of them without, in one batch."""
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
    adapters = [None, adapter, adapter]
    return running.generate(prompts, PARAMS["sampled"], NUM_TOKENS, adapters)


def test_adapter(target: str, tmp_path: Path) -> None:
    """Red when an adapter reaches wrong rows of a tree, or of its logits."""
    folder = write_adapter(Path(target), tmp_path, lm_head=True)
    adapter = LoRARequest("adapter", 1, folder)
    with engine(target, **ARGUMENTS) as plain:
        expected = answers(plain, adapter)
    assert expected[0] != expected[1], "the adapter must matter"
    with engine(target, INDEX, **ARGUMENTS) as running:
        for _ in range(2):
            assert answers(running, adapter) == expected
        assert accepted(running) > NUM_TOKENS
