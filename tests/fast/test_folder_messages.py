"""Folders of draft models and heads that a spec-config may not name, and the words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PretrainedConfig

from tests.fast.tables import assert_says, rows
from tests.heads import DRAFT_CONFIG, HEADS, write_draft, write_head
from tests.published_heads import PublishedHead
from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.checks import (
    check_head,
    check_head_files,
    check_weights,
    layers_read,
)
from vllm_treespec.config.reading import read_config
from vllm_treespec.heads import HeadError, load_any_head, read_head_config
from vllm_treespec.sources.base import FINAL_LAYER

WEIGHTS = "model.safetensors"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """Folder of a draft model."""
    return write_draft(tmp_path / "draft")


def parse(method: str, model: object, **keys: Any) -> MethodConfig:
    """A spec-config for a folder."""
    return parse_spec_config({"method": method, "model": str(model), **keys})


def check(method: str, model: object, **keys: Any) -> None:
    """Check a folder as every start does."""
    config = parse(method, model, **keys)
    check_head_files(config)
    check_weights(config)


def refusal(method: str, model: object, **keys: Any) -> str:
    """The one message with which a folder is refused."""
    with pytest.raises(SpecConfigError) as error:
        check(method, model, **keys)
    assert str(error.value).startswith("speculative_config 'model': ")
    return str(error.value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders by what they hold; those of "bare" hold a config.json alone."""
    found = tmp_path_factory.mktemp("folders")
    for kind in HEADS.values():
        for name in (kind, f"bare/{kind}"):
            write_head(found / name, kind)
    PublishedHead("speculators").write(found / "speculators")
    PublishedHead("eagle").write(found / "eagle-1")
    write_draft(found / "draft")
    write_draft(found / "bare" / "draft")
    for file in (found / "bare").glob(f"*/{WEIGHTS}"):
        file.unlink()
    (found / "empty").mkdir()
    return found


# A method, hybrid's 'drafter' if it is not a draft model, and a folder.
WRONG_KINDS = rows("""
redrafter IN/redrafter => nothing
eagle_tree IN/speculators => nothing
lyanna IN/lyanna => nothing
hybrid eagle IN/eagle => nothing
sd IN/draft => nothing
redrafter /nowhere/head => there is no folder /nowhere/head; name the folder of a head
redrafter IN/empty => IN/empty holds no config.json
redrafter IN/draft => is not the configuration of a head
redrafter IN/medusa => holds a medusa head; write method 'medusa_tree', or name the
redrafter IN/eagle => holds an eagle head; write method 'eagle_tree', or name the
    folder of a red
redrafter IN/lyanna => holds a lyanna head; write method 'lyanna', or name the folder
medusa_tree IN/redrafter => holds a redrafter head; write method 'redrafter'
eagle_tree IN/redrafter => holds a redrafter head; write method 'redrafter', or name
    the folder of an
eagle_tree IN/lyanna => holds a lyanna head; write method 'lyanna', or name the folder
    of an eagle
lyanna IN/eagle => holds an eagle head; write method 'eagle_tree'
hybrid IN/redrafter => not a draft model; write 'drafter' 'red
hybrid IN/eagle => not a draft model; write 'drafter' 'ea
hybrid eagle IN/redrafter => holds a redrafter head; write 'drafter' 'redrafter', or
    name the folder of an eagle head
hybrid eagle IN/medusa => a medusa head; write method 'medusa_tr
sd IN/redrafter => holds a redrafter head, not a draft
sd IN/lyanna => holds a lyanna head, not a draft
sd IN/eagle => holds an eagle head, not a draft model
sd IN/eagle-1 => holds an eagle head, not a draft model
sd IN/speculators => holds an eagle head, not a draft model
sd /nowhere/draft => no folder /nowhere/draft; `treespec assets` prints where
sd IN/empty => IN/empty holds no config.json; name the folder of a model
sd IN/bare/draft => IN/bare/draft holds no *.safetensors weights; convert
redrafter IN/bare/redrafter => holds no model.safetensors; train it again
lyanna IN/bare/lyanna => holds no model.safetensors; train it again
eagle_tree IN/bare/eagle => holds no model.safetensors; train it again, or copy
""")


@pytest.mark.parametrize(("given", "says"), WRONG_KINDS)
def test_wrong_kinds(given: str, says: str, folders: Path) -> None:
    """Red when a folder of another kind gets as far as the worker."""
    method, *drafter, folder = given.replace("IN", str(folders)).split()
    keys = {"drafter": drafter[0]} if drafter else {}
    if says == "nothing":
        check(method, folder, **keys)
    else:
        assert_says(refusal(method, folder, **keys), says.replace("IN", str(folders)))


@pytest.mark.parametrize(
    ("accuracies", "says"),
    [
        ((), "rank_accuracies of the Medusa head are missing or all 0; train it again"),
        (((0.5, 0.2),) * 4, "has 4 levels and there are 3 heads; remove the last"),
    ],
)
def test_accuracies_without_tree(accuracies: Any, says: str, tmp_path: Path) -> None:
    """Red when a Medusa head starts whose accuracies do not fit its heads."""
    head = write_head(tmp_path, "medusa", rank_accuracies=accuracies)
    with pytest.raises(SpecConfigError, match="rank_accuracies") as error:
        check("medusa_tree", head)
    assert_says(error.value, says)


