"""Small random targets that take images, with tokenizers and processors made here."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.engine.tiny_models import SIZES, write_random

# Tokens with a meaning; all others are words.
IMAGE, VIDEO, BEGIN, END = 500, 501, 502, 503
QWEN = {
    IMAGE: "<|image_pad|>",
    VIDEO: "<|video_pad|>",
    BEGIN: "<|vision_start|>",
    END: "<|vision_end|>",
}
GEMMA = {
    IMAGE: "<image_soft_token>",
    BEGIN: "<start_of_image>",
    END: "<end_of_image>",
}
# what a prompt of token ids holds where an image goes
PLACE = {"qwen2.5-vl": [BEGIN, IMAGE, END], "gemma3": [BEGIN]}
WINDOW = 16
TEXT = {
    name: SIZES[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
} | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
GEMMA_TEXT = {
    "head_dim": SIZES["head_dim"],
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {"hidden_size": 64, "intermediate_size": 64, "patch_size": 14}


def write_qwen(folder: Path, **sizes: int) -> None:
    """Write a Qwen2.5-VL: positions have three axes, that of an image is a grid.

    ``sizes`` are other sizes of its language model than ``TEXT``.
    """
    text_sizes = {**TEXT, **sizes}
    eighth = text_sizes["hidden_size"] // text_sizes["num_attention_heads"] // 8
    config = Qwen2_5_VLConfig(
        text_config={
            **text_sizes,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [eighth, 3 * eighth // 2, 3 * eighth // 2],
            },
        },
        vision_config={
            **VISION,
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": TEXT["hidden_size"],
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    text = Qwen2ForCausalLM(Qwen2Config(**text_sizes, tie_word_embeddings=False))
    write_both(Qwen2_5_VLForConditionalGeneration(config), text, folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 28 * 28,
        "max_pixels": 32 * 28 * 28,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    write_tokenizer(folder, QWEN)


def write_gemma(folder: Path) -> None:
    """Write a Gemma 3 with images, of which every second layer has a window."""
    config = Gemma3Config(
        text_config={**TEXT, **GEMMA_TEXT},
        vision_config={
            **VISION,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
        },
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        tie_word_embeddings=False,
    )
    text = Gemma3ForCausalLM(
        Gemma3TextConfig(**TEXT, **GEMMA_TEXT, tie_word_embeddings=False)
    )
    write_both(Gemma3ForConditionalGeneration(config), text, folder)
    # the names of published checkpoints, which vLLM reads
    file = folder / "model.safetensors"
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model."): weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    image = {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "size": {"height": 56, "width": 56},
        "image_seq_length": 4,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    names = {
        "image_token": GEMMA[IMAGE],
        "boi_token": GEMMA[BEGIN],
        "eoi_token": GEMMA[END],
    }
    write_tokenizer(folder, GEMMA, names)


KINDS: dict[str, Callable[[Path], None]] = {
    "qwen2.5-vl": write_qwen,
    "gemma3": write_gemma,
}


def write_tokenizer(
    folder: Path, special: dict[int, str], names: dict[str, str] | None = None
) -> None:
    """Write a tokenizer of words and special tokens beside a model.

    ``names`` are special tokens that the processor asks for by an attribute.
    """
    words = {special.get(i, f"w{i}"): i for i in range(SIZES["vocab_size"])}
    # Gemma's processor puts blank lines around an image, and joins them to others
    for length in range(1, 5):
        words["\n" * length] = words.pop(f"w{500 - length}")
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.add_special_tokens(list(special.values()))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, extra_special_tokens=names or {}
    )
    fast.save_pretrained(folder)


def write_both(target: PreTrainedModel, text: PreTrainedModel, folder: Path) -> None:
    """Write a random target, and its language model alone: a draft model.

    Args:
        target: with images.
        text: of the same sizes, without; it sees no images.
        folder: gets the target, and ``draft`` with the language model.

    """
    write_random(target, folder)
    text.model.load_state_dict(target.model.language_model.state_dict())
    text.lm_head.load_state_dict(target.lm_head.state_dict())
    text.save_pretrained(folder / "draft")


def picture(number: int) -> Image.Image:
    """A picture of its own for every number; their sizes differ, too."""
    width, height = 56 + 28 * (number % 3), 56 + 28 * (number % 2)
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def do_without_torchvision() -> None:
    """Let the models run on a machine without torchvision, where they take no videos.

    vLLM imports their image processors for torchvision, and Qwen2.5-VL's processor
    needs one for videos. Called in an engine's process, before the engine starts.
    """
    for kind in ("qwen2_vl", "gemma3"):
        path = f"transformers.models.{kind}.image_processing"
        pillow: Any = importlib.import_module(f"{path}_pil_{kind}")
        sys.modules[f"{path}_{kind}"] = pillow
    pillow.Gemma3ImageProcessor = pillow.Gemma3ImageProcessorPil
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil
    from transformers.processing_utils import ProcessorMixin
    from vllm import ModelRegistry
    from vllm.model_executor.models import gemma3_mm, qwen2_5_vl

    class ImagesOnly(Qwen2_5_VLProcessor):
        def __init__(self, image_processor: Any, tokenizer: Any) -> None:
            self.image_token, self.video_token = QWEN[IMAGE], QWEN[VIDEO]
            self.image_token_id, self.video_token_id = IMAGE, VIDEO
            ProcessorMixin.__init__(self, image_processor, tokenizer)

    def get_hf_processor(info: Any, **_: object) -> ImagesOnly:
        images = Qwen2VLImageProcessorPil.from_pretrained(info.model_id)
        return ImagesOnly(images, info.get_tokenizer())

    info_class = qwen2_5_vl.Qwen2_5_VLProcessingInfo
    info_class.get_hf_processor = get_hf_processor
    info_class.get_supported_mm_limits = lambda _: {"image": None}
    # so vLLM does not look at the classes in another process
    for model in (
        qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,
        gemma3_mm.Gemma3ForConditionalGeneration,
    ):
        ModelRegistry.register_model(model.__name__, model)
