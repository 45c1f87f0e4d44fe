"""The draft model's training, on a random target of a few thousand parameters."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.fast.tiny_training import VOCAB, some_rows, tiny_target
from vllm_treespec.train.batches import BatchDataset
from vllm_treespec.train.loss import (
    TeacherTargets,
    VocabRows,
    agreement,
    choose_vocab_rows,
    topk_kl,
)
from vllm_treespec.train.model import (
    DraftShape,
    TargetStatistics,
    build_draft,
    project_embedding,
    save_draft,
)
from vllm_treespec.train.teacher import TeacherOptions, cache_teacher, load_cache
from vllm_treespec.train.text import (
    Row,
    TextOptions,
    generate_text,
    read_prompts,
    read_rows,
)

SHAPE = DraftShape(
    hidden_size=16, num_layers=1, num_heads=2, head_dim=8, intermediate_size=24
)


@pytest.fixture
def target() -> LlamaForCausalLM:
    return tiny_target()


@pytest.fixture
def rows() -> list[Row]:
    return some_rows(1)


def exact_kl(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    draft = (hidden @ weight.T).log_softmax(-1)
    return torch.nn.functional.kl_div(draft, target, reduction="batchmean")


def whole(target_probs: torch.Tensor, top_k: int) -> TeacherTargets:
    top = target_probs.topk(top_k, dim=-1)
    rest = (1 - top.values.sum(-1)).clamp_min(0)
    return TeacherTargets(top.indices, top.values, rest)


def random_case(num_positions: int = 13) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(num_positions, 8, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, 8, generator=generator, requires_grad=True)
    logits = 2 * torch.randn(num_positions, VOCAB, generator=generator)
    return hidden, weight, logits.softmax(-1)


def test_loss_and_gradients_are_exact_kl_when_k_is_the_vocabulary() -> None:
    hidden, weight, target_probs = random_case()
    expected = exact_kl(hidden, weight, target_probs)
    wanted = torch.autograd.grad(expected, [hidden, weight])
    loss = topk_kl(hidden, weight, whole(target_probs, VOCAB))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, [hidden, weight]), wanted, atol=1e-5, rtol=1e-4
    )


def test_merged_rest_is_one_more_token_and_a_lower_bound() -> None:
    hidden, weight, target_probs = random_case()
    targets = whole(target_probs, 5)
    draft_probs = (hidden @ weight.T).softmax(-1).gather(1, targets.ids)
    merged_target = torch.cat([targets.probs, targets.rest[:, None]], -1)
    merged_draft = torch.cat([draft_probs, 1 - draft_probs.sum(-1, True)], -1)
    expected = (merged_target * (merged_target / merged_draft).log()).sum(-1).mean()
    loss = topk_kl(hidden, weight, targets)
    torch.testing.assert_close(loss, expected)
    assert loss < exact_kl(hidden, weight, target_probs)
    wanted = torch.autograd.grad(expected, [hidden, weight])
    torch.testing.assert_close(
        torch.autograd.grad(loss, [hidden, weight]), wanted, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("trains_weight", [True, False])
def test_further_columns_are_trained_beside_a_frozen_weight(
    monkeypatch: pytest.MonkeyPatch, chosen: bool, trains_weight: bool
) -> None:
    """Red when the columns' gradient is off, or a frozen weight gets one."""
    # several chunks
    monkeypatch.setattr("vllm_treespec.train.loss.LOGITS_CHUNK", 3)
    hidden, weight, target_probs = (x.detach().double() for x in random_case())
    columns, codes = torch.randn(VOCAB, 3).double(), torch.randn(len(hidden), 3)
    hidden = torch.cat([hidden, codes.double()], dim=-1).requires_grad_()
    columns.requires_grad_()
    weight.requires_grad_(trains_weight)
    rows = None
    if chosen:
        bias = torch.zeros(VOCAB + 1)
        bias[-1] = -torch.inf
        rows = VocabRows(torch.arange(VOCAB), torch.arange(VOCAB), bias)
    loss = topk_kl(
        hidden, weight, whole(target_probs, VOCAB), rows, torch.float64, columns
    )
    trained = [hidden, columns, *([weight] if trains_weight else [])]
    found = torch.autograd.grad(loss, trained)
    whole_weight = torch.cat([weight, columns], dim=-1)
    expected = exact_kl(hidden, whole_weight, target_probs)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    wanted = torch.autograd.grad(expected, trained)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_all_head_rows_give_the_same_loss_as_no_choice() -> None:
    hidden, weight, target_probs = random_case()
    targets = whole(target_probs, 5)
    rows = torch.randperm(VOCAB)
    column = torch.empty(VOCAB, dtype=torch.long)
    column[rows] = torch.arange(VOCAB)
    bias = torch.zeros(VOCAB + 1)
    bias[-1] = -torch.inf
    chosen = topk_kl(hidden, weight, targets, VocabRows(rows, column, bias))
    expected = topk_kl(hidden, weight, targets)
    torch.testing.assert_close(chosen, expected)
    torch.testing.assert_close(
        torch.autograd.grad(chosen, [hidden, weight]),
        torch.autograd.grad(expected, [hidden, weight]),
    )


