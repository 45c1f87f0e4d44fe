"""Uniform numbers: what a seeded request's draws depend on."""

import torch

from vllm_treespec.uniforms import DRAFTING, SCORING, UniformSource


def test_seeded_numbers_ignore_the_batch() -> None:
    """Turns red when batch order, batch size or history reaches a seeded request."""
    alone = UniformSource(0).draw([7], [40], 9, DRAFTING)[0]
    source = UniformSource(1)
    source.draw([7, None, 3], [1, 2, 3], 9, DRAFTING)
    crowd = source.draw([None, 3, 7, None], [5, 40, 40, 40], 9, DRAFTING)
    assert torch.equal(crowd[2], alone)
    assert not torch.equal(crowd[1], alone)


def test_purposes_and_positions_share_nothing() -> None:
    """Turns red when drafting and scoring draw from one stream: that bends the law."""
    source = UniformSource(0)
    rows = [
        source.draw([7], [position], 5, purpose)[0]
        for position in (40, 41)
        for purpose in (DRAFTING, SCORING)
    ]
    numbers = torch.cat(rows)
    assert numbers.unique().numel() == numbers.numel()


def test_ranks_draw_the_same() -> None:
    """Turns red when two workers of one model would draw different trees."""
    first, second = UniformSource(5), UniformSource(5)
    for _ in range(3):
        drawn = first.draw([None, 2], [3, 4], 6, SCORING)
        assert torch.equal(drawn, second.draw([None, 2], [3, 4], 6, SCORING))


def test_numbers_lie_in_the_half_open_interval() -> None:
    """Turns red when a 1.0 could come out: it would draw past the last token."""
    drawn = UniformSource(0).draw([1, None], [0, 0], 5000, SCORING)
    assert drawn.dtype == torch.float64
    assert bool(((drawn >= 0) & (drawn < 1)).all())
