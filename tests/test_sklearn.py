"""scikit-learn estimators: bit for bit equal to a `Trainer`, and compatible with scikit-learn's tools."""

import dataclasses
import gc
import pickle
import tempfile
import unittest
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from joblib import parallel_config
from joblib.externals.loky.backend.resource_tracker import _resource_tracker
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn
from torch.nn import functional

from tests.pages import run_example
from tests.worlds import close_worlds, run_world
from trainer_lib import ConfigurationError, Trainer, TrainerClassifier, TrainerRegressor, TrainingArguments, set_seed
from trainer_lib.callbacks import EMA, EarlyStopping
from trainer_lib.foundation.errors import SignatureError, UnsupportedError

NAMES = np.array(["left", "middle", "right"])


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Let each collection of garbage, of which `fit` makes one, look at what the test made and not at all imports."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def untracked() -> Iterator[None]:
    """End the process that joblib starts to look after temporary files, and keeps until Python ends."""
    yield
    close_worlds()  # those forked meanwhile hold the pipe whose end it waits for
    _resource_tracker._stop()


def task(rows: int = 90, columns: int = 4) -> tuple[Any, Any]:
    """Return inputs, in 64 bits, and the classes 0, 1, 2 of them."""
    inputs = np.random.default_rng(0).normal(size=(rows, columns))
    return inputs, np.digitize(inputs.sum(axis=1), [-1, 1])


def layers(features: int, outputs: int, hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, outputs))


def arguments(**options: Any) -> TrainingArguments:
    usual: dict[str, Any] = {"num_train_epochs": 3, "learning_rate": 0.05, "use_cpu": True, "seed": 3}
    return TrainingArguments(**{**usual, **options})


def by_hand(data: tuple[Any, Any], outputs: int, loss_fn: Any, args: TrainingArguments) -> Trainer:
    """Return the trainer that does what `fit` does."""
    set_seed(3)
    trainer = Trainer(layers(data[0].shape[1], outputs), args, train_dataset=data, loss_fn=loss_fn)
    trainer.fit()
    return trainer