def test_sampled_head_rows_estimate_the_softmax_denominator_without_bias() -> None:
    hidden, weight, target_probs = random_case(1)
    targets = whole(target_probs, 5)
    core = torch.arange(10)
    exact = (hidden @ weight.T).exp().sum()
    generator = torch.Generator().manual_seed(4)
    estimates = []
    for _ in range(2000):
        chosen = choose_vocab_rows(core, targets, 30, VOCAB, generator)
        logits = hidden @ weight[chosen.rows].T + chosen.bias[:-1]
        estimates.append(logits.exp().sum().item())
    samples = torch.tensor(estimates)
    error = samples.std() / len(samples) ** 0.5
    assert abs(samples.mean() - exact) < 4 * error
    # What the target finds likely is never left to chance.
    likely = targets.ids[targets.probs >= 0.01]
    assert bool((chosen.column[likely] < len(chosen.rows)).all())


def test_agreement_of_a_draft_with_itself_is_perfect() -> None:
    hidden, weight, _ = random_case()
    draft_probs = (hidden @ weight.T).softmax(-1).detach()
    quality = agreement(hidden.detach(), weight.detach(), whole(draft_probs, VOCAB))
    torch.testing.assert_close(quality["kl"], torch.zeros(13), atol=1e-5, rtol=0)
    torch.testing.assert_close(quality["acceptance"], torch.ones(13))
    assert quality["top1"].min() == 1


