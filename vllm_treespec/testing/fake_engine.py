"""An engine without vLLM: whole steps through ``TreeDecoder``, with every KV checked.

In each step the target's rows must see the KV of exactly their own paths, accepted
paths must end up in their requests' slots, and the trees that the decoder finds must
be those that were proposed a step before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.stats import StepStats
from vllm_treespec.batch.views import (
    EmittedBatch,
    HiddenStates,
    PagedBatch,
    ScheduledBatch,
    TargetInputs,
)
from vllm_treespec.layouts.base import LayoutLimits, TreeLayout
from vllm_treespec.layouts.branches import BranchLayout
from vllm_treespec.layouts.masks import MaskLayout
from vllm_treespec.layouts.node_masks import NodeMasks
from vllm_treespec.sampling.draws import draw
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sources.base import Sources
from vllm_treespec.step.decoder import TreeDecoder
from vllm_treespec.step.method import EngineLimits, Method
from vllm_treespec.testing.fake_scheduler import Habits, Request, Scheduler, StepPlan
from vllm_treespec.testing.fake_views import Step, blocks_in, first_seen
from vllm_treespec.testing.toy_models import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    KvCache,
    Language,
    ToyDraftModel,
    after,
    hidden_state,
    kv_slots,
    penalised,
    permitted,
    seen_slots,
    texts_so_far,
)
from vllm_treespec.trees.sizes import TreeSizes

DEVICE = torch.device("cpu")


class FakeEngine:
    """Runs requests to their end, and checks every step."""

    def __init__(
        self,
        language: Language,
        method: Method,
        sources: Sources,
        habits: Habits,
        seed: int = 0,
        rank: int = 0,
        masks: bool = False,
    ) -> None:
        """Make the decoder, with a layout of branches or of masks, and the KV."""
        self.language, self.habits = language, habits
        self.scheduler = Scheduler(habits, seed)
        self.random = np.random.default_rng(seed)
        max_len = habits.max_model_len
        limits = EngineLimits(DEVICE, rank, 0, max_len, habits.token_budget)
        layout = make_layout(method, sources, habits, masks)
        self.decoder = TreeDecoder(method, sources, layout, limits, StepStats())
        num_groups = habits.num_groups
        pool = num_groups * habits.num_blocks
        num_blocks = pool + layout.num_fork_blocks(BLOCK_SIZE, num_groups)
        # of a layer of each group: they share memory, a block is used by one group
        self.kv = KvCache(num_blocks)
        layout.bind([[self.kv.cache]] * num_groups, pool, BLOCK_SIZE)
        self.decoder.committed_reader.bind(pool, BLOCK_SIZE)
        for model in sources.models:
            if isinstance(model, ToyDraftModel):
                model.bind(num_blocks, layout)
        # slots that requests had
        self.slots: set[int] = set()
        # trees by how many of their drafts were accepted
        self.accepted: Counter[int] = Counter()
        # steps after which nothing was drafted as plain ones held
        self.num_rested = 0
        # of every step, how many trees came back
        self.num_trees: list[int] = []
        # and its size with the tree of the schedule that was drawn, if any
        self.drawn: list[tuple[int, int | None]] = []

    def add(self, *requests: Request) -> None:
        """Let requests wait."""
        self.scheduler.waiting.extend(requests)

    def run(self, *requests: Request, max_steps: int = 2000) -> list[list[int]]:
        """Answer these requests, and all others; return the answers to these."""
        self.add(*requests)
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
            assert len(self.num_trees) < max_steps, "it does not come to an end"
        return [request.output for request in requests]

    def step(self) -> None:
        """One step, as vLLM's runner makes it."""
        self.plan = plan = self.scheduler.schedule()
        self._tell(plan)
        if not plan.scheduled:
            return
        order = self.random.permutation(len(plan.scheduled))
        batch = [plan.scheduled[i] for i in order]
        self.now = now = Step(
            requests=[s.request for s in batch],
            num_tokens=[s.num_tokens for s in batch],
            drafts=[s.drafts for s in batch],
            in_turn=np.argsort(order),
            token_budget=None if plan.preempted else self.habits.token_budget,
        )
        max_len = self.habits.max_model_len
        slots = self.decoder.slots.lookup([r.name for r in now.requests])
        scheduled = now.scheduled_batch(slots, self.habits)
        inputs = now.target_inputs(-(-max_len // BLOCK_SIZE), self.habits)
        self.decoder.begin_step(scheduled, lambda: inputs)
        self._check_trees()
        self._name_rows(scheduled, inputs)
        hidden, logits = self._run_target(inputs)
        emitted = self._sample(scheduled, logits)
        self.decoder.commit()
        self._append(emitted)
        self._draft(now.emitted_batch(emitted, scheduled, hidden, max_len))
        for request in now.requests:
            self.scheduler.update(request)

    def _tell(self, plan: StepPlan) -> None:
        """Tell the decoder which requests came, went and were preempted."""
        slots = self.decoder.slots
        self.decoder.finish_requests(slots.release([r.name for r in plan.finished]))
        for request in plan.new:
            slots.add(
                request.name,
                request.drafts,
                request.seed,
                request.max_drafts,
                request.forbidden,
            )
        self.decoder.discard_trees(slots.lookup([r.name for r in plan.resumed]))

    def _check_trees(self) -> None:
        """Trees come back where the drafts are the first ones of the last proposal."""
        last = self.decoder.step - 1
        expected = [
            place
            for place, (request, drafts) in enumerate(
                zip(self.now.requests, self.now.drafts, strict=True)
            )
            if drafts
            and self.now.token_budget is not None
            and request.proposed_in == last
            and drafts == request.proposed[: len(drafts)]
        ]
        trees = self.decoder.trees
        assert expected == ([] if trees is None else trees.host_reqs.tolist())
        self.num_trees.append(len(expected))

    def _run_target(self, inputs: TargetInputs) -> tuple[HiddenStates, Tensor]:
        """Run the target, and check that every row sees its own path and no more."""
        texts = self.now.texts
        tokens = inputs.input_ids[: len(texts)].tolist()
        assert tokens == [text[-1] for text in texts]
        positions = [len(text) - 1 for text in texts]
        assert inputs.positions[0][: len(texts)].tolist() == positions
        assert inputs.positions[1].equal(self.now.axes(positions))
        kv = [texts_so_far(text) for text in texts]
        for group in range(self.habits.num_groups):
            self._run_layer(group, inputs.batch, [row + group for row in kv])
        final = torch.tensor([hidden_state(t) for t in texts], dtype=torch.float64)
        by_layer = {}
        for layer in self.decoder.committed_reader.features:
            states = [hidden_state(t, layer) for t in texts]
            by_layer[layer] = torch.tensor(states, dtype=torch.float64)
        wanted = inputs.logits_indices
        logits = torch.stack(
            [after(self.language.target, texts[row]) for row in wanted]
        )
        return HiddenStates(final[wanted], by_layer), logits

    def _run_layer(
        self, group: int, batch: PagedBatch, kv: Sequence[np.ndarray]
    ) -> None:
        """Write the KV of a layer of a group, and check what every row sees there.

        ``kv`` is what each row should see, and last its own.
        """
        own = np.array([row[-1] for row in kv])
        layout, blocks = self.decoder.layout, batch.groups[group]
        plan = None
        if isinstance(layout, BranchLayout):
            plan = layout.shared_plans[group].plan
        if plan is None:
            starts = batch.query_start_loc
            lens, table = batch.context_lens + starts.diff(), blocks.block_table
            self.kv.write(blocks.slot_mapping, own)
        else:
            starts, lens, table = plan.query_start_loc, plan.seq_lens, plan.block_table
            self.kv.write(plan.write_slots, own[plan.write_rows.numpy()])
        rows = []
        for row, slots in seen_slots(layout, starts.tolist(), lens.tolist(), table):
            rows.append(row)
            first = first_seen(group, len(slots))
            seen = self.kv.read(slots[first:])
            assert np.array_equal(seen, kv[row][first:]), "a row sees another path"
        assert rows == list(range(len(kv)))

    def _name_rows(self, scheduled: ScheduledBatch, inputs: TargetInputs) -> None:
        """Note which text every query row ends, by our own record of the trees."""
        trees = self.decoder.trees
        in_tree = set() if trees is None else set(trees.host_reqs.tolist())
        texts: list[list[int]] = [[] for _ in range(sum(self.now.num_tokens))]
        logits_indices, start = inputs.logits_indices.tolist(), 0
        for place, request in enumerate(self.now.requests):
            drafts, num_tokens = self.now.drafts[place], self.now.num_tokens[place]
            chain = request.token_ids + drafts
            first = start + num_tokens - 1 - len(drafts)
            for i in range(num_tokens):
                texts[start + i] = chain[: request.num_computed + i + 1]
            nodes = logits_indices[scheduled.root_rows[place] :][: 1 + len(drafts)]
            if place in in_tree:
                paths = [request.token_ids]
                for token, parent in zip(drafts, request.parents, strict=False):
                    paths.append([*paths[parent], token])
                for row, path in zip(nodes, paths, strict=True):
                    texts[row] = path
            else:
                assert nodes == list(range(first, start + num_tokens))
            start += num_tokens
        self.now.texts = texts

    def _sample(self, scheduled: ScheduledBatch, logits: Tensor) -> list[list[int]]:
        """Emit tokens: of trees what the decoder accepts, else one after the root."""
        sampling = self.now.sampling()
        scored = self.decoder.score(logits, sampling)
        drawn = self.decoder.draw_plainly(logits, sampling)
        by_noise: dict[int, int] = {}
        if drawn is not None:
            tokens = drawn.token_ids.tolist()
            by_noise = dict(zip(drawn.host_reqs.tolist(), tokens, strict=True))
        emitted = []
        for place, request in enumerate(self.now.requests):
            drafts = self.now.drafts[place]
            end = request.num_computed + self.now.num_tokens[place] - len(drafts)
            row = logits[scheduled.root_rows[place]]
            plain = end == len(request.token_ids)
            token = by_noise.get(place)
            if token is None:
                token = self._draw(request, row)
            emitted.append([token] if plain else [])
        if scored is not None:
            assert self.decoder.trees is not None
            rows = scored.emitted(self.decoder.trees.tree).tolist()
            for place, row in zip(self.decoder.trees.host_reqs, rows, strict=True):
                emitted[place] = [token for token in row if token >= 0]
                self.accepted[len(emitted[place]) - 1] += 1
        return emitted

    def _draw(self, request: Request, logits: Tensor) -> int:
        """Sample plainly, with numbers of the request and its length alone."""
        prompt = request.token_ids[: request.num_prompt]
        output = request.token_ids[request.num_prompt :]
        logits = penalised(logits, prompt, output, request.penalties)
        logits = permitted(logits, output, request.forbidden)
        if request.temperature == 0:
            return int(logits.argmax())
        sampling = SamplingTensors(torch.tensor([request.temperature]))
        seed = (
            request.seed if request.seed is not None else crc32(request.name.encode())
        )
        key = [seed, len(request.token_ids)]
        uniform = torch.tensor([np.random.default_rng(key).random()])
        return int(draw(sampling.probs(logits[None]), uniform))

    def _append(self, emitted: list[list[int]]) -> None:
        """Append tokens, and check that all KV is what plain decoding writes."""
        for place, request in enumerate(self.now.requests):
            end = request.num_computed + self.now.num_tokens[place]
            request.token_ids += emitted[place]
            if emitted[place]:
                end = len(request.token_ids) - 1
            request.num_computed = end
            assert len(request.token_ids) <= self.habits.max_model_len
            texts = texts_so_far(request.token_ids[:end])
            for group in range(self.habits.num_groups):
                blocks = blocks_in(group, request, self.habits)
                seen = np.arange(first_seen(group, end + 1), end)
                kv = self.kv.read(kv_slots(blocks, seen))
                assert np.array_equal(kv, texts[seen] + group)
        assert not self.kv.cache[0].any(), "the block in place of freed ones is written"

    def _draft(self, batch: EmittedBatch) -> None:
        """Draw the next trees, and hand them to the scheduler."""
        for request in self.now.requests:
            request.proposed = []
        rests = self.decoder.rests(batch.num_emitted.tolist())
        proposal = None if rests else self.decoder.draft(batch)
        self.num_rested += rests
        index = None if proposal is None else proposal.tree_index
        self.drawn.append((batch.num_reqs, index))
        self.slots.update(batch.slots.tolist())
        if proposal is None:
            return
        drafting = [self.now.requests[place] for place in proposal.reqs]
        method = self.decoder.method
        assert len(drafting) <= method.max_trees
        assert all(r.drafts for r in drafting)
        assert batch.emitted[proposal.reqs].all()
        sizes = method.proposers[proposal.tree_index].sizes
        is_greedy = not any(request.temperature for request in drafting)
        drawn = is_greedy or proposal.tree.draws is not None
        assert drawn or method.rule.follows_noise, (
            f"the rule {method.rule.name} needs draws, and these trees have none; "
            f"coupled_draw needs none"
        )
        for request, drafts, parents, depths in zip(
            drafting,
            proposal.drafts(),
            proposal.draft_parents(),
            proposal.tree.depths.tolist(),
            strict=True,
        ):
            check_tree(drafts, parents, depths, sizes)
            assert len(drafts) <= request.max_drafts
            request.proposed, request.parents = drafts, parents
            request.proposed_in = self.decoder.step


def check_tree(
    drafts: Sequence[int],
    parents: Sequence[int],
    depths: Sequence[int],
    sizes: TreeSizes,
) -> None:
    """Check that drafts are a tree as ``TreeBatch`` says, and no larger than announced.

    Args:
        drafts: tokens of the draft nodes.
        parents: of the draft nodes; 0 is the root.
        depths: of all nodes, the root's first; further entries are not looked at.
        sizes: of the proposer.

    """
    assert all(0 <= token < VOCAB_SIZE for token in drafts), "no token of the target's"
    assert list(parents) == sorted(parents), "nodes are not in level order"
    assert all(0 <= parent <= i for i, parent in enumerate(parents)), "a child is first"
    twins = len(drafts) - len(set(zip(parents, drafts, strict=True)))
    assert not twins, "siblings have the same token"
    expected = [0]
    for parent in parents:
        expected.append(expected[parent] + 1)
    assert list(depths[: len(expected)]) == expected, "depths do not follow parents"
    num_leaves = len(expected) - len(set(parents))
    widest = max(Counter(expected).values())
    found = len(expected), max(expected), widest, num_leaves
    most = sizes.max_nodes, sizes.max_depth, sizes.max_width, sizes.max_leaves
    assert all(n <= bound for n, bound in zip(found, most, strict=True)), (
        f"nodes, levels, width and leaves of a tree are {found}, its sizes say {most}"
    )


def make_layout(
    method: Method, sources: Sources, habits: Habits, masks: bool
) -> TreeLayout:
    """A layout with room for the method's trees."""
    sizes = [proposer.sizes for proposer in method.proposers]
    has_own_kv = any(isinstance(s, ToyDraftModel) for s in sources.models)
    largest = TreeSizes.largest(sizes)
    limits = LayoutLimits(largest, method.max_trees, has_own_kv)
    if masks:
        return MaskLayout(limits, NodeMasks(256, habits.max_running, DEVICE))
    return BranchLayout(limits)
