"""Stage 2: one pass of the frozen target over the text, its top-k kept on disk.

One safetensors shard holds ``rows_per_shard`` conversations:

    token_ids  int32   [num_tokens]        all rows end to end, each cut to seq_len
    row_starts int32   [num_rows + 1]      where each row starts in token_ids
    positions  int32   [num_positions]     supervised positions, as indices of token_ids
    ids        uint16 or int32 [num_positions, k]   likeliest next tokens, best first
    probs      float16 [num_positions, k]  their probabilities at temperature 1
    rest       float32 [num_positions]     the mass of all other tokens
    token_mass float32 [vocab_size]        sum over positions of the target distribution
    moment     float32 [target_hidden, target_hidden]   sum of x x^T, x the hidden state
    hidden_L   bfloat16 [num_tokens, target_hidden]  hidden states before layer L, or
                                           behind the final norm (L = final)

A position is supervised if its next token belongs to the answer.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from vllm_treespec.atomic_files import replaced
from vllm_treespec.heads.weights import weights_problem
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.tools.load import load_model
from vllm_treespec.train.loss import TeacherTargets
from vllm_treespec.train.states import StateFiles, is_state, layer_of, state_name
from vllm_treespec.train.text import Row

# Positions whose logits over the vocabulary are held at once, in float32.
_LOGITS_CHUNK = 512


@dataclass(frozen=True)
class TeacherOptions:
    """What is kept of the target's distributions.

    Attributes:
        top_k: tokens kept per position.
        seq_len: rows are cut to this many tokens.
        batch_tokens: tokens of one forward, padding included.
        layers: before which layers hidden states of all tokens are kept, for heads;
            ``FINAL_LAYER`` stands for those behind the final norm.
    """

    top_k: int = 64
    seq_len: int = 512
    batch_tokens: int = 4096
    rows_per_shard: int = 256
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TargetStatistics:
    """What the start of the draft model needs to know of the target's outputs.

    Attributes:
        token_weights: float32 [vocab_size], how often the target gives each token,
            summing to 1; errors in frequent tokens' logits count more.
        hidden_moment: float32 [target_hidden, target_hidden], mean of x x^T over
            positions, x being the target's hidden state after the final norm.
    """

    token_weights: Tensor
    hidden_moment: Tensor

    def likeliest(self, count: int) -> Tensor:
        """The most frequent tokens, int64 [count], ascending."""
        return self.token_weights.topk(count).indices.sort().values


@dataclass(frozen=True)
class TeacherCache:
    """All shards; fields as in the module's docstring, ids as int32.

    Hidden states stay on disk, all else is in memory.
    """

    token_ids: Tensor
    row_starts: Tensor
    positions: Tensor
    ids: Tensor
    probs: Tensor
    rest: Tensor
    statistics: TargetStatistics
    states: StateFiles

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    def row_bounds(self) -> list[int]:
        """Row r's supervised positions are numbers bounds[r] to bounds[r + 1]."""
        starts = self.row_starts.long()
        return torch.searchsorted(self.positions.long(), starts).tolist()

    def targets(self, index: Tensor) -> TeacherTargets:
        """Return the targets of some positions, float16 rounding normalised away.

        Args:
            index: int64 [n], indices into ``positions``.
        """
        probs, rest = self.probs[index].float(), self.rest[index]
        total = probs.sum(-1) + rest
        return TeacherTargets(
            self.ids[index].long(), probs / total[:, None], rest / total
        )


def load_target(target: str) -> PreTrainedModel:
    """Load the target frozen in bfloat16, on the GPU if there is one.

    Raises:
        SpecConfigError: it is not whole.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model("--target", target, dtype=torch.bfloat16)
    return model.requires_grad_(False).to(device)


def length_buckets(lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of row indices, alike in length, padded to ``batch_tokens``."""
    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        longest = max(longest, lengths[index])
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, longest = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


def pad_right(rows: list[Tensor]) -> Tensor:
    """Pad int rows with 0 into [num_rows, longest]; causal attention needs no mask."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def cache_teacher(
    target: PreTrainedModel,
    target_name: str,
    rows: list[Row],
    folder: Path,
    options: TeacherOptions,
) -> list[Path]:
    """Write the shards of ``rows`` into ``folder``; shards that are there are kept.

    A shard is kept if it was made from the same rows with the same target, and holds
    the hidden states that are wanted.

    Returns:
        The shards' paths, in row order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    columns = (*Progress.get_default_columns()[:1], BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        starts = range(0, len(rows), options.rows_per_shard)
        for number in progress.track(starts, description="teacher: shards"):
            part = rows[number : number + options.rows_per_shard]
            shard = folder / f"shard-{number // options.rows_per_shard:05d}.safetensors"
            shards.append(shard)
            fingerprint = _fingerprint(part, target_name, options)
            kept = _layers_of(shard, fingerprint)
            if kept is not None and kept >= set(options.layers):
                continue
            layers = tuple(sorted({*options.layers, *(kept or ())}))
            tensors = _run_target(target, part, replace(options, layers=layers))
            with replaced(shard) as written:
                save_file(tensors, written, metadata={"fingerprint": fingerprint})
    return shards


