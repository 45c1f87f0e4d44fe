"""From logits to distributions: temperature, top-k, top-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_treespec.host_copies import is_on_cpu

# Smaller probabilities count as 0. Rules divide the mass that some draws leave by its
# sum. With this bound no quotient is denormal. Such a number has few exact bits, and is
# 0 on some GPUs.
SMALLEST = 1e-37
# Fewer tokens within top-k and top-p, and those that tie with the last one, are found
# among the likeliest ones alone. Of bfloat16 logits some ten tie at the 128th place.
MANY_TOKENS = 160
# On a CPU the likeliest tokens are looked for in the blocks of so many tokens that hold
# the likeliest ones.
BLOCK = 128
# Probabilities of 32 bits are grouped by their leading bits, sign and exponent and
# four bits more: 2048 groups hold all of [0, 1].
DROPPED_BITS, NUM_GROUPS = 19, 2048
# Whole numbers that stand for probability 1: sums of thousands of rows are exact.
UNITS = 2.0**48
# The bits of infinity, of numbers of 16 bits.
INFINITY_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of a batch of requests.

    A temperature of 0 means greedy; such a request's distributions are taken at
    temperature 1 and used only to rank tokens.
    """

    # float32 [num_reqs]
    temperature: Tensor
    # int64 [num_reqs], or None when no request limits it
    top_k: Tensor | None = None
    # float32 [num_reqs], or None when no request limits it
    top_p: Tensor | None = None
    # on the host: reading them from the device would make the host wait
    all_greedy: bool = False
    all_random: bool = False

    @property
    def greedy(self) -> Tensor:
        """Which requests are greedy, bool [num_reqs]."""
        return self.temperature == 0

    @property
    def divisors(self) -> Tensor:
        """What logits are divided by, float32 [num_reqs]."""
        return torch.where(self.greedy, 1.0, self.temperature)

    def select(self, rows: Tensor) -> SamplingTensors:
        """Return the parameters of the given requests, ``rows`` int64 [n]."""
        return SamplingTensors(
            temperature=self.temperature[rows],
            top_k=None if self.top_k is None else self.top_k[rows],
            top_p=None if self.top_p is None else self.top_p[rows],
            all_greedy=self.all_greedy,
            all_random=self.all_random,
        )

    def probs(self, logits: Tensor) -> Tensor:
        """Distributions of the given logits under these parameters.

        Args:
            logits: [num_reqs, vocab_size] or [num_reqs, width, vocab_size].

        Returns:
            float32, same shape: softmax of logits / temperature after top-k and
            top-p, in vLLM's order and with its rules for ties. Each is 0 or above
            ``SMALLEST``. Logits without a softmax (NaN or inf among them, or all
            -inf) give token 0 probability 1, which vLLM's sampler emits then.

        """
        logits = logits.to(torch.float32)
        if not self.all_greedy:
            logits = logits / _per_row(self.divisors, logits)
        if self.top_k is None and self.top_p is None:
            return _law(logits)
        flat = logits.reshape(-1, logits.shape[-1])
        top_k, top_p = (
            None
            if limits is None
            else _per_row(limits, logits).expand(*logits.shape[:-1], 1).reshape(-1)
            for limits in (self.top_k, self.top_p)
        )
        if is_on_cpu(logits):
            return _narrow_law(flat, top_k, top_p).view_as(logits)
        return _law(_restrict(flat, top_k, top_p)).view_as(logits)