def state(model: nn.Module) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def assert_equal(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        np.testing.assert_array_equal(value, expected[name])


def test_a_regressor_is_a_trainer_to_the_bit() -> None:
    X, _ = task()
    first, two = X.sum(axis=1), np.stack([X.sum(axis=1), X[:, 0]], axis=1)
    inputs = X.astype(np.float32)
    for targets in (first, two):
        model = TrainerRegressor(layers, arguments()).fit(X, targets)
        columns = targets.reshape(len(X), -1).astype(np.float32)
        trainer = by_hand((inputs, columns), columns.shape[1], functional.mse_loss, arguments())
        assert_equal(state(model.module_), state(trainer.unwrapped_model))
        expected = trainer.predict(inputs).predictions.reshape(targets.shape)
        np.testing.assert_array_equal(model.predict(X), expected)
        trainer.accelerator.free_memory()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_classifier_is_a_trainer_to_the_bit(processes: int) -> None:
    X, y = task()

    def body() -> None:
        before = torch.get_rng_state()
        model = TrainerClassifier(layers, arguments(), callbacks=[EMA(0.9)]).fit(X, NAMES[y])
        assert torch.equal(torch.get_rng_state(), before)
        plain = TrainerClassifier(layers, arguments()).fit(X, NAMES[y])
        inputs = X.astype(np.float32)
        trainer = by_hand((inputs, y), 3, functional.cross_entropy, arguments())
        assert_equal(state(plain.module_), state(trainer.unwrapped_model))
        logits = trainer.predict(inputs).predictions
        np.testing.assert_array_equal(plain.predict(X), NAMES[logits.argmax(axis=1)])
        expected = torch.from_numpy(logits).double().softmax(dim=1).numpy()
        np.testing.assert_array_equal(plain.predict_proba(X), expected)
        assert plain.score(X, NAMES[y]) == (logits.argmax(axis=1) == y).mean()
        assert plain.result_.state.step == trainer.state.step
        assert not np.array_equal(state(model.module_)["0.weight"], state(plain.module_)["0.weight"])

    run_world(body, num_processes=processes, timeout=60)


def test_weights_of_samples_are_those_of_the_mean_by_hand() -> None:
    X, y = task(30)
    share = np.random.default_rng(1).uniform(size=30)
    args = arguments(num_train_epochs=5, per_device_train_batch_size=30, optimizer="sgd", lr_scheduler="constant")
    linear: Any = nn.Linear
    model = TrainerClassifier(linear, args).fit(X, y, sample_weight=share)
    set_seed(3)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    inputs, targets, weights = torch.tensor(X).float(), torch.tensor(y), torch.tensor(share).float()
    for _ in range(5):
        each = functional.cross_entropy(net(inputs), targets, reduction="none")
        optimizer.zero_grad()
        ((each * weights).sum() / weights.sum()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    np.testing.assert_allclose(state(model.module_)["weight"], state(net)["weight"], rtol=1e-6, atol=1e-7)

    def body() -> Any:  # the weights of the halves of an update differ
        halves = dataclasses.replace(args, per_device_train_batch_size=15)
        return state(TrainerClassifier(linear, halves).fit(X, y, sample_weight=share).module_)["weight"]

    for weight in run_world(body, timeout=60):
        np.testing.assert_allclose(weight, state(net)["weight"], rtol=1e-6, atol=1e-7)
    # A sample of twice the weight is one that is there twice.
    doubled = np.where(np.arange(30) < 10, 2.0, 1.0)
    twice = np.concatenate([np.arange(30), np.arange(10)])
    whole = arguments(per_device_train_batch_size=40, lr_scheduler="constant")
    for kind, values, loss_fn in (
        (TrainerClassifier, y, nn.CrossEntropyLoss(label_smoothing=0.1)),
        (TrainerRegressor, X[:, :2], None),
    ):
        weighted = kind(linear, whole, loss_fn=loss_fn).fit(X, values, sample_weight=doubled)
        repeated = kind(linear, whole, loss_fn=loss_fn).fit(X[twice], values[twice])
        np.testing.assert_allclose(
            state(weighted.module_)["weight"], state(repeated.module_)["weight"], rtol=1e-4, atol=1e-6
        )


def test_parameters_go_down_into_arguments_and_the_module() -> None:
    args = arguments()
    model = TrainerClassifier(layers, args, module_kwargs={"hidden": 8})
    parameters = model.get_params()
    assert (parameters["args__learning_rate"], parameters["module_kwargs__hidden"], parameters["verbose"]) == (
        0.05,
        8,
        False,
    )
    assert set(model.get_params(deep=False)) <= set(parameters)
    copied: Any = clone(model)
    other = copied.set_params(args__learning_rate=0.5, module_kwargs__hidden=2, verbose=True)
    assert (other.args.learning_rate, other.module_kwargs, other.verbose) == (0.5, {"hidden": 2}, True)
    assert (args.learning_rate, model.module_kwargs) == (0.05, {"hidden": 8})
    assert TrainerClassifier(layers).set_params(args__max_steps=3).args == TrainingArguments(max_steps=3)
    with pytest.raises(ConfigurationError, match=r"learning_rat.*Did you mean 'learning_rate'"):
        model.set_params(args__learning_rat=0.5)
    with pytest.raises(ValueError, match=r"no parameter 'modul'\. Did you mean 'module'"):
        model.set_params(modul=layers)


@pytest.mark.slow
def test_a_search_in_two_processes_finds_what_one_finds() -> None:
    X, y = task()
    space = {"trainerclassifier__args__learning_rate": [1e-6, 0.05]}
    searches: list[GridSearchCV] = []
    for jobs in (1, 2):
        model = make_pipeline(StandardScaler(), TrainerClassifier(layers, arguments(), module_kwargs={"hidden": 6}))
        raises: Any = "raise"
        search = GridSearchCV(model, space, cv=2, n_jobs=jobs, error_score=raises)
        with parallel_config(backend="multiprocessing"):  # joblib's own takes seconds to start its processes
            searches.append(search.fit(X, NAMES[y]))
    alone, both = searches
    np.testing.assert_array_equal(alone.cv_results_["mean_test_score"], both.cv_results_["mean_test_score"])
    assert both.best_params_ == alone.best_params_ == {"trainerclassifier__args__learning_rate": 0.05}
    np.testing.assert_array_equal(alone.predict(X), both.predict(X))


def test_the_example_of_the_page(tmp_path: Path) -> None:
    names = run_example("other_libraries.md", "GridSearchCV(", tmp_path)
    assert names["search"].best_params_["trainerclassifier__args__learning_rate"] == 0.02


def test_it_is_pickled_and_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    X, y = task()
    model = TrainerClassifier(layers, arguments(mixed_precision="bf16", compile="eager")).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.result_.history == model.result_.history
    assert "forward" not in vars(model.module_)
    assert "".join(capfd.readouterr()) == ""
    TrainerClassifier(layers, arguments(progress_bar=False), verbose=True).fit(X, y)
    shown = capfd.readouterr()
    assert "90 samples" not in shown.out
    assert "Sequential" in shown.err
    assert "epoch 3" in shown.out


def test_each_fit_stops_early_on_its_eval_set() -> None:
    X, y = task()
    stopping = EarlyStopping("eval_accuracy", stop_above=0.5)
    model = TrainerClassifier(layers, arguments(num_train_epochs=20), metrics=["accuracy"], callbacks=[stopping])
    for _ in range(2):
        model.fit(X[:60], NAMES[y[:60]], eval_set=(X[60:], NAMES[y[60:]]))
        assert 0 < model.result_.state.epoch < 20
        assert model.result_.metrics["eval_accuracy"] == model.score(X[60:], NAMES[y[60:]])
    with pytest.raises(ConfigurationError, match="eval_set has a class 'up', which is not in y"):
        model.fit(X, NAMES[y], eval_set=(X[:1], np.array(["up"])))


REFUSED: dict[str, tuple[type[Exception], str, Any, dict[str, Any]]] = {
    "an object": (ConfigurationError, "must be a class of modules", nn.Linear(4, 3), {}),
    "a module of other sizes": (
        SignatureError,
        r"module must take .* \(4, 3\)",
        lambda features: nn.Linear(features, 3),
        {},
    ),
    "too few outputs": (ConfigurationError, "give the model 3 outputs", lambda features, _: nn.Linear(features, 2), {}),
    "shards": (UnsupportedError, "does not support sharded modules", layers, {"args": arguments(fsdp=True)}),
    "going on": (
        ConfigurationError,
        "trains a new module each time",
        layers,
        {"args": arguments(resume="auto", output_dir="runs")},
    ),
    "arguments as a dict": (ConfigurationError, r"TrainingArguments\(\*\*args\)", layers, {"args": {"seed": 3}}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_parameters_are_refused(case: str) -> None:
    kind, words, module, options = REFUSED[case]
    X, y = task()
    with pytest.raises(kind, match=words):
        TrainerClassifier(module, options.get("args", arguments())).fit(X, y)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("max_epochs", r"args=TrainingArguments\(num_train_epochs=…\), or set_params\(args__num_train_epochs=…\)"),
        ("lr", "learning_rate"),
        ("module__hidden", r"module_kwargs=\{'hidden': …\}, or set_params\(module_kwargs__hidden=…\)"),
        ("optimizer__lr", "Give args__learning_rate"),
        ("los_fn", "Did you mean 'loss_fn'"),
    ],
)
def test_parameters_of_skorch_are_answered_with_ours(name: str, instead: str) -> None:
    kind: Any = TrainerClassifier
    for error, call in (
        (SignatureError, lambda: kind(layers, **{name: 1})),
        (ValueError, lambda: kind(layers).set_params(**{name: 1})),
    ):
        with pytest.raises(error, match=f"TrainerClassifier has no parameter '{name}'.*{instead}"):
            call()


def test_sample_weights_need_a_loss_per_sample() -> None:
    X, y = task()
    for loss_fn in (nn.CrossEntropyLoss(torch.ones(3)), lambda outputs, targets: outputs.mean()):
        model = TrainerClassifier(layers, arguments(), loss_fn=loss_fn)
        with pytest.raises(ConfigurationError, match=r"sample_weight needs a loss per sample, .* returns only a mean"):
            model.fit(X, y, sample_weight=np.ones(len(y)))


def plain_layers(features: int, outputs: int) -> nn.Module:
    """Return a network without dropout, which learns the same of the same samples in another order."""
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, outputs))


EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "compares at 1e-7 what modules compute in 32 bits",
}


@pytest.mark.slow
def test_the_checks_of_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its files stay until Python ends
    args = arguments(num_train_epochs=10, per_device_train_batch_size=500, learning_rate=0.3)
    seen: set[str] = set()
    failed: dict[str, str] = {}
    for kind, count in ((TrainerClassifier, 50), (TrainerRegressor, 7)):
        checks: Any = estimator_checks_generator(kind(plain_layers, args))
        # Those that both have go by what both have.
        ours = [(estimator, check) for estimator, check in checks if check.func.__name__ not in seen]
        assert len(ours) >= count
        for estimator, check in ours:
            name: str = check.func.__name__
            seen.add(name)
            try:
                check(estimator)
            except unittest.SkipTest:
                assert name == "check_array_api_input"  # of scikit-learn's experiments
            except Exception as error:  # noqa: BLE001 - all of them are told at once
                failed[name] = f"{type(error).__name__}: {error}"
    assert failed.keys() == EXPECTED.keys(), failed