def _fingerprint(rows: list[Row], target_name: str, options: TeacherOptions) -> str:
    content = {
        "target": target_name,
        "top_k": options.top_k,
        "seq_len": options.seq_len,
        "rows": [[row.token_ids, row.prompt_len] for row in rows],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _layers_of(shard: Path, fingerprint: str) -> set[int] | None:
    """Which hidden states a shard holds; None: it is missing, or another text's.

    A shard that was cut short is named on the console, and counts as missing.
    """
    if not shard.exists():
        return None
    if problem := weights_problem(shard):
        Console().print(f"{problem}: made again", soft_wrap=True)
        return None
    with safe_open(shard, "pt") as file:
        if (file.metadata() or {}).get("fingerprint") != fingerprint:
            return None
        names = file.keys()
        return {layer_of(name) for name in names if is_state(name)}


@torch.inference_mode()
def _run_target(
    target: PreTrainedModel, rows: list[Row], options: TeacherOptions
) -> dict[str, Tensor]:
    """Return one shard's tensors."""
    tokens = [torch.tensor(row.token_ids[: options.seq_len]) for row in rows]
    lengths = [len(row) for row in tokens]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    collected: list[dict[str, Tensor]] = []
    sums: dict[str, Any] = {"token_mass": 0.0, "moment": 0.0}
    shape = (sum(lengths), target.config.get_text_config().hidden_size)
    states_of = {
        layer: torch.empty(shape, dtype=torch.bfloat16) for layer in options.layers
    }
    for batch in length_buckets(lengths, options.batch_tokens):
        input_ids = pad_right([tokens[i] for i in batch]).to(target.device)
        output = target.model(
            input_ids=input_ids,
            use_cache=False,
            output_hidden_states=any(layer != FINAL_LAYER for layer in options.layers),
        )
        hidden = output.last_hidden_state
        for layer in options.layers:
            states = hidden if layer == FINAL_LAYER else output.hidden_states[layer]
            # Moved at once: a copy from the GPU waits for all that it has to do.
            moved = states.bfloat16().cpu()
            for b, i in enumerate(batch):
                states_of[layer][starts[i] : starts[i + 1]] = moved[b, : lengths[i]]
        wanted = [_supervised(rows[i].prompt_len, lengths[i]) for i in batch]
        states = torch.cat([hidden[b, idx] for b, idx in enumerate(wanted)])
        places = torch.cat(
            [starts[i] + idx for i, idx in zip(batch, wanted, strict=True)]
        )
        for part in torch.arange(len(states)).split(_LOGITS_CHUNK):
            chunk = states[part.to(states.device)]
            found = _top_k_of(target, chunk, options.top_k, sums)
            collected.append({"positions": places[part].int(), **found})
    small = target.config.vocab_size <= 2**16
    merged = {name: torch.cat([c[name] for c in collected]) for name in collected[0]}
    merged["ids"] = merged["ids"].to(torch.uint16 if small else torch.int32)
    return {
        "token_ids": torch.cat(tokens).int(),
        "row_starts": starts.int(),
        **merged,
        **{name: value.cpu() for name, value in sums.items()},
        **{state_name(layer): states for layer, states in states_of.items()},
    }


def _supervised(prompt_len: int, length: int) -> Tensor:
    """Return the positions of one row whose next token belongs to the answer."""
    first = max(prompt_len - 1, 0)
    return torch.arange(first, max(length - 1, first))


def _top_k_of(
    target: PreTrainedModel, states: Tensor, top_k: int, sums: dict[str, Any]
) -> dict[str, Tensor]:
    """Return ids, probs and rest of [n, target_hidden] states; add to the sums."""
    probs = target.get_output_embeddings()(states).float().softmax(-1)
    top = probs.topk(min(top_k, probs.shape[-1]), dim=-1)
    sums["token_mass"] += probs.sum(0)
    sums["moment"] += states.float().T @ states.float()
    rest = (1 - top.values.sum(-1)).clamp_min(0)
    return {
        "ids": top.indices.int().cpu(),
        "probs": top.values.half().cpu(),
        "rest": rest.cpu(),
    }


def load_cache(shards: list[Path]) -> TeacherCache:
    """Read shards into one cache; hidden states are left on disk."""
    parts = [_load_small(shard) for shard in shards]
    offsets = torch.tensor([0] + [len(p["token_ids"]) for p in parts]).cumsum(0).int()
    moved = list(zip(parts, offsets[:-1], strict=True))
    starts = [p["row_starts"][:-1] + offset for p, offset in moved]
    mass = torch.stack([p["token_mass"] for p in parts]).sum(0)
    num_positions = sum(len(p["rest"]) for p in parts)
    moment = torch.stack([p["moment"] for p in parts]).sum(0) / num_positions
    positions = torch.cat([p["positions"] + offset for p, offset in moved])
    # Rows were batched by length: put the positions back in text order.
    positions, order = positions.sort()
    return TeacherCache(
        token_ids=torch.cat([p["token_ids"] for p in parts]),
        row_starts=torch.cat([*starts, offsets[-1:]]),
        positions=positions,
        ids=torch.cat([p["ids"].int() for p in parts])[order],
        probs=torch.cat([p["probs"] for p in parts])[order],
        rest=torch.cat([p["rest"] for p in parts])[order],
        statistics=TargetStatistics(mass / mass.sum(), moment),
        states=StateFiles(shards, offsets.tolist()),
    )


def _load_small(shard: Path) -> dict[str, Tensor]:
    """All tensors of a shard but its hidden states."""
    with safe_open(shard, "pt") as file:
        names = [name for name in file.keys() if not is_state(name)]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}
