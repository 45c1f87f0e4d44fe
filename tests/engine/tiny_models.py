"""Small targets with random weights, and draft models that often agree with them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def write_pair(
    folder: Path, noise: float = 0.1, sharpness: float = 1.0, **sizes: Any
) -> tuple[str, str]:
    """Write a target, and a draft model that has its weights with noise on them.

    Args:
        folder: gets two folders.
        noise: of a weight matrix, relative to its own deviation.
        sharpness: factor of the target's logits.
        sizes: other sizes than ``SIZES``.

    Returns:
        folders of the target and of the draft model.

    """
    target, draft = folder / "target", folder / "draft"
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}))
    write_random(model, target, sharpness)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += noise * weight.std() * torch.randn_like(weight)
    model.save_pretrained(draft)
    return str(target), str(draft)


def write_tokenizer(folder: Path, vocab_size: int = SIZES["vocab_size"]) -> None:
    """Write a tokenizer beside a model: token 17 is the word w17."""
    words = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def write_rows(source: str, folder: Path, rows: int) -> str:
    """Write a model with other padding of its vocabulary, and a tokenizer.

    Args:
        source: folder of a Llama.
        folder: gets the model.
        rows: of its vocabulary; those beyond the source's are random.

    Returns:
        the folder.

    """
    model = LlamaForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(folder)
    write_tokenizer(folder, min(rows, SIZES["vocab_size"]))
    return str(folder)


def write_windowed(folder: Path, window: int, **sizes: Any) -> str:
    """Write a target whose attention sees ``window`` tokens; its folder."""
    config = MistralConfig(**{**SIZES, **sizes}, sliding_window=window)
    write_random(MistralForCausalLM(config), folder)
    return str(folder)


def write_layered(
    folder: Path, window: int, windowed: int = 1, patterns: int = 1, **sizes: Any
) -> str:
    """Write a small Gemma 3.

    Args:
        folder: gets the model.
        window: in tokens.
        windowed: layers with a window before each layer without.
        patterns: how often they come.
        sizes: other sizes than ``SIZES``.

    Returns:
        its folder.

    """
    kinds = [*["sliding_attention"] * windowed, "full_attention"] * patterns
    layers = {"num_hidden_layers": len(kinds), "layer_types": kinds}
    config = Gemma3TextConfig(**{**SIZES, **layers, **sizes}, sliding_window=window)
    write_random(Gemma3ForCausalLM(config), folder)
    return str(folder)


def write_with_sinks(folder: Path, window: int, sink: float = 2.0, **sizes: Any) -> str:
    """Write a small GPT-OSS: sinks in all layers, a window in every second one.

    Args:
        folder: gets the model.
        window: in tokens.
        sink: mean of the heads' sinks.
        sizes: other sizes than ``SIZES``.

    Returns:
        its folder.

    """
    config = GptOssConfig(
        **{**SIZES, **sizes}, sliding_window=window, num_local_experts=4
    )
    model = GptOssForCausalLM(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(mean=sink)
    write_random(model, folder)
    return str(folder)


def write_chunked(folder: Path, chunk: int, **sizes: Any) -> str:
    """Write a small Llama 4 of which every second layer sees a chunk; its folder."""
    config = Llama4TextConfig(
        **{**SIZES, **sizes},
        attention_chunk_size=chunk,
        no_rope_layers=[1, 0],
        intermediate_size_mlp=SIZES["intermediate_size"],
        num_local_experts=4,
    )
    write_random(Llama4ForCausalLM(config), folder)
    return str(folder)


def write_random(model: PreTrainedModel, folder: Path, sharpness: float = 1.0) -> None:
    """Give a model random weights under which tokens depend on tokens; write it."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=2 * weight.shape[1] ** -0.5)
        model.lm_head.weight *= sharpness
    model.save_pretrained(folder)


def write_adapter(target: Path, folder: Path, lm_head: bool = False) -> str:
    """Write a LoRA adapter with random weights for a Llama; its folder.

    Args:
        target: folder of the Llama.
        folder: gets the adapter.
        lm_head: whether it changes the LM head, too.

    """
    config = json.loads((target / "config.json").read_text())
    size, rank = config["hidden_size"], 8
    outputs = {
        f"model.layers.{layer}.self_attn.{name}": heads * config["head_dim"]
        for layer in range(config["num_hidden_layers"])
        for name, heads in (
            ("q_proj", config["num_attention_heads"]),
            ("v_proj", config["num_key_value_heads"]),
        )
    }
    if lm_head:
        outputs["lm_head"] = config["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, out in outputs.items():
        key = f"base_model.model.{name}"
        first = torch.randn(rank, size, generator=generator) / size**0.5
        weights[f"{key}.lora_A.weight"] = first
        second = torch.randn(out, rank, generator=generator) * 0.2
        weights[f"{key}.lora_B.weight"] = second
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in outputs}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)
