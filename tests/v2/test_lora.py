"""A LoRA adapter on some of a batch's requests, with draft trees on the V2 runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.lora.request import LoRARequest

from tests.engine.tiny_models import write_adapter
from tests.v2.engines import Engine, engine
from tests.v2.prompts import PARAMS, PROMPTS
from tests.v2.test_graphs import WITH_GRAPHS, rows_of_requests
from tests.v2.test_trees import INDEX, accepted

NUM_TOKENS = 8
# fewer nodes than a graph has rows
SPEC = {**INDEX, "num_drafts": 5}
# max_loras: vLLM's CPU kernels read the last slot for requests without an adapter
ARGUMENTS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def answers(running: Engine, adapter: LoRARequest) -> list[list[int]]:
    """Answer two prompts with the adapter and one of them without, in one batch."""
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
    adapters = [adapter, None, adapter]
    return running.generate(prompts, PARAMS["sampled"], NUM_TOKENS, adapters)


def noting(running: Engine, sizes: list[tuple[int, int, int]]) -> Callable[..., Any]:
    """Note of how many rows adapters are named, rows of logits, and nodes."""
    stock = running.runner.lora_state.make_lora_inputs

    def make_lora_inputs(*args: Any) -> Any:
        inputs, batch = stock(*args), running.runner.decoder.batch
        nodes = int((1 + batch.num_drafts).sum())
        sizes.append((len(inputs[0]), int(batch.num_rows.sum()), nodes))
        return inputs

    return make_lora_inputs


def test_adapter(target: str, tmp_path: Path) -> None:
    """Red when an adapter reaches wrong rows of a tree, or of its logits."""
    sizes: list[tuple[int, int, int]] = []
    folder = write_adapter(Path(target), tmp_path, lm_head=True)
    adapter = LoRARequest("adapter", 1, folder)
    with engine(target, **ARGUMENTS) as plain:
        expected = answers(plain, adapter)
    assert expected[0] != expected[1], "the adapter must matter"
    with engine(target, SPEC, **ARGUMENTS, **WITH_GRAPHS) as running:
        with patch.object(
            running.runner.lora_state, "make_lora_inputs", noting(running, sizes)
        ):
            for _ in range(2):
                assert answers(running, adapter) == expected
        assert all(named == rows for named, rows, _ in sizes)
        assert any(rows > nodes for _, rows, nodes in sizes), "no batch was filled"
        assert accepted(running) > NUM_TOKENS
        assert rows_of_requests() - {1}, "no tree ran in a graph"