def most_likely(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the likeliest tokens; of equally likely ones any.

    Args:
        numbers: [rows, vocab_size], probabilities or logits. A row with NaN gives any
            tokens.
        count: at most the size of the vocabulary.

    Returns:
        their numbers, the highest first, and tokens, int64, both [rows, count].

    """
    num_rows, vocab_size = numbers.shape
    num_blocks = vocab_size // BLOCK
    if not is_on_cpu(numbers) or vocab_size % BLOCK or num_blocks < 2 * count:
        found = numbers.topk(count, dim=1)
        return found.values, found.indices
    # Each of them is in one of as many blocks as have the likeliest tokens.
    blocks = numbers.reshape(-1, BLOCK)
    best = blocks.amax(1).view(num_rows, num_blocks).topk(count, dim=1).indices
    first = num_blocks * torch.arange(num_rows)[:, None]
    within = blocks.index_select(0, (first + best).view(-1))
    within = within.view(num_rows, count * BLOCK)
    highest, places = within.topk(count, dim=1)
    return highest, best.gather(1, places // BLOCK) * BLOCK + places % BLOCK


def likeliest(logits: Tensor, rows: Sequence[int]) -> list[int]:
    """Find the most likely token of some rows; of equally likely ones the first.

    Args:
        logits: [num_rows, vocab_size]. A row with NaN gives any token.
        rows: of the logits.

    """
    if not is_on_cpu(logits):
        found: list[int] = logits[rows].to(torch.float32).argmax(dim=-1).tolist()
        return found
    # On a CPU torch takes many times as long: it converts to float32, and wakes its
    # threads. Bits of positive numbers are in the numbers' order.
    infinity = INFINITY_BITS.get(logits.dtype, 0)
    numbers = logits.view(torch.int16).numpy() if infinity else logits.numpy()
    tokens = []
    for row in rows:
        token = int(numbers[row].argmax())
        if infinity and not 0 < numbers[row, token] <= infinity:
            token = int(logits[row].to(torch.float32).argmax())
        tokens.append(token)
    return tokens


def _law(logits: Tensor) -> Tensor:
    """Softmax, float32; see ``SamplingTensors.probs`` for logits without one."""
    probs = torch.threshold_(torch.softmax(logits, dim=-1), SMALLEST, 0.0)
    # A softmax that has NaN anywhere has it everywhere.
    no_law = probs[..., 0].isnan()
    probs.nan_to_num_(0.0)[..., 0].masked_fill_(no_law, 1.0)
    return probs


def _narrow_law(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The law of few tokens within top-k, then top-p, on a CPU.

    Of equally likely tokens the first ones count as likelier for top-p. Rows in which
    tokens that were not looked at may be inside are left to ``_restrict``.

    Args:
        logits: float32 [rows, vocab_size].
        top_k: int64 [rows], or None.
        top_p: float32 [rows], or None.

    Returns:
        float32 [rows, vocab_size].

    """
    num_rows, vocab_size = logits.shape
    values, tokens = most_likely(logits, min(MANY_TOKENS, vocab_size))
    tokens, order = tokens.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    tokens = tokens.gather(1, order)
    # The least likely one that is inside, and those that were not looked at at most.
    least, beyond = values[:, -1:], values[:, -1:]
    is_limited = torch.zeros((num_rows, 1), dtype=torch.bool)
    if top_k is not None:
        is_limited = (top_k < vocab_size)[:, None]
        place = (top_k.clamp(1, values.shape[1]) - 1)[:, None]
        least = torch.where(is_limited, values.gather(1, place), beyond)
    mass = values.masked_fill(values < least, -torch.inf)
    total = mass.logsumexp(dim=1, keepdim=True)
    if not bool(is_limited.all()):
        total = torch.where(is_limited, total, logits.logsumexp(dim=1, keepdim=True))
    mass = (mass - total).exp_()
    if top_p is not None:
        likelier = mass.double().cumsum(1) - mass
        is_outside = (likelier >= top_p[:, None]) & (top_p < 1)[:, None]
        mass.masked_fill_(is_outside, 0.0)
        inside = values.masked_fill(is_outside, torch.inf).amin(dim=1, keepdim=True)
        least = torch.where(is_limited, least, inside)
    mass /= mass.sum(dim=1, keepdim=True)
    law = torch.zeros_like(logits)
    law.scatter_(1, tokens, torch.threshold_(mass, SMALLEST, 0.0))
    is_known = (least > beyond)[:, 0] & values[:, 0].isfinite()
    if not bool(is_known.all()):
        rest = ~is_known
        limits = (None if each is None else each[rest] for each in (top_k, top_p))
        law[rest] = _law(_restrict(logits[rest], *limits))
    return law


def _per_row(values: Tensor, logits: Tensor) -> Tensor:
    return values.view(-1, *[1] * (logits.dim() - 1))


def _restrict(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Set logits outside top-k, then outside the top-p nucleus, to -inf.

    Masses are summed in float64. CUDA sums a single row in an order that differs from
    run to run (https://github.com/pytorch/pytorch/issues/75240): in float32 the ranks
    of a tensor-parallel target would sometimes find other tokens.

    Args:
        logits: float32 [rows, vocab_size].
        top_k: int64 [rows], or None.
        top_p: float32 [rows], or None.

    """
    if is_on_cpu(logits):
        found = _restrict_unsorted(logits, top_k, top_p)
        if found is not None:
            return found
    ordered, index = logits.sort(dim=-1, descending=False)
    vocab_size = logits.shape[-1]
    if top_k is not None:
        place = (vocab_size - top_k.clamp(1, vocab_size))[:, None]
        least = ordered.gather(-1, place)
        ordered = ordered.masked_fill(ordered < least, -torch.inf)
    if top_p is not None:
        mass_below = ordered.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        outside = mass_below <= 1 - top_p[:, None].double()
        outside[..., -1].fill_(False)
        ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, index, ordered)


def _restrict_unsorted(
    logits: Tensor, top_k: Tensor | None, top_p: Tensor | None
) -> Tensor | None:
    """Do what ``_restrict`` does without sorting all tokens, which takes a CPU long.

    Returns:
        None where logits have no softmax.

    """
    vocab_size = logits.shape[-1]
    if top_k is not None and bool((top_k < vocab_size).any()):
        limited = top_k < vocab_size
        most = int(top_k[limited].max())
        place = (top_k.clamp(1, most) - 1)[:, None]
        least = logits.topk(most, dim=-1).values.gather(-1, place)
        least = least.masked_fill(~limited[:, None], -torch.inf)
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is None:
        return logits
    probs = logits.softmax(dim=-1)
    if bool(probs[:, 0].isnan().any()):
        return None
    return logits.masked_fill(_outside_nucleus(probs, top_p), -torch.inf)


def _outside_nucleus(probs: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens are not among the likeliest ones that together reach ``top_p``.

    Tokens are grouped by the leading bits of their probabilities, which order them.
    Only one group holds tokens inside and outside, and is sorted.

    Args:
        probs: float32 [rows, vocab_size].
        top_p: float32 [rows].

    Returns:
        bool [rows, vocab_size].

    """
    groups = probs.view(torch.int32) >> DROPPED_BITS
    mass = probs.new_zeros((len(probs), NUM_GROUPS))
    mass = mass.scatter_add_(1, groups.long(), probs).double()
    likelier = mass.flip(1).cumsum(1).flip(1) - mass
    is_whole = (top_p >= 1)[:, None]
    split = (likelier >= top_p[:, None]).sum(dim=1, keepdim=True)
    split = split.masked_fill_(is_whole, 0)
    outside = groups < split
    in_split = (groups == split).masked_fill_(is_whole, False)
    rows, tokens = in_split.nonzero(as_tuple=True)
    order = probs[rows, tokens].argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    rows, tokens = rows[order], tokens[order]
    # Sums of whole numbers are exact: it does not matter which rows come before.
    units = (probs[rows, tokens].double() * UNITS).long()
    before = units.cumsum(0) - units
    first = torch.full((len(probs),), torch.iinfo(before.dtype).max)
    before -= first.scatter_reduce_(0, rows, before, "amin")[rows]
    reached = likelier.gather(1, split)[rows, 0] + before / UNITS
    outside[rows, tokens] = reached >= top_p[rows]
    return outside
