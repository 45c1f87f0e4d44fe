"""A table of where the time of the engine tier went."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

HEADER = (
    "| file | tests | engines | minutes | CPU minutes of engines | most GiB |",
    "|---|---|---|---|---|---|",
)


class Line:
    """What the tests of one file took."""

    def __init__(self) -> None:
        self.tests: set[str] = set()
        self.engines = 0
        self.seconds = self.cpu_seconds = self.gib = 0.0

    def add(self, report: pytest.TestReport) -> None:
        """Add a test's set-up, call or tear-down."""
        self.tests.add(report.nodeid)
        self.seconds += report.duration
        for name, usage in report.user_properties:
            if name == "engines":
                assert isinstance(usage, dict)
                self.engines += usage["engines"]
                self.cpu_seconds += usage["cpu_seconds"]
                self.gib = max(self.gib, usage["gib"])

    def text(self, name: str) -> str:
        """The line in Markdown."""
        minutes, cpu_minutes = self.seconds / 60, self.cpu_seconds / 60
        numbers = f"{minutes:.1f} | {cpu_minutes:.1f} | {self.gib:.1f}"
        return f"| {name} | {len(self.tests)} | {self.engines} | {numbers} |"


def where_the_time_went(reports: Iterable[pytest.TestReport]) -> list[str]:
    """The table's lines in Markdown, one per file, the longest first.

    ``minutes`` are those of one pytest process: two of them run side by side.
    """
    lines: dict[str, Line] = defaultdict(Line)
    total = Line()
    for report in reports:
        for line in (lines[report.nodeid.partition("::")[0]], total):
            line.add(report)
    slowest_first = sorted(lines.items(), key=lambda item: -item[1].seconds)
    return [
        *HEADER,
        *(line.text(f"`{name.rpartition('/')[2]}`") for name, line in slowest_first),
        total.text("all"),
    ]
