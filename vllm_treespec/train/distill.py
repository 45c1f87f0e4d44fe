"""What all our training runs share: options, the Trainer, resuming."""

import json
from abc import abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerControl, TrainingArguments

from vllm_treespec.atomic_files import replaced
from vllm_treespec.json_files import read_json_object
from vllm_treespec.train.checkpoints import (
    SumWriter,
    check_finite,
    newest_complete_checkpoint,
)
from vllm_treespec.train.loss import TeacherTargets


@dataclass(frozen=True)
class DistillOptions:
    """How a model learns the target's distributions.

    Attributes:
        lr: peak learning rate; linear warm-up, then cosine to zero.
        eval_share: share of the questions kept for evaluation.
        text_share: share of the other questions that is trained on.
        save_steps: steps between checkpoints.
        max_steps: steps to take, whatever ``epochs`` says; None: ``epochs``.
        evaluations: on the way, at even distances.
    """

    epochs: float = 8
    lr: float = 2e-3
    weight_decay: float = 0.01
    warmup_share: float = 0.04
    eval_share: float = 0.02
    text_share: float = 1.0
    save_steps: int = 200
    max_steps: int | None = None
    evaluations: int = 8
    seed: int = 0


class DistillTrainer(Trainer):
    """Trainer over ready batches; subclasses give the loss and the quality.

    Args:
        options: the rest of ``arguments`` follows from these.
    """

    def __init__(self, options: DistillOptions, **arguments: Any) -> None:
        super().__init__(
            data_collator=lambda items: items[0], callbacks=[SumWriter()], **arguments
        )
        self.options = options
        self.optimizer: torch.optim.Optimizer | None
        self.control: TrainerControl

    @abstractmethod
    def quality(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Values to average over all evaluation batches, by name, each [n]."""

    def special_groups(self) -> list[dict[str, Any]]:
        """Optimizer groups of parameters that have a learning rate of their own."""
        return []

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW with decay on matrices only."""
        if self.optimizer is None:
            special = self.special_groups()
            taken = {id(p) for group in special for p in group["params"]}
            layers = [p for p in self.model.parameters() if id(p) not in taken]
            lr, decay = self.options.lr, self.options.weight_decay
            matrices = [p for p in layers if p.ndim > 1]
            vectors = [p for p in layers if p.ndim == 1]
            self.optimizer = torch.optim.AdamW(
                [
                    {"params": matrices, "lr": lr, "weight_decay": decay},
                    {"params": vectors, "lr": lr, "weight_decay": 0.0},
                    *special,
                ],
                betas=(0.9, 0.95),
                fused=True,
            )
        return self.optimizer

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """Save the weights of a checkpoint, which must be finite.

        Raises:
            ValueError: the training diverged.
        """
        check_finite(self.model, self.state.global_step)
        super().save_model(*arguments, **options)

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Log and return the means of ``quality`` over the evaluation batches."""
        self.model.eval()
        found: dict[str, list[Tensor]] = {}
        for item in DataLoader(self.eval_dataset, batch_size=None):
            for name, values in self.quality(self._prepare_inputs(item)).items():
                found.setdefault(f"{metric_key_prefix}_{name}", []).append(values)
        metrics = {k: round(torch.cat(v).mean().item(), 5) for k, v in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def targets_of(inputs: dict[str, Tensor]) -> TeacherTargets:
    """The teacher's part of a batch."""
    return TeacherTargets(inputs["ids"], inputs["probs"], inputs["rest"])


def run_training(
    trainer_class: type[DistillTrainer],
    model: nn.Module,
    datasets: tuple[Dataset, Dataset],
    folder: Path,
    options: DistillOptions,
    description: dict[str, Any],
    **arguments: Any,
) -> dict[str, Any]:
    """Train ``model`` in place, from the newest whole checkpoint in ``folder`` if any.

    Args:
        datasets: of training and of evaluation batches.
        description: of the model; a run in ``folder`` must have had the same.
        arguments: further ones of the trainer.

    Returns:
        ``steps``, ``seconds`` (of this run), ``history`` (the Trainer's log) and the
        final means of the trainer's ``quality``.

    Raises:
        ValueError: ``folder`` holds checkpoints of a run with other options, or the
            training diverged.
    """
    check_same_run(folder, {**asdict(options), **description})
    train_set, eval_set = datasets
    size = len(train_set)  # type: ignore[arg-type]
    num_steps = options.max_steps or max(1, round(options.epochs * size))
    trainer = trainer_class(
        options=options,
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=num_steps,
            per_device_train_batch_size=1,
            learning_rate=options.lr,
            lr_scheduler_type="cosine",
            warmup_steps=round(options.warmup_share * num_steps),
            max_grad_norm=1.0,
            logging_steps=max(1, min(20, num_steps // 10)),
            eval_strategy="steps",
            eval_steps=max(1, round(num_steps / options.evaluations)),
            save_steps=options.save_steps,
            save_total_limit=2,
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to="none",
            seed=options.seed,
        ),
        train_dataset=train_set,
        eval_dataset=eval_set,
        **arguments,
    )
    newest = newest_complete_checkpoint(folder)
    output = trainer.train(resume_from_checkpoint=newest)
    final = trainer.evaluate(metric_key_prefix="final")
    return {
        "steps": num_steps,
        "seconds": round(output.metrics["train_runtime"]),
        "history": trainer.state.log_history,
        **{key.removeprefix("final_"): value for key, value in final.items()},
    }


def check_same_run(folder: Path, now: dict[str, Any]) -> None:
    """Refuse to resume with another model or schedule; note ours for the next run."""
    path = folder / "options.json"
    if path.exists():
        try:
            before = read_json_object(path)
        except ValueError as error:
            raise ValueError(
                f"{error}: delete {folder}, or use another --out or --work"
            ) from None
        # A run may be made longer or shorter: the schedule follows the new length.
        free = {"epochs", "max_steps", "evaluations"}
        changed = [k for k in now if before.get(k) != now[k] and k not in free]
        if changed:
            raise ValueError(
                f"{folder} holds a run with other {', '.join(changed)}:"
                " delete that folder, or use another --out or --work"
            )
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(path) as part:
        part.write_text(json.dumps(now, indent=2) + "\n")