# A kind of head, what it is made of, and what is other than in ``TARGET``.
TARGETS = rows("""
redrafter [{}, {}] => nothing
redrafter [{}, {"hidden_size": 16}] => has hidden_size 8, the target 16
redrafter [{}, {"vocab_size": 64}] => has vocab_size 32, the target 64
redrafter [{}, {"word_embed_proj_dim": 4}] => (4) and hidden states (8) differ
medusa [{}, {"vocab_size": 64}] => has vocab_size 32, the target 64
lyanna [{}, {}] => nothing
lyanna [{}, {"hidden_size": 16}] => the target 16; use a head trained for this
lyanna [{}, {"vocab_size": 64}] => has vocab_size 32, the target 64
eagle [{}, {}] => nothing
eagle [{"form": "eagle"}, {}] => nothing
eagle [{}, {"vocab_size": 41}] => has vocab_size 40, the target 41; use a
eagle [{}, {"hidden_size": 32}] => has target_hidden_size 16, the target 32
eagle [{"form": "eagle3", "target_hidden_size": 32}, {"hidden_size": 32}] => has
    hidden_size 16, the target 32; use a head trained for this target
eagle [{"form": "eagle3", "target_hidden_size": 32, "embed_tokens": true},
    {"hidden_size": 32}] => nothing
eagle [{}, {"num_hidden_layers": 4}] => layers [2, 4, 5], and the target has 4
eagle [{"form": "eagle3", "layer_ids": null}, {"num_hidden_layers": 4}] => reads hidden
    states before the layers [2, 2, 1], and the target has 4
eagle [{}, {"max_position_embeddings": 100000}] => nothing
""")
TARGET = {
    "redrafter": {"hidden_size": 8, "vocab_size": 32},
    "medusa": {"hidden_size": 8, "vocab_size": 32},
    "lyanna": {"hidden_size": 64, "vocab_size": 32, "num_hidden_layers": 2},
    "eagle": {"hidden_size": 16, "vocab_size": 40, "num_hidden_layers": 8},
}


def written(kind: str, head: dict[str, Any], folder: Path) -> MethodConfig:
    """The spec-config of a head, which is written."""
    if kind == "eagle":
        PublishedHead(**{"form": "speculators", **head}).write(folder)
    else:
        write_head(folder, kind, **head)
    return parse(next(m for m in HEADS if HEADS[m] == kind), folder)


@pytest.mark.parametrize(("given", "says"), TARGETS)
def test_other_targets(given: str, says: str, tmp_path: Path) -> None:
    """Red when a head of another target starts, or one of this target does not.

    Its RoPE was made for 128 positions, and goes on beyond.
    """
    kind, made_of = given.split(" ", 1)
    head, target = json.loads(made_of)
    config = written(kind, head, tmp_path)
    like = PretrainedConfig(**{**TARGET[kind], **target})
    if kind == "lyanna":
        assert layers_read(config, 2) == [FINAL_LAYER]
    if says == "nothing":
        check_head(config, like)
        return
    with pytest.raises(SpecConfigError) as error:
        check_head(config, like)
    assert_says(error.value, says)
    assert kind != "lyanna" or "treespec train lyanna" in str(error.value)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", None])
