"""The command ``treespec batch``, and how it feeds vLLM."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm.v1.engine import FINISH_REASON_STRINGS
from vllm.v1.engine.exceptions import EngineDeadError

from tests.fast.batch_answers import FakeAnswerer
from vllm_treespec.cli import app
from vllm_treespec.tools.batch import engine
from vllm_treespec.tools.batch.cli import FREE, vllm_options
from vllm_treespec.tools.batch.engine import VllmAnswerer, sampling_params_of
from vllm_treespec.tools.batch.rows import Answer, BadRow, BatchError, Row, RowError


class Started:
    """Stands for the engine's answerer; keeps what it was started with."""

    arguments: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        """Keep the arguments."""
        Started.arguments = arguments

    def __call__(self, rows: Iterator[Row]) -> Iterator[list]:
        """Answer as the fake does."""
        return FakeAnswerer()(rows)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """INPUT with two good rows and a bad one, and OUTPUT; no engine starts."""
    monkeypatch.setattr(engine, "VllmAnswerer", Started)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\nbad\n{"prompt": "b"}\n')
    return str(source), str(tmp_path / "out.jsonl")


def call(*arguments: str) -> tuple[int, str]:
    """Exit status of the command and what it prints, on one line."""
    result = CliRunner().invoke(app, ["batch", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_options_reach_the_engine(files: tuple[str, str]) -> None:
    """Red when an option of vLLM's is lost on the way."""
    spec = '{"method": "suffix_tree"}'
    options = ["--model", "m", "--speculative-config", spec, "--chat"]
    options += ["--sampling-params", '{"top_k": 3}', "--max-model-len", "64"]
    status, output = call(*files, *options, "--enforce-eager")
    assert status == 0
    assert "rows answered: 2, in" in output
    assert "bad rows: 1, with reasons" in output
    given = ["--model", "m", "--speculative-config", spec]
    given += ["--max-model-len", "64", "--enforce-eager"]
    assert Started.arguments == (given, {"top_k": 3}, True)


def test_options_of_speed_may_change_between_starts(files: tuple[str, str]) -> None:
    """Red when a batch that ran out of memory cannot go on with a smaller batch."""
    assert call(*files, "--model", "m", "--limit", "1", "--max-num-seqs=8")[0] == 0
    assert call(*files, "--model", "m", "--limit", "2", "--max_num_seqs", "4")[0] == 0
    status, output = call(*files, "--model", "m", "--dtype", "float16")
    assert status == 1
    assert '--dtype is "float16", and was not given when this batch was begun' in output


def test_free_options_are_vllms() -> None:
    """Red when vLLM renames one, so that changing it would be refused again."""
    from vllm.engine.arg_utils import EngineArgs

    names = {name.replace("-", "_") for name in FREE}
    assert names <= set(EngineArgs.__dataclass_fields__)


def test_options_by_name() -> None:
    given = ["--a_b", "1", "2", "--flag", "--c=x=y"]
    assert vllm_options(given) == {"a-b": "1 2", "flag": "", "c": "x=y"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperatur": 1}, "sampling parameter .did you mean 'temperature'"),
        ({"n": 2}, "'n': a batch cannot use this sampling parameter"),
        ({"logprobs": 2}, "'logprobs': a batch cannot use"),
        ({"_all_stop_token_ids": []}, "no such sampling parameter"),
        ({"temperature": "hot"}, "'temperature' is 'hot': Input should be"),
        ({"temperature": -1}, "temperature must be non-negative"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"seed": 2**64}, "'seed' is 18446744073709551616; write"),
        ({"structured_outputs": {"jsn": 1}}, "structured outputs"),
    ],
)
def test_wrong_sampling_parameters(fields: dict[str, Any], message: str) -> None:
    """Red when a misspelt or unusable parameter is dropped without a word."""
    with pytest.raises(RowError, match=message) as error:
        sampling_params_of(fields)
    assert "\n" not in str(error.value)


def test_sampling_parameters_as_json_has_them() -> None:
    found = sampling_params_of(
        {
            "temperature": 0.5,
            "stop": ["."],
            "logit_bias": {"3": 1.5},
            "structured_outputs": {"choice": ["yes", "no"]},
        }
    )
    assert (found.temperature, found.stop, found.logit_bias) == (0.5, ["."], {3: 1.5})
    assert found.structured_outputs.choice == ["yes", "no"]


