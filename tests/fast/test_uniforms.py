"""Uniform numbers: what a seeded request's draws depend on."""

import numpy as np
import torch

from vllm_treespec.core.uniforms import DRAFTING, SCORING, UniformSource


def test_seeded_numbers_ignore_the_batch() -> None:
    """Turns red when batch order, batch size or history reaches a seeded request."""
    alone = UniformSource(0).draw([7], [40], 9, DRAFTING)[0]
    source = UniformSource(1)
    source.draw([7, None, 3], [1, 2, 3], 9, DRAFTING)
    crowd = source.draw([None, 3, 7, None], [5, 40, 40, 40], 9, DRAFTING)
    assert torch.equal(crowd[2], alone)
    assert not torch.equal(crowd[1], alone)


def test_purposes_and_positions_share_nothing() -> None:
    """Turns red when drafting and scoring draw from one stream, which changes laws."""
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


def seeded(seed: int) -> torch.Tensor:
    """Four numbers of a request with this seed."""
    return UniformSource(0).draw([seed], [40], 4, DRAFTING)[0]


def test_every_seed_has_numbers_of_its_own() -> None:
    """Red when seeds share numbers: negative ones did, and those from 2**63 on."""
    near = [2**power + step for power in (31, 53, 62, 63) for step in (-1, 0, 1, 2)]
    negative = [-1, -2, -7, -1000, -(2**31), -(2**53) - 1, -(2**63) + 1]
    seeds = [*range(100), *near, *negative, 2**64 - 2, 2**64 - 1025]
    seeds = list({seed % 2**64: seed for seed in seeds}.values())
    drawn = torch.stack([seeded(seed) for seed in seeds])
    assert drawn.unique().numel() == drawn.numel()


def test_small_seeds_keep_their_numbers() -> None:
    """Red when an answer of a seed from 0 to 2**63 - 1 changes with a new version."""
    for seed in (0, 1, 7, 2**53 + 1, 2**63 - 1):
        generator = np.random.Generator(np.random.Philox(key=seed + 80 * 2**64))
        assert torch.equal(seeded(seed), torch.from_numpy(generator.random(4)))
    assert seeded(7).tolist() == [
        0.3605544414784614,
        0.05670232350941751,
        0.04520844576695504,
        0.023547439815509552,
    ]
