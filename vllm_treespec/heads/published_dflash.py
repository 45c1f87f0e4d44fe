"""The ``config.json`` of published DFlash heads: which form it is, and what it says.

Sources of the forms: github.com/z-lab/dflash (DFlash, DFlash2),
github.com/hao-ai-lab/JetSpec, github.com/deepseek-ai/DeepSpec (DSpark),
github.com/sgl-project/SpecForge and github.com/vllm-project/speculators, as vLLM 0.33
reads them.

``target_layer_ids`` counts the layer that ends: layer L is ``hidden_states[L + 1]`` of
transformers, the state before layer L + 1. speculators' ``aux_hidden_state_layer_ids``
counts the layer that follows, as we do. A block is causal where ``is_causal`` or
``dflash_config.causal`` (vLLM), or ``dflash_config.causal_head`` (JetSpec), says so.
Else it is causal in the layers with windows that ``layer_types`` names, and in no
others; speculators' ``sliding_window_non_causal`` is of layers with windows alone.
Logits are scaled, then capped. DSpark's confidence head is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from vllm_treespec.heads.checkpoint import (
    MASK_FILE,
    WEIGHTS,
    Checkpoint,
    not_a_head,
    validated,
)
from vllm_treespec.heads.config import DFlashHeadConfig, HeadError, Size
from vllm_treespec.heads.published import (
    FIRST_LAYER,
    SLIDING,
    Flag,
    LayerIds,
    PublishedDecoder,
    check_combined,
    decoder_fields,
    of_speculators,
    plain_shapes,
    without_nulls,
)

SPECULATORS_KINDS = ("dflash", "dflash2", "dspark")
# Whether the root's row predicts, where the file does not say it.
ARCHITECTURES = {
    "DFlashDraftModel": False,
    "DFlash2DraftModel": False,
    "DSparkDraftModel": True,
    "Qwen3DSparkModel": True,
}
# Key -> what is supported of it; a head without the key is supported.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "attention_mode": ("gqa",),
    "markov_head_type": ("vanilla",),
    "projector_type": ("dflash", "dflash2", "dspark"),
    "shift_label": (False,),
}
# Keys that we call so, too.
SAME = {
    *("block_size", "mask_token_id", "markov_rank", "selector_rank"),
    *("selector_top_k", "conv_kernel_size", "conv_group_size"),
}


class PublishedDFlash(PublishedDecoder):
    """The keys of a published ``config.json`` that are read, of all forms."""

    model_type: Literal["llama", "mistral", "mixtral", "qwen2", "qwen3"] = "qwen3"
    architectures: tuple[str, ...] = ("DFlashDraftModel",)
    num_hidden_layers: Size
    max_position_embeddings: Size = 32_768
    rope_theta: float = Field(default=1_000_000.0, gt=0)
    block_size: Size
    mask_token_id: NonNegativeInt
    target_layer_ids: LayerIds | None = None
    aux_hidden_state_layer_ids: LayerIds | None = None
    num_target_layers: Size | None = None
    sample_from_anchor: Flag | None = None
    is_causal: Flag | None = None
    causal: Flag | None = None
    causal_head: Flag | None = None
    use_swa: Flag = False
    swa_window_size: Size | None = None
    use_sliding_window: Flag | None = None
    sliding_window: NonNegativeInt | None = None
    sliding_window_non_causal: Flag | None = None
    markov_rank: NonNegativeInt = 0
    selector_rank: NonNegativeInt = 0
    selector_top_k: NonNegativeInt = 0
    conv_kernel_size: NonNegativeInt = 0
    conv_group_size: NonNegativeInt = 0
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None


def is_dflash(config: dict[str, Any]) -> bool:
    """Whether a published ``config.json`` is a DFlash head's, not an EAGLE head's."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return kind in SPECULATORS_KINDS
    return "dflash_config" in config or "block_size" in config


def read_published_dflash(config: dict[str, Any], path: Path) -> PublishedDFlash:
    """Read what a published ``config.json`` says, of whichever form.

    Raises:
        HeadError: it is of a form that is not supported, or of none.

    """
    flat = without_nulls(_flattened(config, path))
    for key, supported in SUPPORTED.items():
        if key not in flat or flat[key] in supported:
            continue
        if key == "markov_head_type" and not flat.get("markov_rank"):
            continue
        known = " or ".join(map(repr, supported)) or "a head without it"
        raise HeadError(
            f"{path}: heads with {key!r} {flat[key]!r} are not supported, only "
            f"{known}; use another head"
        )
    return validated(PublishedDFlash, flat, path)


