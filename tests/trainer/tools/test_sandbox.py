"""Tools restore all state bit for bit, on one rank and on two."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, Modifier, Trainer, set_seed
from trainer_lib.callbacks import EMA, LiveControl, Mixup
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.imports import is_package_available
from trainer_lib.trainer.defaults import prepare_models

Use = Callable[[Trainer], Any]

_EXACT = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")


class Own(nn.Module):
    """A network with running statistics, dropout, and a count that it keeps as a plain number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.layers[0].bias.requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x) * (1 + 1 / (10 + self.calls))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from a generator that the dataset holds."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples, self.rng = samples, np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, label = self.samples[index]
        return features + float(self.rng.normal(scale=0.1)), label


class Unfreezes(Modifier):
    """Does to a model what nothing of the tools does: it changes what is trained, and a plain number."""

    def __init__(self) -> None:
        self.begun = 0

    def on_fit_begin(self, run: Run) -> None:
        self.begun += 1
        run.modules[""].calls += 100  # type: ignore[operator]


class Writes(Callback):
    """Tells whoever looks that it was called."""

    steps = 0

    def on_step_end(self, run: Run) -> None:
        Writes.steps += not run.trainer.args.output_dir  # which trials have


def made(output_dir: Path | None = None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_steps": 8,
        "log_every": 1,
        "eval_every": "4 steps",
        "gradient_accumulation_steps": 2,
    }
    args = arguments(**{**defaults, "output_dir": output_dir, **options.pop("args", {})})
    callbacks = [EMA(0.9), Mixup(0.4, num_classes=2), Unfreezes(), Writes()]
    settings = {
        "callbacks": callbacks,
        "train_dataset": Noisy(TensorDataset(*points())),
        "eval_dataset": points(16),
        **options,
    }
    return trainer(args, **{"model": Own(), **settings})


def tools(n: int = 2) -> dict[str, Use]:
    return {
        "find_learning_rate": lambda trainer: trainer.find_learning_rate(1e-3, 1e3, updates=12),
        "find_batch_size": lambda trainer: trainer.find_batch_size(largest=16),
        "preview": lambda trainer: trainer.preview(3),
        "search": lambda trainer: trainer.search({"learning_rate": (0.001, 0.1, "log")}, n=n),
    }


def outcome(model_trainer: Trainer) -> dict[str, Any]:
    """Return all that a run comes to, and where the generators stand after it."""
    result = model_trainer.fit()
    model = model_trainer.unwrapped_model
    return {
        "history": [{name: entry.get(name) for name in _EXACT} for entry in result.history],
        "weights": [tensor.clone() for tensor in model.state_dict().values()],
        "calls": getattr(model, "calls", 0),
        "drawn": [torch.rand(1).item(), random.random(), float(np.random.rand())],
    }


