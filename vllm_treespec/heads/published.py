"""The ``config.json`` of published EAGLE heads: which form it is, and what it says.

Sources of the forms: github.com/SafeAILab/EAGLE, github.com/sgl-project/SpecForge and
github.com/vllm-project/speculators, as vLLM 0.32 reads them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from transformers import LlamaConfig

from vllm_treespec.heads.checkpoint import Checkpoint, not_a_head, validated
from vllm_treespec.heads.config import (
    EagleHeadConfig,
    HeadError,
    RankAccuracies,
    Size,
)

logger = logging.getLogger(__name__)

# Those whose angles do not depend on how long the text has become.
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
FIRST_LAYER = "layers.0."
SLIDING = "sliding_attention"
# EAGLE-3's only layer, as SafeAILab names it.
MIDDLE_LAYER = "midlayer."
# What layer 0 of EAGLE-3 has and that of EAGLE-1 has not.
VERSION_3_KEY = f"{FIRST_LAYER}hidden_norm.weight"

EAGLE_1_KEYS = {"fc.weight", f"{FIRST_LAYER}self_attn.q_proj.weight"}
# What speculators' form says outside of its ``transformer_layer_config``, of all kinds.
SPECULATORS_KEYS = (
    *("draft_vocab_size", "target_hidden_size", "speculators_config", "treespec"),
    # EAGLE-3
    *("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"),
    "eagle_aux_hidden_state_layer_ids",
    # DFlash, DSpark, DFlash2
    *("block_size", "mask_token_id", "aux_hidden_state_layer_ids"),
    *("sample_from_anchor", "sliding_window_non_causal"),
    *("markov_rank", "markov_head_type", "conv_kernel_size", "conv_group_size"),
    *("selector_rank", "selector_top_k", "projector_type", "shift_label"),
    *("quantization_config", "use_aux_hidden_state"),
)

Flag = Annotated[bool, Field(strict=True)]
LayerIds = tuple[Annotated[int, Field(strict=True, ge=0)], ...]


class EagleSection(BaseModel):
    """``eagle_config``, which SpecForge and vLLM know."""

    eagle_aux_hidden_state_layer_ids: LayerIds | None = None
    use_aux_hidden_state: bool = True
    norm_before_fc: bool | None = None


class OurSection(BaseModel):
    """``treespec``: what we write beside a head that we train."""

    model_config = ConfigDict(extra="forbid")

    rank_accuracies: RankAccuracies = ()
    depth: Size = 5


class Verifier(BaseModel):
    """``verifier``: the target, in speculators' form."""

    architectures: tuple[str, ...] = ()


class SpeculatorsSection(BaseModel):
    """``speculators_config``."""

    verifier: Verifier = Verifier()


class PublishedDecoder(BaseModel):
    """The keys of a published ``config.json`` that are read, of all kinds and forms."""

    model_type: Literal["llama", "mistral", "mixtral", "qwen2", "qwen3"] = "llama"
    hidden_act: Literal["silu"] = "silu"
    hidden_size: Size
    target_hidden_size: Size | None = None
    vocab_size: Size
    draft_vocab_size: Size | None = None
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    max_position_embeddings: Size = 2048
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: dict[str, Any] = {}
    rope_parameters: dict[str, Any] = {}
    partial_rotary_factor: float = 1.0
    layer_types: tuple[str, ...] = ()
    speculators_config: SpeculatorsSection = SpeculatorsSection()
    treespec: OurSection = OurSection()


class PublishedConfig(PublishedDecoder):
    """Those of an EAGLE head."""

    norm_before_residual: Flag = False
    norm_before_fc: Flag = False
    fc_norm: Flag = False
    norm_output: Flag = False
    eagle_aux_hidden_state_layer_ids: LayerIds | None = None
    eagle_config: EagleSection = EagleSection()


def plain_key(key: str) -> str:
    """The key of a tensor, with the first layer under its one name."""
    return key.replace(MIDDLE_LAYER, FIRST_LAYER, 1)


def read_published(config: dict[str, Any], path: Path) -> PublishedConfig:
    """Read what a published ``config.json`` says, of whichever form.

    Raises:
        HeadError: it is of a form that is not supported, or of none.

    """
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise HeadError(
            f"{path}: heads of 'speculators_model_type' {kind!r} are not supported; "
            f"use one of type 'eagle3', 'dflash', 'dflash2' or 'dspark'"
        )
    if kind is not None:
        # False is everybody else's default
        config = of_speculators(config, path, norm_before_residual=True)
    return validated(PublishedConfig, without_nulls(config), path)


