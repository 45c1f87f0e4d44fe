"""The memory of one card, part by part, and what fits into the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_treespec.config import SpecConfigError
from vllm_treespec.config.draft_checks import check_shards, check_target_shards
from vllm_treespec.layouts.kv_budget import BlockBytes
from vllm_treespec.tools.plan.drafters import DraftModel
from vllm_treespec.tools.plan.groups import Pool
from vllm_treespec.tools.plan.parts import (
    Parts,
    Settings,
    kv_block_bytes,
    kv_pool,
    mask_bytes,
    rank_blocks,
)

GIB = 2**30
# Driver, libraries, kernels: of any process. Buffers of collectives: of several ranks.
PROCESS = GIB
COLLECTIVES = GIB
CUDA_GRAPHS = GIB
# Hidden states of a forward that live at the same time, and parts of an MLP.
LIVE_STATES, LIVE_PARTS = 4, 3
# Bytes a logit takes while it is sampled from, or scored: float32 copies, and a sort.
SAMPLED, SCORED = 16, 32

MAX_RANKS = 64
# Shorter texts are of no use to anybody.
SHORTEST_TEXT = 256


@dataclass(frozen=True)
class Row:
    """One part of a card's memory; ``note`` says where the number comes from."""

    key: str
    name: str
    num_bytes: int
    note: str


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of one card.

    Attributes:
        rows: they add up to the card's memory, unless it is too small.
        missing: bytes that lack for a text of ``max_model_len`` tokens.
        num_blocks: of the scheduler.
        block_bytes: KV and features of one of them.
        pool: the KV cache groups that share them.

    """

    rows: list[Row]
    missing: int
    num_blocks: int
    block_bytes: int
    pool: Pool
    max_model_len: int
    max_num_seqs: int

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.pool.block_size

    @property
    def fits(self) -> bool:
        """Whether the engine starts."""
        return self.num_blocks >= self.pool.request_blocks(self.max_model_len)

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests together, if all are as long as they may be."""
        return self.pool.num_tokens(self.num_blocks, self.max_model_len)

    @property
    def token_bytes(self) -> int:
        """KV and features of one token of such a request."""
        if len(self.pool.groups) == 1:
            return self.block_bytes // self.block_size
        blocks = self.pool.request_blocks(self.max_model_len)
        return self.block_bytes * blocks // self.max_model_len

    @property
    def num_requests(self) -> int:
        """Requests that fit at the same time if all are as long as they may be."""
        blocks = self.pool.request_blocks(self.max_model_len)
        return min(self.max_num_seqs, self.num_blocks // blocks)


def make_plan(parts: Parts, settings: Settings) -> MemoryPlan:
    """Share out the memory of one card.

    Raises:
        SpecConfigError: ranks cannot share the target or a draft model.

    """
    check_ranks(parts, settings.num_ranks)
    fixed = fixed_rows(parts, settings)
    usable = int(settings.memory * settings.utilization)
    available = usable - sum(row.num_bytes for row in fixed)
    blocks, pool = rank_blocks(parts, settings), kv_pool(parts, settings)
    needed = pool.request_blocks(parts.max_model_len)
    missing = blocks.forks + needed * (blocks.kv + blocks.features) - available
    num_blocks = 0
    if available > blocks.forks:
        num_blocks = blocks.for_scheduler(available) // blocks.kv
    rows = fixed + block_rows(parts, settings, blocks, num_blocks)
    rest = available - blocks.forks - num_blocks * (blocks.kv + blocks.features)
    if num_blocks:
        free = settings.memory - usable + rest
        note = f"--gpu-memory-utilization {settings.utilization:g}"
        rows.append(Row("left_free", "left free", free, note))
    return MemoryPlan(
        rows=rows,
        missing=max(missing, 0),
        num_blocks=num_blocks,
        block_bytes=blocks.kv + blocks.features,
        pool=pool,
        max_model_len=parts.max_model_len,
        max_num_seqs=settings.num_seqs,
    )


def check_ranks(parts: Parts, num_ranks: int) -> None:
    """Check that ranks can share the target and the draft models.

    Raises:
        SpecConfigError: naming the size that does not divide.

    """
    check_target_shards(parts.target.name, parts.target.config, num_ranks)
    for drafter in parts.drafters:
        if isinstance(drafter, DraftModel):
            check_shards(drafter.model.name, drafter.model.config, num_ranks)


def fixed_rows(parts: Parts, settings: Settings) -> list[Row]:
    """What is there before the first KV block."""
    ranks, dtype = settings.num_ranks, parts.dtype
    source = "headers of its files" if parts.target.from_files else "config.json"
    held = parts.target.num_parameters(ranks) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    note = f"{parts.target.num_parameters() / 1e9:.2f} B parameters, {name}; {source}"
    rows = [Row("target", "target", held, note)]
    for number, drafter in enumerate(parts.drafters):
        held = drafter.weight_bytes(ranks, dtype)
        rows.append(Row(f"drafter_{number}", "drafter", held, drafter.note))
        if copied := drafter.copied_bytes(ranks, dtype):
            note = "of embeddings and output layers, for the drafter"
            rows.append(Row(f"copies_{number}", "copies", copied, note))
    if settings.device == "cuda":
        masks = mask_bytes(parts, settings)
        note = "and buffers of the attention kernel"
        rows.append(Row("node_masks", "node masks", masks, note))
    if settings.allowance is not None:
        return [*rows, Row("allowance", "allowance", settings.allowance, "--allowance")]
    guess = estimated_bytes(parts, settings)
    note = "ESTIMATE: activations, libraries"
    note += ", CUDA graphs" if settings.device == "cuda" else ""
    return [*rows, Row("allowance", "allowance", guess, note)]


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


def block_rows(
    parts: Parts, settings: Settings, blocks: BlockBytes, num_blocks: int
) -> list[Row]:
    """Forks, KV and features."""
    size, dtype, ranks = parts.block_size, parts.dtype, settings.num_ranks
    rows = []
    if blocks.num_fork_blocks:
        note = f"{blocks.num_fork_blocks} blocks of {size} tokens for tree nodes"
        rows.append(Row("forks", "forks", blocks.forks, note))

    num_groups = len(kv_pool(parts, settings).groups)

    def per_block(key: str, name: str, held: int) -> None:
        if held:
            note = f"{held / size / 2**10:.1f} KiB a token"
            if num_groups > 1:
                note = f"{held / 2**10:.1f} KiB a block, {num_groups} groups of layers"
            rows.append(Row(key, name, held * num_blocks, note))

    own = kv_block_bytes(parts.target.kv_heads(ranks), size, dtype)
    own = min(own, blocks.kv)
    per_block("target_kv", "KV of the target", own)
    per_block("drafter_kv", "KV of the drafter", blocks.kv - own)
    per_block("features", "features", blocks.features)
    return rows


def remedies(parts: Parts, settings: Settings, plan: MemoryPlan) -> list[str]:
    """Changes of one option each with which it fits."""
    ways = []
    longest = plan.pool.longest(plan.num_blocks, plan.max_model_len)
    if longest >= SHORTEST_TEXT:
        ways.append(f"--max-model-len {longest}")
    max_trees = parts.config.max_trees
    while max_trees > 1:
        max_trees //= 2
        fewer = parts.config.model_copy(update={"max_trees": max_trees})
        if make_plan(replace(parts, config=fewer), settings).fits:
            ways.append(f'"max_trees": {max_trees} in --speculative-config')
            break
    num_seqs = settings.num_seqs
    while num_seqs > 1:
        num_seqs //= 2
        if make_plan(parts, replace(settings, max_num_seqs=num_seqs)).fits:
            ways.append(f"--max-num-seqs {num_seqs}")
            break
    estimated = replace(settings, allowance=None)
    if settings.allowance is not None and make_plan(parts, estimated).fits:
        ways.append("a smaller --allowance")
    num_ranks = 2 * settings.num_ranks
    while num_ranks <= MAX_RANKS:
        try:
            more = make_plan(parts, replace(settings, num_ranks=num_ranks))
        except SpecConfigError:
            # these ranks cannot share a model
            break
        if more.fits:
            ways.append(f"--tensor-parallel-size {num_ranks}")
            break
        num_ranks *= 2
    return ways