def state(model_trainer: Trainer) -> dict[str, Any]:
    """Return all state that a tool must restore."""
    model: Any = model_trainer.model
    optimizer = model_trainer.optimizer if isinstance(model_trainer.optimizer, torch.optim.Optimizer) else None
    engine = model_trainer.accelerator
    return {
        "weights": [tensor.clone() for tensor in model.state_dict().values()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "trained": [parameter.requires_grad for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "calls": getattr(model, "calls", 0),
        "optimizer": None if optimizer is None else repr(optimizer.state_dict()),
        "rate": None if optimizer is None else float(optimizer.param_groups[0]["lr"]),
        "generators": (torch.get_rng_state(), random.getstate(), repr(np.random.get_state())),
        "attributes": {n: v for n, v in vars(model_trainer).items() if n != "run"},
        "callbacks": [(callback, dict(vars(callback))) for callback in model_trainer.events],
        "heard": Writes.steps,
        "engine": [len(engine._optimizers), len(engine._schedulers), len(engine._dataloaders)],
        "steps": engine.gradient_accumulation_steps,
    }


def same(actual: Any, expected: Any) -> bool:
    if isinstance(actual, Tensor):
        return bool(torch.equal(actual, expected))
    if isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(same(actual[name], expected[name]) for name in actual)
    if isinstance(actual, (list, tuple)):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return actual is expected or bool(actual == expected)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    different = [name for name in expected if not same(actual[name], expected[name])]
    assert not different, different


def needs_optuna() -> None:
    if not is_package_available("optuna"):  # importing it would keep the frames of this test
        pytest.skip("optuna is not installed")


@pytest.mark.parametrize("tool", ["find_learning_rate", "find_batch_size", "preview", "search"])
def test_a_run_after_a_tool_is_the_run_without_it(tool: str, tmp_path: Path) -> None:
    if tool == "search":
        needs_optuna()
    expected = outcome(plain := made())
    plain.accelerator.free_memory()
    folder = tmp_path / "runs"
    model_trainer = made(folder)
    gradient = torch.full((2, 8), 0.25)
    model_trainer.model.layers[3].weight.grad = gradient.clone()  # type: ignore[union-attr]  # which fit adds to, or drops
    before = state(model_trainer)
    tools()[tool](model_trainer)
    assert_same(state(model_trainer), before)
    assert [path.name for path in folder.glob("*")] == (["search"] if tool == "search" else [])
    model_trainer.model.zero_grad()  # type: ignore[union-attr]
    assert_same(outcome(model_trainer), expected)


@pytest.mark.parametrize("tool", ["find_learning_rate", "preview"])
def test_objects_that_were_given_are_as_they_were(tool: str) -> None:
    """With an optimizer that has a state, its schedule, and no seed, after an evaluation and between two runs."""

    def run(use: Use) -> list[Any]:
        set_seed(5)
        model = Own()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=(rate := torch.tensor(0.05)), momentum=0.9)
        model(points()[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        args = {"seed": None, "max_steps": 3}
        model_trainer = made(args=args, model=model, optimizer=optimizer, scheduler=schedule, callbacks=[])
        metrics: dict[str, Any] = model_trainer.evaluate()
        for number in range(2):
            before = state(model_trainer)
            use(model_trainer)
            assert_same(state(model_trainer), before)
            assert number or optimizer.param_groups[0]["lr"] is rate  # a run takes a copy
            metrics[f"{len(metrics)}"] = outcome(model_trainer)
        model_trainer.accelerator.free_memory()
        return [metrics, model_trainer.evaluate(), schedule.last_epoch, schedule.get_last_lr()]

    assert same(run(tools()[tool]), run(lambda trainer: None))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["find_learning_rate"], id="find_learning_rate"),
        pytest.param(["find_batch_size", "preview", "search"], id="others", marks=pytest.mark.slow),
    ],
)
def test_processes_leave_all_as_it_was(names: list[str], tmp_path: Path) -> None:
    if "search" in names:
        needs_optuna()

    def train() -> list[Any]:
        outcomes: list[Any] = []
        for use in (repr, *(tools(n=1)[name] for name in names)):
            model_trainer = made(tmp_path)
            prepare_models(model_trainer)
            before = state(model_trainer)
            use(model_trainer)
            assert_same(state(model_trainer), before)
            outcomes.append(outcome(model_trainer))
            model_trainer.accelerator.free_memory()
        for other in outcomes[1:]:
            assert_same(other, outcomes[0])
        return outcomes[0]["history"]

    first, second = run_world(train, (), 2, timeout=90)
    assert first == second
    assert len(first) > 8


@pytest.mark.slow
def test_sharded_models_keep_their_shards() -> None:
    def train() -> list[Any]:
        outcomes: list[Any] = []
        for tool in (repr, tools()["find_learning_rate"]):
            model_trainer = made(args={"fsdp": True, "max_steps": 3, "eval_every": "never"}, callbacks=[EMA(0.9)])
            tool(model_trainer)
            history = outcome(model_trainer)["history"]
            weights = model_trainer.accelerator.get_state_dict(model_trainer.parts.models.listed[0])
            outcomes.append([history, {name: weight.clone() for name, weight in weights.items()}])
            model_trainer.accelerator.free_memory()
        return outcomes

    for plain, after in run_world(train, (), 2, timeout=90):
        assert same(after, plain)


