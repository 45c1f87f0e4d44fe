"""Keyed numbers: they belong to a request, a position and a purpose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from vllm_treespec.batch.requests import RequestSlots
from vllm_treespec.sampling.uniforms import (
    DRAFTING,
    EMITTING,
    SCORING,
    hashed_uniforms,
    keyed_uniforms,
    noise_keys,
    numbered_key,
    position_keys,
    seeded_key,
)

SUSPICIOUS = 1e-3


def ints(*values: int) -> np.ndarray:
    """Keys or positions."""
    return np.array(values, dtype=np.int64)


def test_numbers_ignore_the_batch() -> None:
    """Red when batch order, batch size or other requests reach a request's numbers."""
    alone = keyed_uniforms(ints(7), ints(40), DRAFTING, 9)[0]
    crowd = keyed_uniforms(ints(5, 3, 7, 1), ints(5, 40, 40, 40), DRAFTING, 12)
    assert torch.equal(crowd[2, :9], alone)
    assert not torch.equal(crowd[1, :9], alone)


def test_purposes_positions_and_places_share_nothing() -> None:
    """Red when drafting, scoring and emitting draw from one stream: laws change."""
    keys, positions = torch.arange(20)[:, None], torch.arange(20)
    numbers = torch.cat(
        [
            hashed_uniforms(
                position_keys(keys, positions, purpose)[..., None],
                torch.arange(-2, 10),
            ).flatten()
            for purpose in (DRAFTING, SCORING, EMITTING)
        ]
    )
    assert numbers.unique().numel() == numbers.numel()


@pytest.mark.parametrize("fixed", ["key", "position", "place"])
def test_numbers_are_uniform(fixed: str) -> None:
    """Red when numbers are no source of chance over keys, positions or places."""
    keys, positions, places = (
        torch.zeros(1, dtype=torch.int64) if fixed == of else torch.arange(200)
        for of in ("key", "position", "place")
    )
    streams = position_keys(keys[:, None], positions, EMITTING)
    numbers = hashed_uniforms(streams[..., None], places).flatten()
    assert numbers.dtype == torch.float64
    assert bool(((numbers > 0) & (numbers < 1)).all())
    assert kstest(numbers.numpy(), "uniform").pvalue > SUSPICIOUS
    lagged = torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]
    assert abs(float(lagged)) < 0.02


def test_noise_belongs_to_the_position_of_its_token() -> None:
    """Red when the noise of a token depends on which root it was drafted from."""
    from_the_start = noise_keys(ints(3), ints(10), 6)[0]
    for step in range(5):
        later = noise_keys(ints(3), ints(10 + step), 6 - step)[0]
        assert torch.equal(later, from_the_start[step:])


def test_every_seed_has_numbers_of_its_own() -> None:
    """Red when seeds share numbers: negative ones did, and those from 2**63 on."""
    near = [2**power + step for power in (31, 53, 62, 63) for step in (-1, 0, 1, 2)]
    negative = [-1, -2, -7, -1000, -(2**31), -(2**53) - 1, -(2**63) + 1]
    seeds = [*range(100), *near, *negative, 2**64 - 2, 2**64 - 1025]
    keys = {seeded_key(seed) for seed in seeds}
    assert len(keys) == len({seed % 2**64 for seed in seeds})


def test_numbers_of_a_seed_stay() -> None:
    """Red when an answer of a seed changes with a new version."""
    keys = ints(seeded_key(7), seeded_key(2**63 + 5))
    numbers = keyed_uniforms(keys, ints(40, 41), DRAFTING, 2)
    assert numbers.tolist() == GOLDEN


GOLDEN = [
    [0.7176504248324719, 0.581553911798986],
    [0.30974294345353937, 0.5637902304313182],
]


def test_requests_without_a_seed_are_numbered() -> None:
    """Red when ranks give other keys, or engines of other seeds the same ones."""
    first, second, other = RequestSlots(5), RequestSlots(5), RequestSlots(6)
    for slots in (first, second, other):
        for name in "abc":
            slots.add(name, True, 9 if name == "b" else None)
        slots.release(["a"])
        slots.add("d", True, None)
    every = np.arange(3)
    assert np.array_equal(first.keys(every), second.keys(every))
    assert first.keys(every).tolist()[1] == seeded_key(9)
    assert (first.keys(every) == other.keys(every)).tolist() == [False, True, False]
    many = [numbered_key(engine, n) for engine in range(30) for n in range(100)]
    assert len({*many, *map(seeded_key, range(3000))}) == 6000
