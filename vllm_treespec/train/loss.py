"""Distillation loss over cached top-k probabilities of the target.

Letters: p the target's distribution, q the draft's, K the cached ids of one position.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Positions that go through the output layer at once; the logits of a chunk are the
# largest tensor of a step (1024 x 49152 in bfloat16: 100 MB).
LOGITS_CHUNK = 1024


@dataclass(frozen=True)
class TeacherTargets:
    """The target's distribution at each supervised position.

    Attributes:
        ids: int64 [num_positions, k], the k likeliest tokens, likeliest first.
        probs: float32 [num_positions, k], their probabilities at temperature 1.
        rest: float32 [num_positions], the mass of all other tokens.
    """

    ids: Tensor
    probs: Tensor
    rest: Tensor

    @classmethod
    def of(cls, inputs: dict[str, Tensor]) -> "TeacherTargets":
        """The teacher's part of a batch."""
        return cls(inputs["ids"], inputs["probs"], inputs["rest"])

    def at(self, index: Tensor | slice) -> "TeacherTargets":
        """The targets of some positions, given by number, slice or mask."""
        return TeacherTargets(self.ids[index], self.probs[index], self.rest[index])


@dataclass(frozen=True)
class VocabRows:
    """The vocabulary rows one training step computes logits for.

    Attributes:
        rows: int64 [num_rows], of the output layer.
        column: int64 [vocab_size], where a token's logit stands; absent: ``num_rows``.
        bias: float32 [num_rows + 1], log of how many tokens a row stands for; the last
            entry, -inf, belongs to a padding column that all absent tokens share.
    """

    rows: Tensor
    column: Tensor
    bias: Tensor

    @classmethod
    def of(
        cls, rows: Tensor, token_ids: Tensor | slice, vocab_size: int
    ) -> "VocabRows":
        """Rows of the output layer that stand for one token each."""
        column = torch.full((vocab_size,), len(rows), device=rows.device)
        column[token_ids] = torch.arange(len(rows), device=rows.device)
        bias = torch.zeros(len(rows) + 1, device=rows.device)
        bias[-1] = -torch.inf
        return cls(rows, column, bias)


def choose_vocab_rows(
    core: Tensor,
    targets: TeacherTargets,
    num_sampled: int,
    vocab_size: int,
    generator: torch.Generator,
    min_prob: float = 0.01,
) -> VocabRows:
    """Pick vocabulary rows for one step: a core, what the batch needs, a sample.

    Kept for certain: ``core`` and every token to which the target gives ``min_prob`` at
    some position. Of the other tokens ``num_sampled`` are drawn uniformly, each
    standing for ``num_others / num_sampled`` tokens, so that the softmax denominator is
    estimated without bias.

    Args:
        core: int64 [num_core], tokens kept in every step.
        generator: on the CPU.
    """
    device = core.device
    certain = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    certain[core] = True
    certain[targets.ids[targets.probs >= min_prob]] = True
    kept, others = certain.nonzero().flatten(), (~certain).nonzero().flatten()
    num_sampled = min(num_sampled, len(others))
    picked = torch.randperm(len(others), generator=generator)[:num_sampled].to(device)
    rows = torch.cat([kept, others[picked]])
    found = VocabRows.of(rows, rows, vocab_size)
    if num_sampled:
        found.bias[len(kept) : -1] = torch.tensor(len(others) / num_sampled).log()
    return found


def topk_kl(
    hidden: Tensor,
    weight: Tensor,
    targets: TeacherTargets,
    vocab_rows: VocabRows | None = None,
    compute_dtype: torch.dtype = torch.float32,
    columns: Tensor | None = None,
) -> Tensor:
    """Mean KL(p || q) over positions, all tokens outside K merged into one bucket.

    KL = sum_K p log(p / q) + p_rest log(p_rest / q_rest). Merging tokens can only lower
    a KL divergence, so this is a lower bound, exact where k is the vocabulary size.

    Args:
        hidden: [num_positions, hidden_size], after the final norm; as wide as
            ``weight`` and ``columns``.
        weight: [vocab_size, hidden_size], of the output layer.
        vocab_rows: compute only these; target mass on absent tokens joins the rest.
        compute_dtype: of the output layer's matrix products and logits.
        columns: [vocab_size, width], further columns of the output layer. They can be
            trained while ``weight`` is frozen, whose gradient costs more.

    Returns:
        float32 scalar with gradients for ``hidden``, ``weight`` and ``columns``.
    """
    bias = None
    if vocab_rows is not None:
        targets = in_columns(targets, vocab_rows)
        weight = _rows_and_padding(weight, vocab_rows)
        columns = None if columns is None else _rows_and_padding(columns, vocab_rows)
        bias = vocab_rows.bias.to(compute_dtype)
    mean: Tensor = _TopKKL.apply(
        hidden,
        weight,
        columns,
        bias,
        targets.ids,
        targets.probs,
        targets.rest,
        compute_dtype,
    )
    return mean


def _rows_and_padding(weight: Tensor, vocab_rows: VocabRows) -> Tensor:
    """The rows of one step; the padding row's logit is -inf, whatever its weight."""
    return torch.cat([weight[vocab_rows.rows], weight[:1].detach()])


