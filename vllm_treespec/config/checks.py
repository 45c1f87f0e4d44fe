"""Whether draft models and heads fit their target, before any weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_treespec.config import HEAD_METHODS, SpecConfigError
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.eagle_tree import EagleTreeConfig
from vllm_treespec.config.hybrid import HEAD_KINDS, HybridConfig
from vllm_treespec.config.reading import check_config_sizes
from vllm_treespec.heads import (
    DFlashHeadConfig,
    EagleHeadConfig,
    HeadError,
    LyannaHeadConfig,
    MedusaHeadConfig,
    head_folder,
    read_head_config,
)
from vllm_treespec.heads.config import DecoderHeadConfig
from vllm_treespec.heads.files import (
    check_head_weights,
    read_heads_hot_tokens,
    read_hot_tokens,
)
from vllm_treespec.heads.names import a_head, no_such_model
from vllm_treespec.heads.published import is_eagle
from vllm_treespec.heads.published_dflash import is_dflash
from vllm_treespec.heads.weights import listed, tensor_headers, weights_problem
from vllm_treespec.json_files import read_json_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

# What a draft model's config.json must say, with the names that it has there.
SIZES = {
    "vocab_size": ("vocab_size",),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
}


def wrong_model(problem: object) -> SpecConfigError:
    """Refuse the key ``model`` of a spec-config for this reason."""
    return SpecConfigError(f"speculative_config 'model': {problem}")


def check_weights(config: MethodConfig) -> None:
    """Check that draft models given as folders are complete.

    Raises:
        SpecConfigError: naming the file that is missing or broken.

    """
    for model in config.models:
        check_folder(model, config)
        check_files(model, config)


def check_folder(model: str, config: MethodConfig) -> None:
    """Check that a draft model's folder is there, and its config.json a model's.

    Raises:
        SpecConfigError: naming the folder or the file.

    """
    if problem := no_such_model(model):
        raise wrong_model(
            f"{problem}; `treespec assets` prints where the shipped draft models lie"
        )
    folder = Path(model)
    if not folder.exists():
        return
    if not (folder / "config.json").is_file():
        raise wrong_model(
            f"{folder} holds no config.json; name the folder of a model in Hugging "
            f"Face format"
        )
    _check_config_file(folder / "config.json", config)


def check_files(model: str, config: MethodConfig) -> None:
    """Check that the weights in a draft model's folder are there and whole.

    Args:
        model: one of the config's, which passed ``check_folder``.
        config: validated.

    Raises:
        SpecConfigError: naming the file that is missing or broken, or weights that are
            whole numbers without scales.

    """
    folder = Path(model)
    if not folder.exists():
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise wrong_model(
            f"{folder} holds no *.safetensors weights; convert them with "
            f"save_pretrained(..., safe_serialization=True)"
        )
    for problem in filter(None, map(weights_problem, files)):
        raise wrong_model(f"{problem}; copy or save the draft model again")
    said = read_json_object(folder / "config.json")
    if kind := kind_of_head(said, files):
        raise _no_draft_model(folder, kind, config)
    # older formats say how weights are quantised in a file of their own
    keys = {"quantization_config", "compression_config"}
    if keys & said.keys() or any(folder.glob("*quant*.json")):
        return
    whole = [
        name
        for file in files
        for name, header in tensor_headers(file).items()
        if name.endswith(".weight") and not header.dtype.is_floating_point
    ]
    if whole:
        raise wrong_model(
            f"weights in {folder} are whole numbers ({listed(whole)}), and its "
            f"config.json has no 'quantization_config'; save the draft model again, "
            f"`treespec shrink` makes one in int8"
        )


def kind_of_head(config: dict[str, Any], files: Iterable[Path] = ()) -> str | None:
    """Which kind of head a folder holds, None: none.

    Args:
        config: its config.json.
        files: of its weights, which must be whole.

    """
    kind = config.get("method")
    if isinstance(kind, str) and kind in HEAD_METHODS:
        return kind
    names = [name for file in files for name in tensor_headers(file)]
    says_so = {"dflash_config", "speculators_model_type"} & config.keys()
    if is_dflash(config) and (says_so or "fc.weight" in names):
        return "dflash"
    return "eagle" if "speculators_model_type" in config or is_eagle(names) else None


def _check_config_file(path: Path, method: MethodConfig) -> None:
    """Check a config.json: it is a model's, and says what a draft model's must."""
    try:
        config = read_json_object(path)
    except ValueError as error:
        raise wrong_model(f"{error}; copy or save the draft model again") from None
    if kind := kind_of_head(config):
        raise _no_draft_model(path.parent, kind, method)
    text = config.get("text_config")
    keys = {*config, *(text if isinstance(text, dict) else ())}
    for size, names in SIZES.items():
        if keys.isdisjoint(names):
            raise wrong_model(
                f"{path} says no {size}; add it, or save the draft model again with "
                f"save_pretrained"
            )
    check_config_sizes("speculative_config 'model'", path, config)


def _no_draft_model(folder: Path, kind: str, config: MethodConfig) -> SpecConfigError:
    return wrong_model(
        f"{folder} holds {a_head(kind)}, not a draft model; write "
        f"{_key_of_head(kind, config)}"
    )


def _key_of_head(kind: str, config: MethodConfig) -> str:
    """The key, with its value, with which a head of this kind is drafted from."""
    if isinstance(config, HybridConfig) and kind in HEAD_KINDS:
        return f"'drafter' '{kind}'"
    return f"method '{HEAD_METHODS[kind]}'"


def check_head_files(config: MethodConfig) -> None:
    """Check that the folder of a head is complete, and of the method's kind.

    Raises:
        SpecConfigError: naming the file that is missing or broken.

    """
    if config.head is None:
        return
    try:
        _check_head_folder(head_folder(config.head), config)
        # a Medusa head's accuracies must give a tree
        config.proposer()
    except ValueError as error:
        raise wrong_model(error) from None


def _check_head_folder(folder: Path, config: MethodConfig) -> None:
    """Check a head's folder.

    Raises:
        HeadError: naming the file that is missing or broken.

    """
    head = read_head_config(folder)
    if head.method != config.head_kind:
        raise HeadError(
            f"{folder} holds {a_head(head.method)}; write "
            f"{_key_of_head(head.method, config)}, or name the folder of "
            f"{a_head(str(config.head_kind))}"
        )
    check_head_weights(folder)
    levels = len(head.rank_accuracies) if isinstance(head, MedusaHeadConfig) else 0
    if levels > head.depth:
        raise HeadError(
            f"'rank_accuracies' in {folder}/config.json has {levels} levels and "
            f"there are {head.depth} heads; remove the last levels"
        )


def check_hot_tokens(config: MethodConfig, vocab_size: int | None = None) -> None:
    """Check the lists of hot tokens of draft models and of EAGLE heads.

    Args:
        config: validated; its head's files are there.
        vocab_size: tokens that target and draft models share, if it is known.

    Raises:
        SpecConfigError: one cannot be read.

    """
    try:
        for file in config.hot_token_files:
            if file is not None:
                read_hot_tokens(file, vocab_size)
        if isinstance(config, EagleTreeConfig) and config.hot_tokens is not None:
            head = read_head_config(config.model)
            # others are refused by check_head_files
            if isinstance(head, EagleHeadConfig):
                read_heads_hot_tokens(Path(config.hot_tokens), head)
    except HeadError as error:
        raise SpecConfigError(f"speculative_config {error}") from None


def check_head(config: MethodConfig, target: PretrainedConfig) -> None:
    """Check that a head was made for a target like this one.

    Raises:
        SpecConfigError: naming what differs.

    """
    if config.head is None:
        return
    try:
        head = read_head_config(config.head)
    except HeadError as error:
        raise wrong_model(error) from None
    sizes = {"vocab_size": (head.vocab_size, target.vocab_size)}
    if isinstance(head, DecoderHeadConfig):
        states = (head.target_hidden_size, target.hidden_size)
        sizes["target_hidden_size"] = states
    if not isinstance(head, DecoderHeadConfig) or (
        head.share_embedding or head.share_output
    ):
        sizes["hidden_size"] = (head.hidden_size, target.hidden_size)
    for name, (found, wanted) in sizes.items():
        if found != wanted:
            raise wrong_model(
                f"the head {config.head} has {name} "
                f"{found}, the target {wanted}; use a head trained for this target"
                f" (treespec train {head.method})"
            )
    embedding_size = target.to_dict().get("word_embed_proj_dim", target.hidden_size)
    if embedding_size != target.hidden_size:
        raise SpecConfigError(
            f"heads do not support targets whose embeddings ({embedding_size}) and "
            f"hidden states ({target.hidden_size}) differ in size yet; remove "
            f"speculative_config"
        )
    if isinstance(head, DecoderHeadConfig):
        _check_target_layers(config.head, head, target)
    if isinstance(head, DFlashHeadConfig):
        depth = max(tree.sizes.draft_depth for tree in config.scheduled_trees())
        if depth > head.num_levels:
            key = "model_depth" if isinstance(config, HybridConfig) else "depth"
            raise SpecConfigError(
                f"the head {config.head} drafts {head.num_levels} levels, and trees "
                f"would have {depth}; write speculative_config '{key}' "
                f"{head.num_levels} or less, in 'schedule' too"
            )


def layers_read(config: MethodConfig, num_target_layers: int) -> list[int]:
    """Before which layers of the target the method's head reads hidden states."""
    head = None if config.head is None else read_head_config(config.head)
    if not isinstance(head, DecoderHeadConfig):
        return []
    return list(head.with_target(num_target_layers).layers)


