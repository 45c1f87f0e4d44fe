"""Targets and requests with images: who drafts trees, who does not, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="it translates vLLM's requests")

from tests.fast.small_engine import model_config
from vllm_treespec.config import SpecConfigError
from vllm_treespec.config.draft_checks import check_text_only
from vllm_treespec.engine.refusals import unsupported_features
from vllm_treespec.engine.request_check import drafters_can_read

VOCAB_SIZE = 100


def request(token_ids: list[int] | None, *modalities: str) -> Any:
    """A request of vLLM's runner, as far as it is read."""
    features = [SimpleNamespace(modality=modality) for modality in modalities]
    embeds = None if token_ids is not None else object()
    return SimpleNamespace(
        prompt_token_ids=token_ids, prompt_embeds=embeds, mm_features=features
    )


def test_other_inputs_than_images_get_no_drafts() -> None:
    """Red when a request drafts whose prompt was not tested, or one with images not."""
    ids = [3, 99, 99, 4]
    assert drafters_can_read(request(ids), VOCAB_SIZE)
    assert drafters_can_read(request(ids, "image", "image"), VOCAB_SIZE)
    for other in ("video", "audio", "vision_chunk"):
        assert not drafters_can_read(request(ids, other), VOCAB_SIZE)
        assert not drafters_can_read(request(ids, "image", other), VOCAB_SIZE)
    assert not drafters_can_read(request(None), VOCAB_SIZE)


@pytest.mark.parametrize("placeholder", [-1, 100])
def test_placeholders_outside_the_vocabulary_get_no_drafts(placeholder: int) -> None:
    """Red when a draft model looks for the embedding of a token that does not exist."""
    ids = [3, placeholder, 4]
    assert not drafters_can_read(request(ids, "image"), VOCAB_SIZE)


def target(**keys: object) -> Any:
    """vLLM's config of a target that has nothing in the way but these keys."""
    usual: dict[str, object] = {
        "multimodal_config": None,
        "is_mm_prefix_lm": False,
        "is_hybrid": False,
        "has_inner_state": False,
        "use_mla": False,
        "is_encoder_decoder": False,
        "runner_type": "generate",
        "attention_chunk_size": None,
    }
    return SimpleNamespace(**{**usual, **keys})


def refused(device: str, **keys: object) -> list[str]:
    """What is refused of such a target."""
    features = unsupported_features(target(**keys), device)
    return [what for what, found in features.items() if found]


def test_what_a_gpu_would_read_otherwise_is_refused() -> None:
    """Red when a GPU reads an image causally that stock vLLM reads both ways."""
    assert refused("cpu", is_mm_prefix_lm=True) == []
    (what,) = refused("cuda", is_mm_prefix_lm=True)
    assert "later tokens of an image" in what


def test_pruning_is_refused() -> None:
    """Red when vLLM may overwrite the nodes' positions after we have placed them."""
    for pruned in (True, False):
        config = SimpleNamespace(is_multimodal_pruning_enabled=lambda on=pruned: on)
        found = refused("cpu", multimodal_config=config)
        assert len(found) == pruned


def test_a_draft_model_reads_text() -> None:
    """Red when a text model is refused, or one with images is not."""
    from transformers import Gemma3Config

    check_text_only("draft", model_config())
    with pytest.raises(SpecConfigError, match="name a text model"):
        check_text_only("draft", Gemma3Config())
