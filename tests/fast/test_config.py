"""Spec-configs: what is accepted, what is refused, and in which words."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.heads import HEADS, write_head
from vllm_treespec.cli import app
from vllm_treespec.config import METHODS, parse_spec_config

MODEL = {"model": "draft"}
# What each method is told besides its name, at least.
LEAST: dict[str, dict] = {
    "sd": MODEL,
    "rsd_c": MODEL,
    "rsd_s": MODEL,
    "spectr": MODEL,
    "specinfer": {"drafts": [{"model": "one"}, {"model": "two"}]},
    "suffix_tree": {},
    "redrafter": {},
    "medusa_tree": {},
    "eagle_tree": MODEL,
    "dflash_tree": MODEL,
    "lyanna": MODEL,
    "hybrid": MODEL,
}


def test_every_method_is_covered() -> None:
    """Turns red when a method is added without a test."""
    assert METHODS.keys() == LEAST.keys()


@pytest.mark.parametrize("method", LEAST)
def test_a_name_and_a_model_are_enough(method: str, tmp_path: Path) -> None:
    """Red when a key must be written, or `treespec expand` leaves one open."""
    spec = {"method": method, **LEAST[method]}
    if method in HEADS:
        spec["model"] = write_head(tmp_path, HEADS[method])
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    done = CliRunner().invoke(app, ["expand", str(file)])
    assert done.exit_code == 0, done.output
    arguments = json.loads(done.stdout)
    printed = arguments["additional_config"]["treespec"]
    open_keys = {key for key in METHODS[method].SHAPE if printed[key] is None}
    assert open_keys <= {"min_probability"}
    config = parse_spec_config(spec)
    assert config.max_trees == 16
    assert parse_spec_config(printed) == config
    fixed = parse_spec_config({**spec, "schedule": "fixed"})
    assert parse_spec_config(fixed.model_dump(mode="json")) == fixed
    num_drafts = config.proposer().sizes.max_nodes - 1
    assert arguments["speculative_config"]["num_speculative_tokens"] == num_drafts
    assert num_drafts <= 32


def test_largest_tree_fits() -> None:
    """Turns red when the limit moves off 63 draft tokens."""
    spec = {"method": "rsd_s", "model": "d", "beam_width": 9, "depth": 7}
    assert parse_spec_config(spec).proposer().sizes.max_nodes == 64


def test_hot_tokens_of_draft_models(tmp_path: Path) -> None:
    """Red when a folder's list is not found, or the spec-config does not come first."""
    own = tmp_path / "hot_tokens.json"
    spec = {"method": "rsd_s", "model": str(tmp_path)}
    assert parse_spec_config(spec).hot_token_files == (None,)
    own.write_text("[1]")
    assert parse_spec_config(spec).hot_token_files == (own,)
    named = parse_spec_config({**spec, "hot_tokens": "other.json"})
    assert named.hot_token_files == (Path("other.json"),)
    both = {"method": "specinfer", "drafts": [{"model": str(tmp_path)}] * 2}
    assert parse_spec_config(both).hot_token_files == (own, own)
    two = {"method": "specinfer", "drafts": [{"model": str(tmp_path)}, {"model": "b"}]}
    assert parse_spec_config(two).hot_token_files == (None, None)
    assert (
        parse_spec_config({**two, "hot_tokens": str(own)}).hot_token_files == (own,) * 2
    )
    every = parse_spec_config({**both, "hot_tokens": "all"})
    assert every.hot_token_files == (None, None)
    hybrid = {"method": "hybrid", "model": str(tmp_path)}
    assert parse_spec_config(hybrid).hot_token_files == (own,)
