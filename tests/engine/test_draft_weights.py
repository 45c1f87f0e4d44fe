"""Weights of draft models that do not fit their config.json are refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.processes import call
from tests.engine.quantised_models import FORMATS, write_quantised
from tests.engine.tiny_models import SIZES, write_random

LAYER = "model.layers.0.self_attn"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
Edit = Callable[[dict[str, Tensor]], object]


def narrower(name: str) -> Edit:
    """Leave out the last column of a tensor."""
    return lambda tensors: tensors.update({name: tensors[name][..., :-1].clone()})


# by the model that is changed
BROKEN: list[tuple[str, str, Edit, str]] = [
    ("tied", "embedding", lambda t: t.pop(EMBEDDING), EMBEDDING),
    ("own", "embedding", lambda t: t.pop(EMBEDDING), EMBEDDING),
    ("own", "output", lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
    ("own", "norm", lambda t: t.pop(NORM), NORM),
    ("own", "query", lambda t: t.pop(f"{LAYER}.q_proj.weight"), f"{LAYER}.qkv_proj"),
    ("own", "narrow", narrower(f"{LAYER}.o_proj.weight"), f"{LAYER}.o_proj.weight ["),
    ("own", "narrow norm", narrower(NORM), f"{NORM} [127]"),
    ("own", "surplus", lambda t: t.update(surplus=t[NORM].clone()), "'surplus'"),
    ("int8", "norm", lambda t: t.pop(NORM), NORM),
    ("int8", "key", lambda t: t.pop(f"{LAYER}.k_proj.weight"), f"{LAYER}.qkv_proj"),
    ("int8", "scale", lambda t: t.pop(f"{LAYER}.k_proj.weight_scale"), "weight_scale"),
]
WHOLE = ["tied", "own", *FORMATS]


def load_all(work: Path) -> dict[str, str]:
    """Load every folder in a process of its own; by folder what was said."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from vllm_treespec.engine.draft_weights import DraftModelLoader

    init_distributed_environment(1, 0, f"file://{work}/store", 0, backend="gloo")
    with set_current_vllm_config(VllmConfig()):
        ensure_model_parallel_initialized(1, 1)
    said = {}
    for name in WHOLE:
        folder = str(work / name)
        config = EngineArgs(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16"
        ).create_engine_config()
        for number in [None, *range(len(BROKEN))]:
            if number is not None and BROKEN[number][0] != name:
                continue
            model_config = copy(config.model_config)
            model_config.model = folder if number is None else str(work / str(number))
            with set_current_vllm_config(config), torch.device("cpu"):
                prefix = f"draft_{number}"
                model = initialize_model(vllm_config=config, prefix=prefix)
                loader = DraftModelLoader(config.load_config)
                try:
                    loader.load_weights(model, model_config)
                    said[Path(model_config.model).name] = "loaded"
                except ValueError as error:
                    said[Path(model_config.model).name] = str(error)
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What was said of every draft model."""
    work = tmp_path_factory.mktemp("drafts")
    for name in ("tied", "own"):
        config = LlamaConfig(**{**SIZES, "tie_word_embeddings": name == "tied"})
        write_random(LlamaForCausalLM(config), work / name)
    for form in FORMATS:
        write_quantised(str(work / "own"), work / form, form)
    for number, (name, _, edit, _) in enumerate(BROKEN):
        tensors = load_file(work / name / "model.safetensors")
        edit(tensors)
        (work / str(number)).mkdir()
        save_file(tensors, work / str(number) / "model.safetensors")
    function = f"{__name__}:{load_all.__name__}"
    found: dict[str, str] = call(function, work, log=work / "log", engines=0)
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_whole_draft_models_are_loaded(name: str, said: dict[str, str]) -> None:
    """Red when a draft model that has all its weights is refused."""
    assert said[name] == "loaded"


@pytest.mark.parametrize(
    ("number", "says"),
    [
        pytest.param(number, says, id=f"{name}-{what}")
        for number, (name, what, _, says) in enumerate(BROKEN)
    ],
)
def test_broken_draft_models_are_refused(
    number: int, says: str, said: dict[str, str]
) -> None:
    """Red when a draft model drafts with whatever was in memory."""
    message = said[str(number)]
    assert message.startswith("speculative_config 'model': the weights of ")
    assert f"/{number} do not fit its config.json (" in message
    assert says in message
    assert message.endswith("; copy or save the draft model again")
