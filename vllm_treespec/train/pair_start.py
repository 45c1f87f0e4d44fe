"""A fresh head that reads pairs, for a target: EAGLE's or Lyanna's."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from vllm_treespec.heads.config import EagleHeadConfig, LyannaHeadConfig
from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.heads.lyanna import LyannaHead
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.model import TargetStatistics

# Standard deviation of fresh weights, as in Llama.
_WEIGHT_STD = 0.02


def layers_to_read(number: str, num_layers: int) -> tuple[int, ...]:
    """Layers of the target that a fresh head reads.

    Args:
        number: ``three`` (EAGLE-3's choice: the inputs of a low, a middle and a high
            layer) or ``one`` (behind the final norm).
        num_layers: of the target.

    Raises:
        ValueError: the target has too few layers for three.
    """
    if number == "one":
        return (FINAL_LAYER,)
    if num_layers < 7:
        raise ValueError(
            f"three different layers need a target of at least 7, this one has"
            f" {num_layers}: pass --layers one"
        )
    return (2, num_layers // 2, num_layers - 3)


def eagle_config(
    target: PreTrainedModel, layers: str, sizes: dict[str, Any]
) -> EagleHeadConfig:
    """Configuration of a fresh EAGLE head, its layer as wide as the target's.

    Args:
        target: of Llama's kind.
        layers: see ``layers_to_read``.
        sizes: further fields.

    Raises:
        ValueError: the target's config lacks a size of a Llama layer.
    """
    known = target_sizes(target)
    num_layers = target.config.get_text_config().num_hidden_layers
    return EagleHeadConfig.model_validate(
        {
            **known,
            "target_layers": layers_to_read(layers, num_layers),
            "combines": layers == "three",
            **sizes,
        }
    )


def lyanna_config(target: PreTrainedModel, sizes: dict[str, Any]) -> LyannaHeadConfig:
    """Configuration of a fresh Lyanna head, its layer as wide as the target's.

    Args:
        target: of Llama's kind.
        sizes: further fields.

    Raises:
        ValueError: the target's config lacks a size of a Llama layer.
    """
    return LyannaHeadConfig.model_validate({**target_sizes(target), **sizes})


def target_sizes(target: PreTrainedModel) -> dict[str, Any]:
    """Fields of a head's configuration that make its layer as wide as the target's.

    Raises:
        ValueError: the target's config lacks a size of a Llama layer.
    """
    known = target.config.get_text_config().to_dict()
    needed = ("hidden_size", "num_attention_heads", "intermediate_size")
    if missing := [key for key in (*needed, "rms_norm_eps") if key not in known]:
        raise ValueError(
            f"the target's config has no {', '.join(missing)}: EAGLE and Lyanna heads"
            " are made for targets with layers of Llama's kind; pass one, or train"
            " redrafter"
        )
    size, num_heads, inner = (known[key] for key in needed)
    rope = known.get("rope_parameters") or {}
    return {
        "hidden_size": size,
        "vocab_size": known["vocab_size"],
        "target_hidden_size": size,
        "num_heads": num_heads,
        "num_kv_heads": known.get("num_key_value_heads") or num_heads,
        "head_size": known.get("head_dim") or size // num_heads,
        "intermediate_size": inner,
        "norm_eps": known["rms_norm_eps"],
        "max_positions": known["max_position_embeddings"],
        # Some targets have RoPE parameters by kind of layer.
        **({"rope": rope} if "rope_type" in rope else {}),
    }


def start_pair_head(
    config: EagleHeadConfig, target: PreTrainedModel, statistics: TargetStatistics
) -> EagleHead:
    """Make a fresh head: the likeliest tokens are hot, its layer starts as nothing."""
    embedding = target.get_input_embeddings().weight.detach()
    output = target.get_output_embeddings().weight.detach()
    embedding_rms = embedding.float().pow(2).mean().sqrt().item()
    head = (
        LyannaHead(config)
        if isinstance(config, LyannaHeadConfig)
        else EagleHead(config)
    )
    _initialise(head, embedding_rms)
    if isinstance(head, LyannaHead):
        state_rms = statistics.hidden_moment.diagonal().mean().sqrt().item()
        _initialise_chain(head, state_rms)
    if head.hot_token_ids is not None:
        head.hot_token_ids.copy_(statistics.likeliest(len(head.hot_token_ids)))
    head = head.to(output.device)
    head.share(embedding, output)
    return head


@torch.no_grad()
def _initialise(head: EagleHead, embedding_rms: float) -> None:
    """Write the first weights.

    Attention and MLP start at zero, so that the feature passes; where layers are
    combined, it is the last one's.
    """
    for module in head.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=_WEIGHT_STD)
    for layer in head.layers:
        layer.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
        layer.down_proj.weight.zero_()  # type: ignore[union-attr, operator]
    size = head.config.hidden_size
    if isinstance(head.combine, nn.Linear):
        head.combine.weight[:, -size:] += torch.eye(size)
    if isinstance(head.fuse, nn.Linear) and "embedding" not in head.config.norms:
        # Both halves of EAGLE-1's fc are read at root mean square 1.
        head.fuse.weight[:, :size] /= embedding_rms


@torch.no_grad()
def _initialise_chain(head: LyannaHead, state_rms: float) -> None:
    """Let the target's state pass all steps of the chain, at its own size."""
    size = head.config.hidden_size
    if isinstance(head.fuse, nn.Linear):
        head.fuse.weight[:, size:] += torch.eye(size)
    head.norm.weight.fill_(state_rms)  # type: ignore[operator]
    if head.info is not None:
        head.info.down.weight.normal_(std=size**-0.5)