def test_other_architectures_are_logged(
    name: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when nobody is told that a head was trained for another kind of target."""
    like = PretrainedConfig(**TARGET["eagle"], architectures=[name] if name else None)
    check_head(written("eagle", {}, tmp_path), like)
    says = "was trained for a LlamaForCausalLM, and the target is a Qwen3"
    assert (says in caplog.text) == (name == "Qwen3ForCausalLM")


CONFIGS = rows("""
{ => is not JSON
NOTHING => is not JSON
{"model_type": "\xff"} => is not JSON
[1, 2] => holds no JSON object
null => holds no JSON object
DEEP => are nested too deeply
- vocab_size => says no vocab_size; add it
- num_hidden_layers => says no num_hidden_layers; add it
+ {"num_attention_heads": 0} => says num_attention_heads 0; correct it
+ {"n_layer": 0} => says n_layer 0; correct it
""")


def config_text(given: str) -> bytes:
    """A config.json as it is given, without a key or with other keys."""
    if given[:1] in ("-", "+"):
        keys = json.loads(given[2:]) if given[0] == "+" else {}
        changed = DRAFT_CONFIG | keys
        changed.pop(given[2:], None)
        return json.dumps(changed).encode()
    given = given.replace("DEEP", "[" * 100_000).replace("NOTHING", "")
    return given.encode("latin-1")


@pytest.mark.parametrize(("given", "says"), CONFIGS)
def test_odd_configuration_of_a_draft_model(given: str, says: str, draft: Path) -> None:
    """Red when a broken config.json is a traceback, or a missing key a default."""
    (draft / "config.json").write_bytes(config_text(given))
    message = refusal("sd", draft)
    assert_says(message, says)
    assert str(draft / "config.json") in message


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": "many"}, {"vocab_size": None}, {"model_type": "no such type"}],
)
def test_configuration_that_transformers_refuses(change: Any, draft: Path) -> None:
    """Red when transformers' own words reach users without the name of the file."""
    (draft / "config.json").write_text(json.dumps({**DRAFT_CONFIG, **change}))
    with pytest.raises(SpecConfigError) as error:
        read_config("'model'", str(draft), AutoConfig.from_pretrained)
    assert_says(error.value, f"'model': {draft / 'config.json'} cannot be read")


def cut(path: Path) -> None:
    """Leave the last quarter of a file away."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])


def test_truncated_weights(draft: Path, tmp_path: Path) -> None:
    """Red when weights cut short by a broken copy are only found out by the worker."""
    cut(draft / WEIGHTS)
    message = refusal("sd", draft)
    assert f"{draft / WEIGHTS} is cut short" in message
    assert "copy or save the draft model again" in message
    head = write_head(tmp_path / "head", "redrafter")
    cut(tmp_path / "head" / WEIGHTS)
    says = f"{tmp_path / 'head' / WEIGHTS} is cut short"
    message = refusal("redrafter", head)
    assert says in message
    assert "copy the head again, or train it again" in message
    with pytest.raises(HeadError, match=re.escape(says)):
        load_any_head(tmp_path / "head")


def test_whole_numbers_are_no_weights_of_a_draft_model(draft: Path) -> None:
    """Red when whole numbers are read as weights, or int8 with scales is refused."""
    weights = {"model.norm.weight": torch.ones(8, dtype=torch.int8)}
    save_file(weights, draft / WEIGHTS)
    message = refusal("sd", draft)
    assert_says(message, f"{draft} are whole numbers (model.norm.weight), and")
    assert "`treespec shrink` makes one in int8" in message
    quantised = {**DRAFT_CONFIG, "quantization_config": {"quant_method": "gptq"}}
    (draft / "config.json").write_text(json.dumps(quantised))
    check("sd", draft)


# What is done to one matrix of a head, and what is said.
MISFITS: list[tuple[Any, str]] = [
    (lambda t, name: t.pop(name), "missing NAMED, not known none; correct it"),
    (lambda t, name: t.update(surplus=t[name]), "missing none, not known surplus; c"),
    (lambda t, name: t.update({name: t[name][:-1].clone()}), "NAMED has the shape ["),
    (lambda t, name: t.update({name: t[name].int()}), "NAMED is torch.int32, and weig"),
]
NOT_FINITE = "NAMED holds NaN or infinity; correct it, train or get the whole head"
NUMBERS: list[tuple[Any, str]] = [
    (lambda t, name: t[name].fill_(torch.nan), NOT_FINITE),
    (lambda t, name: t[name].fill_(-torch.inf), NOT_FINITE),
]


@pytest.mark.parametrize(("edit", "says"), MISFITS + NUMBERS)
@pytest.mark.parametrize("method", HEADS)
def test_weights_of_a_head_that_do_not_fit(
    method: str, edit: Any, says: str, tmp_path: Path
) -> None:
    """Red when a head starts with fresh weights, or with others than its own."""
    head = write_head(tmp_path, HEADS[method])
    check(method, head)
    file = tmp_path / WEIGHTS
    tensors = load_file(file)
    name = max(name for name in tensors if tensors[name].dim() == 2)
    edit(tensors, name)
    save_file({n: tensor.clone() for n, tensor in tensors.items()}, file)
    if (edit, says) in NUMBERS:
        check(method, head)
    else:
        assert_fits(refusal(method, head), says, name, tmp_path)
    with pytest.raises(HeadError) as error:
        load_any_head(tmp_path)
    assert_fits(str(error.value), says, name, tmp_path)


def assert_fits(message: str, says: str, name: str, folder: Path) -> None:
    """Check the words, in which a layer may have its other name."""
    assert_says(message, f"the weights in {folder} do not fit its config.json: ")
    named = message.replace(name, "NAMED").replace(
        name.replace("midlayer.", "layers.0."), "NAMED"
    )
    assert says in named


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"vocab_size": 32', '"vocab_size": true'),
        ('"depth": 3', '"depth": 3.0'),
        ("0.5", "NaN"),
        ("0.5", "Infinity"),
        ("0.5", "1.5"),
        ("{", "\xff"),
        pytest.param("{", "[" * 100_000, id="deep"),
    ],
)
def test_odd_configuration_of_a_head(old: str, new: str, tmp_path: Path) -> None:
    """Red when a number that cannot be is taken, or the file is not named."""
    write_head(tmp_path, "medusa")
    file = tmp_path / "config.json"
    text = file.read_text()
    assert old in text
    file.write_bytes(text.replace(old, new, 1).encode("latin-1"))
    with pytest.raises(HeadError, match=re.escape(str(file))):
        read_head_config(tmp_path)
