"""Draft models whose vocabularies have other padding than the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vllm_treespec.config import SpecConfigError
from vllm_treespec.config.vocabularies import check_vocabularies

WORDS = {f"w{token}": token for token in range(30)}


def write(folder: Path, words: dict[str, int], added: tuple[str, ...] = ()) -> str:
    """Write a tokenizer; its folder."""
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_tokens(list(added))
    fast.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("words", "size", "says"),
    [
        (WORDS, 32, None),
        (WORDS, 40, None),
        ({**WORDS, "more": 31}, 40, None),
        # rows of other numbers are not compared
        ({"x": 0}, 36, None),
        ({"x": 0, **{w: t for w, t in WORDS.items() if t}}, 40, "token 0 is 'x' there"),
        ({"w0": 0, "w1": 1}, 40, "have only 2 of the first 36 in common"),
        (None, 40, "the tokenizer of DRAFT cannot be read to compare them"),
    ],
)
def test_tokens_must_be_the_same(
    words: dict[str, int] | None, size: int, says: str | None, tmp_path: Path
) -> None:
    """Red when other padding is refused, or a model drafts by other numbers."""
    target = write(tmp_path / "target", WORDS, added=("<end>",))
    draft = str(tmp_path / "draft")
    if words is not None:
        write(tmp_path / "draft", words)
    if says is None:
        check_vocabularies({draft: size}, target, 36, trust=False)
        return
    with pytest.raises(SpecConfigError) as error:
        check_vocabularies({draft: size}, target, 36, trust=False)
    message = str(error.value)
    assert f"of {draft} has {size} tokens, the target's 36, and " in message
    assert says.replace("DRAFT", draft) in message
    assert "use a draft model with the target's tokenizer" in message
    assert "\n" not in message


def test_draft_models_of_one_tree_have_one_vocabulary(tmp_path: Path) -> None:
    """Red when draft models of other sizes are only found out in the first step."""
    folders = [write(tmp_path / str(number), WORDS) for number in range(3)]
    draft_sizes = dict(zip(folders[1:], (36, 40), strict=True))
    check_vocabularies(draft_sizes, folders[0], 36, trust=False)
    draft_sizes[folders[1]] = 32
    with pytest.raises(SpecConfigError, match="use draft models with vocabularies of"):
        check_vocabularies(draft_sizes, folders[0], 36, trust=False)
