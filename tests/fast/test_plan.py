"""`treespec plan`: Llama-2-70B's memory, what fits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, LlamaConfig, PretrainedConfig
from typer.testing import CliRunner, Result

from tests.fast.plan_models import (
    EAGLE_8B,
    EAGLE_70B,
    LLAMA_8B,
    LLAMA_70B,
    TINY_LLAMA,
    write_config,
    write_hollow,
    write_hollow_head,
)
from tests.heads import llama, write_head
from vllm_treespec.cli import app
from vllm_treespec.tools.plan import models
from vllm_treespec.tools.plan.models import config_shapes, read_model

SUFFIX = {"method": "suffix_tree"}
PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
SHAPES: dict[str, Any] = {}
KIB, GIB = 2**10, 2**30
# what Llama-2-70B and TinyLlama are known to have
NUM_PARAMETERS = 68_976_648_192
NUM_DRAFT_PARAMETERS = 1_100_048_384


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("models") / "70b", LLAMA_70B)


@pytest.fixture(autouse=True)
def made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 layers without memory take seconds to make."""
    monkeypatch.setattr(models, "config_shapes", cached_shapes)


def cached_shapes(option: str, name: str, config: PretrainedConfig) -> Any:
    key = config.to_json_string()
    if key not in SHAPES:
        SHAPES[key] = config_shapes(option, name, config)
    return SHAPES[key]


def run(target: str, spec: dict[str, Any], *options: str) -> Result:
    given = ["--gpu-memory", "80GiB", "--speculative-config", json.dumps(spec)]
    return CliRunner().invoke(app, ["plan", target, *given, *options])


def planned(target: str, spec: Any, ranks: int, *options: str) -> dict[str, Any]:
    result = run(target, spec, "--tensor-parallel-size", str(ranks), "--json", *options)
    assert not result.stderr, result.stderr
    plan: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if plan["fits"] else 1)
    return plan


def refusal(target: str, spec: Any) -> str:
    result = run(target, spec)
    assert result.exit_code == 1
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    return line


def test_eight_cards(target: str) -> None:
    """Red when weights, KV or the sum of a 70B's card are counted otherwise."""
    plan = planned(target, SUFFIX, 8)
    parts = plan["bytes"]
    # norms are whole on every rank: two a layer, and the last
    norms = (2 * 80 + 1) * 8192
    assert parts["target"] == 2 * ((NUM_PARAMETERS - norms) // 8 + norms)
    # one KV head a rank
    assert plan["token_bytes"] == 2 * 80 * 128 * 2 == 40 * KIB
    assert plan["block_size"] == 16
    assert parts["target_kv"] == plan["num_tokens"] * 40 * KIB
    assert "forks" not in parts
    assert "features" not in parts
    assert sum(parts.values()) == 80 * GIB
    # what 0.92 leaves, and less than a block
    assert 0 <= parts["left_free"] - 0.08 * 80 * GIB <= 16 * 40 * KIB + 1
    assert plan["num_requests"] == plan["num_tokens"] // 4096 > 200


def test_two_cards(target: str) -> None:
    """Red when two cards are refused, which hold it with little room."""
    plan = planned(target, SUFFIX, 2)
    assert plan["fits"]
    assert 64 < plan["bytes"]["target"] / GIB < 64.5
    assert plan["token_bytes"] == 160 * KIB
    assert 4 <= plan["num_requests"] <= 16


def test_one_card_is_too_small(target: str) -> None:
    """Red when a plan that cannot work is called a fit, or names no remedy."""
    plan = planned(target, SUFFIX, 1)
    assert not plan["fits"]
    assert plan["remedies"] == ["--tensor-parallel-size 2"]
    assert plan["missing_bytes"] > 55 * GIB
    shown = run(target, SUFFIX)
    assert shown.exit_code == 1
    assert "does not fit" in shown.stdout
    assert "Pass --tensor-parallel-size 2." in shown.stdout


def test_fewer_requests_make_room(tmp_path: Path) -> None:
    """Red when larger cards are wanted for what one option takes."""
    target = write_config(tmp_path / "8b", LLAMA_8B)
    card = ("--gpu-memory", "24GiB", "--max-model-len", "2048")
    many = ("--max-num-batched-tokens", "4096", "--max-num-seqs", "4096")
    plan = planned(target, SUFFIX, 1, *card, *many)
    (remedy,) = [way for way in plan["remedies"] if "num-seqs" in way]
    assert planned(target, SUFFIX, 1, *card, *many[:2], *remedy.split())["fits"]


def test_a_target_that_says_no_length(tmp_path: Path) -> None:
    """Red when a configuration without a longest text ends the command unexplained."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    target = write_config(tmp_path / "bloom", BloomConfig(**sizes))
    assert "pass --max-model-len" in run(target, SUFFIX).output
    assert planned(target, SUFFIX, 1, "--max-model-len", "99")["fits"]


def test_long_texts_that_do_not_fit(tmp_path: Path) -> None:
    """Red when the longest text that fits is not named, or does not fit."""
    config = LlamaConfig(**{**LLAMA_70B.to_dict(), "max_position_embeddings": 2**20})
    target = write_config(tmp_path / "long", config)
    plan = planned(target, SUFFIX, 2)
    remedy = plan["remedies"][0]
    assert remedy == f"--max-model-len {plan['num_tokens']}"
    assert planned(target, SUFFIX, 2, *remedy.split())["fits"]


def test_fewer_trees_make_room(tmp_path: Path) -> None:
    """Red when forks fill a small memory, and nobody says that fewer trees fit."""
    target = write_config(tmp_path / "tiny", TINY_LLAMA)
    spec = {"method": "sd", "model": target, "max_trees": 64}
    fixed = ("--gpu-memory-utilization", "1", "--allowance", "1MiB")
    options = ("--device", "cpu", *fixed)
    plan = planned(target, spec, 1, *options)
    parts = plan["bytes"]
    weights = parts["target"] + parts["drafter_0"] + parts["allowance"]
    text = plan["max_model_len"] * plan["token_bytes"]
    room = f"{weights + text + int(0.6 * parts['forks'])}B"
    # of an option given twice the last one counts
    small = planned(target, spec, 1, *options, "--gpu-memory", room)
    assert not small["fits"]
    assert '"max_trees": 32 in --speculative-config' in small["remedies"]
    assert planned(target, spec | {"max_trees": 32}, 1, *options, "--gpu-memory", room)[
        "fits"
    ]


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when docs/commands.md shows another table than the command prints."""
    write_config(tmp_path / "Llama-3.1-8B-Instruct", LLAMA_8B)
    write_hollow_head(tmp_path / "HEAD", EAGLE_8B)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "98")
    spec = {"method": "eagle_tree", "model": "HEAD"}
    shown = run("Llama-3.1-8B-Instruct", spec, "--max-model-len", "8192").stdout
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join(line.rstrip() for line in shown.splitlines()) in page


