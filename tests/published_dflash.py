"""Folders as DFlash, JetSpec, DSpark and DFlash2 heads are published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tests.published import Published

Form = Literal["dflash", "jetspec", "dspark", "specforge", "dflash2", "speculators"]
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "jetspec": "DFlashDraftModel",
    "dspark": "Qwen3DSparkModel",
    "specforge": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
}


@dataclass(frozen=True)
class PublishedDFlash(Published):
    """What a published one-pass head is made of, in its authors' words."""

    form: Form = "dflash"
    num_layers: int = 2
    num_kv_heads: int = 2
    lm_head: bool = False
    # with that of attention's output
    qkv_bias: bool = False
    qk_norm: bool = True
    block_size: int = 4
    mask_token_id: int = 39
    # None: the file does not name them
    target_layer_ids: tuple[int, ...] | None = (1, 3, 4)
    num_target_layers: int = 8
    causal: bool = False
    sliding_layers: tuple[int, ...] = ()
    sliding_window: int = 6
    sliding_causal: bool = False
    # sliding layers, all of them, by a switch
    use_swa: bool = False
    sample_from_anchor: bool | None = None
    markov_rank: int = 0
    confidence_head: bool = False
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    mask_embedding: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @property
    def predicts_from_root(self) -> bool:
        """Whether the root's row predicts the first level."""
        if self.sample_from_anchor is None:
            return self.form in ("dspark", "specforge")
        return self.sample_from_anchor

    @property
    def num_levels(self) -> int:
        """Levels that a block predicts."""
        return self.block_size - (not self.predicts_from_root)

    @property
    def said_causal(self) -> bool | None:
        """What a file says of all layers; None: of none, defaults hold."""
        if not self.sliding_layers or self.use_swa:
            return self.causal or None
        default = not self.causal and self.sliding_causal
        return None if default else self.causal

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Numbers of the target's layers behind which hidden states are read."""
        if self.target_layer_ids is not None:
            return self.target_layer_ids
        # DFlash's default for two layers
        return 1, self.num_target_layers - 3

    @property
    def head_size(self) -> int:
        """Of one attention head."""
        return self.head_dim or 8

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of this form."""
        size, rows = self.hidden_size, self.draft_vocab_size or self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (size, len(self.layer_ids) * self.target_size),
            "hidden_norm.weight": (size,),
            "norm.weight": (size,),
        }
        for number in range(self.num_layers):
            shapes |= self.layer_shapes(f"layers.{number}.", size)
        if self.markov_rank:
            shapes["markov_head.markov_w1.weight"] = (self.vocab_size, self.markov_rank)
            shapes["markov_head.markov_w2.weight"] = (rows, self.markov_rank)
        if self.confidence_head:
            shapes["confidence_head.proj.weight"] = (1, size + self.markov_rank)
            shapes["confidence_head.proj.bias"] = (1,)
        if self.selector_rank:
            prefix = "candidate_selector"
            codebook = (self.vocab_size, self.selector_rank)
            shapes[f"{prefix}.predecessor_codebook"] = codebook
            shapes[f"{prefix}.successor_codebook"] = codebook
            shapes[f"{prefix}.hidden_projection.weight"] = (self.selector_rank, size)
        if self.mask_embedding:
            shapes["mask_embedding"] = (size,)
        return shapes

    def layer_shapes(self, layer: str, wide: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a decoder layer."""
        size, shapes = self.hidden_size, super().layer_shapes(layer, wide)
        shapes[f"{layer}input_layernorm.weight"] = (size,)
        if self.qkv_bias:
            shapes[f"{layer}self_attn.o_proj.bias"] = (size,)
        if self.conv_kernel_size:
            taps, groups = self.conv_kernel_size, size // self.conv_group_size
            for part in ("attention", "mlp"):
                conv = f"{layer}{part}_conv"
                shapes[f"{conv}.base_kernel"] = (2, taps, size)
                shapes[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, size)
        return shapes

    def said(self) -> dict[str, Any]:
        """What a form says."""
        own = {
            "block_size": self.block_size,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "sample_from_anchor": self.sample_from_anchor,
        }
        if self.form == "speculators":
            config = own | self._speculators()
        else:
            config = self._layer() | own | self._plain()
        if self.form == "dflash2":
            del config["block_size"]
        if self.form in ("dspark", "specforge", "dflash2"):
            config["is_causal"] = self.said_causal
        return config

    def _layer(self) -> dict[str, Any]:
        kinds = ["full_attention"] * self.num_layers
        window = {}
        if self.sliding_layers and not self.use_swa:
            window = {"sliding_window": self.sliding_window, "use_sliding_window": True}
            for number in self.sliding_layers:
                kinds[number] = "sliding_attention"
        return {
            **self.layer_config(),
            "attention_bias": self.qkv_bias,
            "layer_types": kinds,
            **window,
        }

    def _markov(self) -> dict[str, Any]:
        return {
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": self.confidence_head,
        }

    def _second(self) -> dict[str, Any]:
        return {
            "conv_kernel_size": self.conv_kernel_size,
            "conv_group_size": self.conv_group_size,
            "selector_rank": self.selector_rank,
            "selector_top_k": self.selector_top_k,
        }

    def _plain(self) -> dict[str, Any]:
        """What other forms than speculators' say beside the layer."""
        said = {
            "architectures": [ARCHITECTURES[self.form]],
            "num_target_layers": self.num_target_layers,
        }
        read = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": self.target_layer_ids,
        }
        if self.form == "dspark":
            return said | read | self._markov()
        sections: dict[str, dict[str, Any]] = {
            "dflash": {"causal": self.said_causal},
            "jetspec": {"causal_head": self.causal},
            "specforge": {"projector_type": "dspark", **self._markov()},
            "dflash2": {
                "input_embedding_scale": self.input_embedding_scale,
                "output_multiplier": self.output_multiplier,
                "final_logit_softcapping": self.final_logit_softcapping,
                "block_size": self.block_size,
                **self._second(),
            },
        }
        if self.use_swa:
            read |= {"use_swa": True, "swa_window_size": self.sliding_window}
        return said | {"dflash_config": read | sections[self.form]}

    def _speculators(self) -> dict[str, Any]:
        """What speculators' form says, but for what plain forms say alike."""
        kind = "dspark" if self.markov_rank else "dflash"
        if self.selector_rank:
            kind = "dflash2"
        more = {"dspark": self._markov(), "dflash2": self._second()}.get(kind, {})
        return {
            "speculators_model_type": kind,
            "architectures": [f"{kind}Speculator"],
            "transformer_layer_config": self._layer()
            | {"architectures": ["TargetModel"]},
            "mask_token_id": self.mask_token_id,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in self.layer_ids],
            "sliding_window_non_causal": not self.sliding_causal,
            "speculators_config": {
                "algorithm": kind,
                "verifier": {"architectures": ["LlamaForCausalLM"]},
            },
            **more,
        }
