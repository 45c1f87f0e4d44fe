"""Blocks of a one-pass head, many of a conversation read in one forward.

A block is what the head reads in a step of serving: the token at its *anchor*, then
masks (arXiv 2602.06036). It attends to the conversation before its anchor
and to itself, and to no other block.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_treespec.heads.config import DFlashHeadConfig
from vllm_treespec.heads.dflash import DFlashHead
from vllm_treespec.train.unrolled import slots_by_row

# Blocks that attend together: more share the keys of their conversation, fewer compute
# less that is masked.
_GROUP = 8


def read_blocks(head: DFlashHead, inputs: dict[str, Tensor], anchors: Tensor) -> Tensor:
    """Read one block at each anchor.

    Args:
        head: to run.
        inputs: an item of ``ContextDataset``; its last pair before an anchor is the
            supervised pair that ends with the anchor's token.
        anchors: int64 [m], numbers of supervised pairs.

    Returns:
        [m, depth, hidden_size], for the output layer; level d guesses what the
        teacher's entry number ``anchor + d`` is about.
    """
    states, pairs = inputs["states"].float(), inputs["pairs"][anchors]
    num_rows, longest = states.shape[:2]
    places = torch.arange(longest, device=pairs.device).repeat(num_rows)
    features = head.features(states.flatten(0, 1))
    roots = inputs["token_ids"][:, 1:].flatten()[pairs]
    tokens = head.block_tokens(roots, head.config.num_levels)
    rows = torch.arange(tokens.shape[1], device=pairs.device)
    attend = BlockAttention(
        head.context_kv(features, places),
        num_rows,
        pairs,
        len(rows),
        head.config,
    )
    return head.read_block(tokens, (pairs % longest + 1)[:, None] + rows, attend)


class BlockAttention:
    """Attention of the blocks of one batch; an ``Attend``.

    Blocks are laid out in groups of one conversation each. A group's keys are those of
    its conversation's tokens, then those of its own rows.

    Attributes:
        masks: by layer, bool [num_groups, 1 for all heads, rows of a group, keys].
    """

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        num_rows: int,
        pairs: Tensor,
        block_rows: int,
        config: DFlashHeadConfig,
    ) -> None:
        """Mask the keys.

        Args:
            context: by layer keys and values of the conversations' tokens, each
                [num_rows * longest, num_kv_heads, head_size].
            num_rows: conversations.
            pairs: int64 [m], the place of the token before each anchor, as row *
                longest + i.
            block_rows: of one block.
            config: of the head, whose layers may differ in windows and causality.
        """
        self.context, self.num_rows = context, num_rows
        longest, device = len(context[0][0]) // num_rows, pairs.device
        self.slots, self.groups = slots_by_row(pairs // longest, num_rows, _GROUP)
        last = pairs.new_zeros(num_rows * self.groups * _GROUP)
        last[self.slots] = pairs % longest
        rows = torch.arange(block_rows, device=device)
        # positions of a group's rows, int64 [num_groups, rows of a group, 1]
        ends = last.view(-1, _GROUP, 1).repeat_interleave(block_rows, dim=1)
        positions = ends + 1 + rows.repeat(_GROUP)[:, None]
        keys = torch.arange(longest, device=device)

        def mask(causal: bool, window: int | None) -> Tensor:
            before = keys <= ends
            if window is not None:
                before &= positions - keys < window
            block = torch.ones(block_rows, block_rows, dtype=torch.bool, device=device)
            own = torch.block_diag(*[block.tril() if causal else block] * _GROUP)
            return torch.cat([before, own.expand(len(before), -1, -1)], dim=-1)[:, None]

        kinds = [(c, config.window(n)) for n, c in enumerate(config.causality)]
        made = {kind: mask(*kind) for kind in set(kinds)}
        self.masks = [made[kind] for kind in kinds]

    def __call__(
        self, number: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend; shapes as ``Attend`` has them."""
        before = self.context[number]
        out = scaled_dot_product_attention(
            self._in_groups(query),
            torch.cat([self._of_groups(before[0]), self._in_groups(key)], dim=-2),
            torch.cat([self._of_groups(before[1]), self._in_groups(value)], dim=-2),
            attn_mask=self.masks[number],
            enable_gqa=True,
        )
        blocks = out.transpose(1, 2).flatten(2).unflatten(1, (_GROUP, -1)).flatten(0, 1)
        return blocks[self.slots].flatten(0, 1)

    def _of_groups(self, x: Tensor) -> Tensor:
        """Of every group its conversation's, [num_groups, heads, longest, size]."""
        rows = x.unflatten(0, (self.num_rows, 1, -1)).transpose(2, 3)
        return rows.expand(-1, self.groups, -1, -1, -1).flatten(0, 1)

    def _in_groups(self, x: Tensor) -> Tensor:
        """[m * block_rows, heads, size] to [num_groups, heads, rows of it, size]."""
        blocks = x.unflatten(0, (len(self.slots), -1))
        num_groups = self.num_rows * self.groups
        empty = x.new_zeros(num_groups * _GROUP, *blocks.shape[1:])
        laid_out = empty.index_copy(0, self.slots, blocks)
        return laid_out.unflatten(0, (-1, _GROUP)).flatten(1, 2).transpose(1, 2)
