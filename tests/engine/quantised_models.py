"""Small models with quantised weights, in the formats that deployments use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP_SIZE = 32
# int4 values of one int32
PACKED = 8
# AWQ's order of the eight values of an int32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_quantised(source: str, folder: Path, form: str, output: bool = False) -> str:
    """Write a model with the quantised weights of another.

    Args:
        source: folder of a Llama.
        folder: gets the model.
        form: a key of ``FORMATS``.
        output: whether the output layer is quantised, too; the embedding never is.

    Returns:
        the folder.

    """
    quantise, settings = FORMATS[form]
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(Path(source) / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") or (output and layer == "lm_head"):
            parts = quantise(weight.float())
            tensors |= {f"{layer}.{part}": t.contiguous() for part, t in parts.items()}
        else:
            tensors[name] = weight
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((Path(source) / "config.json").read_text())
    config["quantization_config"] = settings | (
        {"lm_head": output} if "bits" in settings else {} if output else KEEP_OUTPUT
    )
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def int8(weight: Tensor) -> dict[str, Tensor]:
    """One scale an output channel."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def fp8(weight: Tensor) -> dict[str, Tensor]:
    """One scale an output channel."""
    scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values from 0 to 15 around 8, [rows, columns], and scales, [rows, groups]."""
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    scale = groups.abs().amax(2) / 7
    values = (groups / scale[..., None]).round() + 8
    return values.flatten(1).to(torch.int32), scale


def packed(values: Tensor) -> Tensor:
    """Eight values of the last dimension in one int32, the first in the low bits."""
    shifts = 4 * torch.arange(PACKED, dtype=torch.int32)
    parts = values.to(torch.int32).unflatten(-1, (-1, PACKED)) << shifts
    return parts.sum(-1, dtype=torch.int32)


def packed_int4(weight: Tensor) -> dict[str, Tensor]:
    """Int4 as compressed-tensors packs it: along the inputs."""
    values, scale = int4(weight)
    return {
        "weight_packed": packed(values),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def gptq(weight: Tensor) -> dict[str, Tensor]:
    """Int4 as GPTQ packs it: along the inputs, transposed."""
    values, scale = int4(weight)
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP_SIZE
    return {
        "qweight": packed(values).T,
        "qzeros": packed(torch.full_like(scale.T, 7)),
        "scales": scale.T.half(),
        "g_idx": groups,
    }


def awq(weight: Tensor) -> dict[str, Tensor]:
    """Int4 as AWQ packs it: along the outputs, in an order of its own."""
    values, scale = int4(weight)
    in_order = values.T.unflatten(1, (-1, PACKED))[..., AWQ_ORDER].flatten(1)
    return {
        "qweight": packed(in_order),
        "qzeros": packed(torch.full_like(scale.T, 8)),
        "scales": scale.T.half(),
    }


def compressed(form: str, weights: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    """The ``quantization_config`` of compressed-tensors."""
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
    }
    if inputs:
        group["input_activations"] = {"symmetric": True, "dynamic": True, **inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def eight_bits(kind: str) -> dict[str, Any]:
    """The same for weights by channel and inputs by token."""
    bits = {"num_bits": 8, "type": kind}
    weights = {**bits, "strategy": "channel"}
    return compressed(f"{kind}-quantized", weights, **bits, strategy="token")


KEEP_OUTPUT = {"ignore": ["lm_head"]}
FOUR_BITS = {"bits": 4, "group_size": GROUP_SIZE}
FORMATS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "int8": (int8, eight_bits("int")),
    "fp8": (fp8, eight_bits("float")),
    "int4": (
        packed_int4,
        compressed(
            "pack-quantized",
            {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": GROUP_SIZE,
            },
        ),
    ),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "desc_act": False, "sym": True, **FOUR_BITS},
    ),
    "awq": (
        awq,
        {"quant_method": "awq", "zero_point": True, "version": "gemm", **FOUR_BITS},
    ),
}
