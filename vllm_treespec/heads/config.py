"""The ``config.json`` of a head: one validated type per kind of head."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from vllm_treespec.sources.base import FINAL_LAYER

# true is no size
Size = Annotated[int, Field(strict=True, gt=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
RankAccuracies = Annotated[
    tuple[tuple[Share, ...], ...],
    Field(description="by level and rank, how often that guess is the target's token"),
]


class HeadError(ValueError):
    """A head's folder that cannot be used; the message names file, key and remedy."""


class HeadConfig(BaseModel):
    """What all heads share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: Size = Field(description="of the target's hidden state")
    vocab_size: Size = Field(description="of the target")
    num_hot_tokens: Size | None = Field(
        default=None, description="tokens the head can draft; null: the vocabulary"
    )
    depth: Size = Field(default=5, description="levels it was measured on")
    share_embedding: bool = Field(
        default=True, description="read tokens through the target's embedding"
    )
    share_output: bool = Field(
        default=True, description="take the target's output layer, frozen"
    )

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that the head can draft."""
        return self.num_hot_tokens or self.vocab_size

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers before which hidden states are read."""
        return (FINAL_LAYER,)


class BlockHeadConfig(HeadConfig):
    """A head of ResNet blocks, which reads no context."""

    @property
    def target_hidden_size(self) -> int:
        """Of the hidden states that are read."""
        return self.hidden_size

    num_blocks: NonNegativeInt = Field(
        default=2, strict=True, description="ResNet blocks"
    )


class ReDrafterHeadConfig(BlockHeadConfig):
    """One recurrent head for all levels."""

    method: Literal["redrafter"] = "redrafter"
    inner_size: Size | None = Field(
        default=None, description="width of the ResNet blocks; null: 2 x hidden_size"
    )


class MedusaHeadConfig(BlockHeadConfig):
    """One head a level."""

    method: Literal["medusa"] = "medusa"
    rank_accuracies: RankAccuracies = ()


class DecoderHeadConfig(HeadConfig):
    """A head of decoder layers, which attends to a context of its own."""

    target_layers: tuple[int, ...] | None = Field(
        default=(FINAL_LAYER,),
        description="hidden states before these layers of the target are read; -1: "
        "those behind its final norm; null: three, by its number of layers",
    )
    target_hidden_size: Size = Field(description="of those hidden states")
    num_layers: Size = Field(default=1, description="decoder layers")
    num_heads: Size = Field(description="attention heads")
    num_kv_heads: Size = Field(description="key-value heads")
    head_size: Size = Field(description="of one attention head")
    intermediate_size: Size = Field(description="width of the MLP")
    norm_eps: float = Field(default=1e-5, gt=0, description="of all norms")
    rope: dict[str, Any] = Field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0},
        description="transformers' rope_parameters",
    )
    max_positions: Size = Field(
        default=4096, description="positions that scaled RoPE was trained on"
    )
    qkv_bias: bool = Field(default=False, description="biases of q, k and v")
    o_bias: bool = Field(default=False, description="bias of attention's output")
    qk_norm: bool = Field(default=False, description="norms of q and k, as in Qwen3")
    rank_accuracies: RankAccuracies = ()
    verifier: tuple[str, ...] = Field(
        default=(), description="architectures of the target, where the file says so"
    )

    @model_validator(mode="after")
    def _attention_can_be_computed(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads are no multiple of "
                f"{self.num_kv_heads} key-value heads"
            )
        if self.head_size % 2:
            raise ValueError(
                f"rotary embeddings turn pairs of numbers, and an attention head has "
                f"{self.head_size}"
            )
        return self

    @property
    def layers(self) -> tuple[int, ...]:
        """``target_layers``, which are known once ``with_target`` was called."""
        assert self.target_layers is not None
        return self.target_layers

    @property
    def num_target_layers(self) -> int:
        """Number of the target's layers whose hidden states are read."""
        return 3 if self.target_layers is None else len(self.target_layers)

    def window(self, number: int) -> int | None:
        """Positions that a row sees in this layer, its own among them; None: all."""
        return None

    def with_target(self, num_layers: int) -> Self:
        """The same for a target of ``num_layers`` layers: ``target_layers`` is known.

        Without layers of its own a head reads those of EAGLE-3's authors: 2, the
        middle, the last but two.

        Raises:
            HeadError: the target has no such layers.

        """
        layers = self.target_layers
        if layers is None:
            layers = (2, num_layers // 2, num_layers - 3)
        if layers != (FINAL_LAYER,) and not (
            all(a < b for a, b in pairwise(layers))
            and layers[0] >= 0
            and layers[-1] <= num_layers
        ):
            raise HeadError(
                f"the head reads hidden states before the layers {list(layers)}, and "
                f"the target has {num_layers}; use a head trained for this target"
            )
        return self.model_copy(update={"target_layers": layers})


class EagleHeadConfig(DecoderHeadConfig):
    """A head with context: EAGLE-1 (or 2, its weights are the same), or EAGLE-3.

    Folders hold published forms of it (``published.py``), none of our own.
    """

    method: Literal["eagle"] = "eagle"
    version: Literal[1, 3] = Field(
        default=3, description="1: fuses embedding and feature; 3: attends to both"
    )
    combines: bool = Field(
        default=False, description="a linear layer makes one feature of the layers"
    )
    fuse_bias: bool = Field(default=False, description="bias of EAGLE-1's fc")
    norm_before_residual: bool = Field(
        default=False, description="EAGLE-3: the normed feature is the residual"
    )
    norm_layers: bool = Field(
        default=False, description="a norm of each target layer before they combine"
    )
    norm_before_combine: bool = Field(
        default=False, description="one norm of all target layers before they combine"
    )
    norm_output: bool = Field(
        default=False, description="the next feature is the normed output"
    )
    norms: tuple[Literal["embedding", "fused", "output"], ...] = Field(
        default=(), description="further norms of EAGLE-1's variants (HASS)"
    )

    @property
    def feature_size(self) -> int:
        """Width of what is kept of a token."""
        if self.combines:
            return self.hidden_size
        return self.target_hidden_size * self.num_target_layers


class LyannaHeadConfig(EagleHeadConfig):
    """A chain of hidden states, to which tokens are told when they are sampled.

    The layers are EAGLE-1's. Folders hold our own form of it.
    """

    method: Literal["lyanna"] = "lyanna"  # type: ignore[assignment]
    version: Literal[1] = 1
    norm_output: Literal[True] = True
    norms: tuple[Literal["embedding", "fused", "output"], ...] = Field(
        default=("embedding", "fused", "output"),
        description="of the embedding, of what attention reads, of the state",
    )
    first_token: bool = Field(
        default=True, strict=True, description="pairs are read with their token"
    )
    context: bool = Field(
        default=True, strict=True, description="a chain attends to the text before it"
    )
    token_info_rank: NonNegativeInt = Field(
        default=64, strict=True, description="of the token info; 0: there is none"
    )
    token_info: Literal["hot", "all"] = Field(
        default="hot", description="tokens that give information: the hot ones, or all"
    )

    @model_validator(mode="after")
    def _reads_the_final_state(self) -> LyannaHeadConfig:
        size = self.hidden_size
        if self.target_layers != (FINAL_LAYER,) or self.combines:
            raise ValueError("a lyanna head reads the final hidden state alone")
        if self.target_hidden_size != size:
            raise ValueError("hidden_size and target_hidden_size must be the same")
        if "output" not in self.norms:
            raise ValueError("norms must hold 'output': the state fed back is normed")
        return self


class DFlashHeadConfig(DecoderHeadConfig):
    """A head that drafts a block in one forward: DFlash, JetSpec, DSpark or DFlash2.

    Folders hold published forms of it (``published_dflash.py``), none of our own.
    """

    method: Literal["dflash"] = "dflash"
    target_layers: tuple[NonNegativeInt, ...] = Field(
        min_length=1,
        description="hidden states before these layers of the target are read; one "
        "more than the numbers that are published",
    )
    qk_norm: bool = Field(default=True, description="norms of q and k, as in Qwen3")
    block_size: Size = Field(description="rows of the block it was trained on")
    mask_token_id: NonNegativeInt = Field(description="token of the rows below a root")
    own_mask: bool = Field(
        default=False, description="the mask's embedding is a vector of its own"
    )
    sample_from_anchor: bool = Field(
        default=False, description="the root's row predicts the first level"
    )
    causal: bool = Field(
        default=False, description="rows of a block see only earlier rows of it"
    )
    sliding_layers: tuple[NonNegativeInt, ...] = Field(
        default=(), description="numbers of the layers with a sliding window"
    )
    sliding_window: Size | None = Field(
        default=None, description="positions, a row's own among them, that those see"
    )
    sliding_causal: bool = Field(
        default=False, description="the same as causal, of those layers alone"
    )
    markov_rank: NonNegativeInt = Field(
        default=0, description="of the bias by the parent's token; 0: there is none"
    )
    selector_rank: NonNegativeInt = Field(
        default=0, description="of the scores of edges; 0: there are none"
    )
    selector_top_k: NonNegativeInt = Field(
        default=0, description="candidates of a level between which edges are scored"
    )
    conv_kernel_size: NonNegativeInt = Field(
        default=0, description="rows that convolutions read; 0: there are none"
    )
    conv_group_size: NonNegativeInt = Field(
        default=0, description="channels that share a computed kernel"
    )
    input_scale: float = Field(default=1.0, description="of embeddings")
    output_scale: float = Field(default=1.0, gt=0, description="of logits")
    output_softcap: float | None = Field(
        default=None, gt=0, description="bound that tanh keeps logits within"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.num_levels == 0:
            raise ValueError(
                "block_size must be 2 or more: the root's row predicts no token"
            )
        if not self.own_mask and self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} must be below vocab_size "
                f"{self.vocab_size}"
            )
        if self.markov_rank and self.selector_rank:
            raise ValueError("a head has markov_rank or selector_rank, not both")
        if (self.selector_rank > 0) != (self.selector_top_k > 0):
            raise ValueError("selector_rank needs selector_top_k, and the reverse")
        if self.selector_top_k > self.draft_vocab_size:
            raise ValueError(
                f"selector_top_k {self.selector_top_k} must be at most the number of "
                f"tokens the head can draft, {self.draft_vocab_size}"
            )
        if (self.conv_kernel_size > 0) != (self.conv_group_size > 0):
            raise ValueError("conv_kernel_size needs conv_group_size, and the reverse")
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size {self.conv_group_size} must divide hidden_size "
                f"{self.hidden_size}"
            )
        return self

    @model_validator(mode="after")
    def _windows_fit(self) -> Self:
        layers, window = self.sliding_layers, self.sliding_window
        if bool(layers) != (window is not None) or (self.sliding_causal and not layers):
            raise ValueError(
                "sliding_layers needs sliding_window, and sliding_causal needs both"
            )
        if layers and max(layers) >= self.num_layers:
            raise ValueError(
                f"sliding_layers {list(layers)} must be below {self.num_layers}"
            )
        # So a window never hides a row of the block, and of the context it hides as
        # much in every kernel.
        if window is not None and window <= self.block_size:
            raise ValueError(
                f"sliding_window {window} must be more than block_size "
                f"{self.block_size}"
            )
        return self

    @property
    def causality(self) -> tuple[bool, ...]:
        """By layer, whether rows of a block see only earlier rows of it."""
        sliding = set(self.sliding_layers)
        return tuple(
            self.sliding_causal if number in sliding else self.causal
            for number in range(self.num_layers)
        )

    def window(self, number: int) -> int | None:
        """Those of the layers that slide."""
        return self.sliding_window if number in self.sliding_layers else None

    @property
    def num_levels(self) -> int:
        """Levels that a block predicts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


AnyHeadConfig = (
    ReDrafterHeadConfig
    | MedusaHeadConfig
    | EagleHeadConfig
    | LyannaHeadConfig
    | DFlashHeadConfig
)