class Fails(Own):
    def forward(self, x: Tensor) -> Tensor:
        if self.calls == 5:
            raise RuntimeError("the sixth call")
        return super().forward(x)


def test_a_tool_that_fails_leaves_all_as_it_was() -> None:
    model_trainer = made(model=Fails(), callbacks=[])
    before = state(model_trainer)
    with pytest.raises(RuntimeError, match="the sixth call"):
        model_trainer.find_learning_rate(1e-3, 1e-1, updates=10)
    assert_same(state(model_trainer), before)


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*points(), strict=True))


class Once(Numbers):
    def __next__(self) -> Any:
        raise StopIteration


def test_data_that_is_read_anew_is_read_from_its_beginning() -> None:
    def losses(use: Use) -> list[float]:
        model_trainer = trainer(arguments(max_steps=6, log_every=1, num_train_epochs=None), train_dataset=Numbers())
        use(model_trainer)
        return [entry["loss"] for entry in model_trainer.fit().history]

    assert losses(lambda trainer: trainer.preview()) == losses(lambda trainer: trainer.find_learning_rate(updates=10))
    loader = DataLoader(TensorDataset(*points()), batch_size=8, shuffle=True, generator=torch.Generator())
    drawn = loader.generator.get_state()  # type: ignore[union-attr]
    trainer(train_dataset=loader).preview()
    assert torch.equal(loader.generator.get_state(), drawn)  # type: ignore[union-attr]


@pytest.mark.parametrize("tool", ["find_learning_rate", "find_batch_size", "preview", "search"])
def test_what_cannot_be_rehearsed_is_refused(tool: str) -> None:
    class During(Callback):
        def on_fit_begin(self, run: Run) -> None:
            getattr(run.trainer, tool)(*options)

    options = ({"learning_rate": [0.1]},) if tool == "search" else ()
    message = rf"{tool}\(\) "
    with pytest.raises(ConfigurationError, match=message + r"cannot run while fit\(\) is in progress"):
        trainer(callbacks=[During()]).fit()
    with pytest.raises(ConfigurationError, match=message + "needs data"):
        getattr(trainer(train_dataset=None), tool)(*options)
    with pytest.raises(ConfigurationError, match=message + r".*\(Once\), which can be read only once"):
        getattr(trainer(train_dataset=Once()), tool)(*options)


def test_whom_somebody_outside_asks_takes_no_part() -> None:
    trainer(callbacks=[LiveControl(signal_name=None)]).preview()  # which has no file to look for


def test_a_callback_that_cannot_be_copied_is_named() -> None:
    class Locked(Modifier):
        def __init__(self) -> None:
            self.generator = (number for number in range(3))

    with pytest.raises(ConfigurationError, match=r"preview\(\) trains with copies .* Locked cannot be copied"):
        trainer(callbacks=[Locked()]).preview()


def test_copies_of_callbacks_know_the_same_model() -> None:
    class Knows(Modifier):
        seen: list[Any] = []  # noqa: RUF012

        def __init__(self, model: nn.Module) -> None:
            self.model, self.weight = model, model[3].weight  # type: ignore[index]

        def on_fit_begin(self, run: Run) -> None:
            Knows.seen.append((self.model is run.modules[""], self.weight is run.modules[""][3].weight, self))  # type: ignore[index]

    model = network()
    callback = Knows(model)
    trainer(model=model, callbacks=[callback]).preview()
    ((same_model, same_weight, copy),) = Knows.seen
    assert same_model
    assert same_weight
    assert copy is not callback
