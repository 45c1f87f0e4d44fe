"""The noise of vLLM's V2 sampler, computed for likely tokens alone."""

from unittest.mock import patch

import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from tests.v2.engines import engine
from tests.v2.prompts import NUM_TOKENS, PROMPTS
from tests.v2.test_trees import accepted
from vllm_treespec.engine.v2 import noise
from vllm_treespec.kernels.gumbel import gumbel_noise
from vllm_treespec.sampling.coupling import noise_of
from vllm_treespec.sampling.gumbel import gumbel_keys

SEEDS = torch.tensor([0, 5, -7, 2**62 + 12345, -(2**63)])
COUNT, VOCAB_SIZE = 4, 300


def test_noise_is_the_samplers() -> None:
    """Red when vLLM hashes another way: drafts would follow noise of nobody."""
    generator = torch.Generator().manual_seed(0)
    roots = torch.tensor([0, 17, 100_000, 5, 2**31 + 3])
    logits = torch.randn(len(SEEDS), COUNT, VOCAB_SIZE, generator=generator)
    keys = gumbel_keys(SEEDS.numpy(), roots, COUNT)
    found = gumbel_noise(keys[..., None], torch.arange(VOCAB_SIZE))
    ours = (logits.softmax(-1) / found).argmax(-1)
    positions = roots[:, None] + torch.arange(COUNT)
    rows = torch.arange(len(SEEDS)).repeat_interleave(COUNT)
    theirs = gumbel_sample(
        logits.flatten(0, 1),
        rows,
        torch.ones(len(SEEDS)),
        SEEDS,
        positions.flatten(),
        apply_temperature=False,
        is_drafting=False,
    )
    assert ours.flatten().tolist() == theirs.tolist()
    assert bool((found > 0).all())


def test_drafts_follow_the_noise(pair: tuple[str, str]) -> None:
    """Red when ranked drafts look at other noise than the sampler.

    The target drafts for itself, so that all is accepted that is drafted by its noise.
    """
    spec = {
        "method": "hybrid",
        "model": pair[0],
        "num_drafts": 5,
        "depth": 3,
        "schedule": "fixed",
        "max_cached_tokens": 0,
    }
    params = {"temperature": 2.0, "seed": 3}
    with engine(pair[0], spec) as running:
        answers = running.generate(PROMPTS[:2], params, NUM_TOKENS)
        by_its_noise = accepted(running)
        with patch.object(noise, "gumbel_noise", noise_of):
            assert running.generate(PROMPTS[:2], params, NUM_TOKENS) == answers
        assert by_its_noise > 1.3 * accepted(running) > 0
