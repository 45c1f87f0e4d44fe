"""`treespec shrink`: a draft model in int8, with a list of hot tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vllm_treespec.atomic_files import atomic_writes
from vllm_treespec.config import HEAD_METHODS
from vllm_treespec.config.checks import kind_of_head
from vllm_treespec.config.reading import read_config
from vllm_treespec.heads.names import a_head
from vllm_treespec.heads.weights import weights_problem
from vllm_treespec.json_files import read_json_object
from vllm_treespec.tools.load import load_model
from vllm_treespec.tools.prompts import SHIPPED_WORKLOADS, read_jsonl

HOT_TOKENS = "hot_tokens.json"
OUTPUT_LAYER = "lm_head"
# Tokens of a text after which the guesses of both models are compared.
COMPARED = 512


class ShrinkError(ValueError):
    """A draft model or a text that cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Shrunk:
    """What became of a draft model.

    Attributes:
        mb_before: MB (10^6 bytes) that drafting one token read.
        mb_after: that it reads now.
        same: share of places where the likeliest token stayed the same.
        num_hot_tokens: tokens that are drafted; None: all.
        coverage: share of the text's tokens that they are.

    """

    mb_before: float
    mb_after: float
    same: float
    num_hot_tokens: int | None
    coverage: float


def shrink(
    draft: str,
    out: Path,
    text: Path | None,
    num_hot_tokens: int,
    tokenizer_of: str | None,
    console: Console,
) -> Shrunk:
    """Write a smaller form of a draft model.

    Linear layers get int8 weights, one scale a row, and round their inputs to int8
    token by token (compressed-tensors' W8A8). The output layer keeps its precision.

    Args:
        draft: folder or hub id.
        out: a folder that is empty, or does not exist yet.
        text: like the target's answers, see ``texts_of``; None: no hot tokens.
        num_hot_tokens: how many of the text's commonest tokens are drafted.
        tokenizer_of: model whose tokenizer it has; None: its own.
        console: shows what is going on.

    Raises:
        ShrinkError: OUT is not empty, or there is no text, or DRAFT is a head, damaged
            or quantised already.
        SpecConfigError: there is no such model, or a weight is missing or not finite.

    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ShrinkError(f"{out} exists and is not empty; name a new folder")
    texts = [] if text is None else list(texts_of(text))
    if text is not None and not texts:
        raise ShrinkError(f"--text: {text} has no texts, only numbers or nothing")
    console.print(f"Reading {draft}")
    model, tokenizer = _load(draft, tokenizer_of or draft)
    before = _read_mb(model, None)
    hot_tokens, coverage = None, 1.0
    if texts:
        console.print(f"Counting the tokens of {text}")
        counts = Counter(token for one in texts for token in tokens(tokenizer, one))
        hot_tokens = hottest(counts, num_hot_tokens, _ends(model))
        coverage = sum(counts[token] for token in hot_tokens) / counts.total()
    shown = texts or list(texts_of(SHIPPED_WORKLOADS))
    every = chain.from_iterable(tokens(tokenizer, one) for one in shown)
    sample = list(islice(every, COMPARED))
    guesses = _guesses(model, sample)
    quantise(model)
    same = float((_guesses(model, sample) == guesses).double().mean())
    with atomic_writes(out) as partial:
        _save(model, tokenizer, partial)
        if hot_tokens is not None:
            (partial / HOT_TOKENS).write_text(json.dumps(hot_tokens) + "\n")
    num_hot = None if hot_tokens is None else len(hot_tokens)
    return Shrunk(before, _read_mb(model, num_hot), same, num_hot, coverage)


def texts_of(path: Path) -> Iterator[str]:
    """All text of a file.

    A file whose name ends in .jsonl or .jsonl.gz gives every text within its rows, so
    chat logs and results of batches can be used as they are. Any other file is text.

    Raises:
        PromptError: the JSONL file is missing or empty, or a line is no JSON.
        ShrinkError: the text file is missing or empty.

    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        for _, row in read_jsonl(path):
            yield from _strings(row)
        return
    if not path.is_file() or not (text := path.read_text().strip()):
        raise ShrinkError(f"--text: {path} is no file with text")
    yield text


