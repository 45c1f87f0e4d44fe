"""EAGLE and Lyanna heads in training: unrolled, on whole conversations."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, smooth_l1_loss
from transformers import PreTrainedModel

from vllm_treespec.heads import (
    EagleHead,
    EagleHeadConfig,
    LyannaHead,
    LyannaHeadConfig,
)
from vllm_treespec.sources.base import FINAL_LAYER
from vllm_treespec.train.batches import TeacherBatches
from vllm_treespec.train.head import HeadDrafter
from vllm_treespec.train.loss import TeacherTargets
from vllm_treespec.train.options import LyannaOptions, PairOptions
from vllm_treespec.train.teacher import TargetStatistics
from vllm_treespec.train.unrolled import unrolled

# Standard deviation of fresh weights, as in Llama.
WEIGHT_STD = 0.02
# What training.json says of a Lyanna head; its ablations differ in these.
VARIANTS = {"first_token", "context", "token_info_rank", "token_info"}


class PairHead(HeadDrafter):
    """A head that reads pairs; its loss is a weighted mean of ``topk_kl`` over steps.

    Attributes:
        distance: from what the head makes of a pair to the target's state there.
    """

    distance: Any
    options: PairOptions
    head: EagleHead

    def guesses(
        self, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, TeacherTargets]:
        """The guesses at each level; features are the target's, then the head's own."""
        levels, outputs, index = [], [], []
        with torch.autocast(inputs["states"].device.type, dtype=torch.bfloat16):
            features = self.head.features(inputs["states"].float()).float()
            steps = unrolled(self.head, features, inputs, self.config.depth)
            for step, (pairs, out, before) in enumerate(steps):
                levels.append(torch.full_like(pairs, step))
                outputs.append(self.head.output_inputs_after(out, before).float())
                index.append(pairs + step)
        targets = TeacherTargets.of(inputs).at(torch.cat(index))
        return torch.cat(levels), torch.cat(outputs), targets

    def loss(
        self, inputs: dict[str, Tensor], progress: float, generator: torch.Generator
    ) -> Tensor:
        """``topk_kl`` of each step, and the distance of the states."""
        options, targets = self.options, TeacherTargets.of(inputs)
        states = inputs["states"].float()
        if options.feature_noise:
            drawn = torch.rand(states.shape, generator=generator).to(states.device)
            states = states + (2 * drawn - 1) * options.feature_noise
        weights, losses = [], []
        with torch.autocast(states.device.type, dtype=torch.bfloat16):
            features = self.head.features(states).float()
            wanted = features.flatten(0, 1)
            steps = unrolled(self.head, features, inputs, options.steps)
            for step, (pairs, out, before) in enumerate(steps):
                read = self.head.output_inputs_after(out, before).float()
                loss = self.kl(read, targets.at(pairs + step))
                if options.feature_weight:
                    # The last supervised pair is followed by no feature.
                    place = inputs["pairs"][pairs] + 1 + step
                    near = self.distance(out.float(), wanted[place].detach())
                    loss = loss + options.feature_weight * near
                weights.append(options.step_decay**step)
                losses.append(weights[-1] * loss)
        return torch.stack(losses).sum() / sum(weights)


class Eagle(PairHead):
    """An EAGLE head, written in SafeAILab's form."""

    distance = staticmethod(smooth_l1_loss)

    @staticmethod
    def config_for(
        target: PreTrainedModel, layers: str, **sizes: Any
    ) -> EagleHeadConfig:
        """Configure a head; see ``target_sizes`` and ``layers_to_read``."""
        known = target_sizes(target)
        num_layers = target.config.get_text_config().num_hidden_layers
        known["target_layers"] = layers_to_read(layers, num_layers)
        known["combines"] = layers == "three"
        return EagleHeadConfig.model_validate({**known, **sizes})

    def build(self, target: PreTrainedModel, statistics: TargetStatistics) -> EagleHead:
        """Make a fresh head; its layer starts as nothing."""
        head = EagleHead(self.config)
        initialise(head, target)
        return head


