"""A stand-in for vLLM in batches; as a program, a slow batch that can be killed."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_treespec.tools.batch.rows import Answer, Finished, Row, bad_row
from vllm_treespec.tools.batch.run import Settings, run_batch

TOO_LONG = "too long"


class FakeAnswerer:
    """Answers groups of rows, the last one first; refuses prompts that are too long."""

    def __init__(self, room: int = 3, seconds: float = 0.0) -> None:
        """Take ``room`` rows at a time, for so many seconds."""
        self.room = room
        self.seconds = seconds
        # lines that it was asked for
        self.asked: list[int] = []

    def __call__(self, rows: Iterator[Row]) -> Iterator[list[Finished]]:
        """Answer the rows."""
        inside: list[Row] = []
        for row in rows:
            self.asked.append(row.line)
            inside.append(row)
            if len(inside) == self.room:
                time.sleep(self.seconds)
                yield [answer_of(row) for row in reversed(inside[1:])]
                del inside[1:]
        yield [answer_of(row) for row in inside]


def answer_of(row: Row) -> Finished:
    """The answer, which follows from the prompt."""
    if row.prompt == TOO_LONG:
        return bad_row(row, TOO_LONG)
    said = row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]
    return Answer(row.id, row.line, f"{said}!", "stop", len(said), 1 + len(said))


def main() -> None:
    """Run a slow batch on the files that the command line names."""
    settings = Settings(Path(sys.argv[1]), Path(sys.argv[2]), options={"--model": "m"})
    run_batch(settings, FakeAnswerer(seconds=0.02), lambda progress: None)


if __name__ == "__main__":
    main()
