"""Tensor-parallel ranks draw the same trees, or the engine stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_treespec.engine.scheduler import PADDING_TOKEN_ID

if TYPE_CHECKING:
    from vllm_treespec.engine.v1.drafter import Proposal


def check_same_drafts(
    rank: int, proposal: Proposal, req_id: str, scheduled: list[int]
) -> None:
    """Compare a request's scheduled drafts, which are rank 0's, with this rank's.

    Each rank draws every tree itself, from the same numbers, and nothing is sent. A
    rank that computed something else would go on with another text unnoticed.

    Args:
        rank: this one's number.
        proposal: the trees that it drew last.
        req_id: the request.
        scheduled: its drafts as the scheduler sends them.

    Raises:
        SystemExit: when they differ. vLLM hears answers of rank 0 alone, but it watches
            all processes and stops the engine when one ends.

    """
    if rank == 0 or req_id not in proposal.rows or PADDING_TOKEN_ID in scheduled:
        return
    if proposal.find(req_id, scheduled) is None:
        raise SystemExit(
            f"tensor-parallel rank {rank} drew other drafts than rank 0 for request "
            f"{req_id}; give every rank the same kind of device and, on CPU, as many "
            f"cores (VLLM_CPU_OMP_THREADS_BIND), or remove speculative_config"
        )
