"""The tiers of tests: what `make test` runs, and what it leaves out."""

from pathlib import Path

from _pytest.mark import ParameterSet

from tests.engine.selection import NOTHING, QUICK, is_quick
from tests.tiers import cases, grid

ENGINE = Path(__file__).parents[1] / "engine"


def test_the_table_names_files() -> None:
    """Red when a file was renamed: then all of its tests would be quick."""
    assert [name for name in QUICK if not (ENGINE / name).exists()] == []


def test_files_without_a_line_are_quick() -> None:
    """Red when a new engine test is left out unseen, or a thorough one is not."""
    assert is_quick("test_new.py", "test_tokens[rsd_s]")
    assert is_quick("test_greedy.py", "test_tokens_equal_plain[hybrid]")
    assert not is_quick("test_greedy.py", "test_tokens_equal_plain[hybrid-eagle]")
    thorough = next(name for name, pattern in QUICK.items() if pattern == NOTHING)
    assert not is_quick(thorough, "test_anything")


def test_quick_parameters_have_no_mark() -> None:
    """Red when the helpers mark the wrong parameters."""

    def marked(parameters: list) -> list[bool]:
        return [isinstance(p, ParameterSet) and bool(p.marks) for p in parameters]

    assert marked(cases(["a", "b"], quick=["b"])) == [True, False]
    assert marked(cases([(1, 2), (3, 4)], quick=[(1, 2)])) == [False, True]
    found = grid("ab", [0, 1], quick=lambda name, number: name == "a" and number)
    assert [p.values for p in found] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert marked(found) == [True, False, True, True]
