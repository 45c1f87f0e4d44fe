"""Batches: each row is answered exactly once, whatever happens meanwhile."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fast.batch_answers import TOO_LONG, FakeAnswerer
from vllm_treespec import atomic_files
from vllm_treespec.tools.batch import files, journal
from vllm_treespec.tools.batch.rows import BatchError, Columns
from vllm_treespec.tools.batch.run import Progress, Settings, Summary, run_batch

OPTIONS = {"--model": "m", "--sampling-params": {"temperature": 0}}
# Good rows, bad ones, a row without an id, a blank line, no newline at the end.
MIXED = (
    '{"id": "a", "prompt": "one"}\n'
    '{"prompt": "two"}\n'
    "not JSON\n"
    "\n"
    '{"id": 7, "prompt": "too long"}\n'
    '{"id": "b", "prompt": "üml\u2028aut"}\n'
    '{"id": "c"}\n'
    '{"id": "d", "messages": [{"role": "user", "content": "hi"}]}\n'
    '{"id": "a", "prompt": "six", "sampling_params": {"max_tokens": 3}}'
)
ANSWERED = [("a", 1), (2, 2), ("b", 6), ("d", 8), ("a", 9)]
BAD = [(3, 3), (7, 5), ("c", 7)]


class Killed(BaseException):
    """What stands for a kill in these tests."""


class KillingOs:
    """The module ``os``, until so many steps of writing were done; then a kill.

    A kill comes before a call, after it or, for a write, when half is written.
    """

    def __init__(self, steps: int) -> None:
        """Kill after so many steps."""
        self.steps = steps

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of ``os``."""
        return getattr(os, name)

    def step(self) -> None:
        """Do one step, or end here."""
        if self.steps == 0:
            raise Killed
        self.steps -= 1

    def around(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call, unless killed before or after."""
        self.step()
        result = call(*arguments)
        self.step()
        return result

    def write(self, file: int, data: bytes) -> int:
        """Write half, which is allowed, or all of a single byte."""
        return self.around(os.write, file, data[: max(1, len(data) // 2)])

    def fsync(self, file: int) -> None:
        """Wait for the disk."""
        self.around(os.fsync, file)

    def ftruncate(self, file: int, length: int) -> None:
        """Cut a file."""
        self.around(os.ftruncate, file, length)

    def unlink(self, file: Path) -> None:
        """Remove a file; a killed process removes none."""
        self.around(os.unlink, file)

    def replace(self, old: Path, new: Path) -> None:
        """Rename a file."""
        self.around(os.replace, old, new)


def settings_of(folder: Path, text: str = MIXED, **changes: Any) -> Settings:
    """A batch in a folder, its input written."""
    source = folder / "in.jsonl"
    source.write_text(text, encoding="utf-8")
    defaults: dict[str, Any] = {
        "input": source,
        "output": folder / "out.jsonl",
        "options": OPTIONS,
    }
    return Settings(**{**defaults, **changes})


def run(settings: Settings, answer: FakeAnswerer | None = None) -> Summary:
    """Run a batch with the fake answerer."""
    return run_batch(settings, answer or FakeAnswerer(), lambda progress: None)


def lines_of(path: Path) -> list[dict]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def ids_of(path: Path) -> list[tuple]:
    """Ids and lines of a JSONL file, in its order."""
    return [(row["id"], row["line"]) for row in lines_of(path)]


def journaled(settings: Settings) -> set[int]:
    """Lines whose rows stand in a journal as a whole."""
    if not settings.journal.exists():
        return set()
    whole = settings.journal.read_bytes().split(b"\n")[1:-1]
    return {json.loads(line)["line"] for line in whole}


def with_line(settings: Settings, line: bytes, place: int) -> None:
    """Put a line into a journal, before the one of that place."""
    lines = settings.journal.read_bytes().splitlines(keepends=True)
    lines.insert(place, line)
    settings.journal.write_bytes(b"".join(lines))


def test_each_row_is_answered_or_reported(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert run(settings) == Summary(answered=5, bad=3)
    assert ids_of(settings.output) == ANSWERED
    texts = [row["text"] for row in lines_of(settings.output)]
    assert texts == ["one!", "two!", "üml\u2028aut!", "hi!", "six!"]
    bad = lines_of(settings.bad_rows)
    assert [(row["id"], row["line"]) for row in bad] == BAD
    assert bad[0]["reason"].startswith("not JSON")
    assert bad[0]["row"] == "not JSON"
    assert bad[1]["reason"] == TOO_LONG
    assert "no prompt" in bad[2]["reason"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.bad.jsonl",
        "out.jsonl.journal",
    ]


def killed_after(
    steps: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Run a batch that is killed after so many steps; whether it came that far."""
    kept = journaled(settings)
    answer = FakeAnswerer()
    with monkeypatch.context() as patch:
        killing = KillingOs(steps)
        patch.setattr(journal, "os", killing)
        patch.setattr(atomic_files, "os", killing)
        try:
            run(settings, answer)
        except Killed:
            return True
        finally:
            assert kept.isdisjoint(answer.asked)
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("later", [10, 45, 1000])
def test_a_kill_at_any_step_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    """Red when a kill between two steps loses a row, or lets one be answered twice.

    The second start is killed ``later``, too, or not at all; then one finishes.
    """
    for steps in itertools.count():
        folder = tmp_path / str(steps)
        folder.mkdir()
        settings = settings_of(folder)
        killed = killed_after(steps, settings, monkeypatch)
        killed_after(later, settings, monkeypatch)
        kept = journaled(settings)
        answer = FakeAnswerer()
        run(settings, answer)
        assert kept.isdisjoint(answer.asked)
        assert ids_of(settings.output) == ANSWERED
        assert ids_of(settings.bad_rows) == BAD
        if not killed:
            break
    assert steps > 100


def test_a_kill_while_answering(tmp_path: Path) -> None:
    """Red when rows inside the engine count as finished, or finished ones do not."""

    def killed(rows: Iterator) -> Iterator[list]:
        yield next(FakeAnswerer()(rows))
        raise Killed

    settings = settings_of(tmp_path)
    for _ in range(2):
        with pytest.raises(Killed):
            run_batch(settings, killed, lambda progress: None)
    assert not settings.output.exists()
    kept = journaled(settings)
    answer = FakeAnswerer()
    assert run(settings, answer) == Summary(answered=5, bad=3)
    assert kept
    assert kept.isdisjoint(answer.asked)
    assert ids_of(settings.output) == ANSWERED


@pytest.mark.thorough
def test_a_process_killed_three_times(tmp_path: Path) -> None:
    """Red when what a killed process leaves keeps the next one from going on."""
    rows = [json.dumps({"id": f"r{n}", "prompt": f"p{n}"}) for n in range(120)]
    settings = settings_of(tmp_path, "\n".join(rows) + "\nbad\n")
    command = [sys.executable, "-m", "tests.fast.batch_answers"]
    command += [str(settings.input), str(settings.output)]
    finished = [0]
    for _ in range(3):
        process = subprocess.Popen(command)
        while len(journaled(settings)) < finished[-1] + 15:
            assert process.poll() is None, "the batch ended before it was killed"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        finished.append(len(journaled(settings)))
    assert 45 <= finished[-1] < 120
    subprocess.run(command, check=True, timeout=60)
    found = lines_of(settings.output)
    assert [row["id"] for row in found] == [f"r{n}" for n in range(120)]
    assert [row["text"] for row in found] == [f"p{n}!" for n in range(120)]
    assert ids_of(settings.bad_rows) == [(121, 121)]


def test_torn_lines_are_answered_again(tmp_path: Path) -> None:
    """Red when a journal that lost power in the middle of a line is not repaired."""
    settings = settings_of(tmp_path)
    run(settings_of(tmp_path, limit=6))
    whole = settings.journal.read_bytes()
    settings.journal.write_bytes(whole[:-9])
    torn = FakeAnswerer()
    run(settings_of(tmp_path, limit=6), torn)
    assert len(torn.asked) == 1
    broken = whole.splitlines(keepends=True)
    lost = json.loads(broken[3])["line"]
    broken[3] = b"\0" * (len(broken[3]) - 1) + b"\n"
    settings.journal.write_bytes(b"".join(broken))
    repaired = FakeAnswerer()
    run(settings_of(tmp_path, limit=6), repaired)
    assert repaired.asked == [lost]
    run(settings)
    assert ids_of(settings.output) == ANSWERED


@pytest.mark.parametrize("place", [3, 7], ids=["middle", "last"])
@pytest.mark.parametrize(
    "line",
    [
        b'{"line": "x"}',
        b'{"line": 9}',
        b'{"id": 9, "line": 9, "reason": "no row"}',
        b'{"id": 9, "line": 9, "reason": "", "row": "", "text": "both"}',
        b'{"treespec_batch": 1, "options": {}}',
        b"[9]",
        b"[" * 9999,
        b"null",
        b"",
    ],
)
def test_odd_lines_of_a_journal_are_no_rows(
    tmp_path: Path, line: bytes, place: int
) -> None:
    """Red when such a line ends every start, or costs rows that are finished."""
    run(settings_of(tmp_path, limit=6))
    settings = settings_of(tmp_path)
    with_line(settings, line + b"\n", place)
    answer = FakeAnswerer()
    assert run(settings, answer) == Summary(answered=5, bad=3)
    assert sorted(answer.asked) == [8, 9]
    assert ids_of(settings.output) == ANSWERED
    assert ids_of(settings.bad_rows) == BAD


def test_a_journal_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Red when a batch that was half finished before an upgrade starts anew."""
    settings = settings_of(tmp_path)
    run(settings_of(tmp_path, limit=6))
    first, *rows = settings.journal.read_bytes().splitlines(keepends=True)
    options = json.loads(first)["options"]
    earlier = json.dumps({"treespec_batch": 1, "options": options}).encode() + b"\n"
    settings.journal.write_bytes(earlier + b"".join(rows))
    answer = FakeAnswerer()
    assert run(settings, answer) == Summary(answered=5, bad=3)
    assert sorted(answer.asked) == [8, 9]
    assert ids_of(settings.bad_rows) == BAD


def test_a_row_twice_in_a_journal(tmp_path: Path) -> None:
    """Red when a row is answered and bad at once."""
    settings = settings_of(tmp_path)
    run(settings_of(tmp_path, limit=6))
    again = {"id": "x", "line": 1, "reason": "late", "row": ""}
    # no row of INPUT: line 4 is blank
    for fields in (again, {**again, "line": 4}):
        with_line(settings, json.dumps(fields).encode() + b"\n", 7)
    assert run(settings) == Summary(answered=5, bad=3)
    assert ids_of(settings.output) == ANSWERED


@pytest.mark.parametrize("left", [b"", b'{"tree', b'{"treespec_batch": 1, "opt'])
def test_a_journal_without_its_first_line(tmp_path: Path, left: bytes) -> None:
    """Red when a kill at the very start needs a hand to clean up."""
    settings = settings_of(tmp_path)
    settings.journal.write_bytes(left)
    assert run(settings).answered == 5


def test_a_finished_batch_is_not_run_again(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    first = run(settings)
    # The answers are in OUTPUT alone.
    assert len(settings.journal.read_bytes().splitlines()) == 1
    answer = FakeAnswerer()
    assert run(settings, answer) == first
    assert not answer.asked
    settings.output.unlink()
    with pytest.raises(BatchError, match=r"finished.*is gone; .*remove"):
        run(settings)


def test_limit_takes_the_first_rows_and_more_later(tmp_path: Path) -> None:
    """Red when a trial run has to be thrown away, or is answered again."""
    answer = FakeAnswerer()
    trial = settings_of(tmp_path, limit=3)
    assert run(trial, answer) == Summary(answered=2, bad=1)
    assert ids_of(trial.output) == ANSWERED[:2]
    settings = settings_of(tmp_path)
    assert run(settings, answer) == Summary(answered=5, bad=3)
    assert ids_of(settings.output) == ANSWERED
    assert len(answer.asked) == len(set(answer.asked)) == 6


def test_a_smaller_limit_after_a_larger_one(tmp_path: Path) -> None:
    run(settings_of(tmp_path, limit=6))
    small = settings_of(tmp_path, limit=2)
    assert run(small) == Summary(answered=2, bad=0)
    assert ids_of(small.output) == ANSWERED[:2]
    assert not small.bad_rows.exists()


def test_a_limit_of_bad_rows_keeps_the_others(tmp_path: Path) -> None:
    """Red when a look at the first row, a bad one, throws finished rows away."""
    text = 'bad\n{"prompt": "a"}\n'
    run(settings_of(tmp_path, text + '{"prompt": "b"}\n', limit=2))
    first = settings_of(tmp_path, text + '{"prompt": "b"}\n', limit=1)
    assert run(first) == Summary(answered=0, bad=1)
    assert journaled(first) == {1, 2}


def test_progress_counts_earlier_starts(tmp_path: Path) -> None:
    """Red when the bar starts at nought after a kill, or tokens are counted twice."""
    run(settings_of(tmp_path, limit=3))
    seen: list[Progress] = []

    def show(progress: Progress) -> None:
        seen.append(replace(progress))

    run_batch(settings_of(tmp_path), FakeAnswerer(), show)
    # A blank line counts as a row until it is read.
    assert seen[0] == Progress(total=9, finished=3, bad=1)
    later = ("üml\u2028aut", "hi", "six")
    tokens = sum(1 + len(text) for text in later)
    assert seen[-1] == Progress(total=8, finished=8, bad=3, tokens=tokens)


def test_parquet_round_trip(tmp_path: Path) -> None:
    """Red when Parquet files lose rows, order, ids or their type."""
    rows = [
        {"key": 10, "prompt": "one", "messages": None, "sampling_params": None},
        {"key": 11, "prompt": None, "messages": None, "sampling_params": None},
        {
            "key": 12,
            "prompt": None,
            "messages": [{"role": "user", "content": "hi"}],
            "sampling_params": {"max_tokens": 4, "temperature": None},
        },
    ]
    source = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), source)
    settings = Settings(
        source, tmp_path / "out.parquet", OPTIONS, columns=Columns(id="key")
    )
    assert run(settings) == Summary(answered=2, bad=1)
    table = pq.read_table(settings.output)
    assert table.schema == files.answer_schema(whole_ids=True)
    assert table.column("id").to_pylist() == [10, 12]
    assert table.column("line").to_pylist() == [1, 3]
    assert table.column("text").to_pylist() == ["one!", "hi!"]
    (bad,) = lines_of(settings.bad_rows)
    assert (bad["id"], bad["line"]) == (11, 2)
    given = list(files.read_rows(source, settings.columns))[2]
    assert given.sampling_params == {"max_tokens": 4}  # type: ignore[union-attr]


def test_ids_of_two_kinds_are_text_in_parquet(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, output=tmp_path / "out.parquet")
    run(settings)
    table = pq.read_table(settings.output)
    assert table.column("id").to_pylist() == [str(row_id) for row_id, _ in ANSWERED]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": ""}', "no prompt: 'prompt' is empty"),
        ('{"prompt": null}', "no prompt: neither 'prompt' nor 'messages'"),
        ('{"prompt": 5}', "'prompt' is not text"),
        ('{"prompt": "\\ud800"}', "half a character"),
        ('{"prompt": "x", "messages": []}', "both 'prompt' and 'messages'"),
        ('{"messages": []}', "not a list of messages"),
        ('{"messages": "hi"}', "not a list of messages"),
        ('{"messages": [{"role": "user"}]}', "needs 'role' and 'content'"),
        ('{"messages": [{"role": "user", "content": 5}]}', "'role' and 'content'"),
        ('{"prompt": "x", "sampling_params": 5}', "is not an object"),
        ('{"prompt": "x", "id": [1]}', "'id' is neither text nor a whole number"),
        ('{"prompt": "x", "id": true}', "'id' is neither text nor a whole number"),
        ('{"prompt": "x", "id": 99999999999999999999}', "more than 64 bits"),
        ('{"prompt": "x", "id": NaN}', "not JSON: NaN"),
        ('["prompt"]', "not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "x"', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8 text"),
    ],
)
def test_bad_rows_say_why(tmp_path: Path, line: str | bytes, reason: str) -> None:
    settings = settings_of(tmp_path)
    raw = line.encode() if isinstance(line, str) else line
    settings.input.write_bytes(b'{"prompt": "good"}\n' + raw + b"\n")
    assert run(settings) == Summary(answered=1, bad=1)
    (bad,) = lines_of(settings.bad_rows)
    assert bad["line"] == 2
    assert reason in bad["reason"]
    assert bad["row"].startswith(raw.decode(errors="backslashreplace")[:9])


def test_options_of_another_run_are_refused(tmp_path: Path) -> None:
    """Red when answers of two models, or to two inputs, can come into one file."""
    run(settings_of(tmp_path, limit=3))
    changed = {**OPTIONS, "--model": "other"}
    with pytest.raises(BatchError, match=r'--model is "other", and was "m".*OUTPUT'):
        run(settings_of(tmp_path, options=changed))
    with pytest.raises(BatchError, match=r"--chat is true, and was not given"):
        run(settings_of(tmp_path, options={**OPTIONS, "--chat": True}))
    with pytest.raises(BatchError, match=r"content of INPUT \(SHA-256\)"):
        run(settings_of(tmp_path, MIXED + "\n\n"))
    assert run(settings_of(tmp_path)).answered == 5


def test_options_may_change_while_nothing_is_answered(tmp_path: Path) -> None:
    """Red when a start that vLLM refused must be cleaned up by hand."""

    def refused(rows: Iterator) -> Iterator[list]:
        raise BatchError("no such model")
        yield

    other = settings_of(tmp_path, options={"--model": "typing error"})
    with pytest.raises(BatchError, match="no such model"):
        run_batch(other, refused, lambda progress: None)
    assert run(settings_of(tmp_path)).answered == 5


def test_two_processes_do_not_share_a_batch(tmp_path: Path) -> None:
    """Red when a second start answers what the first is answering."""
    settings = settings_of(tmp_path)
    child = "from tests.fast.batch_answers import main; main()"
    files_of = [str(settings.input), str(settings.output)]
    command = [sys.executable, "-c", child, *files_of]
    with journal.Journal(settings.journal, {}):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "another process writes to" in found.stderr


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    for path in (settings.output, settings.bad_rows):
        path.write_text("mine")
        with pytest.raises(BatchError, match=r"exists, and no journal says"):
            run(settings)
        assert path.read_text() == "mine"
        path.unlink()
    for text in ("mine", "mine\n", "{}\n", '{"treespec_batch": 1}\n', "[1]\n"):
        settings.journal.write_text(text)
        with pytest.raises(BatchError, match="is no journal of treespec batch"):
            run(settings)
        assert settings.journal.read_text() == text


def test_two_outputs_share_no_file(tmp_path: Path) -> None:
    """Red when one batch removes or replaces what another one has written."""
    bad = settings_of(tmp_path, output=tmp_path / "s.jsonl")
    clean = settings_of(tmp_path, output=tmp_path / "s.parquet", limit=2)
    run(clean)
    assert run(bad).bad == 3
    run(clean)
    assert ids_of(bad.bad_rows) == BAD
    files_of = [{batch.output, batch.journal, batch.bad_rows} for batch in (bad, clean)]
    assert files_of[0].isdisjoint(files_of[1])


def test_nothing_is_kept_when_every_row_is_bad(tmp_path: Path) -> None:
    """Red when a wrong --prompt-column ends as a finished batch."""
    settings = settings_of(tmp_path, columns=Columns(prompt="question"))
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'
    settings.input.write_text(text)
    with pytest.raises(BatchError, match=r"no row .* line 1: .*'question'"):
        run(settings)
    assert list(tmp_path.iterdir()) == [settings.input]
    assert run(settings_of(tmp_path, text)).answered == 2


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("in.csv", "out.jsonl"), r"INPUT .*in.csv: its name must end in"),
        (("in.jsonl", "out.txt"), r"OUTPUT .*out.txt: its name must end in"),
        (("in.jsonl", "no/out.jsonl"), r"there is no folder"),
        (("in.jsonl", "s.jsonl.bad.jsonl"), r"OUTPUT .*bad rows; name another"),
        (("in.parquet", "out.jsonl"), r"is no Parquet file"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, names: tuple[str, str], message: str
) -> None:
    source, output = (tmp_path / name for name in names)
    source.write_text(MIXED)
    with pytest.raises(BatchError, match=message):
        run(Settings(source, output, OPTIONS))
    assert list(tmp_path.iterdir()) == [source]


def test_parquet_without_prompts(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), source)
    with pytest.raises(BatchError, match=r"--prompt-column \(there are: text, n\)"):
        run(Settings(source, tmp_path / "out.jsonl", OPTIONS))
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("what", ["page", "text", "name"])
def test_damaged_parquet_is_named_before_a_row_is_answered(
    tmp_path: Path, what: str
) -> None:
    """Red when the message names no file, or comes when rows have been answered."""
    source = tmp_path / "in.parquet"
    rows = [{"prompt": f"row {n}", "unread": "x"} for n in range(40)]
    pq.write_table(
        pa.Table.from_pylist(rows), source, row_group_size=20, compression="none"
    )
    damaged = source.read_bytes()
    group = "row group 1 of 2 is damaged"
    if what == "page":
        start = pq.read_metadata(source).row_group(1).column(0).dictionary_page_offset
        damaged = damaged[:start] + b"\xff" * 16 + damaged[start + 16 :]
    elif what == "text":
        damaged = damaged.replace(b"row 33", b"row \xff3")
    else:
        damaged = damaged.replace(b"unread", b"unrea\xff")
        group = "is no Parquet file"
    source.write_bytes(damaged)
    answer = FakeAnswerer()
    with pytest.raises(BatchError, match=rf"in\.parquet.*{group}"):
        run(Settings(source, tmp_path / "out.jsonl", OPTIONS), answer)
    assert not answer.asked
    assert list(tmp_path.iterdir()) == [source]


def test_damage_in_a_column_that_is_not_read(tmp_path: Path) -> None:
    """Red when a batch is refused for what it does not need."""
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "unread": ["x"]}), source)
    whole = source.read_bytes()
    start = pq.read_metadata(source).row_group(0).column(1).dictionary_page_offset
    source.write_bytes(whole[:start] + b"\xff" * 16 + whole[start + 16 :])
    assert run(Settings(source, tmp_path / "out.jsonl", OPTIONS)).answered == 1


def test_an_input_without_rows(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="has no rows"):
        run(settings_of(tmp_path, "\n\n"))
