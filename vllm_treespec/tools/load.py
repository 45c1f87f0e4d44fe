"""Whole models of transformers, or one message."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from vllm_treespec.config import SpecConfigError
from vllm_treespec.config.reading import read_config
from vllm_treespec.heads.weights import first_not_finite


def check_model(what: str, model: str) -> None:
    """Check that there is a model, before engines start; no weights are fetched.

    Raises:
        SpecConfigError: there is no such model.

    """
    read_config(what, model, _config_dict)


def _config_dict(model: str) -> dict[str, Any]:
    """What a model's config.json holds; vLLM knows types that transformers does not."""
    found: dict[str, Any]
    found, _ = PretrainedConfig.get_config_dict(model)
    if not found:
        raise OSError("there is nothing in it")
    return found


def load_model(what: str, model: str, **options: Any) -> PreTrainedModel:
    """Load a causal language model, for evaluation; ``what`` names it in messages.

    Raises:
        SpecConfigError: it cannot be read, lacks a weight, or has weights that are NaN
            or infinite.

    """
    read_config(what, model, AutoConfig.from_pretrained)
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            model, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise SpecConfigError(
            f"{what}: the weights of {model} cannot be read ({reason}); copy or save "
            f"the model again"
        ) from None
    if lost := sorted(info["missing_keys"]):
        raise SpecConfigError(
            f"{what}: {model} lacks the weights {', '.join(lost[:3])}"
            f"{' and others' if lost[3:] else ''}; copy or save the model again"
        )
    if name := first_not_finite(dict(loaded.named_parameters())):
        raise SpecConfigError(
            f"{what}: {name} of {model} holds NaN or infinity; copy or train the model "
            f"again"
        )
    made: PreTrainedModel = loaded.eval()
    return made
