"""Verifies the trees of a step with vLLM's V2 sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_treespec.batch.matching import rows_of
from vllm_treespec.batch.views import GREEDY_BELOW
from vllm_treespec.engine.v2.custom_processors import watch_custom_processors
from vllm_treespec.engine.v2.node_processors import StepTexts, read_paths
from vllm_treespec.engine.v2.views import final_sampling
from vllm_treespec.host_copies import on_device
from vllm_treespec.kernels.follow import follow_trees
from vllm_treespec.scorers import ScorerOutput, TargetLogits
from vllm_treespec.trees.tree import MAX_NODES

if TYPE_CHECKING:
    from vllm_treespec.batch.matching import PlacedTrees
    from vllm_treespec.engine.v2.runner import TreeRunnerMixin
    from vllm_treespec.engine.v2.vllm_types import InputBatch


class TreeSampler:
    """Stands in the place of vLLM's rejection sampler, for steps with trees.

    vLLM's own sampler draws a token after every node, by the noise of the request's
    seed and the node's position. A tree that is not drawn at random is then followed:
    the text is the one that vLLM draws without drafts. So are drawn trees where all
    requests are greedy. Elsewhere the method's rule verifies drawn drafts, on the
    sampler's final logits.
    """

    enable_adaptive_verification = False
    # int64 [num_reqs, width], see ``put_together``; of the step, if it has drafts
    nodes: Tensor | None = None

    def __init__(self, runner: TreeRunnerMixin) -> None:
        """Take the runner, whose sampler and decoder are used."""
        self.runner = runner
        read_paths(runner.sampler, StepTexts(runner.decoder))
        self.custom_processors = watch_custom_processors(runner.sampler)

    def __call__(
        self,
        logits: Tensor,
        batch: InputBatch,
        draft_logits: None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Draw, verify, and put both together.

        Args:
            logits: [num_rows, vocab_size].
            batch: of the step.
            draft_logits: trees have none.
            invalid_drafts: bool [num_rows], drafts whose grammar masks are unknown.

        """
        runner, decoder = self.runner, self.runner.decoder
        sampler = runner.sampler
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        dims = sampler.get_logprobs_dims(batch.idx_mapping_np)
        if invalid_drafts is not None:
            num_nodes = on_device(1 + decoder.batch.num_drafts, logits.device)
            decoder.cut_trees(
                valid_nodes(
                    invalid_drafts,
                    batch.cu_num_logits.long(),
                    num_nodes,
                )
            )
        sampled, processed = sampler.sample(
            logits, *_rows_of(batch), return_logprobs=dims is not None
        )
        sampled, trees = sampled.view(-1), decoder.trees
        if trees is not None and self.follows(batch):
            tokens, num_emitted, nodes = self.follow(trees, sampled, batch)
        else:
            if trees is not None:
                final = sampler.apply_sampling_params(logits, *_rows_of(batch))
                decoder.accept(self.verify(trees, final, batch))
            at_roots = sampled[batch.cu_num_logits[:-1]]
            tokens, num_emitted, nodes = self.put_together(at_roots, decoder.scored)
        self.nodes = nodes
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_emitted,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            runner.req_states.prefill_len.gpu,
        )
        logprobs = None
        if dims is not None:
            raw = sampler.logprobs_mode.startswith("raw")
            used = logits if raw else processed
            logprobs = self._logprobs(batch, used, tokens, num_emitted, nodes, dims)
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def follows(self, batch: InputBatch) -> bool:
        """Whether the step's trees are followed: greedy ones are, drawn or not."""
        if self.runner.decoder.method.rule.follows_noise:
            return True
        temperature = self.runner.sampler.sampling_states.temperature.np
        return bool((temperature[batch.idx_mapping_np] < GREEDY_BELOW).all())

    def may_draft_trees(self, row: int) -> bool:
        """Whether no custom processor changes the request in this row of the runner.

        All else that vLLM's sampler applies is that of each node.
        """
        return not any(custom.changes[row] for custom in self.custom_processors)

    def follow(
        self, trees: PlacedTrees, sampled: Tensor, batch: InputBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Follow trees along the tokens drawn after every node.

        Returns what ``put_together`` does.
        """
        decoder = self.runner.decoder
        tree_of = rows_of(trees.slots, decoder.batch.slots).astype(np.int32)
        followed = follow_trees(
            trees.tree,
            sampled,
            batch.cu_num_logits,
            on_device(tree_of, sampled.device),
            decoder.sizes.max_depth,
        )
        decoder.accept(followed.scored)
        return followed.emitted, followed.num_emitted, followed.nodes

    def verify(
        self, trees: PlacedTrees, final: Tensor, batch: InputBatch
    ) -> ScorerOutput:
        """Verify drawn trees by the method's rule; some requests are sampled.

        Args:
            trees: of the step.
            final: [num_rows, vocab_size], logits that tokens are drawn from.
            batch: of the step.

        """
        decoder, root_rows = self.runner.decoder, trees.root_rows
        view = final_sampling(self.runner, batch)
        sampling = view.select(trees.host_reqs, trees.reqs)
        positions = batch.positions[batch.logits_indices[root_rows]]
        keys = decoder.slots.keys(trees.slots)
        target = TargetLogits(final, root_rows, sampling)
        in_graph = self.runner.speculator.verify(trees.tree, target, keys, positions)
        if in_graph is not None:
            return in_graph
        step = trees.tree_index, trees.tree, target
        return decoder.verifier.verify(*step, keys, positions)

    def put_together(
        self, at_roots: Tensor, scored: ScorerOutput | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Put trees and requests without one together.

        Args:
            at_roots: int64 [num_reqs], tokens drawn after the roots.
            scored: of the trees.

        Returns:
            emitted tokens, padded with -1, int64 [num_reqs, width]; how many, int32
            [num_reqs]; the node after which each was drawn, int64 [num_reqs, width].

        """
        trees = self.runner.decoder.trees
        num_emitted = torch.ones_like(at_roots, dtype=torch.int32)
        if scored is None or trees is None:
            return at_roots[:, None], num_emitted, torch.zeros_like(at_roots[:, None])
        width = 1 + scored.path.shape[1]
        tokens = at_roots.new_full((len(at_roots), width), -1)
        tokens[:, 0] = at_roots
        tokens[trees.reqs] = scored.emitted(trees.tree)
        num_emitted[trees.reqs] = (scored.num_accepted + 1).int()
        nodes = torch.zeros_like(tokens)
        nodes[trees.reqs, 1:] = scored.path.clamp(min=0)
        return tokens, num_emitted, nodes

    def _logprobs(
        self,
        batch: InputBatch,
        logits: Tensor,
        tokens: Tensor,
        num_emitted: Tensor,
        nodes: Tensor,
        dims: tuple[int, int],
    ) -> LogprobsTensors:
        """Log probabilities of emitted tokens, as vLLM lays them out.

        Row i of a request's rows is for its i-th token; those behind are not read.
        ``dims``: how many of the likeliest tokens, and of tokens that a request names.
        """
        sampler, first_rows = self.runner.sampler, batch.cu_num_logits.long()
        reqs = requests_of_rows(first_rows, len(logits))
        place = batch.expanded_local_pos.long()
        emitted = place < num_emitted[reqs]
        column = place.clamp(max=tokens.shape[1] - 1)
        rows = first_rows[reqs] + torch.where(emitted, nodes[reqs, column], place)
        return compute_topk_scores(
            logits[rows],
            dims[0],
            torch.where(emitted, tokens[reqs, column], 0),
            batch.cu_num_logits_np.tolist(),
            sampler.logprob_token_ids_state,
            batch.expanded_idx_mapping,
            max_per_req_token_ids=dims[1],
            logits_mode=sampler.logprobs_mode.endswith("logits"),
        )


def requests_of_rows(first_rows: Tensor, num_rows: int) -> Tensor:
    """Place in the batch of each row's request, int64 [num_rows].

    Args:
        first_rows: int64 [num_reqs + 1], first row of each request.
        num_rows: of the logits, so that the host does not wait for the device.

    """
    num_reqs = len(first_rows) - 1
    return torch.repeat_interleave(
        torch.arange(num_reqs, device=first_rows.device),
        first_rows.diff(),
        output_size=num_rows,
    )


def valid_nodes(
    invalid_drafts: Tensor, first_rows: Tensor, num_nodes: Tensor
) -> Tensor:
    """How many nodes each request's tree may keep: those before the first invalid one.

    A tree without an invalid node stays whole: it keeps the draws that add no node.
    Rows that fill a batch up to a CUDA graph's are no nodes.

    Args:
        invalid_drafts: bool [num_rows].
        first_rows: int64 [num_reqs + 1], first row of each request.
        num_nodes: int64 [num_reqs], of each request's tree.

    Returns:
        int64 [num_reqs], MAX_NODES for whole trees.

    """
    reqs = requests_of_rows(first_rows, len(invalid_drafts))
    node = torch.arange(len(invalid_drafts), device=reqs.device) - first_rows[reqs]
    is_invalid = invalid_drafts & (node < num_nodes[reqs])
    node = node.masked_fill(~is_invalid, MAX_NODES)
    return torch.full_like(num_nodes, MAX_NODES).scatter_reduce(0, reqs, node, "amin")


def _rows_of(batch: InputBatch) -> tuple[object, ...]:
    """What vLLM's sampler is told of the rows of logits."""
    return (
        batch.expanded_idx_mapping,
        batch.idx_mapping,
        batch.idx_mapping_np,
        batch.positions[batch.logits_indices],
        batch.input_ids[batch.logits_indices],
        batch.expanded_local_pos,
        batch.seq_lens_cpu_upper_bound.numpy(),
    )
