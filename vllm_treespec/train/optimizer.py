"""AdamW of a drafter's weights, with Muon for matrices of its layers."""

from typing import Any

from torch.optim import AdamW, Muon, Optimizer

from vllm_treespec.train.drafter import Drafter


def make_optimizer(drafter: Drafter) -> Optimizer:
    """Make the optimizer; AdamW has decay on matrices only.

    Args:
        drafter: whose ``model`` was made.
    """
    options, special = drafter.options, drafter.special_groups()
    lr, decay = options.lr, options.weight_decay
    taken = {id(p) for group in special for p in group["params"]}
    layers = drafter.muon_matrices()
    taken |= {id(p) for p in layers}
    others = [p for p in drafter.model.parameters() if id(p) not in taken]
    matrices = [p for p in others if p.ndim > 1]
    vectors = [p for p in others if p.ndim == 1]
    adamw = AdamW(
        [
            {"params": matrices, "lr": lr, "weight_decay": decay},
            {"params": vectors, "lr": lr, "weight_decay": 0.0},
            *special,
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    if not layers:
        return adamw
    # Its steps are as long as AdamW's, so both have one learning rate.
    muon = Muon(layers, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return Both(muon, adamw)


class Both(Optimizer):
    """Two optimizers of different weights, as one for schedules and checkpoints."""

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        """Take both; groups are theirs."""
        self.parts: tuple[Optimizer, Optimizer] = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of each."""
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        # loading makes new groups, and schedules write learning rates into these
        self.param_groups = [g for part in self.parts for g in part.param_groups]
