"""Options of ``treespec train``: each one declared once, with its name and help.

A dataclass gives type and default of an option to the kinds that it serves. Fields that
``OPTIONS`` lacks are set from Python alone.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from typer import BadParameter, Option

OPTIONS = {
    "target": Option(help="Target model: folder or hub id."),
    "out": Option(help="Folder of the drafter to write."),
    "prompts": Option("--data", "--prompts", help="Questions, JSONL; repeatable."),
    "text": Option(help="The target's own text, made before; repeatable."),
    "text_tokens": Option(help="Answer tokens to make."),
    "work": Option(help="Text and hidden states, to be shared (default OUT/work)."),
    "hot_tokens": Option(help="Likeliest tokens, the ones to draft; 0 = all."),
    "seq_len": Option(help="Conversations are cut here."),
    "top_k": Option(help="Target tokens kept a position."),
    "max_mb": Option(help="Refuse weights larger than this."),
    # training
    "epochs": Option(help="Passes over the text."),
    "max_steps": Option(min=1, help="Steps to take, whatever --epochs says."),
    "text_share": Option(min=0.001, max=1.0, help="Share of the text to train on."),
    "lr": Option(help="Peak learning rate."),
    "embedding_lr": Option(help="Peak learning rate of the tied embedding."),
    "token_info_lr": Option(help="Peak learning rate of the token info."),
    "batch_tokens": Option(help="Tokens of one step, padding included."),
    "batch_positions": Option(help="Positions of one step."),
    "save_steps": Option(help="Steps between checkpoints."),
    "evaluations": Option(min=1, help="On the way, at even distances."),
    "seed": Option(help="Of all draws."),
    "core_rows": Option(help="Tokens in every step's softmax; 0 = all (slower)."),
    "exact_share": Option(help="Last share of steps with the whole softmax."),
    "steps": Option(min=1, help="Levels trained, unrolled; 1 = EAGLE-1's training."),
    "step_decay": Option(help="Weight of a level, times that of the one before."),
    "feature_weight": Option(help="Of a loss on states; EAGLE: with --layers one."),
    "anchor_share": Option(
        min=0.001, max=1.0, help="Share of the positions at which a block is read."
    ),
    "level_share": Option(
        min=0.001, max=1.0, help="Share of a level's guesses, of the level above, kept."
    ),
    "feature_noise": Option(help="Uniform noise on the target's states, up to this."),
    # shapes
    "hidden_size": Option(help="A multiple of --heads."),
    "num_layers": Option("--layers"),
    "num_heads": Option("--heads"),
    "head_dim": Option(),
    "intermediate_size": Option(),
    "depth": Option(min=1, help="Levels; of EAGLE and Lyanna, those measured."),
    "num_blocks": Option("--blocks", help="ResNet blocks."),
    "share_embedding": Option(
        " /--own-embedding", show_default=False, help="Train a copy of it."
    ),
    "share_output": Option(
        " /--own-output", show_default=False, help="Train a copy of the output layer."
    ),
    "inner_size": Option(help="Width of the blocks; 0 = 2 x hidden size."),
    "version": Option(min=1, max=3, help="3: EAGLE-3; 1: EAGLE-1 and EAGLE-2."),
    "layers": Option(
        help="Hidden states that are read: of a low, a middle and a high layer, or the"
        " final ones (default: three for EAGLE-3, one for EAGLE-1)."
    ),
    "norm_output": Option(help="Feed back the normed output (default: EAGLE-3 does)."),
    "norm_layers": Option(help="Norm each layer's states (default: with three)."),
    "first_token": Option(help="Read the root's token, not its hidden state alone."),
    "context": Option(help="Attend to the text before, not to the chain alone."),
    "token_info_rank": Option(min=0, help="Of the token info; 0: none."),
    "token_info": Option(help="Tokens that give it: the hot ones, or all."),
    "block_size": Option(min=1, help="Tokens that one forward drafts."),
    "markov_rank": Option(min=0, help="Of the bias by the token before; 0: none."),
    "mask_token": Option(
        min=0, help="Its embedding stands for tokens to draft (default: the last one)."
    ),
    "causal": Option(help="Rows of a block see only earlier ones."),
}


@dataclass(frozen=True)
class RunOptions:
    """Models, files and text of one command."""

    target: str
    out: Path
    prompts: list[Path] | None = None
    text: list[Path] | None = None
    text_tokens: int = 1_000_000
    work: Path | None = None
    hot_tokens: int = 8192
    seq_len: int = 512
    top_k: int = 64
    max_mb: float | None = None

    def place(self, named: str) -> Path:
        """The path of ``OUT/name`` or ``WORK/name``."""
        folder, name = named.split("/")
        work = self.work or self.out / "work"
        return {"OUT": self.out, "WORK": work}[folder] / name


@dataclass(frozen=True)
class DraftRunOptions(RunOptions):
    """The same for a draft model, which needs less text."""

    text_tokens: int = 600_000


@dataclass(frozen=True)
class DistillOptions:
    """How a drafter learns the target's distributions.

    Attributes:
        lr: linear warm-up, then cosine to zero.
        eval_share: share of the questions kept for evaluation.
        text_share: of the other questions; evaluation does not depend on it.
    """

    epochs: float = 8
    lr: float = 2e-3
    weight_decay: float = 0.01
    warmup_share: float = 0.04
    eval_share: float = 0.02
    text_share: float = 1.0
    save_steps: int = 100
    max_steps: int | None = None
    evaluations: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Shape:
    """Sizes of a kind of drafter."""

    def sizes(self) -> dict[str, Any]:
        """Fields of the drafter's config."""
        return asdict(self)

    def check(self, options: Any) -> None:
        """Refuse options that exclude each other.

        Args:
            options: of the training.

        Raises:
            typer.BadParameter: they do; the message names both.
        """