class FakeLLM:
    """As much of ``vllm.LLM`` as the answerer uses; answers one request a step."""

    def __init__(self, max_num_seqs: int) -> None:
        """Have an empty engine."""
        scheduler = SimpleNamespace(max_num_seqs=max_num_seqs)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler)
        self.llm_engine = self
        self.inside: dict[str, str] = {}
        self.counter = 0
        # how many requests were inside at each step
        self.crowds: list[int] = []
        self.conversations: list[Any] = []
        # what it raises, by prompt
        self.refusals: dict[str, Exception] = {
            "too long": ValueError("The prompt has\n9 tokens"),
            "no image": ConnectionError("Max retries exceeded with url: /x.png"),
            "bad video": RuntimeError("half \ud83d of it"),
            "bad image": struct.error("unpack requires a buffer of 4 bytes"),
            "dead": EngineDeadError(),
        }

    def enqueue(self, prompt: str, params: Any, use_tqdm: bool) -> list[str]:
        """Take a prompt."""
        self.counter += 1
        if prompt in self.refusals:
            raise self.refusals[prompt]
        self.inside[str(self.counter)] = f"{prompt} {params.max_tokens}"
        return [f"{self.counter}-0a1b2c3d"]

    def enqueue_chat(self, prompt: Any, params: Any, use_tqdm: bool) -> list[str]:
        """Take a conversation."""
        self.conversations.append(prompt)
        return self.enqueue(prompt[-1]["content"], params, use_tqdm)

    def step(self) -> list[Any]:
        """Finish the newest request."""
        self.crowds.append(len(self.inside))
        request_id, text = self.inside.popitem()
        if text.startswith("poison"):
            raise RuntimeError("out of memory")
        word = text.split()[0]
        reason = word if word in FINISH_REASON_STRINGS else "stop"
        found = SimpleNamespace(text=text, finish_reason=reason, token_ids=[1, 2])
        output = {"request_id": request_id, "outputs": [found], "finished": True}
        return [SimpleNamespace(**output, prompt_token_ids=[1])]


def answered(llm: FakeLLM, prompts: list[str], chat: bool = False) -> list[Any]:
    """What the answerer makes of prompts with a fake engine."""
    answerer = VllmAnswerer([], {}, chat)
    answerer.defaults = {"max_tokens": 5}
    answerer._start = lambda: llm  # type: ignore[method-assign]
    rows = (
        Row(line, line, prompt, {"max_tokens": 7} if line == 2 else {}, "")
        for line, prompt in enumerate(prompts, 1)
    )
    return [record for group in answerer(rows) for record in group]


def test_the_engine_is_kept_full() -> None:
    """Red when rows wait for a whole portion, or more than two crowds go in."""
    llm = FakeLLM(max_num_seqs=3)
    found = answered(llm, [f"p{n}" for n in range(20)])
    assert llm.crowds == [6] * 15 + [5, 4, 3, 2, 1]
    assert sorted(answer.line for answer in found) == list(range(1, 21))
    assert all(answer.text.split()[0] == f"p{answer.line - 1}" for answer in found)
    assert {answer.text for answer in found} >= {"p0 5", "p1 7"}


def test_rows_that_the_engine_refuses() -> None:
    """Red when one row whose image cannot be fetched or decoded ends the batch."""
    llm = FakeLLM(max_num_seqs=1)
    prompts = ["too long", "a", "no image", "bad video", "bad image"]
    found = answered(llm, prompts)
    bad = {row.line: row.reason for row in found if isinstance(row, BadRow)}
    assert bad == {
        1: "The prompt has 9 tokens",
        3: "ConnectionError: Max retries exceeded with url: /x.png",
        4: "RuntimeError: half \\ud83d of it",
        5: "error: unpack requires a buffer of 4 bytes",
    }
    (answer,) = [row for row in found if isinstance(row, Answer)]
    assert (answer.prompt_tokens, answer.completion_tokens) == (1, 2)


def test_every_end_of_a_request() -> None:
    """Red when an answer is lost by how it ends, or vLLM has an end that is new."""
    found = answered(FakeLLM(max_num_seqs=9), list(FINISH_REASON_STRINGS))
    kept = {row.finish_reason for row in found if isinstance(row, Answer)}
    bad = {row.reason for row in found if isinstance(row, BadRow)}
    assert kept == {"stop", "length", "repetition"}
    assert bad == {"vLLM ended it with 'abort'", "vLLM ended it with 'error'"}


def test_a_dead_engine_is_no_bad_row() -> None:
    """Red when an engine that is dead makes bad rows of all that are left."""
    with pytest.raises(BatchError, match=r"EngineDeadError.*lines in it: 1;"):
        answered(FakeLLM(max_num_seqs=1), ["a", "dead", "b"])


def test_chat_makes_conversations() -> None:
    llm = FakeLLM(max_num_seqs=1)
    answered(llm, ["a"], chat=True)
    assert llm.conversations == [[{"role": "user", "content": "a"}]]


def test_a_failing_engine_names_the_rows_in_it() -> None:
    """Red when one row that ends the engine cannot be found."""
    with pytest.raises(BatchError, match=r"RuntimeError: out of memory.* 1, 2;"):
        answered(FakeLLM(max_num_seqs=1), ["a", "poison"])


def test_bad_rows_of_a_finished_batch_may_be_gone(files: tuple[str, str]) -> None:
    """Red when the command names a file that is not there."""
    assert "bad rows: 1, with reasons, in" in call(*files, "--model", "m")[1]
    Path(f"{files[1]}.bad.jsonl").unlink()
    status, output = call(*files, "--model", "m")
    assert status == 0
    assert output.endswith(".bad.jsonl, which is gone")


def test_wrong_options_of_vllm(tmp_path: Path) -> None:
    """Red when sampling parameters of all rows are looked at row by row."""
    answerer = VllmAnswerer(["--model", str(tmp_path)], {"top": 1})
    with pytest.raises(BatchError, match="--sampling-params: 'top': there is no such"):
        list(answerer(iter([])))


def test_rows_of_json_stay_json(files: tuple[str, str]) -> None:
    """Red when OUTPUT escapes text that its reader wants to see."""
    Path(files[0]).write_text(json.dumps({"prompt": "größer"}))
    assert call(*files, "--model", "m")[0] == 0
    assert "größer!" in Path(files[1]).read_text(encoding="utf-8")
