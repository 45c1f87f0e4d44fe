"""Text, teacher, loss and start of a draft model, on a random target."""

from __future__ import annotations

import gzip
import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.fast.tiny_training import VOCAB, some_rows, tiny_draft, tiny_target
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.batches import BatchDataset
from vllm_treespec.train.draft import project_embedding
from vllm_treespec.train.loss import (
    TeacherTargets,
    VocabRows,
    choose_vocab_rows,
    quality_of,
    topk_kl,
)
from vllm_treespec.train.pipeline import save_drafter
from vllm_treespec.train.teacher import (
    TargetStatistics,
    TeacherOptions,
    cache_teacher,
    load_cache,
)
from vllm_treespec.train.text import (
    Row,
    TextOptions,
    generate_text,
    read_prompts,
    read_rows,
)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target()


@pytest.fixture
def rows() -> list[Row]:
    return some_rows(1)


def exact_kl(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """KL divergence over the whole vocabulary."""
    draft = (hidden @ weight.T).log_softmax(-1)
    return torch.nn.functional.kl_div(draft, target, reduction="batchmean")


def assert_same_loss(found: Tensor, expected: Tensor, trained: list[Tensor]) -> None:
    """Compare losses and their gradients."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=1e-6)
    ours, wanted = (torch.autograd.grad(x, trained) for x in (found, expected))
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


def whole(target_probs: Tensor, top_k: int) -> TeacherTargets:
    """A teacher's targets of distributions."""
    top = target_probs.topk(top_k, dim=-1)
    rest = (1 - top.values.sum(-1)).clamp_min(0)
    return TeacherTargets(top.indices, top.values, rest)


def random_case(num_positions: int = 13) -> tuple[Tensor, ...]:
    """Hidden states, output layer and distributions of a target, float64."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((num_positions, 8), (VOCAB, 8), (num_positions, VOCAB))
    hidden, weight, logits = (
        torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes
    )
    return hidden.requires_grad_(), weight.requires_grad_(), (2 * logits).softmax(-1)


def test_merged_rest_is_one_more_token_and_a_lower_bound() -> None:
    """Red when the mass outside the kept tokens is dropped or spread."""
    hidden, weight, target_probs = random_case()
    targets = whole(target_probs, 5)
    draft_probs = (hidden @ weight.T).softmax(-1).gather(1, targets.ids)
    merged_target = torch.cat([targets.probs, targets.rest[:, None]], -1)
    merged_draft = torch.cat([draft_probs, 1 - draft_probs.sum(-1, True)], -1)
    expected = (merged_target * (merged_target / merged_draft).log()).sum(-1).mean()
    loss = topk_kl(hidden, weight, targets, compute_dtype=torch.float64)
    assert loss < exact_kl(hidden, weight, target_probs)
    assert_same_loss(loss, expected, [hidden, weight])


def test_loss_and_gradients_are_exact_kl_when_k_is_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a gradient is off, also of chosen rows or of columns beside a weight."""
    for chosen, width, trains_weight in product((0, 1), (0, 3), (True, False)):
        # several chunks
        monkeypatch.setattr("vllm_treespec.train.loss.LOGITS_CHUNK", 3)
        hidden, weight, target_probs = (x.detach() for x in random_case())
        columns = torch.randn(VOCAB, width).double().requires_grad_() if width else None
        hidden = torch.cat([hidden, torch.randn(len(hidden), width).double()], dim=-1)
        hidden.requires_grad_()
        weight.requires_grad_(trains_weight)
        order = torch.randperm(VOCAB)
        rows = VocabRows.of(order, order, VOCAB) if chosen else None
        targets = whole(target_probs, VOCAB)
        loss = topk_kl(hidden, weight, targets, rows, torch.float64, columns)
        whole_weight = (
            weight if columns is None else torch.cat([weight, columns], dim=-1)
        )
        expected = exact_kl(hidden, whole_weight, target_probs)
        trained = [x for x in (hidden, weight, columns) if x is not None]
        assert_same_loss(loss, expected, [x for x in trained if x.requires_grad])


def test_sampled_head_rows_estimate_the_softmax_denominator_without_bias() -> None:
    """Red when a sampled row's weight is off, or a likely token is left to chance."""
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
    likely = targets.ids[targets.probs >= 0.01]
    assert bool((chosen.column[likely] < len(chosen.rows)).all())


def test_quality_of_a_draft_with_itself_is_perfect() -> None:
    """Red when KL, rank or acceptance compare other tokens than the loss does."""
    hidden, weight, _ = (x.detach().float() for x in random_case())
    quality = quality_of(hidden, weight, whole((hidden @ weight.T).softmax(-1), VOCAB))
    torch.testing.assert_close(quality.kl, torch.zeros(13), atol=1e-5, rtol=0)
    torch.testing.assert_close(quality.acceptance, torch.ones(13))
    assert not quality.rank.any()


def test_teacher_cache_holds_what_the_target_says(
    tmp_path: Path, target: LlamaForCausalLM, rows: list[Row]
) -> None:
    """Red when positions, tokens or probabilities of the shards get out of step."""
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
    """Red when more text redoes whole shards, or changed text does not."""
    options = TeacherOptions(top_k=4, rows_per_shard=4)
    shards = cache_teacher(target, "tiny", rows, tmp_path, options)
    before = [shard.stat().st_mtime_ns for shard in shards]
    more = [*rows, Row([5, 6, 7], 1)]
    again = cache_teacher(target, "tiny", more, tmp_path, options)
    after = [shard.stat().st_mtime_ns for shard in again]
    assert after[:2] == before[:2]
    assert after[2] != before[2]
    assert load_cache(again).num_rows == len(more)


def test_shards_are_made_again_with_a_further_layer(
    tmp_path: Path, target: LlamaForCausalLM, rows: list[Row]
) -> None:
    """Red when a head reads states that its shards lack, or another's are dropped."""
    for layers in ((2, 4), (FINAL_LAYER,), ()):
        options = TeacherOptions(top_k=4, layers=layers)
        cache = load_cache(cache_teacher(target, "tiny", rows, tmp_path, options))
        assert all(map(cache.states.has, layers))
    assert cache.states.read((2, 4, FINAL_LAYER), 0, 5).shape == (5, 96)


def test_projection_to_full_width_keeps_logits_up_to_a_shift(
    target: LlamaForCausalLM,
) -> None:
    """Red when the start of a draft model loses what its width can hold."""
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
    """Red when --max-mb passes, or its refusal names no remedy."""
    with pytest.raises(ValueError, match=r"--hidden-size or raise --max-mb"):
        save_drafter(tiny_draft(target), tmp_path, max_mb=0.001)


def test_text_file_cut_in_a_line_reads_to_the_last_whole_row(tmp_path: Path) -> None:
    """Red when text of a killed run is refused, or its last whole row is lost."""
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
    ) -> list[Any]:
        answer = SimpleNamespace(token_ids=(1, 2), text="why?", finish_reason="stop")
        return [SimpleNamespace(outputs=[answer]) for _ in prompts]


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``import vllm`` find an engine that needs no model."""
    module = SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.usefixtures("fake_vllm")
def test_text_is_appended_by_batches_and_a_cut_run_goes_on(tmp_path: Path) -> None:
    """Red when a killed text stage starts over, or answers are not the target's."""
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
    """Red when such a target ends in a traceback."""
    monkeypatch.setattr(FakeTokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="pass --text"):
        generate_text("target", [], tmp_path / "text.jsonl", TextOptions(), 200)


def test_prompts_are_read_from_the_usual_keys(tmp_path: Path) -> None:
    """Red when a key that docs/train.md names is not read."""
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
