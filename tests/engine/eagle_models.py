"""A small target whose language an EAGLE head knows exactly, and heads for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.heads import lyanna_head
from vllm_treespec.heads import save_head

VOCAB_SIZE = 64
HIDDEN_SIZE = 128
HEAD_SIZE = 64
NUM_HEADS = 2
INTERMEDIATE_SIZE = 64
# A hidden state holds a vector of the token, one of the token before, and a 1.
SIZE = 48
OWN, BEFORE, ONE = slice(0, SIZE), slice(SIZE, 2 * SIZE), 2 * SIZE
# of RoPE's frequencies, those that find the token before
NUM_FREQUENCIES = 12
SHARPNESS = 40.0
EPS = 1e-9
# All tokens' embeddings have this root mean square, and all hidden states that.
BEFORE_RMS = ((SIZE + 1) / HIDDEN_SIZE) ** 0.5
AFTER_RMS = ((2 * SIZE + 1) / HIDDEN_SIZE) ** 0.5
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": False,
}


def write_known_language(folder: Path) -> tuple[str, str]:
    """Write a target whose next token depends on the last two, and an EAGLE-1 head.

    The target's one layer copies the vector of the token before: its attention looks
    one place back. The head takes that vector from the feature, for which it needs no
    attention. Both come to the same hidden state, so that every draft is accepted as
    long as each pair has its own token's feature.

    Returns:
        folders of target and head.

    """
    torch.manual_seed(0)
    target, head = folder / "target", folder / "head"
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    vectors = torch.randn(VOCAB_SIZE, SIZE)
    vectors *= SIZE**0.5 / vectors.norm(dim=1, keepdim=True)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.zero_()
        embedding = model.model.embed_tokens.weight
        embedding[:, OWN], embedding[:, ONE] = vectors, 1.0
        attention = model.model.layers[0].self_attn
        query, key = looks_back()
        attention.q_proj.weight[:HEAD_SIZE, ONE] = query * BEFORE_RMS
        attention.k_proj.weight[:HEAD_SIZE, ONE] = key * BEFORE_RMS
        identity = torch.eye(SIZE)
        attention.v_proj.weight[:SIZE, OWN] = identity * BEFORE_RMS
        attention.o_proj.weight[BEFORE, :SIZE] = identity
        model.model.norm.weight.fill_(AFTER_RMS)
        model.lm_head.weight.copy_(torch.randn(VOCAB_SIZE, HIDDEN_SIZE))
    model.save_pretrained(target)
    write_head(head)
    return str(target), str(head)


def looks_back() -> tuple[Tensor, Tensor]:
    """A query and a key that are most alike where the key stands one place before."""
    half = HEAD_SIZE // 2
    angles = 10_000.0 ** (-torch.arange(half) / half)
    used = (torch.arange(half) < NUM_FREQUENCIES).float()
    size = (SHARPNESS * HEAD_SIZE**0.5) ** 0.5
    query = torch.cat([size * used, torch.zeros(half)])
    key = torch.cat([size * used * angles.cos(), size * used * angles.sin()])
    return query, key


def pair_of_vectors() -> Tensor:
    """Makes a hidden state of an embedding and of the feature before it."""
    fc = torch.zeros(HIDDEN_SIZE, 2 * HIDDEN_SIZE)
    identity = torch.eye(SIZE)
    fc[OWN, OWN], fc[ONE, ONE] = identity, 1.0
    fc[BEFORE, HIDDEN_SIZE : HIDDEN_SIZE + SIZE] = identity
    return fc


@torch.no_grad()
def write_lyanna_head(folder: Path, target: Path) -> str:
    """Write a Lyanna head that knows the target's language by halves; its folder.

    The state of the first level is the target's own. Later states are the same, and
    the token info adds what the token before says: half of what is to be known.
    """
    sizes: dict[str, Any] = {
        name: SIZES[name] for name in ("hidden_size", "vocab_size")
    }
    sizes |= {"intermediate_size": INTERMEDIATE_SIZE, "num_kv_heads": NUM_HEADS}
    head = lyanna_head(**sizes, depth=5, norm_eps=EPS, token_info_rank=SIZE)
    assert head.info is not None
    weights = dict(head.named_parameters())
    for weight in weights.values():
        weight.zero_()
    weights["embedding_norm.weight"].fill_(BEFORE_RMS)
    weights["norm.weight"].fill_(AFTER_RMS)
    weights["fuse.weight"].copy_(pair_of_vectors())
    head.info.down.weight[:, OWN] = torch.eye(SIZE)
    output = load_file(target / "model.safetensors")["lm_head.weight"]
    head.info.up.copy_(output[:, OWN])
    head.info.gain.fill_(SIZE**0.5)
    save_head(head, folder)
    return str(folder)


def write_head(folder: Path) -> None:
    """Write the head: ``fc`` alone, all else adds nothing."""
    fc = pair_of_vectors()
    wide = NUM_HEADS * HEAD_SIZE
    layer = {
        "self_attn.q_proj": torch.randn(wide, HIDDEN_SIZE),
        "self_attn.k_proj": torch.randn(wide, HIDDEN_SIZE),
        "self_attn.v_proj": torch.randn(wide, HIDDEN_SIZE),
        "self_attn.o_proj": torch.zeros(HIDDEN_SIZE, wide),
        "mlp.gate_proj": torch.randn(INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.up_proj": torch.randn(INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.down_proj": torch.zeros(HIDDEN_SIZE, INTERMEDIATE_SIZE),
        "post_attention_layernorm": torch.ones(HIDDEN_SIZE),
    }
    tensors = {f"layers.0.{name}.weight": tensor for name, tensor in layer.items()}
    folder.mkdir(parents=True)
    save_file({"fc.weight": fc, **tensors}, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
    (folder / "config.json").write_text(json.dumps({**config, "bias": False}))
