"""How the tensors of heads are named in their files."""

from __future__ import annotations

import re

from vllm_treespec.heads.base import Head
from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.heads.published import FIRST_LAYER

# Published names by ours, of all kinds; several are rows one below the other.
NAMES = {
    "embedding.weight": ("embed_tokens.weight",),
    "output.weight": ("lm_head.weight",),
    r"layer_norms.(\d+).weight": ("fc_norm.{}.weight",),
    r"layers.(\d+).qkv_proj.(weight|bias)": (
        "layers.{}.self_attn.q_proj.{}",
        "layers.{}.self_attn.k_proj.{}",
        "layers.{}.self_attn.v_proj.{}",
    ),
    r"layers.(\d+).o_proj.(weight|bias)": ("layers.{}.self_attn.o_proj.{}",),
    r"layers.(\d+).([qk])_norm.weight": ("layers.{}.self_attn.{}_norm.weight",),
    r"layers.(\d+).gate_up_proj.weight": (
        "layers.{}.mlp.gate_proj.weight",
        "layers.{}.mlp.up_proj.weight",
    ),
    r"layers.(\d+).down_proj.weight": ("layers.{}.mlp.down_proj.weight",),
    r"layers.(\d+).post_attention_norm.weight": (
        "layers.{}.post_attention_layernorm.weight",
    ),
    r"input_norms.(\d+).weight": ("layers.{}.input_layernorm.weight",),
}
NAMES_1 = NAMES | {
    r"fuse.(weight|bias)": ("fc.{}",),
    "embedding_norm.weight": ("embed_layernorm.weight",),
    "fused_norm.weight": ("hidden_layernorm.weight",),
    "norm.weight": ("lm_head_layernorm.weight",),
}
NAMES_3 = NAMES | {
    "combine.weight": ("fc.weight",),
    "combine_norm.weight": ("input_norm.weight",),
    "embedding_norm.weight": (f"{FIRST_LAYER}input_layernorm.weight",),
    "feature_norm.weight": (f"{FIRST_LAYER}hidden_norm.weight",),
    "norm.weight": ("norm.weight",),
}
NAMES_DFLASH = NAMES | {
    "combine.weight": ("fc.weight",),
    "feature_norm.weight": ("hidden_norm.weight",),
    "norm.weight": ("norm.weight",),
    "mask": ("mask_embedding",),
    "markov.embedding.weight": ("markov_head.markov_w1.weight",),
    "markov.output.weight": ("markov_head.markov_w2.weight",),
    r"convolutions.(\d+).(attention|mlp).base_kernel": (
        "layers.{}.{}_conv.base_kernel",
    ),
    r"convolutions.(\d+).(attention|mlp).project.weight": (
        "layers.{}.{}_conv.kernel_projection.weight",
    ),
    r"selector.(predecessor|successor)s": ("candidate_selector.{}_codebook",),
    "selector.project.weight": ("candidate_selector.hidden_projection.weight",),
}
# Derived from config.json, or read beside the table.
NOT_READ = re.compile(r"d2t|t2d|.*rotary_emb\.inv_freq")
# The target's, which speculators kept; and an estimate that trees have no use for.
NOT_READ_DFLASH = re.compile(
    rf"{NOT_READ.pattern}|verifier_(norm|lm_head)\.weight|confidence_head\..*"
)


def names_of(head: Head) -> dict[str, tuple[str, ...]]:
    """The names, in its files, of each of a head's tensors.

    Tensors of our own form have our names. Published hot tokens are offsets ``d2t``.
    """
    names = head.state_dict()
    if not head.published:
        return {name: (name,) for name in names}
    return {n: published_names(head, n) for n in names if n != "hot_token_ids"}


def published_names(head: Head, name: str) -> tuple[str, ...]:
    """The published names of one of a head's tensors."""
    table = NAMES_DFLASH
    if isinstance(head, EagleHead):
        table = NAMES_1 if head.config.version == 1 else NAMES_3
    for pattern, names in table.items():
        if match := re.fullmatch(pattern, name):
            return tuple(published.format(*match.groups()) for published in names)
    raise KeyError(name)
