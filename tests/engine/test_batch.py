"""Batch jobs with trees, as a user runs them: our command and vLLM's own."""

import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.engine.conftest import TINY
from tests.engine.processes import EngineProcessError, call
from tests.engine.tiny_models import SIZES, write_tokenizer

MAX_TOKENS = 40
MAX_MODEL_LEN = 128
ENGINE = {
    "--dtype": "float32",
    "--max-model-len": str(MAX_MODEL_LEN),
    "--max-num-seqs": "4",
    "--kv-cache-memory-bytes": str(2**28),
}
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}


@dataclass(frozen=True)
class Work:
    """What is answered, by what, and how plain decoding answers it."""

    # folder of the target
    worded: str
    # spec-config for the command line
    spec: str
    prompts: list[list[int]]
    plain: list[list[int]]


@pytest.fixture(scope="module")
def worded(tiny: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the small target with a tokenizer: token 17 is the word w17."""
    folder = tmp_path_factory.mktemp("batch") / "target"
    shutil.copytree(tiny["target"], folder)
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of 1 to 60 tokens."""
    draw = random.Random(0)
    return [
        [draw.randrange(3, SIZES["vocab_size"]) for _ in range(draw.randint(1, 60))]
        for _ in range(48)
    ]


@pytest.fixture(scope="module")
def plain(
    run_engine: Callable[..., dict], tiny: dict[str, str], prompts: list[list[int]]
) -> list[list[int]]:
    """What ``LLM.generate`` answers without trees."""
    job = {"prompts": prompts, "params": GREEDY, "max_in_flight": len(prompts)}
    options = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, **TINY}
    found = run_engine(None, [job], model=tiny["target"], **options)
    return [answer["token_ids"] for answer in found["jobs"][0]]


@pytest.fixture(scope="module")
def work(
    worded: str, tiny: dict[str, str], prompts: list[list[int]], plain: list[list[int]]
) -> Work:
    """The prompts, with a draft model."""
    tree = {"method": "rsd_s", "beam_width": 3, "depth": 3, "schedule": "fixed"}
    return Work(worded, json.dumps({**tree, "model": tiny["draft"]}), prompts, plain)


def words_of(tokens: list[int]) -> str:
    """Tokens as text."""
    return " ".join(f"w{token}" for token in tokens)


def tokens_of(text: str) -> list[int]:
    """Text as tokens."""
    return [int(word.removeprefix("w")) for word in text.split()]


def run_program(program: str, *arguments: str) -> int | str | None:
    """In a fork: run a program of this environment; its exit status."""
    sys.argv = [program, *arguments]
    (entry,) = entry_points(group="console_scripts", name=program)
    try:
        entry.load()()
    except SystemExit as end:
        return end.code
    return 0


def run(log: Path, *command: str) -> int | str | None:
    """Run a program until it ends; its exit status."""
    return call("tests.engine.test_batch:run_program", *command, log=log)


def killed(log: Path, journal: Path, rows: int, *command: str) -> None:
    """Run a program until a journal has so many rows, then kill it."""
    me = os.getpid()

    def kill() -> None:
        while not journal.exists() or journal.read_bytes().count(b"\n") <= rows:
            time.sleep(0.001)
        (writer,) = [
            child
            for child in psutil.Process(me).children(recursive=True)
            if str(journal) in [file.path for file in child.open_files()]
        ]
        writer.kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(EngineProcessError, match="terminated abruptly"):
        run(log, *command)
    thread.join()


def input_lines(prompts: list[list[int]]) -> list[str]:
    """The prompts as rows, every third as a conversation; five bad rows among them."""
    lines = [
        json.dumps(
            {"id": f"r{n}", "messages": [{"role": "user", "content": words_of(prompt)}]}
            if n % 3 == 0
            else {"id": f"r{n}", "prompt": words_of(prompt)}
        )
        for n, prompt in enumerate(prompts)
    ]
    too_long = words_of([5] * (MAX_MODEL_LEN + 1))
    wrong = {"prompt": "w5", "sampling_params": {"temperature": "hot"}}
    unknown = {"prompt": "w5", "sampling_params": {"logprobs": 3}}
    parts = [{"type": "image_url", "image_url": {"url": "file:///no/image.png"}}]
    image = {"messages": [{"role": "user", "content": parts}]}
    bad = [{"prompt": too_long}, wrong, unknown, image]
    return ["not JSON", *lines[:9], *map(json.dumps, bad), *lines[9:]]


