"""Training of heads, on random targets of a few thousand parameters."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.tiers import grid
from vllm_treespec.heads import (
    MedusaHead,
    MedusaHeadConfig,
    ReDrafterHead,
    ReDrafterHeadConfig,
    load_head,
)
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.batches import split_rows
from vllm_treespec.train.head import (
    NUM_RANKS,
    HeadOptions,
    HeadTrainer,
    draft_vocab_rows,
    level_quality,
    train_head,
)
from vllm_treespec.train.head_batches import HeadDataset
from vllm_treespec.train.pipeline import evaluate_folder, make_head, start_head
from vllm_treespec.train.teacher import (
    TeacherCache,
    TeacherOptions,
    cache_teacher,
    load_cache,
)
from vllm_treespec.train.text import Row

VOCAB, HIDDEN, DEPTH = 97, 32, 3
TEACHER = TeacherOptions(top_k=16, layers=(FINAL_LAYER,))
SIZES = {"num_hot_tokens": 60, "depth": DEPTH, "num_blocks": 1}
OPTIONS = HeadOptions(epochs=8, batch_positions=64, eval_share=0.2, save_steps=1000)


def make_target(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    if kind == "opt":
        config = OPTConfig(
            **common, ffn_dim=48, word_embed_proj_dim=HIDDEN, init_std=0.3
        )
        return OPTForCausalLM(config).eval()
    more = {"intermediate_size": 48, "initializer_range": 0.3}
    if kind == "qwen":
        return Qwen2ForCausalLM(
            Qwen2Config(**common, **more, num_key_value_heads=2)
        ).eval()
    return LlamaForCausalLM(LlamaConfig(**common, **more, num_key_value_heads=2)).eval()


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("llama")


@pytest.fixture
def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(2)
    lengths = [9, 21, 14, 2, 30, 17, 11, 5, 26] * 3
    return [
        Row(torch.randint(VOCAB, (n,), generator=generator).tolist(), min(n - 1, 4))
        for n in lengths
    ]


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


@pytest.mark.parametrize(
    ("kind", "method"),
    grid(
        ["llama", "qwen", "opt"],
        ["redrafter", "medusa"],
        quick=lambda *case: case in (("llama", "redrafter"), ("qwen", "medusa")),
    ),
)
def test_training_lowers_kl_and_the_folder_loads(
    tmp_path: Path, rows: list[Row], method: str, kind: str
) -> None:
    """Red when a target family, the saved folder or the command's record breaks."""
    target = make_target(kind)
    target.save_pretrained(tmp_path / "target")
    name = str(tmp_path / "target")
    # Different prompt lengths make the same text different questions.
    again = [Row(r.token_ids, n) for n in (1, 2, 3) for r in rows if n < r.prompt_len]
    work, out = tmp_path / "work", tmp_path / "out"
    record = make_head(name, out, work, again, method, SIZES, TEACHER, OPTIONS)
    first = record["evaluations"][0]["eval_kl"]
    assert record["result"]["kl"] < 0.9 * first
    head = load_head(out)
    assert isinstance(head, MedusaHead if method == "medusa" else ReDrafterHead)
    assert head.hot_token_ids is not None
    assert head.hot_token_ids.diff().min() > 0
    assert not {"embedding.weight", "output.weight"} & head.state_dict().keys()
    assert json.loads((out / "training.json").read_text())["result"]["steps"] > 0
    assert (out / "curves.png").stat().st_size > 0
    found = evaluate_folder(name, out, work, again, TEACHER)
    assert len(found["accuracies"]) == DEPTH
    assert len(found["accuracies"][0]) == NUM_RANKS
    if isinstance(head.config, MedusaHeadConfig):
        assert len(head.config.rank_accuracies) == DEPTH


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


def test_cut_run_resumes_to_the_same_weights(
    tmp_path: Path, target: PreTrainedModel, cache: TeacherCache
) -> None:
    """Red when a step's random levels or the optimizer's state are not resumed."""

    def run(folder: str, save_steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        head = start_head("redrafter", SIZES, target, cache.statistics)
        options = replace(OPTIONS, epochs=3, save_steps=save_steps)
        train_head(head, cache, tmp_path / folder, options)
        return head.state_dict()

    uncut = run("uncut", save_steps=1000)
    compute_loss = HeadTrainer.compute_loss
    with pytest.MonkeyPatch.context() as patch:

        def cut(self: HeadTrainer, *args: object, **kwargs: object) -> torch.Tensor:
            if self.state.global_step == 5:
                raise KeyboardInterrupt
            return compute_loss(self, *args, **kwargs)  # type: ignore[arg-type]

        patch.setattr(HeadTrainer, "compute_loss", cut)
        with pytest.raises(KeyboardInterrupt):
            run("cut", save_steps=3)
    for name, value in run("cut", save_steps=3).items():
        torch.testing.assert_close(value, uncut[name])


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
