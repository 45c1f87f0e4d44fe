"""A head with context drafts on the true path: training's form of serving.

In step 0 it reads all pairs of a conversation. In step s it reads, in the place of a
pair's feature, what it made of the pair in step s - 1, and the token s places further.
As in serving, it then attends to the target's pairs up to its own (step 0) and to
its own drafts since (steps 1 to s), and to no others. arXiv 2503.01840, figure 6.

A head of a chain reads no token after step 0. Without context it attends to its own
pair and drafts alone.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_treespec.heads.eagle import EagleHead

# Queries of one block of the attention after the first step.
_BLOCK = 32


def unrolled(
    head: EagleHead, features: Tensor, inputs: dict[str, Tensor], steps: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield what the head makes of the supervised pairs in each step.

    Args:
        head: to run.
        features: [num_rows, longest, feature_size], ``head.features`` of the states.
        inputs: an item of ``ContextDataset``.
        steps: how many.

    Yields:
        int64 [m], which supervised pairs have an entry of the teacher ``step`` tokens
        further; the head's outputs there, [m, hidden_size], which guess what the
        teacher's entry number ``pair + step`` is about; and the token before that
        guess, int64 [m].
    """
    pairs, left, token_ids = inputs["pairs"], inputs["left"], inputs["token_ids"]
    num_rows, longest = features.shape[:2]
    attend = _Attention(num_rows, longest, pairs, head.context)
    positions = torch.arange(longest, device=pairs.device).repeat(num_rows)
    after = token_ids[:, 1:].flatten()
    out = head.read(features.flatten(0, 1), after, positions, attend)
    kept, out = torch.arange(len(pairs), device=pairs.device), out[pairs]
    yield kept, out, after[pairs]
    for step in range(1, steps):
        rest = left[kept] >= step
        kept, out = kept[rest], out[rest]
        attend.begin(kept)
        places = pairs[kept]
        before = after[places + step]
        out = head.read_drafted(out, before, places % longest + step, attend)
        yield kept, out, before


def slots_by_row(row: Tensor, num_rows: int, size: int) -> tuple[Tensor, int]:
    """Lay entries of rows out in blocks of one row each, equally many for each row.

    Args:
        row: int64 [n], of each entry, ascending.
        num_rows: rows.
        size: entries of a block.

    Returns:
        int64 [n], the entries' slots in all blocks, one block behind the other; and
        the number of blocks of a row.
    """
    counts = torch.bincount(row, minlength=num_rows)
    blocks = -(-int(counts.max()) // size)
    first = counts.cumsum(0) - counts
    numbers = torch.arange(len(row), device=row.device)
    return row * blocks * size + numbers - first[row], blocks


class _Attention:
    """Attention of all steps of one batch; an ``Attend``.

    Queries of steps after the first are those of supervised pairs, laid out in blocks
    of one conversation each. A block's keys are the target's pairs of its conversation
    and the block's own drafts, each of which one query sees. Without context the own
    pair is seen as a draft is.
    """

    def __init__(
        self, num_rows: int, longest: int, pairs: Tensor, context: bool
    ) -> None:
        self.num_rows = num_rows
        self.pairs, self.context = pairs, context
        self.slots, self.blocks = slots_by_row(pairs // longest, num_rows, _BLOCK)
        width, device = self.blocks * _BLOCK, pairs.device
        own = torch.eye(_BLOCK, dtype=torch.bool, device=device)
        # masks are [number of blocks, 1 for all heads, queries, keys]
        self.own = self.mask = own.expand(num_rows * self.blocks, 1, -1, -1)
        if context:
            last = pairs.new_zeros(num_rows * width)
            last[self.slots] = pairs % longest
            places = torch.arange(longest, device=device)
            self.mask = places <= last.view(-1, 1, _BLOCK, 1)
        # by layer, keys and values of each step
        self.seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.places = self.slots
        self.drafting = False

    def begin(self, kept: Tensor) -> None:
        """Go to the next step, which reads these supervised pairs."""
        self.drafting = True
        self.places = self.slots[kept]
        self.mask = torch.cat([self.mask, self.own], dim=-1)

    def __call__(
        self, number: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend; shapes as ``Attend`` has them."""
        if not self.drafting and not self.context:
            kept = [self._in_blocks(x[self.pairs]) for x in (key, value)]
            self.seen[number] = [(kept[0], kept[1])]
            group = query.shape[1] // key.shape[1]
            return value.repeat_interleave(group, 1).flatten(1)
        if not self.drafting:
            query, key, value = (
                x.unflatten(0, (self.num_rows, -1)).transpose(1, 2)
                for x in (query, key, value)
            )
            kept = [x.repeat_interleave(self.blocks, 0) for x in (key, value)]
            self.seen[number] = [(kept[0], kept[1])]
            out = scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            return out.transpose(1, 2).flatten(2).flatten(0, 1)
        query, key, value = (self._in_blocks(x) for x in (query, key, value))
        self.seen[number].append((key, value))
        out = scaled_dot_product_attention(
            query,
            torch.cat([key for key, _ in self.seen[number]], dim=-2),
            torch.cat([value for _, value in self.seen[number]], dim=-2),
            attn_mask=self.mask,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(2).flatten(0, 1)[self.places]

    def _in_blocks(self, x: Tensor) -> Tensor:
        """[n, heads, head_size] to [number of blocks, heads, _BLOCK, head_size]."""
        empty = x.new_zeros(len(self.mask) * _BLOCK, *x.shape[1:])
        laid_out = empty.index_copy(0, self.places, x)
        return laid_out.unflatten(0, (-1, _BLOCK)).transpose(1, 2)