def batch_command(folder: Path, work: Work) -> list[str]:
    """The command that answers the prompts, which are written."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(input_lines(work.prompts)))
    options = {"--model": work.worded, "--speculative-config": work.spec, **ENGINE}
    command = ["treespec", "batch", str(source), str(output)]
    command += [part for option in options.items() for part in option]
    return [*command, "--sampling-params", json.dumps(GREEDY), "--enforce-eager"]


def check_answers(output: Path, work: Work) -> dict[int, str]:
    """Compare answers with those without trees; the reasons of bad rows, by line."""
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(len(work.plain))]
    assert [tokens_of(row["text"]) for row in rows] == work.plain
    assert [row["prompt_tokens"] for row in rows] == list(map(len, work.prompts))
    bad = Path(f"{output}.bad.jsonl").read_text().splitlines()
    reasons = {row["line"]: row["reason"] for row in map(json.loads, bad)}
    assert list(reasons) == [1, 11, 12, 13, 14]
    return reasons


def test_batch_equals_generate_and_survives_a_kill(work: Work, tmp_path: Path) -> None:
    """Red when rows get another row's answer or prompt, or a kill leaves an engine."""
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    journal = tmp_path / "out.jsonl.journal"
    command = batch_command(tmp_path, work)
    killed(log, journal, 10, *command)
    assert "custom_class" in log.read_text()
    assert not output.exists()
    assert journal.read_bytes().count(b"\n") < len(work.prompts)
    assert run(log, *command) == 0, log.read_text()[-4000:]
    reasons = check_answers(output, work)
    assert "not JSON" in reasons[1]
    assert str(MAX_MODEL_LEN) in reasons[11]
    assert reasons[12].startswith("'temperature' is 'hot'")
    assert reasons[13].startswith("'logprobs'")
    assert "Cannot load local files" in reasons[14]


@pytest.mark.skipif(
    find_spec("ray") is None,
    reason="Ray is not installed: pip install 'vllm-treespec[ray]'",
)
def test_batch_over_ray_goes_on_after_a_kill(work: Work, tmp_path: Path) -> None:
    """Red when a portion is lost or answered twice, or a kill leaves Ray behind.

    The second start needs no Ray: the journal is the same.
    """
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    command = batch_command(tmp_path, work)
    killed(log, tmp_path / "out.jsonl.journal", 5, *command, "--ray", "1")
    assert not output.exists()
    assert run(log, *command) == 0, log.read_text()[-4000:]
    check_answers(output, work)


def test_run_batch_of_vllm_with_trees(work: Work, tmp_path: Path) -> None:
    """Red when vLLM's own batch command cannot be given our methods."""
    requests = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": work.worded,
                "messages": [{"role": "user", "content": words_of(prompt)}],
                **GREEDY,
            },
        }
        for n, prompt in enumerate(work.prompts)
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, requests)) + "\n")
    options = {"--model": work.worded, "--speculative-config": work.spec, **ENGINE}
    command = ["vllm", "run-batch", "-i", str(source), "-o", str(output)]
    command += [part for option in options.items() for part in option]
    log = tmp_path / "log"
    assert run(log, *command, "--enforce-eager") in (0, None), log.read_text()[-4000:]
    assert "custom_class" in log.read_text()
    answers = {}
    for line in output.read_text().splitlines():
        answer = json.loads(line)
        message = answer["response"]["body"]["choices"][0]["message"]
        answers[answer["custom_id"]] = tokens_of(message["content"])
    assert answers == {f"r{n}": tokens for n, tokens in enumerate(work.plain)}
