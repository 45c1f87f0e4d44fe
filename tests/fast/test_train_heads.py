"""Training of heads, on random targets of a few thousand parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.fast.tiny_training import (
    HIDDEN,
    STEPS,
    TEACHER,
    VOCAB,
    some_rows,
    started,
    tiny_cache,
    tiny_target,
    trained,
)
from vllm_treespec.heads import ReDrafterHeadConfig, build_head, save_head
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.batches import HeadDataset, split_rows
from vllm_treespec.train.loss import quality_of
from vllm_treespec.train.options import RunOptions
from vllm_treespec.train.pipeline import evaluate_head
from vllm_treespec.train.teacher import TeacherCache, cache_teacher, load_cache

ROWS = some_rows(3)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def cache(
    tmp_path_factory: pytest.TempPathFactory, target: PreTrainedModel
) -> TeacherCache:
    return tiny_cache(tmp_path_factory.mktemp("teacher"), target)


def test_cached_hidden_states_are_the_targets(
    cache: TeacherCache, target: PreTrainedModel
) -> None:
    """Red when hidden states and positions get out of step, or the norm is left out."""
    row = 4
    start, bounds = int(cache.row_starts[row]), cache.row_bounds()
    part = slice(bounds[row], bounds[row + 1])
    end = int(cache.row_starts[row + 1])
    kept = cache.states.read((FINAL_LAYER,), start, end)
    places = cache.positions[part].long() - start
    token_ids = torch.tensor([ROWS[row].token_ids])
    hidden = target.model(token_ids).last_hidden_state[0, places]
    torch.testing.assert_close(kept[places], hidden.bfloat16(), atol=0.02, rtol=0.02)
    logits = target.get_output_embeddings()(hidden)
    assert (logits.argmax(-1) == cache.ids[part][:, 0]).float().mean() > 0.9


def test_batches_pair_hidden_states_with_the_tokens_that_follow(
    cache: TeacherCache,
) -> None:
    """Red when a level's token, teacher row or row end is off by one."""
    data = HeadDataset(cache, [4], 10**6, STEPS, 0)
    (item,) = [data[number] for number in range(len(data))]
    answer = ROWS[4].token_ids[ROWS[4].prompt_len :]
    n = len(answer) - 1
    assert item["token_ids"][:, 0].tolist() == answer[:-1]
    assert item["supervised"].sum(1).tolist() == [min(STEPS, n - i) for i in range(n)]
    for level in range(STEPS):
        supervised = item["supervised"][:, level]
        assert item["token_ids"][supervised, level].tolist() == answer[level:-1]
    # The teacher's row of a pair is the one after its token.
    place = ROWS[4].prompt_len + torch.arange(n)
    first = item["supervised"].nonzero()[:, 1] == 0
    index = torch.searchsorted(cache.positions.long(), place + int(cache.row_starts[4]))
    assert torch.equal(item["ids"][first], cache.targets(index).ids)


def test_no_question_is_in_training_and_evaluation(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    """Red when answers to one question are split, or --text-share moves evaluation."""
    twice = [row for row in ROWS for _ in range(2)]
    cache = load_cache(cache_teacher(target, "tiny", twice, tmp_path, TEACHER))
    train, evaluation = split_rows(cache, 0.3, 0)
    assert sorted(train + evaluation) == list(range(len(twice)))
    assert not {r // 2 for r in train} & {r // 2 for r in evaluation}
    part, same = split_rows(cache, 0.3, 0, text_share=0.5)
    assert same == evaluation
    assert set(part) < set(train)
    assert abs(len(part) - len(train) / 2) <= 2


def test_own_weights_start_from_the_targets_and_are_trained(
    tmp_path: Path, target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when --own-embedding or --own-output is ignored or starts from nothing."""
    own: dict[str, Any] = {"share_embedding": False, "share_output": False}
    drafter = started("redrafter", target, cache, num_blocks=1, **own)
    head, output = drafter.head, target.get_output_embeddings().weight
    torch.testing.assert_close(head.output.weight.data, output[head.hot_token_ids])
    before = head.output.weight.detach().clone()
    trained(drafter, cache, tmp_path / "run")
    assert not torch.equal(head.output.weight, before)
    assert {"embedding.weight", "output.weight"} <= head.state_dict().keys()


def test_quality_counts_ranks_and_acceptance_of_the_draft_vocabulary(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when columns of the draft vocabulary are mistaken for tokens."""
    drafter = started("redrafter", target, cache)
    head, hot = drafter.head, drafter.head.hot_token_ids
    features = torch.randn(40, HIDDEN)
    targets = cache.targets(torch.arange(40))
    quality = quality_of(features, head.output_weight(), targets, drafter.rows)
    probs = torch.zeros(40, VOCAB).index_copy(
        1, hot, head.logits(features).softmax(-1).detach()
    )
    best = targets.ids[:, 0]
    ranked = probs.argsort(dim=1, descending=True)
    rank = (ranked == best[:, None]).int().argmax(1)
    rank = torch.where(torch.isin(best, hot), rank, len(hot))
    assert torch.equal(quality.rank, rank)
    expected = torch.minimum(probs.gather(1, targets.ids), targets.probs).sum(1)
    torch.testing.assert_close(quality.acceptance, expected, atol=1e-5, rtol=1e-4)


def test_head_of_another_target_is_refused(
    tmp_path: Path, target: PreTrainedModel
) -> None:
    """Red when a head is evaluated on hidden states of another size."""
    head, text = tmp_path / "head", tmp_path / "text.jsonl"
    save_head(build_head(ReDrafterHeadConfig(hidden_size=16, vocab_size=VOCAB)), head)
    target.save_pretrained(tmp_path / "target")
    text.write_text('{"token_ids": [1, 2, 3], "prompt_len": 1}\n' * 2)
    run = RunOptions(str(tmp_path / "target"), head, text=[text], work=tmp_path)
    with pytest.raises(
        ValueError, match=f"{head} is for hidden .*of 16 .*{run.target}"
    ):
        evaluate_head(run)
