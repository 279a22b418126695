"""A hand-written training loop to compare modifiers with, and runs that are killed and resumed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, network, points, trainer
from trainer_lib.events import Callback

BATCH, RATE = 8, 0.1
Named = dict[str, Tensor]

OPTIONS: dict[str, Any] = {
    "num_train_epochs": 2,
    "optimizer": "sgd",
    "learning_rate": RATE,
    "weight_decay": 0.0,
    "lr_scheduler": "constant",
    "max_grad_norm": None,
    "shuffle": False,
}


def batches(data: tuple[Tensor, Tensor] | None = None, epochs: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a run, of all processes together."""
    inputs, targets = data or points()
    cuts = range(0, len(inputs), BATCH)
    return [(inputs[at : at + BATCH], targets[at : at + BATCH]) for _ in range(epochs) for at in cuts]


def loop(
    model: nn.Module,
    loss: Callable[[nn.Module, int, Any], Tensor] = lambda model, step, batch: cross_entropy(model(batch[0]), batch[1]),
    *,
    before: Callable[[nn.Module, int], Any] = lambda model, step: None,
    after: Callable[[nn.Module, int], Any] = lambda model, step: None,
    seen: Sequence[Any] | None = None,
) -> nn.Module:
    """Train by hand, with something before and after each update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step, batch in enumerate(seen or batches(), start=1):
        optimizer.zero_grad()
        loss(model, step, batch).backward()
        before(model, step)
        optimizer.step()
        after(model, step)
    return model


def weights(model: nn.Module) -> Named:
    """Return copies of all tensors of a model, whole."""
    state: dict[str, Any] = model.state_dict()
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        for name, tensor in state.items()
    }


def trained(*callbacks: Callback, model: nn.Module | None = None, **options: Any) -> Named:
    """Return the weights after a run of a trainer."""
    datasets = {name: options.pop(name) for name in ("train_dataset", "eval_dataset", "loss_fn") if name in options}
    model = model or network()
    defaults = {**OPTIONS, "per_device_train_batch_size": BATCH}
    model_trainer = trainer(arguments(**{**defaults, **options}), model=model, callbacks=list(callbacks), **datasets)
    model_trainer.fit()
    return weights(model_trainer.unwrapped_model)


def resumed(make: Callable[[], Callback], folder: Path, **options: Any) -> tuple[Named, Named]:
    """Return the weights of a run, and of one that died and went on."""
    options = {"save_every": 3, "optimizer": "adamw", "shuffle": True, **options}
    model = options.pop("model", None) or (lambda: network(dropout=0.2))
    whole = trained(make(), model=model(), output_dir=folder / "whole", **options)
    try:
        trained(make(), Dies(8), model=model(), output_dir=folder / "parts", **options)
    except InterruptedError:
        return whole, trained(make(), model=model(), output_dir=folder / "parts", resume="auto", **options)
    raise AssertionError("It did not die.")


def assert_close(actual: Named, expected: Named) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=2e-5, atol=1e-6, msg=lambda message, name=name: f"{name}: {message}"
        )


def assert_equal(actual: Named, expected: Named) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []
