"""Reference updates of whole batches, written by hand, for tests of models and batches."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.events import Callback, Run


class Updates(Callback):
    """Keeps the gradients of each update, by name, and its loss."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []

    def on_optimizer_step_begin(self, run: Run) -> None:
        self.gradients.append(gradients_of(run.trainer.unwrapped_model))

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.losses.append(values["loss"])


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model by the names of its parameters."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


class CompleteUpdates(Updates):
    """Keeps gradients as soon as they are complete."""

    on_backward_end = Updates.on_optimizer_step_begin
    on_optimizer_step_begin = Callback.on_optimizer_step_begin


def updates_of(model: nn.Module, dataset: Any, *, updates: Updates | None = None, **options: Any) -> Updates:
    """Train for one pass with a learning rate of 0, so that each update begins at the same weights."""
    known = {name: options.pop(name) for name in ("loss_fn", "processing_class", "collate_fn") if name in options}
    defaults: dict[str, Any] = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": "sgd",
        "learning_rate": 0.0,
        "lr_scheduler": "constant",
        "log_every": 1,
        "shuffle": False,
        "max_grad_norm": None,
        "use_cpu": True,
        "progress_bar": False,
    }
    updates = updates or Updates()
    args = TrainingArguments(**{**defaults, **options})
    Trainer(model, args, train_dataset=dataset, callbacks=[updates], **known).fit()
    return updates


def assert_updates(actual: Updates, model: nn.Module, losses: Sequence[Callable[[], Tensor]]) -> None:
    """Compare with what `model` has as gradients of each of these losses."""
    model.train()
    assert len(actual.gradients) == len(actual.losses) == len(losses)
    for gradients, logged, compute in zip(actual.gradients, actual.losses, losses, strict=True):
        model.zero_grad()
        loss = compute()
        loss.backward()
        assert logged == pytest.approx(loss.item(), rel=1e-6)
        expected = gradients_of(model)
        assert gradients.keys() == expected.keys()
        largest = max(float(parameter.abs().max()) for parameter in expected.values())
        assert largest > 1e-4  # else nothing is compared
        for name, gradient in expected.items():
            torch.testing.assert_close(
                gradients[name],
                gradient,
                rtol=1e-5,
                atol=1e-6 * largest,
                msg=lambda message, name=name: f"{name}: {message}",
            )


def with_fixed_statistics(model: Any) -> Any:
    """Return a model whose BatchNorm does not train: its statistics would be those of a micro-batch."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign]
            module.training = False
    return model
