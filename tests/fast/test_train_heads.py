"""Training of heads, on random targets of a few thousand parameters."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.fast.tiny_training import HIDDEN, VOCAB, some_rows, tiny_target
from vllm_treespec.heads import (
    ReDrafterHeadConfig,
)
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.batches import split_rows
from vllm_treespec.train.head import (
    NUM_RANKS,
    HeadOptions,
    draft_vocab_rows,
    level_quality,
    train_head,
)
from vllm_treespec.train.head_batches import HeadDataset
from vllm_treespec.train.pipeline import evaluate_folder, start_head
from vllm_treespec.train.teacher import (
    TeacherCache,
    TeacherOptions,
    cache_teacher,
    load_cache,
)
from vllm_treespec.train.text import Row

DEPTH = 3
TEACHER = TeacherOptions(top_k=16, layers=(FINAL_LAYER,))
SIZES = {"num_hot_tokens": 60, "depth": DEPTH, "num_blocks": 1}
OPTIONS = HeadOptions(epochs=8, batch_positions=64, eval_share=0.2, save_steps=1000)


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_target()


@pytest.fixture
def rows() -> list[Row]:
    return some_rows(3)


@pytest.fixture
def cache(tmp_path: Path, target: PreTrainedModel, rows: list[Row]) -> TeacherCache:
    shards = cache_teacher(target, "tiny", rows, tmp_path / "teacher", TEACHER)
    return load_cache(shards)


def test_cached_hidden_states_are_the_targets(
    cache: TeacherCache, target: PreTrainedModel, rows: list[Row]
) -> None:
    """Red when hidden states and positions get out of step, or the norm is left out."""
    row = 4
    start, bounds = int(cache.row_starts[row]), cache.row_bounds()
    part = slice(bounds[row], bounds[row + 1])
    end = int(cache.row_starts[row + 1])
    kept = cache.states.read((FINAL_LAYER,), start, end)
    places = cache.positions[part].long() - start
    token_ids = torch.tensor([rows[row].token_ids])
    hidden = target.model(token_ids).last_hidden_state[0, places]
    torch.testing.assert_close(kept[places], hidden.bfloat16(), atol=0.02, rtol=0.02)
    logits = target.get_output_embeddings()(hidden)
    assert (logits.argmax(-1) == cache.ids[part][:, 0]).float().mean() > 0.9


def test_batches_pair_hidden_states_with_the_tokens_that_follow(
    cache: TeacherCache, rows: list[Row]
) -> None:
    """Red when a level's token, teacher row or row end is off by one."""
    data = HeadDataset(cache, [4], 10**6, DEPTH, 0)
    (item,) = [data[number] for number in range(len(data))]
    answer = rows[4].token_ids[rows[4].prompt_len :]
    n = len(answer) - 1
    assert item["token_ids"][:, 0].tolist() == answer[:-1]
    assert item["supervised"].sum(1).tolist() == [min(DEPTH, n - i) for i in range(n)]
    for level in range(DEPTH):
        supervised = item["supervised"][:, level]
        assert item["token_ids"][supervised, level].tolist() == answer[level:-1]
    # The teacher's row of a pair is the one after its token.
    place = rows[4].prompt_len + torch.arange(n)
    first = item["supervised"].nonzero()[:, 1] == 0
    index = torch.searchsorted(cache.positions.long(), place + int(cache.row_starts[4]))
    assert torch.equal(item["ids"][first], cache.targets(index).ids)


def test_no_question_is_in_training_and_evaluation(
    tmp_path: Path, target: PreTrainedModel, rows: list[Row]
) -> None:
    """Red when answers to one question are split: evaluation would be on known text."""
    twice = [row for row in rows for _ in range(2)]
    shards = cache_teacher(target, "tiny", twice, tmp_path / "twice", TEACHER)
    train, evaluation = split_rows(load_cache(shards), 0.3, 0)
    assert sorted(train + evaluation) == list(range(len(twice)))
    assert not {r // 2 for r in train} & {r // 2 for r in evaluation}


def test_own_weights_start_from_the_targets_and_are_trained(
    tmp_path: Path, target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when --own-embedding or --own-output is ignored or starts from nothing."""
    sizes = {**SIZES, "share_embedding": False, "share_output": False}
    head = start_head("redrafter", sizes, target, cache.statistics)
    output = target.get_output_embeddings().weight
    assert head.hot_token_ids is not None
    torch.testing.assert_close(head.output.weight.data, output[head.hot_token_ids])
    before = head.output.weight.detach().clone()
    train_head(head, cache, tmp_path / "run", OPTIONS)
    assert not torch.equal(head.output.weight, before)
    assert {"embedding.weight", "output.weight"} <= head.state_dict().keys()


def test_quality_counts_ranks_and_acceptance_of_the_draft_vocabulary(
    target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when columns of the draft vocabulary are mistaken for tokens."""
    head = start_head("redrafter", SIZES, target, cache.statistics)
    features = torch.randn(40, HIDDEN)
    targets = cache.targets(torch.arange(40))
    quality = level_quality(head, features, targets, draft_vocab_rows(head))
    hot = head.hot_token_ids
    assert hot is not None
    probs = torch.zeros(40, VOCAB).index_copy(
        1, hot, head.logits(features).softmax(-1).detach()
    )
    best = targets.ids[:, 0]
    ranked = probs.argsort(dim=1, descending=True)
    rank = (ranked == best[:, None]).int().argmax(1)
    rank = torch.where(torch.isin(best, hot), rank, NUM_RANKS).clamp(max=NUM_RANKS)
    assert torch.equal(quality.rank, rank)
    expected = torch.minimum(probs.gather(1, targets.ids), targets.probs).sum(1)
    torch.testing.assert_close(quality.acceptance, expected, atol=1e-5, rtol=1e-4)


def test_head_of_another_target_is_refused(
    tmp_path: Path, target: PreTrainedModel, rows: list[Row]
) -> None:
    """Red when a head is evaluated on hidden states of another size."""
    from vllm_treespec.heads import build_head, save_head

    other = ReDrafterHeadConfig(hidden_size=16, vocab_size=VOCAB)
    save_head(build_head(other), tmp_path / "head")
    target.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="hidden states of 16"):
        evaluate_folder(
            str(tmp_path / "target"), tmp_path / "head", tmp_path, rows, TEACHER
        )
