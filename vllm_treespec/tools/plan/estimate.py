"""What vLLM measures when it starts, and a plan can only estimate."""

from __future__ import annotations

from vllm_treespec.tools.plan.parts import Parts, Settings

GIB = 2**30
# Driver, libraries, kernels: of any process. Buffers of collectives: of several ranks.
PROCESS = GIB
COLLECTIVES = GIB
CUDA_GRAPHS = GIB
# Hidden states of a forward that live at the same time, and parts of an MLP.
LIVE_STATES, LIVE_PARTS = 4, 3
# Bytes a logit takes while it is sampled from, or scored: float32 copies, and a sort.
SAMPLED, SCORED = 16, 32


def estimated_bytes(parts: Parts, settings: Settings) -> int:
    """Activations of the largest stage of a step, libraries and graphs."""
    num_ranks, target = settings.num_ranks, parts.target
    widths = [(target.hidden_size, target.inner_size // num_ranks)]
    widths += [drafter.widths(num_ranks) for drafter in parts.drafters]
    forward = max(LIVE_STATES * size + LIVE_PARTS * part for size, part in widths)
    num_trees = min(parts.config.max_trees, settings.num_seqs)
    largest = max(
        forward * settings.num_batched_tokens * parts.dtype.itemsize,
        settings.num_seqs * target.vocab_size * SAMPLED,
        num_trees * parts.sizes.max_nodes * target.vocab_size * SCORED,
    )
    fixed = PROCESS + (COLLECTIVES if num_ranks > 1 else 0)
    return largest + fixed + (CUDA_GRAPHS if settings.device == "cuda" else 0)
