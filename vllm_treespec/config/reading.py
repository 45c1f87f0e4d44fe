"""Reading the configuration of a model that a user names, and saying why it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError

from vllm_treespec.config.base import SpecConfigError
from vllm_treespec.heads.names import no_such_model
from vllm_treespec.json_files import read_json_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig

A_MODEL = "the folder, or the hub id, of a model in Hugging Face format"
# What readers of configurations raise, and pydantic for them.
UNREADABLE = (
    OSError,
    ValueError,
    RecursionError,
    ZeroDivisionError,
    StrictDataclassError,
)
# What a text model has at least one of.
POSITIVE = {
    *("vocab_size", "hidden_size", "n_embd"),
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"),
}


def read_config(
    what: str, model: str, read: Callable[..., PretrainedConfig], **options: Any
) -> PretrainedConfig:
    """Read the configuration of a model in Hugging Face format.

    Args:
        what: the key or option that names the model, for the message.
        model: folder or hub id.
        read: called with ``model`` and ``options``.

    Raises:
        SpecConfigError: naming the model and what is wrong with it.

    """
    if problem := no_such_model(model):
        raise SpecConfigError(f"{what}: {problem}; name {A_MODEL}")
    check_sizes(what, model)
    try:
        return read(model, **options)
    except UNREADABLE as error:
        raise unreadable(what, model, error) from None


def unreadable(what: str, model: str, error: Exception) -> SpecConfigError:
    """Say in one line why the configuration of a model could not be read.

    Args:
        what: the key or option that names the model.
        model: folder or hub id.
        error: one of ``UNREADABLE``.

    """
    reason = first_sentence(error)
    file = Path(model) / "config.json"
    if not file.parent.exists():
        return SpecConfigError(
            f"{what}: there is no folder {model}, and the hub gave no model of that "
            f"name ({reason}); name {A_MODEL}"
        )
    if file.parent.is_dir() and not file.is_file():
        return SpecConfigError(f"{what}: {model} holds no config.json; name {A_MODEL}")
    where = file if file.is_file() else model
    return SpecConfigError(
        f"{what}: {where} cannot be read ({reason}); name a model that the installed "
        f"vLLM serves: {A_MODEL}"
    )


def first_sentence(error: Exception) -> str:
    """What an error says, without the advice that follows."""
    if isinstance(error, ZeroDivisionError):
        return "a size in it is 0"
    said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
    text = " ".join(str(said).split()).removeprefix("Value error, ")
    return text.split(". ")[0].removesuffix(".")


def check_sizes(what: str, model: str) -> None:
    """Check that a model in a folder has layers, heads and so on.

    Raises:
        SpecConfigError: naming the size that is below 1, or the file if it is no JSON.

    """
    file = Path(model)
    file = file if file.suffix == ".json" else file / "config.json"
    if not file.is_file():
        return
    try:
        said = read_json_object(file)
    except ValueError as error:
        raise SpecConfigError(
            f"{what}: {error}; copy or save the model again"
        ) from None
    check_config_sizes(what, file, said)


def check_config_sizes(what: str, file: Path, said: dict[str, Any]) -> None:
    """Check that a config.json tells of layers, heads and so on.

    Args:
        what: the key or option that names the model.
        file: for messages.
        said: what it holds.

    Raises:
        SpecConfigError: naming the size that is below 1.

    """
    text = said.get("text_config")
    for key, size in {**said, **(text if isinstance(text, dict) else {})}.items():
        if key in POSITIVE and isinstance(size, int) and size < 1:
            raise SpecConfigError(
                f"{what}: {file} says {key} {size}; correct it, or save the model "
                f"again with save_pretrained"
            )
