"""Stage 1: conversations answered by the target itself, one JSON row each.

A row is ``{"token_ids": [...], "prompt_len": n, "temperature": t}``: prompt and answer
in one list, the answer starting at index ``prompt_len``; other keys are not read.
"""

import gzip
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from vllm_treespec.json_files import parse_json

PROMPT_KEYS = "prompt, question, instruction (with input) or turns"
_PLACEHOLDER = "<<<user>>>"
_ROW_FORM = 'a line is {"token_ids": [...], "prompt_len": n}'


@dataclass(frozen=True)
class Row:
    """One conversation: ``token_ids[prompt_len:]`` is the target's answer."""

    token_ids: list[int]
    prompt_len: int


@dataclass(frozen=True)
class TextOptions:
    """How much text the target writes, and how.

    Attributes:
        num_tokens: answer tokens wanted in all.
        batch_size: conversations generated and appended to the file at a time.
        own_question_share: of conversations whose question the target samples.
        temperatures: one is drawn for each answer.
        max_answer_tokens: tokens of one answer at most.
        max_model_len: vLLM's context length; longer prompts are left out.
    """

    num_tokens: int = 600_000
    batch_size: int = 256
    own_question_share: float = 0.5
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_answer_tokens: int = 300
    max_model_len: int = 1024
    seed: int = 0


