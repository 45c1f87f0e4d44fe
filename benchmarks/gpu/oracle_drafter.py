"""The drafter of fixed acceptance as vLLM's ``custom_class``, and its arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.oracle import (
    OracleProposer,
    accept_by_coins,
    default_depth,
    last_path,
)
from vllm_treespec.config import parse_spec_config
from vllm_treespec.core.decoder import Method, TreeDecoder
from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.engine.v1.drafter import TreeDrafter
from vllm_treespec.plugin import stock_arguments
from vllm_treespec.scorers import ScorerOutput, TargetLogits

DRAFTER = "benchmarks.gpu.oracle_drafter.OracleDrafter"


class OracleDecoder(TreeDecoder):
    """Has drafts accepted by coins; its text is nonsense.

    Positions, masks, the target's forward, scoring, the move of keys and values and
    all bookkeeping are those of every method. The rule of the request is run, and what
    it accepts is replaced; a walk (on CPU) costs what it costs to reject random
    drafts.
    """

    acceptance: float
    # int64, the nodes of the path that coins are thrown for
    path: Tensor

    def verify(
        self, index: int, tree: TreeBatch, target: TargetLogits, uniforms: Tensor
    ) -> ScorerOutput:
        """Run the rule, then let coins decide what is accepted."""
        scored = super().verify(index, tree, target, uniforms)
        return accept_by_coins(
            tree, self.path, self.acceptance, uniforms, scored.next_token_ids
        )


class OracleDrafter(TreeDrafter):
    """Drafts random tokens, in no time."""

    decoder_class = OracleDecoder

    def method(self, batched: bool) -> Method:
        """Draw by the oracle; the tree comes in ``additional_config``."""
        num_nodes = self.vllm_config.additional_config["oracle"]["num_nodes"]
        oracle = OracleProposer(
            num_nodes,
            default_depth(num_nodes),
            self.vllm_config.model_config.get_vocab_size(),
        )
        return replace(super().method(batched), proposers=[oracle])

    def make_decoder(self, *args: Any) -> TreeDecoder:
        """Make the decoder; the acceptance comes in ``additional_config``."""
        decoder = super().make_decoder(*args)
        assert isinstance(decoder, OracleDecoder)
        settings = self.vllm_config.additional_config["oracle"]
        decoder.acceptance = float(settings["acceptance"])
        (oracle,) = decoder.method.proposers
        assert isinstance(oracle, OracleProposer)
        decoder.path = torch.tensor(
            last_path(oracle.parents), dtype=torch.int64, device=decoder.limits.device
        )
        return decoder


def oracle_arguments(
    num_nodes: int, acceptance: float, max_trees: int, device: str
) -> dict[str, Any]:
    """Stock vLLM arguments of an engine that drafts through :class:`OracleDrafter`.

    Args:
        num_nodes: of every tree, root included; 1 stands for steps without drafts.
        acceptance: probability to accept a node once its parent is accepted.
        max_trees: most running requests.
        device: ``"cpu"`` or ``"cuda"``.

    """
    spec = {
        # stands for a method without a draft model, with a tree of the same size
        "method": "suffix_tree",
        "num_drafts": max(num_nodes - 1, 1),
        "depth": max(default_depth(num_nodes), 1),
        "max_trees": max_trees,
        "schedule": "fixed",
    }
    arguments = stock_arguments(parse_spec_config(spec), None, device)
    arguments["speculative_config"]["model"] = DRAFTER
    oracle = {"num_nodes": num_nodes, "acceptance": acceptance}
    arguments["additional_config"]["oracle"] = oracle
    return arguments


def use_acceptance(worker: Any, acceptance: float) -> None:
    """Change the acceptance from now on, through ``LLM.collective_rpc``."""
    worker.model_runner.decoder.acceptance = acceptance
