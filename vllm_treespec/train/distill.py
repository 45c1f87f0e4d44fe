"""Training of every drafter: the Trainer, checkpoints, resuming."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl, TrainingArguments

from vllm_treespec.atomic_files import replaced
from vllm_treespec.json_files import read_json_object
from vllm_treespec.train.batches import TeacherBatches, split_rows
from vllm_treespec.train.checkpoints import (
    SumWriter,
    check_finite,
    newest_complete_checkpoint,
)
from vllm_treespec.train.drafter import Drafter
from vllm_treespec.train.optimizer import make_optimizer
from vllm_treespec.train.teacher import TeacherCache


class DistillTrainer(Trainer):
    """Trainer of a drafter over ready batches.

    Args:
        drafter: gives model, loss and quality.
        arguments: those of ``Trainer``.
    """

    def __init__(self, drafter: Drafter, **arguments: Any) -> None:
        super().__init__(
            model=drafter.model,
            data_collator=lambda items: items[0],
            callbacks=[SumWriter()],
            **arguments,
        )
        self.drafter = drafter
        self.optimizer: torch.optim.Optimizer | None
        self.control: TrainerControl

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the drafter's mean loss of one batch."""
        step = self.state.global_step
        generator = torch.Generator().manual_seed(self.drafter.options.seed + step)
        return self.drafter.loss(inputs, step / self.state.max_steps, generator)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the drafter's optimizer, once."""
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.drafter)
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
        """Log and return the means of the drafter's quality over all batches."""
        self.model.eval()
        found: dict[str, list[Tensor]] = {}
        for item in DataLoader(self.eval_dataset, batch_size=None):
            quality = self.drafter.quality(self._prepare_inputs(item))
            for name, values in quality.items():
                found.setdefault(f"{metric_key_prefix}_{name}", []).append(values)
        metrics = {k: round(torch.cat(v).mean().item(), 5) for k, v in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def datasets(
    drafter: Drafter, cache: TeacherCache
) -> tuple[TeacherBatches, TeacherBatches]:
    """Training and evaluation batches; no question is in both."""
    options = drafter.options
    training, evaluation = split_rows(
        cache, options.eval_share, options.seed, options.text_share
    )
    return drafter.batches(cache, training), drafter.batches(cache, evaluation)


def run_training(
    drafter: Drafter, train_set: TeacherBatches, eval_set: TeacherBatches, folder: Path
) -> dict[str, Any]:
    """Train a drafter, from the newest whole checkpoint in ``folder`` if any.

    Returns:
        ``steps``, ``positions`` (supervised ones seen), ``seconds`` (of this run),
        ``history`` (the Trainer's log) and the final means of the drafter's quality.

    Raises:
        ValueError: there is nothing to train or to evaluate on, ``folder`` holds
            checkpoints of a run with other options, or the training diverged.
    """
    options = drafter.options
    if not len(train_set) or not len(eval_set):
        raise ValueError(
            "the text has too few answers of 2 tokens or more to train and evaluate on:"
            " add text, or raise --text-share"
        )
    check_same_run(folder, {**asdict(options), **drafter.description()})
    num_steps = options.max_steps or max(1, round(options.epochs * len(train_set)))
    trainer = DistillTrainer(
        drafter,
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
    )
    newest = newest_complete_checkpoint(folder)
    output = trainer.train(resume_from_checkpoint=newest)
    final = trainer.evaluate(metric_key_prefix="final")
    return {
        "steps": num_steps,
        "positions": round(train_set.num_positions * num_steps / len(train_set)),
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