@dataclass(frozen=True)
class DraftShape(Shape):
    """Sizes of the draft model; everything else is taken over from the target.

    The output layer costs ``vocab_size * hidden_size`` per draft step and dominates, so
    ``hidden_size`` is the number to keep small.
    """

    hidden_size: int = 192
    num_layers: int = 3
    num_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 768

    def check(self, options: DistillOptions) -> None:
        """Refuse widths that transformers refuses."""
        if self.hidden_size % self.num_heads:
            raise BadParameter(
                f"--hidden-size {self.hidden_size} is no multiple of --heads"
                f" {self.num_heads}: transformers refuses such a Llama"
            )


@dataclass(frozen=True)
class DraftOptions(DistillOptions):
    """How the draft model is trained.

    Attributes:
        sampled_rows: tokens beside ``core_rows`` that a step draws, see
            ``loss.choose_vocab_rows``.
    """

    save_steps: int = 200
    embedding_lr: float = 1e-3
    batch_tokens: int = 4096
    core_rows: int = 8192
    sampled_rows: int = 3072
    exact_share: float = 0.1


@dataclass(frozen=True)
class BlockShape(Shape):
    """Sizes of Medusa heads."""

    depth: int = 5
    num_blocks: int = 2
    share_embedding: bool = True
    share_output: bool = True


@dataclass(frozen=True)
class ReDrafterShape(BlockShape):
    """Sizes of a ReDrafter head."""

    inner_size: int = 0

    def sizes(self) -> dict[str, Any]:
        """Fields of the head's config."""
        return {**asdict(self), "inner_size": self.inner_size or None}


@dataclass(frozen=True)
class HeadOptions(DistillOptions):
    """How a head that reads no context is trained.

    Attributes:
        level_share: each level is trained on this share of the positions on which the
            level above is: deeper levels are reached less often.
    """

    epochs: float = 6
    batch_positions: int = 2048
    level_share: float = 0.8


class Layers(StrEnum):
    """Which hidden states of the target a head reads."""

    ONE = "one"
    THREE = "three"


@dataclass(frozen=True)
class EagleShape(Shape):
    """Sizes of an EAGLE head."""

    version: int = 3
    layers: Layers | None = None
    norm_output: bool | None = None
    norm_layers: bool | None = None
    depth: int = 5

    @property
    def read_layers(self) -> Layers:
        """``layers``, or the version's default."""
        return self.layers or (Layers.ONE if self.version == 1 else Layers.THREE)

    def sizes(self) -> dict[str, Any]:
        """What ``Eagle.config_for`` makes a head's config of."""
        three = self.read_layers == Layers.THREE
        output, layers = self.norm_output, self.norm_layers
        return {
            "layers": self.read_layers,
            "version": self.version,
            "depth": self.depth,
            "norm_output": self.version == 3 if output is None else output,
            "norm_layers": three if layers is None else layers,
        }

    def check(self, options: "PairOptions") -> None:
        """Refuse what no EAGLE head has."""
        three = self.read_layers == Layers.THREE
        if self.version == 2:
            raise BadParameter(
                "--version 2: EAGLE-2's heads are EAGLE-1's; pass --version 1"
            )
        if self.version == 1 and three:
            raise BadParameter(
                "--version 1 reads the final hidden state; leave out --layers three"
            )
        if self.version == 1 and self.norm_layers:
            raise BadParameter("--norm-layers is for EAGLE-3; leave it out")
        if three and options.feature_weight:
            raise BadParameter(
                "--feature-weight needs the target's own features; pass --layers one"
            )


@dataclass(frozen=True)
class PairOptions(DistillOptions):
    """How a head that reads pairs is trained, unrolled over its own drafts.

    Attributes:
        steps: 1 is EAGLE-1's training.
        feature_weight: of the distance between what the head makes of a pair and the
            target's state there: smooth L1 as EAGLE-1, or Lyanna's mean square.
    """

    epochs: float = 3
    lr: float = 1e-3
    batch_tokens: int = 4096
    steps: int = 3
    step_decay: float = 0.8
    feature_weight: float = 0.0
    feature_noise: float = 0.0
    evaluations: int = 5


class Told(StrEnum):
    """Which tokens give information about the one after them."""

    HOT = "hot"
    ALL = "all"


@dataclass(frozen=True)
class LyannaShape(Shape):
    """Sizes and variant of a Lyanna head."""

    first_token: bool = True
    context: bool = True
    token_info_rank: int = 64
    token_info: Told = Told.HOT
    depth: int = 5


@dataclass(frozen=True)
class LyannaOptions(PairOptions):
    """How a Lyanna head is trained."""

    token_info_lr: float = 1e-2


@dataclass(frozen=True)
class DFlashShape(Shape):
    """Sizes of a one-pass head; the rest follows the target."""

    num_layers: int = 2
    intermediate_size: int = 0
    block_size: int = 8
    markov_rank: int = 64
    mask_token: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class DFlashOptions(DistillOptions):
    """How a one-pass head is trained.

    Attributes:
        anchor_share: of the supervised positions, drawn in every step.
        level_share: each level is trained on this share of the blocks on which the
            level above is.
    """

    epochs: float = 3
    lr: float = 2e-3
    batch_tokens: int = 1024
    anchor_share: float = 0.25
    level_share: float = 0.8
    evaluations: int = 5
