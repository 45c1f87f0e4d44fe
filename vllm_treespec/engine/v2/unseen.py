"""Draws on the device while the host does not know the tokens that trees grow from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_treespec.batch.matching import Proposal
from vllm_treespec.batch.views import GREEDY_BELOW
from vllm_treespec.engine.v2.views import hidden_by_layer, sampling_view
from vllm_treespec.host_copies import on_device
from vllm_treespec.sampling.gumbel import gumbel_keys
from vllm_treespec.sampling.texts import NO_TEXTS
from vllm_treespec.sources.base import SampledTokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_treespec.batch.unseen import UnseenTrees
    from vllm_treespec.engine.v2.late import StepInFlight
    from vllm_treespec.engine.v2.runner import TreeRunnerMixin
    from vllm_treespec.schedule.plan import StepPlan
    from vllm_treespec.trees.draft import Draft


class UnseenDrafter:
    """Draws trees from what the last step left on the device.

    So no step waits for the one before it. Beside an index it is the models' part of
    the trees that nobody waits for: the host looks up the rest meanwhile. It is for
    steps in which all requests decode and draft, from a source that has read all that
    came before.
    """

    def __init__(self, runner: TreeRunnerMixin) -> None:
        """Take the runner, whose decoder draws."""
        self.runner = runner

    def may_draw(self, step: StepInFlight, scheduled: SchedulerOutput) -> bool:
        """Whether the trees behind a step can be drawn before it is over.

        Args:
            step: the last one; the host has seen those before it.
            scheduled: the next one.

        """
        runner, decoder = self.runner, self.runner.decoder
        slots = step.scheduled.slots
        # a plan that held for several steps is observed before there is another
        if not decoder.drafter.unseen_sources or decoder.clock.rest.num_steps:
            return False
        # a grammar's masks are made of trees on the host
        if scheduled.has_structured_output_requests:
            return False
        if not (step.scheduled.only_decodes and step.completes.all()):
            return False
        if not decoder.slots.may_draft(slots).all():
            return False
        if len(slots) > decoder.method.max_trees:
            return False
        # a draft model reads all that a step may have committed, and a root
        num_read = len(slots) * (1 + committed_at_most(step))
        if num_read > decoder.limits.max_num_tokens:
            return False
        # the step's roots: what is before them was read
        roots = runner.texts.num_tokens[step.rows] - 1
        table = runner.host_blocks.table[step.rows]
        return decoder.committed_reader.has_read(table, roots)

    def plan(self, step: StepInFlight) -> StepPlan:
        """Plan the step behind the last one."""
        temperature = self.runner.sampler.sampling_states.temperature.np[step.rows]
        slots = step.scheduled.slots
        return self.runner.decoder.plan(slots, temperature >= GREEDY_BELOW)

    def fits(
        self, plan: StepPlan, step: StepInFlight, scheduled: SchedulerOutput
    ) -> bool:
        """Whether models draw of the planned trees, and these have room.

        Args:
            plan: of the next step.
            step: the last one.
            scheduled: the next one.

        """
        decoder, slots = self.runner.decoder, step.scheduled.slots
        part = decoder.drafter.unseen_part(plan)
        # others decode plainly
        if part is None or set(plan.slots) != set(slots.tolist()):
            return False
        assert plan.tree is not None
        proposer = decoder.method.proposers[plan.tree]
        ends = self.runner.texts.num_tokens[step.rows] + committed_at_most(step)
        if (ends + proposer.sizes.max_depth + 1 >= self.runner.max_model_len).any():
            return False
        if part is not proposer:
            return True
        return self._have_rows(plan, proposer.sizes.max_nodes - 1, step, scheduled)

    def _have_rows(
        self,
        plan: StepPlan,
        num_drafts: int,
        step: StepInFlight,
        scheduled: SchedulerOutput,
    ) -> bool:
        """Whether each tree may have so many drafts; see ``fits``."""
        slots = step.scheduled.slots
        if plan.max_rows is not None and plan.max_rows < num_drafts * len(slots):
            return False
        if (self.runner.decoder.slots.max_drafts(slots) < num_drafts).any():
            return False
        reserved = scheduled.scheduled_spec_decode_tokens
        return all(
            len(reserved.get(req_id, ())) >= num_drafts
            for req_id in step.batch.req_ids
            if req_id in scheduled.num_scheduled_tokens
        )

    def draw(self, plan: StepPlan, step: StepInFlight) -> UnseenTrees | Draft:
        """Draw the trees behind the last step, and put drafts where vLLM reads them.

        Returns:
            the trees; or what models draft of them, which the host completes.

        """
        runner, slots = self.runner, step.scheduled.slots
        decoder = runner.decoder
        part = decoder.drafter.unseen_part(plan)
        assert part is not None
        assert plan.tree is not None
        sampled = self._sampled(step)
        places = np.arange(len(slots))
        view = sampling_view(runner, step.rows, step.batch.idx_mapping, NO_TEXTS)
        sampling = view.select(places, on_device(places, runner.device))
        noise = None
        if decoder.method.rule.follows_noise and not sampling.all_greedy:
            seeds = runner.sampler.sampling_states.seeds.np[step.rows]
            noise = gumbel_keys(seeds, sampled.end, part.sizes.max_depth)
        given = plan.of_slots(slots.tolist()), slots, sampled, sampling, noise
        with decoder.stats.stage("draft"):
            draft = decoder.drafter.draw_unseen(*given)
        if part is not decoder.method.proposers[plan.tree]:
            return draft
        runner.drafter.save_schedule()
        step.followed = True
        drafts, held = draft.tree.token_ids[:, 1:], runner.req_states.draft_tokens
        held[step.batch.idx_mapping, : drafts.shape[1]] = drafts
        return decoder.propose_unseen(draft, plan, slots)

    def _sampled(self, step: StepInFlight) -> SampledTokens:
        """What a step committed."""
        runner, batch, emitted = self.runner, step.batch, step.emitted
        index, reader = batch.idx_mapping, runner.decoder.committed_reader
        num_tokens = emitted.num_tokens.long()
        # query rows of the step's root and of the drafts that were accepted
        rows = batch.query_start_loc[: batch.num_reqs, None].long()
        width = committed_at_most(step)
        if emitted.nodes is not None:
            rows = rows + emitted.nodes[:, :width]
        hidden = None
        if reader.reads_roots:
            hidden = step.hidden[rows.gather(1, num_tokens[:, None] - 1)[:, 0]]
        by_layer = hidden_by_layer(runner, step)
        group = runner.group_order[0]
        ends = runner.req_states.num_computed_tokens.gpu[index].long()
        offsets = torch.arange(rows.shape[1], device=runner.device)
        return SampledTokens(
            num_tokens=num_tokens,
            positions=(ends - num_tokens)[:, None] + offsets,
            block_table=runner.block_tables.block_tables[group].gpu[index],
            input_ids=batch.input_ids,
            rows=rows,
            next_token_ids=emitted.token_ids[:, :width].clamp(min=0),
            num_blocks=runner.host_blocks.num_blocks[step.rows],
            features={layer: by_layer[layer][rows] for layer in reader.features},
            hidden=hidden,
        )


def committed_at_most(step: StepInFlight) -> int:
    """Tokens that a request has committed in a step if all its drafts were accepted.

    The host knows how deep the trees are, unless they were unseen.
    """
    width, drawn = step.emitted.token_ids.shape[1], step.trees.proposal
    return min(width, 1 + drawn.max_depth) if isinstance(drawn, Proposal) else width