def test_draft_model(target: str, tmp_path: Path) -> None:
    """Red when ranks hold a draft model whole, or its KV or forks are forgotten."""
    draft = write_config(tmp_path / "tiny", TINY_LLAMA)
    spec = {"method": "rsd_s", "model": draft, "beam_width": 4, "depth": 4}
    length = ("--max-model-len", "2048")
    plan, alone = planned(target, spec, 8, *length), planned(target, SUFFIX, 8, *length)
    parts = plan["bytes"]
    # 4 KV heads on 8 ranks: half of the ranks hold copies
    assert parts["drafter_0"] / 2 > NUM_DRAFT_PARAMETERS / 8
    assert parts["drafter_0"] / 2 < 1.05 * NUM_DRAFT_PARAMETERS / 8
    draft_token = 2 * 22 * 64 * 2
    assert plan["token_bytes"] == 40 * KIB + draft_token
    # 16 trees, one fork each, of 2 blocks
    assert parts["forks"] == 16 * 2 * 16 * plan["token_bytes"]
    assert plan["num_tokens"] < alone["num_tokens"]
    assert sum(parts.values()) == 80 * GIB


def test_draft_model_reads_shorter_texts(target: str, tmp_path: Path) -> None:
    """Red when a plan is made for an engine that would not start."""
    spec = {"method": "sd", "model": write_config(tmp_path / "tiny", TINY_LLAMA)}
    assert "pass --max-model-len 2048 or less" in refusal(target, spec)


def test_forks_on_a_cpu(target: str, tmp_path: Path) -> None:
    """Red when a CPU's forks are counted as a GPU's."""
    draft = write_config(tmp_path / "tiny", TINY_LLAMA)
    spec = {"method": "rsd_s", "model": draft, "beam_width": 4, "depth": 4}
    plan = planned(target, spec, 8, "--device", "cpu", "--max-model-len", "2048")
    assert plan["block_size"] == 32
    assert "node_masks" not in plan["bytes"]
    # 16 trees of 13 paths, one of them in the request's own blocks; 2 blocks each
    assert plan["bytes"]["forks"] == 16 * 12 * 2 * 32 * plan["token_bytes"]


