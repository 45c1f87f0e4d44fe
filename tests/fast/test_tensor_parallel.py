"""Whether tensor-parallel ranks can share a draft model."""

import pytest
from transformers import GPT2Config, LlamaConfig

from vllm_treespec.config import SpecConfigError
from vllm_treespec.config.draft_checks import check_shards

SIZES = {
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "intermediate_size": 768,
    "hidden_size": 768,
}


@pytest.mark.parametrize(
    ("ranks", "changed"),
    [
        (1, {}),
        (3, {}),
        (6, {}),
        (2, {"num_key_value_heads": 4}),
        (4, {"num_key_value_heads": 1}),
    ],
)
def test_draft_models_that_divide_start(ranks: int, changed: dict[str, int]) -> None:
    """Red when a draft model is refused that vLLM can divide, or copy heads of."""
    check_shards("some/draft", LlamaConfig(**{**SIZES, **changed}), ranks)


@pytest.mark.parametrize(
    ("ranks", "changed", "says"),
    [
        (5, {}, "num_attention_heads 12, which tensor_parallel_size=5 does"),
        (2, {}, "num_key_value_heads 3, which tensor_parallel_size=2 does"),
        (3, {"intermediate_size": 512}, "intermediate_size 512, which"),
    ],
)
def test_draft_models_that_do_not_divide_are_named(
    ranks: int, changed: dict[str, int], says: str
) -> None:
    """Red when such a draft model gets as far as vLLM's assertions in a worker."""
    with pytest.raises(SpecConfigError) as error:
        check_shards("some/draft", LlamaConfig(**{**SIZES, **changed}), ranks)
    assert says in str(error.value)
    assert "some/draft" in str(error.value)


def test_sizes_under_other_names_are_found() -> None:
    """Red when only configurations with Llama's names are checked."""
    with pytest.raises(SpecConfigError, match="num_attention_heads 12"):
        check_shards("gpt2", GPT2Config(n_head=12), 5)
