"""Copies of whole KV blocks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class BlockCopier:
    """Copies whole KV blocks in all given layers, whatever their inner layout."""

    def __init__(self, kv_caches: Iterable[Tensor]) -> None:
        """Take the layers' caches, each [num_blocks, ...]."""
        self.stacks = [_as_stack(group) for group in _even_groups(list(kv_caches))]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks ``sources`` over blocks ``targets``, both int64 [n].

        All sources are read before the first target is written.
        """
        if sources.numel() == 0:
            return
        for stack in self.stacks:
            words = stack.view(torch.int64)
            words.index_copy_(1, targets, words.index_select(1, sources))

    def copy_disjoint(self, sources: Tensor, targets: Tensor) -> None:
        """Like :meth:`copy`, faster, where no target is also a source."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for stack in self.stacks:
                stack[:, target].copy_(stack[:, source])


def _even_groups(kv_caches: list[Tensor]) -> Iterable[list[Tensor]]:
    """Runs of caches of one shape at even distances in one allocation."""
    group: list[Tensor] = []
    for cache in kv_caches:
        if group and not _continues(group, cache):
            yield group
            group = []
        group.append(cache)
    if group:
        yield group


def _continues(group: list[Tensor], cache: Tensor) -> bool:
    last = group[-1]
    same = (
        cache.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        and cache.shape == last.shape
        and cache.stride() == last.stride()
        and cache.storage_offset() > last.storage_offset()
    )
    if not same or len(group) == 1:
        return same
    step = last.storage_offset() - group[-2].storage_offset()
    return cache.storage_offset() - last.storage_offset() == step


def _as_stack(group: list[Tensor]) -> Tensor:
    """One view [num_layers, num_blocks, ...] of evenly spaced caches."""
    first = group[0]
    if len(group) == 1:
        return first[None]
    step = group[1].storage_offset() - first.storage_offset()
    return torch.as_strided(
        first,
        (len(group), *first.shape),
        (step, *first.stride()),
        first.storage_offset(),
    )