def without_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that say something: null says as much as leaving a key out."""
    return {key: value for key, value in config.items() if value is not None}


def of_speculators(
    config: dict[str, Any], path: Path, **defaults: bool
) -> dict[str, Any]:
    """All keys of speculators' form side by side, as vLLM flattens it.

    Raises:
        HeadError: it has no layer.

    """
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise not_a_head(path, "'transformer_layer_config' is missing")
    own = {key: config[key] for key in SPECULATORS_KEYS if key in config}
    return layer | defaults | own


def is_eagle(shapes: Iterable[str]) -> bool:
    """Whether these are the names of an EAGLE head's tensors."""
    keys = set(map(plain_key, shapes))
    return VERSION_3_KEY in keys or keys >= EAGLE_1_KEYS


def eagle_config(said: PublishedConfig, checkpoint: Checkpoint) -> EagleHeadConfig:
    """Translate what a published ``config.json`` says.

    Keys of the file decide where the configuration is not to be relied on: biases,
    norms of q and k, number of layers.

    Raises:
        HeadError: it says something that is not supported, or the weights do not fit.

    """
    path = checkpoint.folder / "config.json"
    shapes = plain_shapes(checkpoint)
    if not is_eagle(shapes):
        raise not_a_head(path, "the weights beside it are not those of an EAGLE head")
    if SLIDING in said.layer_types:
        raise HeadError(
            f"{path}: EAGLE heads with {SLIDING!r} in 'layer_types' are not supported; "
            f"use another head"
        )
    common = decoder_fields(said, shapes, path)
    common["num_layers"] = _num_layers(shapes)
    common["qk_norm"] = f"{FIRST_LAYER}self_attn.q_norm.weight" in shapes
    if VERSION_3_KEY in shapes:
        common |= {"version": 3, **_eagle_3(said, shapes, path)}
    else:
        common |= {"version": 1, **_eagle_1(said, shapes)}
    return validated(EagleHeadConfig, common, path)