def _strings(value: Any) -> Iterator[str]:
    """The texts within a value of JSON, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)


def tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text, without those that mark its beginning or end."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def hottest(counts: Counter[int], num_hot_tokens: int, ends: list[int]) -> list[int]:
    """The commonest tokens, and those that end an answer, ascending."""
    common = [token for token, _ in counts.most_common(num_hot_tokens)]
    return sorted({*common, *ends})


def quantise(model: PreTrainedModel) -> None:
    """Let a model's linear layers compute as they will in int8, still as floats.

    Raises:
        ShrinkError: the model has no such layers.

    """
    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    config = QuantizationConfig(
        config_groups={"int8": scheme},
        ignore=[OUTPUT_LAYER],
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(model, config)
    layers = [m for m in model.modules() if hasattr(m, "quantization_scheme")]
    if not layers:
        raise ShrinkError("the model has no linear layers to write in int8")
    for layer in layers:
        low, high = layer.weight.aminmax(dim=1, keepdim=True)
        scale, _ = calculate_qparams(low, high, scheme.weights)
        layer.weight_scale.data.copy_(scale)


def _load(
    draft: str, tokenizer_of: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model as it is."""
    _refuse_heads(Path(draft))
    config = read_config("DRAFT", draft, AutoConfig.from_pretrained)
    if getattr(config, "quantization_config", None):
        raise ShrinkError(
            f"{draft} is quantised already; name the model it was made of"
        )
    model = load_model("DRAFT", draft, dtype="auto", use_safetensors=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    except (OSError, ValueError):
        raise ShrinkError(
            f"{tokenizer_of} holds no tokenizer; name the target with --tokenizer"
        ) from None
    return model, tokenizer


def _refuse_heads(folder: Path) -> None:
    """Refuse a folder that holds a head, or files that are damaged.

    Raises:
        ShrinkError: it does.

    """
    if not (folder / "config.json").is_file():
        return
    files = sorted(folder.glob("*.safetensors"))
    try:
        config = read_json_object(folder / "config.json")
    except ValueError as error:
        raise ShrinkError(f"{error}; copy or save the draft model again") from None
    for problem in filter(None, map(weights_problem, files)):
        raise ShrinkError(f"{problem}; copy or save the draft model again")
    if kind := kind_of_head(config, files):
        raise ShrinkError(
            f"{folder} holds {a_head(kind)}, and shrink is for draft models; write it "
            f"into a spec-config as it is, with method '{HEAD_METHODS[kind]}'"
        )


def _ends(model: PreTrainedModel) -> list[int]:
    """Tokens that end an answer."""
    ends = model.generation_config.eos_token_id or model.config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


@torch.inference_mode()
def _guesses(model: PreTrainedModel, sample: list[int]) -> Tensor:
    """The likeliest next token at each place of a text."""
    return model(torch.tensor([sample])).logits[0].argmax(-1)


def _read_mb(model: PreTrainedModel, num_hot_tokens: int | None) -> float:
    """MB that drafting one token reads: the layers, and rows of the output layer."""
    output = model.get_output_embeddings().weight
    layers = sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if parameter is not output and not name.endswith("embed_tokens.weight")
    )
    rows = output.shape[0] if num_hot_tokens is None else num_hot_tokens
    return (layers + rows * output[0].nbytes) / 1e6


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path
) -> None:
    """Write the model with its weights in int8 as vLLM reads it."""
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    tokenizer.save_pretrained(out)


def table(shrunk: Shrunk) -> Table:
    """Say what was gained and what was lost."""
    shown = Table(show_header=False)
    shown.add_row(
        "read for a drafted token", f"{shrunk.mb_before:.0f} → {shrunk.mb_after:.0f} MB"
    )
    shown.add_row("likeliest token unchanged", f"{100 * shrunk.same:.0f} % of places")
    if shrunk.num_hot_tokens is None:
        shown.add_row("hot tokens", "none: name a --text like the target's answers")
    else:
        shown.add_row(
            "hot tokens",
            f"{shrunk.num_hot_tokens}, {100 * shrunk.coverage:.1f} % of the text",
        )
    return shown