def head_joins_groups(
    config: MethodConfig, layer_types: Collection[str], kv_heads: tuple[int, int]
) -> bool:
    """Whether a head's layer is one more of the target's layers that see all tokens.

    Then vLLM groups it with them. Other layers would get groups of one layer each.

    Args:
        config: validated.
        layer_types: of the target, as in its config.json.
        kv_heads: key-value heads of each layer of it on one rank, and their size.

    """
    if config.models or config.head is None:
        return False
    head = read_head_config(config.head)
    if isinstance(head, LyannaHeadConfig) and not head.context:
        return True
    # One-pass heads write later than the scheduler gives blocks away; see their source.
    return (
        isinstance(head, EagleHeadConfig)
        and head.num_layers == 1
        and (head.num_kv_heads, head.head_size) == kv_heads
        and {"full_attention", "sliding_attention"} <= set(layer_types)
    )


def _check_target_layers(
    name: str, head: DecoderHeadConfig, target: PretrainedConfig
) -> None:
    """Check the layers that a head reads, and warn of another architecture."""
    try:
        head.with_target(target.num_hidden_layers)
    except HeadError as error:
        raise wrong_model(f"{name}: {error}") from None
    found = target.architectures or ()
    if head.verifier and found and not set(found) & set(head.verifier):
        logger.warning(
            "The head %s was trained for a %s, and the target is a %s",
            name,
            ", ".join(head.verifier),
            ", ".join(found),
        )
