"""Muon for the matrices of hidden layers, and AdamW for all other parameters, as one optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from trainer_lib.trainer.optim.hidden_matrices import HIDDEN, marked_groups
from trainer_lib.trainer.optim.per_parameter import loss_of


class MuonAdamW(Optimizer):
    """Muon for hidden matrices and AdamW for embeddings, the output layer, norms and biases.

    Args:
        params: Parameters, or groups; a group says by `hidden_matrices` whether Muon trains it, and matrices are
            trained by Muon where it does not.
        lr: The learning rate. With `adjust_lr_fn="match_rms_adamw"`, it suits both.
        weight_decay: The weight decay.
        momentum: Muon's momentum.
        nesterov: Whether the momentum is Nesterov's.
        ns_steps: Muon's Newton-Schulz iterations.
        adjust_lr_fn: How Muon's learning rate follows the sizes of a matrix: "match_rms_adamw" or "original".
        betas: AdamW's decay rates.
        eps: AdamW's smallest divisor.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> [group["hidden_matrices"] for group in MuonAdamW(layer.parameters()).param_groups]
        [True, False]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        # Made for their checks and defaults alone.
        muon = Muon(
            [torch.zeros(1, 1)], lr, weight_decay, momentum, nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn
        )
        adamw = AdamW([torch.zeros(1)], lr, betas, eps, weight_decay)
        groups = [{**(muon if group[HIDDEN] else adamw).defaults, **group} for group in marked_groups(params)]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step with both."""
        loss = loss_of(closure)
        for optimizer in self._optimizers():
            optimizer.step()
        return loss

    def _optimizers(self) -> list[Optimizer]:
        """Return both on the current groups and states, which loading replaces."""
        parts: list[Optimizer] = []
        for kind, is_hidden in ((Muon, True), (AdamW, False)):
            groups = [group for group in self.param_groups if group[HIDDEN] is is_hidden]
            if not groups:
                continue
            optimizer = self.__dict__.get(kind.__name__)
            if optimizer is None:
                self.__dict__[kind.__name__] = optimizer = kind(groups)
            optimizer.param_groups, optimizer.state = groups, self.state
            parts.append(optimizer)
        return parts