def plain_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's tensors, with the first layer under its one name.

    Raises:
        HeadError: a tensor has no numbers.

    """
    shapes = {}
    for key, (shape, _) in checkpoint.headers.items():
        if 0 in shape or not shape:
            path = checkpoint.folder / "config.json"
            raise not_a_head(path, f"'{key}' beside it has the shape {list(shape)}")
        shapes[plain_key(key)] = shape
    return shapes


def decoder_fields(
    said: PublishedDecoder, shapes: dict[str, tuple[int, ...]], path: Path
) -> dict[str, Any]:
    """Fields of ``DecoderHeadConfig`` that all published forms say alike.

    Raises:
        HeadError: it says something that is not supported.

    """
    draft_size = _draft_vocab_size(said, shapes, path)
    return {
        "hidden_size": said.hidden_size,
        "vocab_size": said.vocab_size,
        "num_hot_tokens": draft_size if draft_size < said.vocab_size else None,
        "depth": said.treespec.depth,
        "rank_accuracies": said.treespec.rank_accuracies,
        "share_embedding": "embed_tokens.weight" not in shapes,
        "share_output": "lm_head.weight" not in shapes,
        "num_heads": said.num_attention_heads,
        "num_kv_heads": said.num_key_value_heads or said.num_attention_heads,
        "head_size": said.head_dim or said.hidden_size // said.num_attention_heads,
        "intermediate_size": said.intermediate_size,
        "norm_eps": said.rms_norm_eps,
        "rope": _rope(said, path),
        "max_positions": said.max_position_embeddings,
        "qkv_bias": f"{FIRST_LAYER}self_attn.q_proj.bias" in shapes,
        "verifier": said.speculators_config.verifier.architectures,
    }


def _eagle_1(said: PublishedConfig, shapes: dict[str, Any]) -> dict[str, Any]:
    """What EAGLE-1 and its variants have of their own."""
    norms = {
        "embedding": "embed_layernorm.weight",
        "fused": "hidden_layernorm.weight",
        "output": "lm_head_layernorm.weight",
    }
    return {
        "target_hidden_size": said.hidden_size,
        "fuse_bias": "fc.bias" in shapes,
        "norms": tuple(name for name, key in norms.items() if key in shapes),
    }


def _eagle_3(
    said: PublishedConfig, shapes: dict[str, Any], path: Path
) -> dict[str, Any]:
    """What EAGLE-3 has of its own."""
    size = said.target_hidden_size or said.hidden_size
    ours: dict[str, Any] = {
        "target_hidden_size": size,
        "norm_before_residual": said.norm_before_residual,
        "norm_output": said.norm_output,
    }
    if not said.eagle_config.use_aux_hidden_state:
        if size != said.hidden_size:
            raise HeadError(
                f"{path}: without 'use_aux_hidden_state' the target's hidden states "
                f"are the features, and 'target_hidden_size' {size} is not "
                f"'hidden_size' {said.hidden_size}"
            )
        return ours
    layers = _layer_ids(said)
    num_layers = 3 if layers is None else len(layers)
    key = "eagle_aux_hidden_state_layer_ids"
    check_combined(shapes.get("fc.weight", (0,)), num_layers, size, key, path)
    before = said.eagle_config.norm_before_fc
    return ours | {
        "target_layers": layers,
        "combines": True,
        "norm_layers": said.fc_norm,
        "norm_before_combine": said.norm_before_fc if before is None else before,
    }


def check_combined(
    shape: tuple[int, ...], num_layers: int, size: int, key: str, path: Path
) -> None:
    """Check that ``fc``, of this shape, reads the hidden states that ``key`` names.

    Raises:
        HeadError: it reads more, or fewer.

    """
    if shape[-1] != num_layers * size:
        raise HeadError(
            f"{path}: 'fc.weight' reads {shape[-1]} numbers, which are not "
            f"{num_layers} hidden states of {size}; correct '{key}' or "
            f"'target_hidden_size'"
        )


def _layer_ids(said: PublishedConfig) -> tuple[int, ...] | None:
    """The target's layers before which hidden states are read; None: not said.

    vLLM counts the layer that follows. SpecForge counts the layer that ends, and its
    first is 1: 1 is added to its numbers.
    """
    if said.eagle_aux_hidden_state_layer_ids:
        return said.eagle_aux_hidden_state_layer_ids
    layers = said.eagle_config.eagle_aux_hidden_state_layer_ids or None
    if layers and layers[0] == 1:
        shifted = tuple(layer + 1 for layer in layers)
        logger.info("Layers %s are SpecForge's numbers of %s", layers, shifted)
        return shifted
    return layers


def _draft_vocab_size(
    said: PublishedDecoder, shapes: dict[str, Any], path: Path
) -> int:
    """Check how many tokens the head can draft."""
    size = said.draft_vocab_size or shapes.get("d2t", (said.vocab_size,))[0]
    if size > said.vocab_size:
        raise HeadError(
            f"{path}: 'draft_vocab_size' {size} is more than 'vocab_size' "
            f"{said.vocab_size}"
        )
    if size < said.vocab_size and "d2t" not in shapes:
        raise HeadError(
            f"{path}: 'draft_vocab_size' is {size} and 'vocab_size' "
            f"{said.vocab_size}, but the weights have no 'd2t'; get the whole head"
        )
    for key in ("d2t", "lm_head.weight"):
        rows = shapes.get(key, (size,))[0]
        if rows != size:
            raise HeadError(
                f"{path}: '{key}' has {rows} rows and 'draft_vocab_size' is {size}; "
                f"they must agree"
            )
    return size


def _num_layers(shapes: dict[str, Any]) -> int:
    """Number of decoder layers; some files give the target's as their own."""
    numbers = [re.match(r"layers\.(\d+)\.", key) for key in shapes]
    return max((int(number[1]) for number in numbers if number), default=0) + 1


def _rope(said: PublishedDecoder, path: Path) -> dict[str, Any]:
    """Rotary embeddings as transformers' ``rope_parameters``."""
    given = dict(said.rope_parameters or said.rope_scaling)
    old_kind = given.pop("type", None)
    kind = given.pop("rope_type", None) or old_kind or "default"
    part = given.get("partial_rotary_factor", said.partial_rotary_factor)
    nested = any(isinstance(value, dict) for value in given.values())
    if kind not in ROPE_KINDS or part != 1 or nested:
        raise HeadError(
            f"{path}: rotary embeddings of type {kind!r} with partial_rotary_factor "
            f"{part} are not supported; supported are {', '.join(ROPE_KINDS)}, one for "
            f"all layers, with partial_rotary_factor 1"
        )
    config = LlamaConfig()
    config.max_position_embeddings = said.max_position_embeddings
    config.rope_parameters = {"rope_type": kind, "rope_theta": said.rope_theta}
    config.rope_parameters |= {k: v for k, v in given.items() if v is not None}
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        raise not_a_head(path, " ".join(str(error).split())) from None
    parameters: dict[str, Any] = config.rope_parameters
    return parameters
