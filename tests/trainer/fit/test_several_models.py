"""Several models, several optimizers: one step is one update round, whoever steps."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import TensorDataset

from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, ParameterGroup, Trainer


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
    return {"generator": generator, "discriminator": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))}


def losses(models: Any, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the discriminator's loss, the made samples, and what is real."""
    made = models["generator"](real[:, :3])
    ones = torch.ones(len(real), 1)
    of_real = binary_cross_entropy_with_logits(models["discriminator"](real), ones)
    of_made = binary_cross_entropy_with_logits(models["discriminator"](made.detach()), 0 * ones)
    return of_real + of_made, made, ones


class Adversaries(Trainer):
    def training_step(self, model: Any, batch: Any) -> None:
        (real,) = batch
        loss, made, ones = losses(model, real)
        self.backward(loss * len(real), weight=len(real), optimizer="discriminator")
        self.optimizers["discriminator"].step()
        self.optimizers["discriminator"].zero_grad()
        fooled = binary_cross_entropy_with_logits(model["discriminator"](made), ones)
        self.backward(fooled * len(real), weight=len(real), optimizer="generator")
        self.optimizers["generator"].step()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        self.log("discriminator_loss", loss, weight=len(real))


def by_hand(inputs: Tensor, size: int) -> dict[str, nn.Module]:
    trained = models()
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in trained.items()}
    for start in range(0, len(inputs), size):
        real = inputs[start : start + size]
        loss, made, ones = losses(trained, real)
        loss.backward()
        optimizers["discriminator"].step()
        optimizers["discriminator"].zero_grad()
        binary_cross_entropy_with_logits(trained["discriminator"](made), ones).backward()
        optimizers["generator"].step()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
    return trained


@pytest.mark.parametrize("processes", [1, 2])
def test_adversaries_take_turns_in_a_step(processes: int) -> None:
    inputs, _ = points(32)

    def body() -> tuple[int, dict[str, dict[str, Tensor]]]:
        trained = models()
        args = arguments(
            num_train_epochs=1,
            shuffle=False,
            optimizer="sgd",
            learning_rate=0.1,
            lr_scheduler="constant",
            per_device_train_batch_size=8 // processes,
            log_every=1,
        )
        result = Adversaries(trained, args, train_dataset=TensorDataset(inputs)).fit()
        assert all("discriminator_loss" in entry for entry in result.history)
        return result.state.step, {name: model.state_dict() for name, model in trained.items()}

    expected = by_hand(inputs, 8)
    for step, states in run_world(body, (), processes, timeout=60) if processes > 1 else [body()]:
        assert step == 4
        for name, state in states.items():
            torch.testing.assert_close(state, expected[name].state_dict(), rtol=1e-5, atol=1e-6)


class EverySecond(Trainer):
    """Steps the second optimizer in every second update."""

    def training_step(self, model: Any, batch: Any) -> None:
        for name in list(model)[: 1 + self.state.step % 2]:
            self.backward(model[name](batch[0][:, : model[name][0].in_features]).square().mean(), optimizer=name)
            self.optimizers[name].step()
            self.optimizers[name].zero_grad()


def test_an_optimizer_that_the_first_update_leaves_out_gets_no_warning_of_torch() -> None:
    made = EverySecond(models(), arguments(num_train_epochs=1), train_dataset=TensorDataset(points(32)[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made.fit().state.step == 4


def test_one_loss_for_two_optimizers() -> None:
    """The halves of one model, each with its own kind of optimizer."""

    class Halves(Trainer):
        def configure_optimizer(self) -> dict[str, torch.optim.Optimizer]:
            model: Any = self.unwrapped_model
            return {
                "body": torch.optim.SGD(model[0].parameters(), lr=0.1),
                "head": torch.optim.SGD(model[3].parameters(), lr=0.2),
            }

    halves, grouped = network(), network()
    options: dict[str, Any] = {"train_dataset": points(), "loss_fn": cross_entropy}
    result = Halves(halves, arguments(lr_scheduler="constant", max_grad_norm=None), **options).fit()
    groups = [ParameterGroup("0.*", learning_rate=0.1), ParameterGroup("3.*", learning_rate=0.2)]
    args = arguments(optimizer="sgd", parameter_groups=groups, lr_scheduler="constant", max_grad_norm=None)
    Trainer(grouped, args, **options).fit()
    assert result.state.step == 10
    torch.testing.assert_close(halves.state_dict(), grouped.state_dict(), rtol=1e-6, atol=1e-7)


def test_each_optimizer_has_a_schedule() -> None:
    trained = models()
    args = arguments(num_train_epochs=1, warmup=2, learning_rate=0.1)
    model_trainer = Adversaries(trained, args, train_dataset=TensorDataset(points(32)[0]))
    model_trainer.fit()
    assert {name: schedule.get_last_lr() for name, schedule in model_trainer.schedulers.items()} == {
        "generator": [0.0],
        "discriminator": [0.0],
    }


def test_several_models_need_a_step_of_ones_own() -> None:
    with pytest.raises(ConfigurationError, match="Override training_step"):
        Trainer(models(), arguments(), train_dataset=TensorDataset(points()[0])).fit()


def test_an_unknown_optimizer() -> None:
    class Misspelt(Trainer):
        def training_step(self, model: Any, batch: Any) -> None:
            self.backward(model["generator"](batch[0][:, :3]).sum(), optimizer="generater")

    with pytest.raises(ConfigurationError, match="Did you mean 'generator'"):
        Misspelt(models(), arguments(), train_dataset=TensorDataset(points()[0])).fit()


def test_frozen_and_slower_parts() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer(arguments(parameter_groups=[ParameterGroup("0.*", frozen=True)]), model=model).fit()
    after = model.state_dict()
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["3.weight"], after["3.weight"])


@pytest.mark.parametrize("kind", ["instance", "class", "function"])
def test_an_optimizer_and_a_schedule_of_ones_own(kind: str) -> None:
    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model = network()
    optimizer: Any = {
        "instance": torch.optim.SGD(model.parameters(), lr=0.1),
        "class": torch.optim.SGD,
        "function": lambda parameters: torch.optim.SGD(parameters, lr=0.1),  # pyright: ignore[reportUnknownLambdaType]
    }[kind]
    expected = network()
    by_hand = torch.optim.SGD(expected.parameters(), lr=0.1 if kind != "class" else arguments().learning_rate)
    schedule = halve(by_hand)
    batches = [column.split(8) for column in points()]
    for _ in range(2):
        for inputs, targets in zip(*batches, strict=True):
            cross_entropy(expected(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
            by_hand.step()
            schedule.step()
            by_hand.zero_grad()
    model_trainer = trainer(
        arguments(shuffle=False),
        model=model,
        optimizer=optimizer,
        scheduler=halve if kind != "instance" else halve(optimizer),
    )
    model_trainer.fit()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
