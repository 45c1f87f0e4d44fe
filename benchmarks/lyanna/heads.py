"""Heads without their draft vocabulary, and names of what a head leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import model
from vllm_treespec.heads import (
    EagleHead,
    LyannaHead,
    load_eagle_head,
    load_lyanna_head,
    save_head,
)
from vllm_treespec.tools.store import settings_of


def full_twin(kind: str, folder: str, target: str, out: Path) -> str:
    """Write a head that is another one, but drafts all tokens.

    Args:
        kind: "eagle" or "lyanna".
        folder: of the head, which has a draft vocabulary.
        target: folder of the model whose output layer it uses.
        out: the twin comes into a folder in OUT/heads, if it is not there yet.

    Returns:
        The twin's folder.

    Raises:
        ValueError: the head drafts all tokens, or has an output layer of its own.

    """
    twin = (out / "heads" / f"{kind}-full-{settings_of(model(folder))}").resolve()
    # it is written last
    if (twin / "config.json").is_file():
        return str(twin)
    if kind == "eagle":
        head = sharing_eagle(folder, target)
    else:
        head = load_lyanna_head(folder)
    if head.config.num_hot_tokens is None or not head.config.share_output:
        raise ValueError(
            f"{folder} drafts all tokens, or has an output layer of its own; name a "
            "head with a draft vocabulary and the target's output layer: it is "
            "compared with itself without that vocabulary"
        )
    if isinstance(head, LyannaHead):
        save_head(lyanna_of_all_tokens(head), twin)
    else:
        head.config = head.config.model_copy(update={"num_hot_tokens": None})
        head.hot_token_ids = None
        save_head(head, twin, next(head.parameters()).dtype)
    return str(twin)


def sharing_eagle(folder: str, target: str) -> EagleHead:
    """Load a head, and let it share the weights that equal the target's."""
    from transformers import AutoModelForCausalLM

    head = load_eagle_head(folder)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    layers = loaded.get_input_embeddings(), loaded.get_output_embeddings()
    dtype = next(head.parameters()).dtype
    head.share(*(layer.weight.detach().to(dtype) for layer in layers))
    return head


def lyanna_of_all_tokens(head: LyannaHead) -> LyannaHead:
    """Copy a head that shares the target's output layer, without a draft vocabulary.

    What a token adds to logits of hot tokens stays the same, and it adds nothing to
    those of others. The norm of the token info is now over all tokens, most of them 0:
    codes grow by sqrt(all / hot), and the gain makes up for it.
    """
    full = LyannaHead(head.config.model_copy(update={"num_hot_tokens": None}))
    tensors = head.state_dict()
    hot = tensors.pop("hot_token_ids")
    if full.info is not None:
        share = (len(hot) / head.config.vocab_size) ** 0.5
        columns, gains = tensors["info.up"], tensors["info.gain"]
        up = columns.new_zeros(full.info.up.shape)
        gain = gains.new_zeros(len(up))
        up[hot], gain[hot] = columns, gains * share
        tensors |= {"info.up": up, "info.gain": gain}
    full.load_state_dict(tensors, assign=True)
    return full.eval().requires_grad_(False)


def variant_of(config: Mapping[str, Any]) -> str:
    """Say what a Lyanna head leaves out, of its config or of training.json's part."""
    has = {
        "first token": config["first_token"],
        "context": config["context"],
        "token info": config["token_info_rank"],
    }
    said = [f"without {part}" for part, there in has.items() if not there]
    if has["token info"] and config["token_info"] == "all":
        said.append("token info of all tokens")
    return ", ".join(said) or "full"
