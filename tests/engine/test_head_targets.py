"""A head finds the weights that it shares in targets of several architectures."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import call

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "vocab_size": 100,
}
WITH_MLP = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {**WITH_MLP, "architectures": ["LlamaForCausalLM"]},
    "qwen2": {**WITH_MLP, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**WITH_MLP, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "opt": {
        **SIZES,
        "architectures": ["OPTForCausalLM"],
        "ffn_dim": 64,
        "word_embed_proj_dim": 64,
    },
}
CASES = [(name, tied) for name in TARGETS for tied in (True, False)]


def build(folder: Path) -> Any:
    """Build a target as an engine does, without weights of its own."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
    ).create_engine_config()
    with set_current_vllm_config(config):
        return initialize_model(vllm_config=config)


def find_weights(work: Path) -> dict[str, Any]:
    """Build every target in a process of its own; say what was found in it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    from vllm_treespec.engine.head_source import shared_weights

    store = f"file://{work}/store"
    init_distributed_environment(1, 0, store, 0, backend="gloo")
    with set_current_vllm_config(VllmConfig()):
        ensure_model_parallel_initialized(1, 1)
    found: dict[str, Any] = {}
    for name, tied in CASES:
        model = build(work / f"{name}-{tied}")
        embedding, output = shared_weights(model)
        assert embedding is not None
        assert output is not None
        inner = model.model.decoder if name == "opt" else model.model
        found[f"{name}-{tied}"] = [
            embedding is inner.embed_tokens.weight,
            output is model.lm_head.weight,
            (output is embedding) == tied,
            min(len(embedding), len(output)) >= SIZES["vocab_size"],
        ]
    try:
        shared_weights(inner.layers)
    except ValueError as error:
        found["nothing"] = str(error)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was found in each target."""
    work = tmp_path_factory.mktemp("targets")
    for name, tied in CASES:
        folder = work / f"{name}-{tied}"
        folder.mkdir()
        config = {**TARGETS[name], "model_type": name, "tie_word_embeddings": tied}
        (folder / "config.json").write_text(json.dumps(config))
    function = f"{__name__}:{find_weights.__name__}"
    return call(function, work, log=work / "log", engines=0)


@pytest.mark.parametrize("name", [f"{name}-{tied}" for name, tied in CASES])
def test_weights_are_the_targets_own(name: str, found: dict[str, Any]) -> None:
    """Red when a head copies a target's weights, or takes others than its layers'."""
    assert found[name] == [True] * 4


def test_targets_without_such_layers_are_named(found: dict[str, Any]) -> None:
    """Red when a head that shares weights starts without them."""
    assert "has 0 and 0 of them; train a head with --own-embedding" in found["nothing"]