def test_eagle_head(target: str, tmp_path: Path) -> None:
    """Red when a head is divided, or its copies, KV or features are forgotten."""
    head = write_hollow_head(tmp_path / "eagle", EAGLE_70B)
    spec = {"method": "eagle_tree", "model": head}
    plan = planned(target, spec, 8)
    parts = plan["bytes"]
    layer = 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672 + 8192
    # angles in float32
    tables = 4096 * 128 * 4
    assert parts["drafter_0"] == 2 * (layer + 2 * 8192 * 8192) + tables
    assert parts["copies_0"] == 2 * 2 * 32000 * 8192
    # the target's, one layer with all 8 KV heads, and a feature
    assert plan["token_bytes"] == 40 * KIB + 2 * 8 * 128 * 2 + 8192 * 2
    assert parts["features"] == plan["num_tokens"] * 8192 * 2
    alone = planned(target, spec, 1, "--max-model-len", "1024")
    assert "copies_0" not in alone["bytes"]


def test_head_without_context(tmp_path: Path) -> None:
    """Red when such a head gets KV, forks or features."""
    target = write_config(tmp_path / "target", llama())
    head = write_head(tmp_path / "head", "redrafter", num_hot_tokens=10)
    parts = planned(target, {"method": "redrafter", "model": head}, 1)["bytes"]
    assert parts["drafter_0"] > 0
    # rows of hot tokens are copied even on one rank
    assert parts["copies_0"] == 10 * 8 * 2
    assert not {"drafter_kv", "features", "forks"} & set(parts)


@pytest.mark.parametrize("context", [True, False])
def test_lyanna_head(tmp_path: Path, context: bool) -> None:
    """Red when a chain's own needs are forgotten, or given to one without context."""
    target = write_config(tmp_path / "target", llama(hidden_size=64))
    sizes = {"num_hot_tokens": 10, "context": context}
    bare = write_head(tmp_path / "bare", "lyanna", token_info_rank=0, **sizes)
    head = write_head(tmp_path / "head", "lyanna", token_info_rank=2, **sizes)
    without = planned(target, {"method": "lyanna", "model": bare}, 1)["bytes"]
    parts = planned(target, {"method": "lyanna", "model": head}, 1)["bytes"]
    # W1, W2 and gains; then a code for each token, and the scaled columns
    info = 2 * 64 + 10 * 2 + 10 + (32 + 10) * 2
    assert parts["drafter_0"] - without["drafter_0"] == 2 * info
    assert ("features" in parts) is context
    assert ("drafter_kv" in parts) is context


def test_files_are_counted_where_there_are_any(tmp_path: Path) -> None:
    """Red when a folder's headers say something else than its configuration."""
    config = LlamaConfig(**{**TINY_LLAMA.to_dict(), "num_hidden_layers": 2})
    folder = write_config(tmp_path / "files", config)
    shapes = config_shapes("TARGET", folder, config)
    assert not read_model("TARGET", folder).from_files
    write_hollow(Path(folder) / "model.safetensors", shapes)
    model = read_model("TARGET", folder)
    assert model.from_files
    assert model.shapes == shapes


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    """Red when a tied output layer is counted, from a configuration or from a file."""
    small = {**TINY_LLAMA.to_dict(), "num_hidden_layers": 2}
    config = LlamaConfig(**{**small, "tie_word_embeddings": True})
    folder = write_config(tmp_path / "tied", config)
    once = read_model("TARGET", folder).num_parameters()
    untied = LlamaConfig(**{**small, "tie_word_embeddings": False})
    shapes = config_shapes("TARGET", folder, untied)
    write_hollow(Path(folder) / "model.safetensors", shapes)
    assert read_model("TARGET", folder).num_parameters() == once


def test_allowance_replaces_the_estimate(target: str) -> None:
    """Red when a measured allowance is not taken, or the estimate is not named so."""
    parts = planned(target, SUFFIX, 8, "--allowance", "5GiB")["bytes"]
    assert parts["allowance"] == 5 * GIB
    assert "ESTIMATE" in run(target, SUFFIX, "--tensor-parallel-size", "8").stdout


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "sizes of quantised weights",
        ),
        ({"layer_types": ["linear_attention"] * 80}, "hybrid or state-space"),
    ],
)
def test_targets_that_trees_do_not_support(
    changed: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Red when a target is planned for that the plugin refuses."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B.to_dict() | changed))
    assert says in refusal(str(tmp_path), SUFFIX)


def test_target_may_be_its_configuration(target: str) -> None:
    """Red when a file is asked for at the hub."""
    assert planned(f"{target}/config.json", SUFFIX, 8)["fits"]
