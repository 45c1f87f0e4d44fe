"""Stage 3: the draft model learns the target's cached distributions."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    LlamaForCausalLM,
    Trainer,
    TrainerControl,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from vllm_treespec.train.batches import BatchDataset, split_rows
from vllm_treespec.train.loss import (
    TeacherTargets,
    agreement,
    choose_head_rows,
    topk_kl,
)
from vllm_treespec.train.teacher import TeacherCache


@dataclass(frozen=True)
class DraftOptions:
    """How the draft model is trained.

    Attributes:
        lr: peak learning rate of the layers; linear warm-up, then cosine to zero.
        embedding_lr: the same for the tied embedding, which starts from the target's.
        batch_tokens: tokens of one step, padding included.
        core_rows: likeliest tokens whose logits every step computes; 0 = all tokens.
        sampled_rows: others drawn per step, see ``loss.choose_head_rows``.
        exact_share: last share of the steps, in which all logits are computed.
        eval_share: share of the conversations kept for evaluation.
        save_steps: steps between checkpoints.
    """

    epochs: float = 8
    lr: float = 2e-3
    embedding_lr: float = 1e-3
    weight_decay: float = 0.01
    warmup_share: float = 0.04
    batch_tokens: int = 4096
    core_rows: int = 8192
    sampled_rows: int = 3072
    exact_share: float = 0.1
    eval_share: float = 0.02
    save_steps: int = 200
    seed: int = 0


class DraftTrainer(Trainer):
    """Trainer whose loss is ``topk_kl`` and whose evaluation is ``agreement``.

    Args:
        core: int64 [core_rows], the target's likeliest tokens.
        options: the rest of ``arguments`` follows from these.
    """

    def __init__(self, core: Tensor, options: DraftOptions, **arguments: Any) -> None:
        super().__init__(data_collator=lambda items: items[0], **arguments)
        self.core = core.to(self.args.device)
        self.options = options
        self.optimizer: torch.optim.Optimizer | None
        self.control: TrainerControl

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW with the embedding's own learning rate and decay on matrices only."""
        if self.optimizer is None:
            embedding = self.model.model.embed_tokens.weight
            layers = [p for p in self.model.parameters() if p is not embedding]
            lr, decay = self.options.lr, self.options.weight_decay
            matrices = [p for p in layers if p.ndim > 1]
            norms = [p for p in layers if p.ndim == 1]
            self.optimizer = torch.optim.AdamW(
                [
                    {"params": matrices, "lr": lr, "weight_decay": decay},
                    {"params": norms, "lr": lr, "weight_decay": 0.0},
                    {
                        "params": [embedding],
                        "lr": self.options.embedding_lr,
                        "weight_decay": 0.0,
                    },
                ],
                betas=(0.9, 0.95),
                fused=True,
            )
        return self.optimizer

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the mean loss of one batch; ``inputs`` as ``BatchDataset`` items."""
        hidden = self._hidden(model, inputs)
        targets = _targets(inputs)
        weight = model.lm_head.weight
        head_rows = None
        step = self.state.global_step
        exact_from = self.state.max_steps * (1 - self.options.exact_share)
        if len(self.core) < len(weight) and step < exact_from:
            # Seeded by the step: a resumed run draws what an uncut one would.
            generator = torch.Generator().manual_seed(self.options.seed + step)
            head_rows = choose_head_rows(
                self.core, targets, self.options.sampled_rows, len(weight), generator
            )
        return topk_kl(hidden, weight, targets, head_rows, torch.bfloat16)

    def _hidden(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Return the final hidden state, float32 [num_positions, hidden_size]."""
        with torch.autocast(self.args.device.type, dtype=torch.bfloat16):
            output = model.model(input_ids=inputs["input_ids"], use_cache=False)
        return output.last_hidden_state.flatten(0, 1)[inputs["places"]].float()

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Log and return the means of ``agreement`` over the evaluation rows."""
        self.model.eval()
        found: dict[str, list[Tensor]] = {}
        for item in DataLoader(self.eval_dataset, batch_size=None):
            inputs = self._prepare_inputs(item)
            hidden = self._hidden(self.model, inputs)
            quality = agreement(hidden, self.model.lm_head.weight, _targets(inputs))
            for name, values in quality.items():
                found.setdefault(f"{metric_key_prefix}_{name}", []).append(values)
        metrics = {k: round(torch.cat(v).mean().item(), 5) for k, v in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def _targets(inputs: dict[str, Tensor]) -> TeacherTargets:
    return TeacherTargets(inputs["ids"], inputs["probs"], inputs["rest"])


def train_draft(
    draft: LlamaForCausalLM, cache: TeacherCache, folder: Path, options: DraftOptions
) -> dict[str, Any]:
    """Train ``draft`` in place, from the last checkpoint in ``folder`` if there is one.

    Returns:
        ``steps``, ``positions`` (supervised positions seen), ``seconds`` (of this run),
        ``history`` (the Trainer's log) and the final ``kl``, ``top1``, ``acceptance``.

    Raises:
        ValueError: ``folder`` holds checkpoints of a run with other options.
    """
    _check_same_run(folder, draft, options)
    train_rows, eval_rows = split_rows(cache.num_rows, options.eval_share, options.seed)
    train_set = BatchDataset(cache, train_rows, options.batch_tokens)
    eval_set = BatchDataset(cache, eval_rows, options.batch_tokens)
    num_steps = max(1, round(options.epochs * len(train_set)))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=1,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=round(options.warmup_share * num_steps),
        max_grad_norm=1.0,
        logging_steps=max(1, min(20, num_steps // 10)),
        eval_strategy="epoch",
        save_steps=options.save_steps,
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        seed=options.seed,
    )
    mass = cache.statistics.token_weights
    core = mass.topk(min(options.core_rows or len(mass), len(mass))).indices
    trainer = DraftTrainer(
        core=core,
        options=options,
        model=draft,
        args=arguments,
        train_dataset=train_set,
        eval_dataset=eval_set,
    )
    last = get_last_checkpoint(str(folder))
    output = trainer.train(resume_from_checkpoint=last)
    final = trainer.evaluate(metric_key_prefix="final")
    return {
        "steps": num_steps,
        "positions": round(train_set.num_positions * num_steps / len(train_set)),
        "seconds": round(output.metrics["train_runtime"]),
        "history": trainer.state.log_history,
        **{key.removeprefix("final_"): value for key, value in final.items()},
    }


def _check_same_run(
    folder: Path, draft: LlamaForCausalLM, options: DraftOptions
) -> None:
    """Refuse to resume with another model or schedule; note ours for the next run."""
    folder.mkdir(parents=True, exist_ok=True)
    config = draft.config
    now = {
        **asdict(options),
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
    }
    path = folder / "options.json"
    if path.exists():
        before = json.loads(path.read_text())
        # A run may be made longer or shorter: the schedule follows the new length.
        changed = [k for k in now if before.get(k) != now[k] and k != "epochs"]
        if changed:
            raise ValueError(
                f"{folder} holds a run with other {', '.join(changed)}:"
                " delete that folder or pass another --out"
            )
    path.write_text(json.dumps(now, indent=2) + "\n")
