"""Tables written as text: a line each for an input and the words that refuse it."""

import pytest


def rows(table: str) -> list:
    """Parameters (input, words) of a table with lines ``input => words``.

    A row may go on in indented lines.
    """
    lines: list[str] = []
    for line in table.strip().splitlines():
        if line.startswith(" "):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    found = [line.split(" => ", 1) for line in lines]
    return [pytest.param(given, says, id=given[:60]) for given, says in found]


def assert_says(message: object, says: str, limit: int = 600) -> None:
    """Compare an error with its words: one line, and not the screen full."""
    assert says in str(message)
    assert "\n" not in str(message)
    assert len(str(message)) < limit


def written_out(words: list[str], places: dict[str, str]) -> list[str]:
    """Words of a call; a name at the beginning of one stands for something longer."""
    for name, value in places.items():
        words = [
            value + word.removeprefix(name) if word.startswith(name) else word
            for word in words
        ]
    return words
