"""The support page says what its tests test."""

import re
from pathlib import Path

from tests.engine.support import PAGE, ROWS, with_tables
from tests.engine.support_checks import Own

ROOT = Path(__file__).parents[2]


def test_page_is_written_from_the_tables() -> None:
    """Red when the tables change and the page does not, or is edited by hand."""
    text = PAGE.read_text()
    assert text == with_tables(text), "run python -m tests.engine.support"


def test_features_are_named_once() -> None:
    """Red when a feature stands in two rows that may contradict each other."""
    features = [row.feature for row in ROWS]
    assert len(set(features)) == len(features)


def test_own_tests_exist() -> None:
    """Red when a row names a test that was renamed or removed."""
    for row in ROWS:
        if isinstance(row.check, Own):
            path, name = row.check.test.split("::")
            text = (ROOT / path).read_text()
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), row.check.test
