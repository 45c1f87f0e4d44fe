"""Targets whose layers see windows, in one KV cache group or in several."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.tiny_models import write_layered, write_windowed
from tests.v2.conftest import SIZES
from tests.v2.engines import engine
from tests.v2.prompts import NUM_TOKENS, PARAMS, PROMPTS
from tests.v2.test_trees import INDEX, accepted

# longer than a tree, shorter than the prompts
WINDOW = 20
SEEN = PROMPTS[1:3]


@pytest.mark.parametrize("write", [write_windowed, write_layered])
def test_windows(write: Callable[..., str], tmp_path: Path) -> None:
    """Red when a node sees another window than its position's, or another group's KV.

    Prefix caching is on, so that trees also lie behind blocks of other requests.
    """
    target = write(tmp_path / "target", WINDOW, **SIZES)
    with engine(target, enable_prefix_caching=True) as plain:
        expected = plain.generate(SEEN, PARAMS["sampled"], NUM_TOKENS)
    with engine(target, INDEX, enable_prefix_caching=True) as running:
        for _ in range(2):
            answers = running.generate(SEEN, PARAMS["sampled"], NUM_TOKENS)
            assert answers == expected
        assert accepted(running) > NUM_TOKENS // 2