def read_prompts(path: Path) -> list[str]:
    """Read user questions from a JSONL file, which may be gzipped.

    Raises:
        ValueError: a line is no JSON object, or has none of ``PROMPT_KEYS``.
    """
    prompts = []
    for number, line in enumerate(lines_of(path), 1):
        prompt = _prompt_of(_json_object(line, f"{path}:{number}"))
        if prompt is None:
            raise ValueError(f"{path}:{number}: no key {PROMPT_KEYS}; add one")
        prompts.append(prompt)
    return prompts


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; ``.gz`` is unpacked."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        yield from file


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    """Read a line that must hold one JSON object; errors name file and line."""
    try:
        found = parse_json(line)
    except ValueError as error:
        raise ValueError(
            f"{where}: not JSON ({error}); each line must be one JSON object in UTF-8"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: not a JSON object; {_ROW_FORM}")
    return found


def _prompt_of(row: dict[str, Any]) -> str | None:
    for key in ("prompt", "question"):
        if key in row:
            return str(row[key])
    if row.get("turns"):
        return str(row["turns"][0])
    if "instruction" not in row:
        return None
    instance = row["instances"][0] if row.get("instances") else row
    return "\n".join(filter(None, [row["instruction"], instance.get("input", "")]))


def read_rows(path: Path, vocab_size: int) -> list[Row]:
    """Read the rows of a text file; a last line cut short by a kill is left out.

    Raises:
        ValueError: naming the first line that is no row of this module's form, or
            whose ids are none of the target's ``vocab_size`` tokens.
    """
    rows = []
    for number, line in enumerate(lines_of(path), 1):
        if not line.endswith((b"\n", b"}")):
            break
        where = f"{path}:{number}"
        row = _json_object(line, where)
        wrong = _wrong_with(row, vocab_size)
        if wrong:
            raise ValueError(f"{where}: {wrong}")
        rows.append(Row(row["token_ids"], row["prompt_len"]))
    return rows


def _wrong_with(row: dict[str, Any], vocab_size: int) -> str | None:
    """Say why a row cannot be trained on, and the remedy; None if it can."""
    for key in ("token_ids", "prompt_len"):
        if key not in row:
            return f"no key {key}; {_ROW_FORM}"
    token_ids, prompt_len = row["token_ids"], row["prompt_len"]
    if not isinstance(token_ids, list) or not token_ids:
        return f"token_ids is no list of token ids, or empty; {_ROW_FORM}"
    # By type: True is no token id.
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            return f"token_ids[{index}] is {token_id!r}, no integer; {_ROW_FORM}"
        if not 0 <= token_id < vocab_size:
            return (
                f"token_ids[{index}] is {token_id}, the target's tokens are 0 to"
                f" {vocab_size - 1}; make the text with the tokenizer of --target"
            )
    if type(prompt_len) is not int:
        return f"prompt_len is {prompt_len!r}, no integer; {_ROW_FORM}"
    if not 0 <= prompt_len < len(token_ids):
        return (
            f"prompt_len is {prompt_len} and token_ids has {len(token_ids)}: no answer"
            f" to learn; give prompt_len from 0 to {len(token_ids) - 1}, or leave the"
            f" line out"
        )
    return None


def generate_text(
    target: str,
    prompts: list[str],
    path: Path,
    options: TextOptions,
    vocab_size: int,
) -> None:
    """Let the target answer ``prompts`` and questions of its own; fill the file.

    Batches are appended to ``path`` as they end, so a killed run goes on where it was.

    Raises:
        ValueError: the target's tokenizer has no chat template, or the file holds
            what is no row of a target with ``vocab_size`` tokens.
    """
    _drop_torn_line(path)
    before = read_rows(path, vocab_size)
    done = sum(len(row.token_ids) - row.prompt_len for row in before)
    if done >= options.num_tokens:
        return
    # vLLM is only needed for this stage, and its import takes long.
    from vllm import LLM

    llm = LLM(
        target,
        max_model_len=options.max_model_len,
        max_num_seqs=min(options.batch_size, 128),
        gpu_memory_utilization=0.9 * _free_share(),
        enforce_eager=not torch.cuda.is_available(),  # compiling for it takes minutes
        seed=options.seed + done,
    )
    if llm.get_tokenizer().chat_template is None:
        raise ValueError(f"{target}: tokenizer has no chat template; pass --text FILE")
    rng = random.Random(options.seed + done)
    with path.open("a", encoding="utf-8") as file:
        while done < options.num_tokens:
            for row in _generate_batch(llm, prompts, rng, options):
                file.write(json.dumps(row) + "\n")
                done += len(row["token_ids"]) - row["prompt_len"]
            file.flush()
            print(f"text: {done:,} of {options.num_tokens:,} answer tokens")


def _free_share() -> float:
    """Share of the device's memory that no process holds: vLLM starts with no more."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return free / total
    memory = psutil.virtual_memory()
    return memory.available / memory.total


def _drop_torn_line(path: Path) -> None:
    """Cut a half-written last line off; make the file if there is none."""
    path.touch()
    # In place, so that a kill here loses no row.
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _generate_batch(
    llm: Any, prompts: list[str], rng: random.Random, options: TextOptions
) -> Iterator[dict[str, Any]]:
    """Yield one batch of finished rows; ``llm`` is a ``vllm.LLM``."""
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    num_own = round(
        options.batch_size * (options.own_question_share if prompts else 1.0)
    )
    questions = _sample_questions(llm, num_own, options)
    if prompts:
        questions += rng.choices(prompts, k=options.batch_size - num_own)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for question in questions
    ]
    # The template writes its own special tokens: encode without adding them again.
    encoded = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    room = options.max_model_len - options.max_answer_tokens
    encoded = [token_ids for token_ids in encoded if len(token_ids) <= room]
    temperatures = rng.choices(options.temperatures, k=len(encoded))
    outputs = llm.generate(
        [{"prompt_token_ids": token_ids} for token_ids in encoded],
        [
            SamplingParams(temperature=value, max_tokens=options.max_answer_tokens)
            for value in temperatures
        ],
        # vLLM's bar of this batch
        use_tqdm=True,
    )
    for token_ids, temperature, output in zip(
        encoded, temperatures, outputs, strict=True
    ):
        yield {
            "token_ids": token_ids + list(output.outputs[0].token_ids),
            "prompt_len": len(token_ids),
            "temperature": temperature,
        }


def _sample_questions(llm: Any, count: int, options: TextOptions) -> list[str]:
    """Sample questions from the chat template's user turn; drop unfinished ones."""
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    opening = tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACEHOLDER}], tokenize=False
    ).split(_PLACEHOLDER)[0]
    prompt = {"prompt_token_ids": tokenizer.encode(opening, add_special_tokens=False)}
    outputs = llm.generate(
        [prompt] * count,
        SamplingParams(temperature=1.0, max_tokens=160),
        use_tqdm=True,
    )
    asked = [
        out.outputs[0] for out in outputs if out.outputs[0].finish_reason == "stop"
    ]
    return [question for out in asked if (question := out.text.strip())]
