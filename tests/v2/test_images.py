"""Targets that take images on the V2 runner; their positions have three axes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.engine.child import generate
from tests.engine.image_models import PLACE, do_without_torchvision, write_qwen
from tests.v2.engines import Engine, engine
from tests.v2.prompts import PARAMS, PROMPTS
from tests.v2.test_trees import INDEX, accepted
from vllm_treespec.batch.views import TargetInputs
from vllm_treespec.engine.v2.axes import InputsWithAxes

NUM_TOKENS = 8
PLACES = PLACE["qwen2.5-vl"]
# one head of the KV cache, see ``conftest.SIZES``
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1}
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
    "enable_prefix_caching": True,
}
JOB: dict[str, Any] = {
    "prompts": [
        PROMPTS[1],
        [*PROMPTS[0], *PLACES, *PROMPTS[1]],
        [*PROMPTS[0], *PLACES, *PROMPTS[1]],
        [*PLACES, *PROMPTS[0], *PLACES, *PROMPTS[3]],
    ],
    "images": [[], [2], [5], [4, 8]],
    "params": {
        **PARAMS["sampled"],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "detokenize": False,
    },
    "max_in_flight": 4,
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small Qwen2.5-VL."""
    do_without_torchvision()
    folder = tmp_path_factory.mktemp("qwen")
    write_qwen(folder, **SIZES)
    return str(folder)


def answers(running: Engine) -> list[list[int]]:
    """Answer prompts with images and without, in one batch."""
    return [answer["token_ids"] for answer in generate(running.llm, JOB, None)]


def test_images(qwen: str) -> None:
    """Red when a node behind an image has another position than its token has."""
    with engine(qwen, **ARGUMENTS) as plain:
        expected = answers(plain)
    assert expected[1] != expected[2], "images must matter"
    with engine(qwen, INDEX, **ARGUMENTS) as running:
        assert answers(running) == expected
        accepted(running)
        assert answers(running) == expected
        assert accepted(running) > 2 * NUM_TOKENS
        with patch.object(InputsWithAxes, "place_nodes", TargetInputs.place_nodes):
            assert answers(running) != expected, "positions of chains must differ"