class Lyanna(PairHead):
    """A Lyanna head."""

    distance = staticmethod(mse_loss)
    options: LyannaOptions
    head: LyannaHead

    @staticmethod
    def config_for(target: PreTrainedModel, **sizes: Any) -> LyannaHeadConfig:
        """Configure a head; see ``target_sizes``."""
        return LyannaHeadConfig.model_validate({**target_sizes(target), **sizes})

    @torch.no_grad()
    def build(
        self, target: PreTrainedModel, statistics: TargetStatistics
    ) -> LyannaHead:
        """Make a fresh head, whose chain passes the target's state at its own size."""
        head = LyannaHead(self.config)
        initialise(head, target)
        size = self.config.hidden_size
        if isinstance(head.fuse, nn.Linear):
            head.fuse.weight[:, size:] += torch.eye(size)
        state_rms = statistics.hidden_moment.diagonal().mean().sqrt().item()
        head.norm.weight.fill_(state_rms)  # type: ignore[operator]
        if head.info is not None:
            head.info.down.weight.normal_(std=size**-0.5)
        return head

    def special_groups(self) -> list[dict[str, Any]]:
        """The token info: it starts at next to nothing, and is to grow fast."""
        if self.head.info is None:
            return []
        rate = {"lr": self.options.token_info_lr, "weight_decay": 0.0}
        return [{"params": list(self.head.info.parameters()), **rate}]

    def record(self, evaluation: TeacherBatches) -> dict[str, Any]:
        """The same as of other heads, and the variant."""
        variant = self.config.model_dump(include=VARIANTS)
        return {**super().record(evaluation), "head": variant}


def layers_to_read(number: str, num_layers: int) -> tuple[int, ...]:
    """Layers of the target that a fresh head reads.

    Args:
        number: ``three`` (EAGLE-3's choice: the inputs of a low, a middle and a high
            layer) or ``one`` (behind the final norm).
        num_layers: of the target.

    Raises:
        ValueError: the target has too few layers for three.
    """
    if number == "one":
        return (FINAL_LAYER,)
    if num_layers < 7:
        raise ValueError(
            f"three different layers need a target of at least 7, this one has"
            f" {num_layers}: train eagle, and pass --layers one"
        )
    return (2, num_layers // 2, num_layers - 3)


def target_sizes(target: PreTrainedModel) -> dict[str, Any]:
    """Fields of a head's configuration that make its layer as wide as the target's.

    Raises:
        ValueError: the target's config lacks a size of a Llama layer.
    """
    known = target.config.get_text_config().to_dict()
    needed = ("hidden_size", "num_attention_heads", "intermediate_size")
    if missing := [key for key in (*needed, "rms_norm_eps") if key not in known]:
        raise ValueError(
            f"the target's config has no {', '.join(missing)}: EAGLE, Lyanna and"
            " one-pass heads are made for targets with layers of Llama's kind; pass"
            " one, or train redrafter"
        )
    size, num_heads, inner = (known[key] for key in needed)
    rope = known.get("rope_parameters") or {}
    return {
        "hidden_size": size,
        "vocab_size": known["vocab_size"],
        "target_hidden_size": size,
        "num_heads": num_heads,
        "num_kv_heads": known.get("num_key_value_heads") or num_heads,
        "head_size": known.get("head_dim") or size // num_heads,
        "intermediate_size": inner,
        "norm_eps": known["rms_norm_eps"],
        "max_positions": known["max_position_embeddings"],
        # Some targets have RoPE parameters by kind of layer.
        **({"rope": rope} if "rope_type" in rope else {}),
    }


@torch.no_grad()
def initialise(head: EagleHead, target: PreTrainedModel) -> None:
    """Write the first weights.

    Attention and MLP start at zero, so that the feature passes; where layers are
    combined, it is the last one's.
    """
    for module in head.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=WEIGHT_STD)
    for layer in head.layers:
        layer.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
        layer.down_proj.weight.zero_()  # type: ignore[union-attr, operator]
    size = head.config.hidden_size
    if isinstance(head.combine, nn.Linear):
        head.combine.weight[:, -size:] += torch.eye(size)
    if isinstance(head.fuse, nn.Linear) and "embedding" not in head.config.norms:
        # Both halves of EAGLE-1's fc are read at root mean square 1.
        embedding = target.get_input_embeddings().weight.detach().float()
        embedding_rms = embedding.pow(2).mean().sqrt().item()
        head.fuse.weight[:, :size] /= embedding_rms