def _flattened(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """All keys side by side; vLLM prefers those of ``dflash_config``, too."""
    if config.get("speculators_model_type") is None:
        section = config.get("dflash_config") or {}
        if not isinstance(section, dict):
            raise not_a_head(path, "'dflash_config' is no JSON object")
        return config | without_nulls(section)
    flat = of_speculators(
        config, path, sample_from_anchor=False, sliding_window_non_causal=False
    )
    # names of training classes, and what the target's layer is
    dropped = ("architectures", "is_causal")
    return {key: value for key, value in flat.items() if key not in dropped}


def dflash_config(said: PublishedDFlash, checkpoint: Checkpoint) -> DFlashHeadConfig:
    """Translate what a published ``config.json`` says.

    Raises:
        HeadError: it says something that is not supported, or the weights do not fit.

    """
    path = checkpoint.folder / "config.json"
    shapes = plain_shapes(checkpoint)
    _check_mask(checkpoint.folder, "mask_embedding" in shapes)
    config: dict[str, Any] = {
        **decoder_fields(said, shapes, path),
        "num_layers": said.num_hidden_layers,
        "target_hidden_size": said.target_hidden_size or said.hidden_size,
        "target_layers": _target_layers(said, path),
        "o_bias": f"{FIRST_LAYER}self_attn.o_proj.bias" in shapes,
        "own_mask": "mask_embedding" in shapes,
        "sample_from_anchor": _samples_from_anchor(said, path),
        **_windows_and_causality(said, path),
        **said.model_dump(include=SAME),
        "input_scale": said.input_embedding_scale,
        "output_scale": said.output_multiplier * said.logit_scale,
        "output_softcap": said.final_logit_softcapping or None,
    }
    norm = shapes.get(f"{FIRST_LAYER}self_attn.q_norm.weight")
    if said.head_dim is None and norm is not None:
        config["head_size"] = norm[0]
    if "treespec" not in said.model_fields_set:
        rows = said.block_size - (not config["sample_from_anchor"])
        config["depth"] = max(rows, 1)
    if config["num_hot_tokens"] and said.selector_rank:
        raise HeadError(
            f"{path}: a candidate selector drafts the whole vocabulary, and "
            f"'draft_vocab_size' is {said.draft_vocab_size}; use another head"
        )
    count, size = len(config["target_layers"]), config["target_hidden_size"]
    shape = shapes.get("fc.weight", (count * size,))
    check_combined(shape, count, size, "target_layer_ids", path)
    return validated(DFlashHeadConfig, config, path)


def _check_mask(folder: Path, has_mask: bool) -> None:
    """Check that the mask's embedding is no pickled file of its own.

    Raises:
        HeadError: naming it.

    """
    path = folder / MASK_FILE
    if path.is_file() and not has_mask:
        raise HeadError(
            f"{path} is not read, for weights come from safetensors alone; write it "
            f"into {WEIGHTS} as the tensor 'mask_embedding'"
        )


def _target_layers(said: PublishedDFlash, path: Path) -> tuple[int, ...]:
    """The target's layers before which hidden states are read."""
    if said.aux_hidden_state_layer_ids is not None:
        return said.aux_hidden_state_layer_ids
    ids = said.target_layer_ids
    if ids is None and said.num_target_layers is not None:
        ids = _spread(said.num_target_layers, said.num_hidden_layers)
    if not ids:
        raise not_a_head(path, "'target_layer_ids' is missing")
    return tuple(layer + 1 for layer in ids)


def _spread(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Published numbers of layers where a file names none: the authors' default."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + number * step) for number in range(num_layers))


def _samples_from_anchor(said: PublishedDFlash, path: Path) -> bool:
    """Whether the root's row predicts the first level."""
    known = [name for name in said.architectures if name in ARCHITECTURES]
    if not known:
        raise HeadError(
            f"{path}: heads of the architecture {', '.join(said.architectures)} are "
            f"not supported; use one of {', '.join(ARCHITECTURES)}"
        )
    if said.sample_from_anchor is not None:
        return said.sample_from_anchor
    if said.markov_rank and not ARCHITECTURES[known[0]]:
        raise HeadError(
            f"{path}: a head of the architecture {known[0]} with 'markov_rank' "
            f"{said.markov_rank} must say whether the root's row predicts; add "
            f"'sample_from_anchor'"
        )
    return ARCHITECTURES[known[0]]


def _windows_and_causality(said: PublishedDFlash, path: Path) -> dict[str, Any]:
    """What each layer sees of the context and of the block."""
    given = (said.is_causal, said.causal, said.causal_head)
    said_causal = next((one for one in given if one is not None), None)
    causal = bool(said_causal)
    layers = _sliding_layers(said, path)
    if not layers:
        return {"causal": causal}
    window = said.swa_window_size
    if window is None and said.use_sliding_window is not False:
        window = said.sliding_window
    if not window:
        raise HeadError(
            f"{path}: the layers {list(layers)} have a sliding window of unknown size; "
            f"add 'sliding_window' and 'use_sliding_window' true, or 'swa_window_size'"
        )
    sliding_causal = SLIDING in said.layer_types
    if said_causal is not None:
        sliding_causal = said_causal
    elif said.sliding_window_non_causal is not None:
        sliding_causal = not said.sliding_window_non_causal
    return {
        "causal": sliding_causal if len(layers) == said.num_hidden_layers else causal,
        "sliding_layers": layers,
        "sliding_window": window,
        "sliding_causal": sliding_causal,
    }


def _sliding_layers(said: PublishedDFlash, path: Path) -> tuple[int, ...]:
    """Layers with a window: all by ``use_swa``, if ``layer_types`` names none."""
    count = said.num_hidden_layers
    if said.use_sliding_window and not said.layer_types:
        raise HeadError(
            f"{path}: 'use_sliding_window' does not say which layers have a sliding "
            f"window; add 'layer_types'"
        )
    kinds = said.layer_types[:count] or ("full_attention",) * count
    if len(kinds) < count or not {*kinds} <= {"full_attention", SLIDING}:
        raise HeadError(
            f"{path}: 'layer_types' {list(kinds)} must name {count} layers of "
            f"'full_attention' or {SLIDING!r}; use another head"
        )
    layers = tuple(number for number, kind in enumerate(kinds) if kind == SLIDING)
    return layers or (tuple(range(count)) if said.use_swa else ())