def in_columns(targets: TeacherTargets, vocab_rows: VocabRows) -> TeacherTargets:
    """The targets with columns of these rows as ids; absent mass joins the rest.

    An absent token's id is the padding column, its probability 0.
    """
    ids = vocab_rows.column[targets.ids]
    absent = ids == len(vocab_rows.rows)
    rest = targets.rest + (targets.probs * absent).sum(-1)
    return TeacherTargets(ids, targets.probs.masked_fill(absent, 0), rest)


class _TopKKL(torch.autograd.Function):
    """Computes the gradients in the forward pass, so no chunk's logits are kept."""

    @staticmethod
    def forward(ctx, hidden, weight, columns, bias, ids, probs, rest, compute_dtype):  # type: ignore[no-untyped-def]
        output = weight.to(compute_dtype)
        if columns is not None:
            output = torch.cat([output, columns.to(compute_dtype)], dim=-1)
        grad_hidden = torch.empty_like(hidden)
        # the output layer's columns from here on are trained
        trains_weight, trains_columns = ctx.needs_input_grad[1:3]
        first = 0 if trains_weight else weight.shape[1]
        grad_output = None
        if trains_weight or trains_columns:
            grad_output = torch.zeros_like(output[:, first:], dtype=torch.float32)
        total = torch.zeros((), device=hidden.device)
        count = max(len(hidden), 1)
        for start in range(0, len(hidden), LOGITS_CHUNK):
            part = slice(start, start + LOGITS_CHUNK)
            inputs = hidden[part].to(compute_dtype)
            logits = (
                inputs @ output.T
                if bias is None
                else torch.addmm(bias, inputs, output.T)
            )
            loss, grad = position_loss(logits, ids[part], probs[part], rest[part])
            total += loss.sum()
            grad_hidden[part] = (grad @ output).to(hidden.dtype) / count
            if grad_output is not None:
                grad_output += grad.T @ inputs[:, first:]
        grad_weight = grad_columns = None
        if grad_output is not None:
            border = weight.shape[1] - first
            grad_output /= count
            if trains_weight:
                grad_weight = grad_output[:, :border].to(weight.dtype)
            if trains_columns:
                grad_columns = grad_output[:, border:].to(columns.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_columns)
        return total / count

    @staticmethod
    def backward(ctx, grad_loss):  # type: ignore[no-untyped-def]
        grads = [g if g is None else g * grad_loss for g in ctx.saved_tensors]
        return *grads, None, None, None, None, None


def position_loss(
    logits: Tensor, ids: Tensor, probs: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss [n] and its gradient [n, num_rows] for one chunk of logits.

    With s = softmax(logits): the gradient is s - p on K and s (1 - p_rest / q_rest)
    elsewhere. q_rest is summed, not taken as 1 - sum_K q, which would cancel.
    """
    tiny = torch.finfo(torch.float32).tiny
    soft = torch.softmax(logits, -1)
    draft = soft.gather(1, ids).float()
    # Flat index_fill_/index_copy_: scatter_ on a wide CPU tensor is 100 times slower.
    offsets = torch.arange(len(ids), device=ids.device)[:, None] * soft.shape[1]
    cells, flat = (ids + offsets).flatten(), soft.view(-1)
    flat.index_fill_(0, cells, 0)
    draft_rest = soft.sum(-1).float().clamp_min(tiny)
    loss = torch.xlogy(probs, probs / draft.clamp_min(tiny)).sum(-1) + torch.xlogy(
        rest, rest / draft_rest
    )
    soft *= (1 - rest / draft_rest)[:, None].to(soft.dtype)
    flat.index_copy_(0, cells, (draft - probs).to(soft.dtype).flatten())
    return loss, soft


@dataclass(frozen=True)
class Quality:
    """How well a drafter guesses at some positions, each [num_positions].

    Attributes:
        kl: as ``topk_kl``.
        rank: place of the target's likeliest token among the draft's; past the last
            place if it is not in the draft vocabulary.
        acceptance: sum over K of min(p, q), the probability that one draft token is
            accepted at temperature 1, from below because tokens outside K are left out.
    """

    kl: Tensor
    rank: Tensor
    acceptance: Tensor


def quality_of(
    hidden: Tensor,
    weight: Tensor,
    targets: TeacherTargets,
    vocab_rows: VocabRows | None = None,
) -> Quality:
    """Compare a drafter's distributions with the teacher's, in float32.

    Args:
        hidden: [num_positions, width].
        weight: of the output layer, [rows of the draft vocabulary, width].
        vocab_rows: the draft vocabulary; None: all of the target's.
    """
    found = []
    output = weight.float()
    if vocab_rows is not None:
        targets = in_columns(targets, vocab_rows)
    for start in range(0, len(hidden), LOGITS_CHUNK):
        part = slice(start, start + LOGITS_CHUNK)
        near = targets.at(part)
        logits = hidden[part].float() @ output.T
        if vocab_rows is not None:
            logits = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        draft = (logits.gather(1, near.ids) - logits.logsumexp(-1, keepdim=True)).exp()
        rank = (logits > logits.gather(1, near.ids[:, :1])).sum(-1)
        acceptance = torch.minimum(draft, near.probs).sum(-1)
        kl, _ = position_loss(logits, near.ids, near.probs, near.rest)
        found.append((kl, rank, acceptance))
    return Quality(*map(torch.cat, zip(*found, strict=True)))
