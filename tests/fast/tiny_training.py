"""Training of drafters on a random target of a few thousand parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from vllm_treespec.heads import EagleHead
from vllm_treespec.heads.base import Head
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.batches import ContextDataset
from vllm_treespec.train.distill import datasets, run_training
from vllm_treespec.train.drafter import Drafter
from vllm_treespec.train.kinds import KINDS
from vllm_treespec.train.options import DraftShape
from vllm_treespec.train.teacher import (
    TargetStatistics,
    TeacherCache,
    TeacherOptions,
    cache_teacher,
    load_cache,
)
from vllm_treespec.train.text import Row
from vllm_treespec.train.unrolled import unrolled

VOCAB, HIDDEN, LAYERS, STEPS = 97, 32, 7, 3
TARGET_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
AnyHead = TypeVar("AnyHead", bound=Head)
TEACHER = TeacherOptions(top_k=16, layers=(2, 3, 4, FINAL_LAYER))


def tiny_target() -> PreTrainedModel:
    """A random Llama whose distributions are not flat."""
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**TARGET_SIZES)).eval()


def some_rows(number: int) -> list[Row]:
    """``number`` times nine conversations of random tokens."""
    generator = torch.Generator().manual_seed(2)
    lengths = [9, 21, 14, 2, 30, 17, 11, 3, 26] * number
    return [
        Row(torch.randint(VOCAB, (n,), generator=generator).tolist(), min(n - 1, 4))
        for n in lengths
    ]


def tiny_cache(folder: Path, target: PreTrainedModel) -> TeacherCache:
    """What the target says of ``some_rows(3)``, in several shards."""
    options = replace(TEACHER, rows_per_shard=10)
    return load_cache(cache_teacher(target, "tiny", some_rows(3), folder, options))


def bigram_cache(folder: Path, target: PreTrainedModel) -> TeacherCache:
    """A language whose next token hangs on the last one, and is uncertain."""
    generator = torch.Generator().manual_seed(4)
    after = torch.rand(VOCAB, VOCAB, generator=generator).argsort(1)[:, :4]
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    drawn = probs.multinomial(60 * 24, replacement=True, generator=generator)
    rows: list[Row] = []
    for choices in drawn.view(60, 24).tolist():
        tokens = [len(rows)]
        for choice in choices:
            tokens.append(int(after[tokens[-1], choice]))
        rows.append(Row(tokens, 2))
    cache = load_cache(cache_teacher(target, "tiny", rows, folder, TEACHER))
    last = cache.token_ids[cache.positions.long()].long()
    return replace(
        cache,
        ids=after[last].int(),
        probs=probs.expand(len(last), -1).half(),
        rest=torch.zeros(len(last)),
    )


def started(
    kind: str,
    target: PreTrainedModel,
    cache: TeacherCache,
    options: dict[str, Any] | None = None,
    **sizes: Any,
) -> Any:
    """A drafter of a kind of head as training starts it, with hot tokens."""
    made = KINDS[kind]
    small = {"epochs": 4, "eval_share": 0.2, "save_steps": 1000}
    whole = kind in ("eagle", "lyanna", "dflash")
    batch = "batch_tokens" if whole else "batch_positions"
    levels = "block_size" if kind == "dflash" else "depth"
    given = {"num_hot_tokens": 60, levels: STEPS, **sizes}
    config = made.drafter.config_for(target, **given)
    torch.manual_seed(3)
    drafter = made.drafter(
        made.options(**{**small, batch: 64, **(options or {})}), config
    )
    drafter.start(target, cache.statistics)
    return drafter


def tiny_draft(target: PreTrainedModel, **options: Any) -> Drafter:
    """A draft model as training starts it."""
    made = KINDS["draft"]
    shape = DraftShape(
        hidden_size=16, num_layers=1, num_heads=2, head_dim=8, intermediate_size=24
    )
    given = made.options(**{"batch_tokens": 64, **options})
    drafter: Drafter = made.drafter.plan(shape, given, None, target)
    weights = torch.full((VOCAB,), 1 / VOCAB)
    torch.manual_seed(3)
    drafter.start(target, TargetStatistics(weights, torch.eye(HIDDEN)))
    return drafter


def trained(drafter: Drafter, cache: TeacherCache, folder: Path) -> dict[str, Any]:
    """What training on a cache gives."""
    return run_training(drafter, *datasets(drafter, cache), folder)


def shake(head: AnyHead) -> AnyHead:
    """Give a head weights that all do something."""
    for weight in head.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.1)
    return head.requires_grad_(False)


def run_steps(head: EagleHead, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What the output layer reads in every step, [n, width].

    It is NaN where a step does not go.
    """
    features = head.features(inputs["states"].float())
    found = []
    for kept, out, before in unrolled(head, features, inputs, STEPS):
        read = head.output_inputs_after(out, before)
        whole = torch.full((len(inputs["pairs"]), read.shape[1]), torch.nan)
        whole[kept] = read
        found.append(whole)
    return found


class PlainAttention:
    """Attention over all that was read through it, in plain matrix products."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def copy(self) -> PlainAttention:
        """The same text, to go on elsewhere."""
        other = PlainAttention()
        other.seen = dict(self.seen)
        return other

    def __call__(
        self, number: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend causally; shapes as ``Attend`` has them."""
        if number in self.seen:
            keys, values = self.seen[number]
            key, value = torch.cat([keys, key]), torch.cat([values, value])
        self.seen[number] = key, value
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        num_before = len(key) - len(query)
        later = torch.ones(len(query), len(key)).triu(num_before + 1).bool()
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def served_outputs(
    head: EagleHead, states: Tensor, tokens: Tensor, pair: int, text: PlainAttention
) -> list[Tensor]:
    """What a head makes in serving of a pair, then of its drafts on the true path.

    Args:
        head: to run.
        states: [n, feature_size], the target's.
        tokens: int64 [n + 1].
        pair: its number.
        text: what was read before; the pair is added.

    """
    if not head.context:
        text = PlainAttention()
    place = torch.tensor([pair])
    outs = [head.read(states[pair : pair + 1], tokens[place + 1], place, text)]
    drafting = text.copy()
    for step in range(1, min(STEPS, len(tokens) - 1 - pair)):
        token = tokens[place + 1 + step]
        outs.append(head.read_drafted(outs[-1], token, place + step, drafting))
    return outs


def assert_trained_as_served(head: EagleHead, cache: TeacherCache) -> None:
    """Compare the steps of training with serving, number by number."""
    data = ContextDataset(cache, [0, 1, 2, 4], 200, head.config.layers)
    (number,) = range(len(data))
    inputs, longest = data[number], data[number]["states"].shape[1]
    found = run_steps(head, inputs)
    compared = 0
    for line, row in enumerate(data.batches[number]):
        tokens = cache.token_ids[cache.row_starts[row] : cache.row_starts[row + 1]]
        tokens = tokens.long()
        states = head.features(inputs["states"][line].float())
        text = PlainAttention()
        for pair in range(len(tokens) - 1):
            outs = served_outputs(head, states, tokens, pair, text)
            (entry,) = (inputs["pairs"] == line * longest + pair).nonzero(as_tuple=True)
            if not len(entry):
                continue
            for step, out in enumerate(outs[: int(inputs["left"][entry]) + 1]):
                before = tokens[pair + 1 + step][None]
                read = head.output_inputs_after(out, before)
                torch.testing.assert_close(
                    found[step][entry], read, rtol=1e-5, atol=1e-5
                )
                compared += 1
    assert compared == sum(int((~step.isnan()).all(1).sum()) for step in found)
