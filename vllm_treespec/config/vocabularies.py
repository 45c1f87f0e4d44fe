"""Whether draft models speak of the target's tokens, where sizes differ by padding."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import AutoTokenizer

from vllm_treespec.config import SpecConfigError


def check_vocabularies(
    draft_sizes: Mapping[str, int], tokenizer: str, target_size: int, trust: bool
) -> None:
    """Check that draft models and target number their tokens alike.

    Models of one family often have one tokenizer, and another number of rows: some are
    padding. Rows that only one of two models has are never drafted.

    Args:
        draft_sizes: rows of each draft model's vocabulary.
        tokenizer: folder or hub id of the target's.
        target_size: rows of the target's vocabulary.
        trust: whether tokenizers may be code of their own.

    Raises:
        SpecConfigError: naming both sizes and a token.

    """
    for model, size in draft_sizes.items():
        if size == target_size:
            continue
        problem = tokenizers_differ(model, tokenizer, min(size, target_size), trust)
        if problem is not None:
            raise SpecConfigError(
                f"speculative_config 'model': the vocabulary of {model} has {size} "
                f"tokens, the target's {target_size}, and {problem}; use a draft model "
                f"with the target's tokenizer, or one trained for this target "
                f"(treespec train draft)"
            )
    if len({min(size, target_size) for size in draft_sizes.values()}) > 1:
        sizes = ", ".join(f"{size} ({model})" for model, size in draft_sizes.items())
        raise SpecConfigError(
            f"speculative_config 'models': the vocabularies of draft models of one "
            f"tree have {sizes} tokens, the target's {target_size}; use draft models "
            f"with vocabularies of one size"
        )


def tokenizers_differ(model: str, other: str, size: int, trust: bool) -> str | None:
    """How two tokenizers differ in the tokens below ``size``; None: not at all.

    Ids that only one of them has are left out.
    """
    own: dict[int, str] = {}
    theirs: dict[int, str] = {}
    for name, tokens in ((model, own), (other, theirs)):
        try:
            read = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
        # what transformers raises of files that are missing or broken
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            return f"the tokenizer of {name} cannot be read to compare them ({reason})"
        tokens.update({i: token for token, i in read.get_vocab().items() if i < size})
    shared = own.keys() & theirs.keys()
    for token_id in sorted(shared):
        if own[token_id] != theirs[token_id]:
            return (
                f"token {token_id} is {own[token_id]!r} there and "
                f"{theirs[token_id]!r} for the target"
            )
    if 2 * len(shared) < size:
        return f"their tokenizers have only {len(shared)} of the first {size} in common"
    return None