def test_teacher_cache_holds_what_the_target_says(
    tmp_path: Path, target: LlamaForCausalLM, rows: list[Row]
) -> None:
    options = TeacherOptions(top_k=7, seq_len=25, batch_tokens=64, rows_per_shard=4)
    shards = cache_teacher(target, "tiny", rows, tmp_path, options)
    cache = load_cache(shards)
    dataset = BatchDataset(cache, list(range(len(rows))), batch_tokens=60)
    batched = [index for batch in dataset.batches for index in batch]
    assert sorted(batched) == list(range(len(rows)))
    for number, batch in enumerate(dataset.batches):
        item = dataset[number]
        expected = []
        for row in (rows[index] for index in batch):
            ids = torch.tensor(row.token_ids[:25])
            probs = target(ids[None]).logits[0].softmax(-1)
            expected.append(probs[row.prompt_len - 1 : len(ids) - 1])
        targets = whole(torch.cat(expected), 7)
        assert item["input_ids"].numel() <= 60
        torch.testing.assert_close(item["ids"], targets.ids)
        torch.testing.assert_close(item["probs"], targets.probs, atol=2e-3, rtol=1e-2)
        torch.testing.assert_close(item["rest"], targets.rest, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(cache.statistics.token_weights.sum(), torch.tensor(1.0))


def test_teacher_keeps_finished_shards_and_redoes_changed_ones(
    tmp_path: Path, target: LlamaForCausalLM, rows: list[Row]
) -> None:
    options = TeacherOptions(top_k=4, rows_per_shard=4)
    shards = cache_teacher(target, "tiny", rows, tmp_path, options)
    before = [shard.stat().st_mtime_ns for shard in shards]
    more = [*rows, Row([5, 6, 7], 1)]
    again = cache_teacher(target, "tiny", more, tmp_path, options)
    after = [shard.stat().st_mtime_ns for shard in again]
    assert after[:2] == before[:2]
    assert after[2] != before[2]
    assert load_cache(again).num_rows == len(more)


def test_projection_to_full_width_keeps_logits_up_to_a_shift(
    target: LlamaForCausalLM,
) -> None:
    embedding = target.lm_head.weight.detach()
    states = torch.randn(200, 32)
    statistics = TargetStatistics(
        torch.full((VOCAB,), 1 / VOCAB), states.T @ states / len(states)
    )
    logits = states @ embedding.T
    centred = logits - logits.mean(-1, keepdim=True)
    full = project_embedding(embedding, statistics, 32)
    solved = torch.linalg.lstsq(full, centred.T).solution
    torch.testing.assert_close((full @ solved).T, centred, atol=1e-3, rtol=1e-3)


def test_too_large_weights_are_refused(
    tmp_path: Path, target: LlamaForCausalLM
) -> None:
    draft = build_draft(target, SHAPE, TargetStatistics.without_text(target))
    with pytest.raises(ValueError, match="--hidden-size"):
        save_draft(draft, tmp_path, max_mb=0.001)


def test_text_file_cut_in_a_line_reads_to_the_last_whole_row(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    whole = '{"token_ids": [1, 2], "prompt_len": 1}'
    path.write_text(whole + '\n{"token_ids": [1,')
    assert read_rows(path, 3) == [Row([1, 2], 1)]
    # Text made by hand may lack the last newline.
    path.write_text(f"{whole}\n{whole}")
    assert read_rows(path, 3) == [Row([1, 2], 1)] * 2
    packed = tmp_path / "text.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_rows(packed, 3) == [Row([1, 2], 1)] * 2


WRONG_ROWS = {
    b'{"token_ids": [1, 99], "prompt_len": 1}': r"token_ids\[1\] is 99.*0 to 98.*--t",
    b'{"token_ids": [-1, 2], "prompt_len": 1}': r"token_ids\[0\] is -1.*--target",
    b'{"token_ids": [1, 2.0], "prompt_len": 1}': r"token_ids\[1\] is 2.0, no integer",
    b'{"token_ids": [1, true], "prompt_len": 1}': r"token_ids\[1\] is True, no integer",
    b'{"token_ids": [], "prompt_len": 0}': "token_ids is no list .* or empty",
    b'{"token_ids": "ab", "prompt_len": 0}': "token_ids is no list",
    b'{"token_ids": [1, 2], "prompt_len": 2}': "prompt_len is 2 and .* 2: .*0 to 1",
    b'{"token_ids": [1, 2], "prompt_len": -1}': "prompt_len is -1 .*0 to 1",
    b'{"token_ids": [1, 2], "prompt_len": "1"}': "prompt_len is '1', no integer",
    b'{"token_ids": [1, 2]}': "no key prompt_len; a line is",
    b'{"tokens": []}': "no key token_ids; a line is",
    b"[1, 2]": "not a JSON object; a line is",
    b"token_ids": "not JSON",
    b"": "not JSON",
    b'{"token_ids": [1, 2], "prompt_len": 1, "note": "\xff"}': "it is not UTF-8 text",
    b"[" * 100_000: "its lists and objects are nested too deeply",
}


@pytest.mark.parametrize("line", WRONG_ROWS, ids=lambda line: repr(line[:60]))
def test_wrong_rows_are_refused_by_line(tmp_path: Path, line: bytes) -> None:
    """Red when a row that cannot be trained on passes, or its line is not named."""
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'{"token_ids": [1, 98], "prompt_len": 0}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"text\.jsonl:2: .*{WRONG_ROWS[line]}"):
        read_rows(path, 99)


class FakeTokenizer:
    """Letters are tokens; user turns stand in brackets."""

    chat_template: str | None = "{...}"

    def apply_chat_template(
        self, messages: list[dict[str, str]], **options: bool
    ) -> str:
        return f"[{messages[0]['content']}]"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


class FakeLLM:
    """Answers every prompt with the two tokens 1, 2 and the text "why?"."""

    starts = 0

    def __init__(self, model: str, **options: object) -> None:
        type(self).starts += 1

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def generate(
        self, prompts: list[object], parameters: object, use_tqdm: bool
    ) -> list[Output]:
        return [Output() for _ in prompts]


@dataclass(frozen=True)
class Answer:
    """One answer, as vLLM reports it."""

    token_ids: tuple[int, ...] = (1, 2)
    text: str = "why?"
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Output:
    """What vLLM reports of a prompt."""

    outputs: tuple[Answer, ...] = (Answer(),)


@dataclass(frozen=True)
class Params:
    """How an answer is sampled."""

    temperature: float
    max_tokens: int


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``import vllm`` find an engine that needs no model."""
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, Params
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.usefixtures("fake_vllm")
def test_text_is_appended_by_batches_and_a_cut_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    options = TextOptions(num_tokens=16, batch_size=4, own_question_share=0.5)
    first = {"token_ids": [7, 8, 9], "prompt_len": 1, "temperature": 0.0}
    path.write_text(json.dumps(first) + '\n{"token_ids": [7,')
    generate_text("target", ["how?"], path, options, 200)
    rows = read_rows(path, 200)
    # 2 answer tokens were there; two batches of 4 answers of 2 tokens fill up 16.
    assert len(rows) == 9
    assert rows[0] == Row([7, 8, 9], 1)
    asked = {"".join(map(chr, row.token_ids[: row.prompt_len])) for row in rows[1:]}
    assert asked == {"[how?]", "[why?]"}
    assert all(row.token_ids[row.prompt_len :] == [1, 2] for row in rows[1:])
    # A full file is left alone, without starting the engine.
    starts = FakeLLM.starts
    generate_text("target", ["how?"], path, options, 200)
    assert FakeLLM.starts == starts


@pytest.mark.usefixtures("fake_vllm")
def test_target_without_chat_template_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="pass --text"):
        generate_text("target", [], tmp_path / "text.jsonl", TextOptions(), 200)


def test_prompts_are_read_from_the_usual_keys(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    made = [
        {"prompt": "a"},
        {"question": "b"},
        {"turns": ["c", "later"]},
        {"instruction": "d", "instances": [{"input": "e"}]},
        {"instruction": "f"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    assert read_prompts(path) == ["a", "b", "c", "d\ne", "f"]
    path.write_text('{"text": "g"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: no key"):
        read_prompts(path)
