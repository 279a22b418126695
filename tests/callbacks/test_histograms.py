"""Tests of histograms of gradients, weights and activations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.callbacks.by_hand import assert_equal, trained
from tests.trainer.tasks import arguments, network, trainer
from tests.worlds import run_world
from trainer_lib import FullyShardedDataParallelPlugin
from trainer_lib.callbacks import Histograms, JsonlLog, TensorBoardCallback
from trainer_lib.callbacks import histograms as module
from trainer_lib.callbacks.histograms import counted
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError


class Seen(Callback):
    """Keeps what a loop by hand would count, of one update."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.values: dict[str, Tensor] = {}

    def on_micro_batch_begin(self, run: Run) -> None:
        if run.state.step + 1 == self._step and "activations/0" not in self.values:
            weights = run.parameters
            inner = nn.functional.linear(run.batch[0], weights["0.weight"], weights["0.bias"]).detach()
            self.values |= {"activations/0": inner, "activations/1": inner.tanh()}

    def on_backward_end(self, run: Run) -> None:
        if run.state.step + 1 == self._step:
            for name, parameter in run.parameters.items():
                assert parameter.grad is not None
                self.values |= {
                    f"weights/{name}": parameter.detach().clone(),
                    f"gradients/{name}": parameter.grad.clone(),
                }


def history_entries(history: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    return [line for line in lines if line["event"] == "histograms"]


def assert_counted(actual: dict[str, Any], values: Tensor, bins: int = 30) -> None:
    low, high = float(values.min()), float(values.max())
    assert (actual["low"], actual["high"]) == (low, high)
    assert actual["counts"] == torch.histc(values.flatten(), bins, low, high).int().tolist()
    assert actual["mean"] == pytest.approx(float(values.double().mean()), rel=1e-9, abs=1e-12)
    assert actual["deviation"] == pytest.approx(float(values.double().std(correction=0)), rel=1e-6)
    assert actual["not_finite"] == 0


def test_histograms_show_values_before_clipping_and_the_update(tmp_path: Path) -> None:
    history, seen = tmp_path / "history.jsonl", Seen(6)
    args = arguments(log_every=5, max_grad_norm=0.01, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    trainer(args, callbacks=[seen, Histograms("3 steps"), JsonlLog(history)]).fit()
    lines = history_entries(history)
    assert [(line["step"], line["of_step"]) for line in lines] == [(5, 3), (10, 6), (10, 9)]
    line = lines[1]
    assert set(line["activations"]) == {"0", "1", "2", "3"}
    for name, values in seen.values.items():
        kind, _, where = name.partition("/")
        assert_counted(line[kind][where], values)
    assert len(seen.values) == 2 + 4 + 4


def test_hooks_exist_only_in_the_first_batch_of_a_recorded_update() -> None:
    class Hooked(Callback):
        order = 1

        def __init__(self) -> None:
            self.batches: list[int] = []

        def on_micro_batch_begin(self, run: Run) -> None:
            if any(layer._forward_hooks for layer in run.modules[""].modules()):
                self.batches.append(run.state.micro_batches + 1)

    hooked = Hooked()
    args = arguments(gradient_accumulation_steps=2, per_device_train_batch_size=4)
    run = trainer(args, callbacks=[Histograms("3 steps"), hooked])
    run.fit()
    assert hooked.batches == [5, 11, 17]  # the first of updates 3, 6 and 9
    assert not any(layer._forward_hooks for layer in run.unwrapped_model.modules())


def test_no_hook_stays_after_a_batch_that_is_skipped() -> None:
    class Skips(Modifier):
        def on_micro_batch_begin(self, run: Run) -> None:
            run.control.skip_batch = run.state.step == 2

    run = trainer(arguments(), callbacks=[Histograms("1 step"), Skips()])
    run.fit()
    assert not any(layer._forward_hooks for layer in run.unwrapped_model.modules())


def test_training_is_the_same_with_it_and_without_it() -> None:
    model = lambda: network(dropout=0.2)  # noqa: E731
    assert_equal(trained(Histograms("1 step"), model=model()), trained(model=model()))


@pytest.mark.parametrize("strategy", ["replicas", "shards"])
def test_rank_0_records_its_values(tmp_path: Path, strategy: str) -> None:
    options: dict[str, Any] = {"fsdp": FullyShardedDataParallelPlugin()} if strategy == "shards" else {}

    def body() -> Tensor:
        weight: list[Tensor] = []

        class First(Callback):
            def on_backward_end(self, run: Run) -> None:
                parameter = run.parameters["0.weight"]
                weight.append(getattr(parameter, "_local_tensor", parameter).detach().clone())

        args = arguments(max_steps=1, per_device_train_batch_size=4, **options)
        history = JsonlLog(tmp_path / "history.jsonl")
        callbacks = [First(), history, Histograms("1 step", only=["0", "0.*"])]
        trainer(args, callbacks=callbacks).fit()
        return weight[0]

    weights = run_world(body, timeout=60)
    (line,) = history_entries(tmp_path / "history.jsonl")
    assert set(line["weights"]) == set(line["gradients"]) == {"0.weight", "0.bias"}
    assert sum(line["activations"]["0"]["counts"]) == 4 * 8
    assert_counted(line["weights"]["0.weight"], weights[0])
    assert weights[0].numel() == (24 if strategy == "shards" else 48)


def test_counts_of_nonfinite_constant_and_chunked_values(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.tensor([1.0, float("nan"), -3.0, float("inf"), 0.5, float("-inf")])
    assert counted(numbers, 4).tolist() == [-3.0, 1.0, -1.5, 10.25, 3.0, 3.0, 1.0, 0.0, 0.0, 2.0]
    assert counted(torch.full((5,), 2.0), 3).tolist()[4:] == [5.0, 0.0, 5.0, 0.0, 0.0]
    assert counted(torch.full((2,), float("nan")), 3).tolist()[4:] == [0.0, 2.0, 0.0, 0.0, 0.0]
    huge = torch.tensor([-3e38, 0.0, 3e38])
    assert counted(huge, 3).tolist()[4:] == [3.0, 0.0, 1.0, 1.0, 1.0]
    assert counted(torch.tensor([0.0, 1.0, 2.0], dtype=torch.bfloat16), 2).tolist()[4:] == [3.0, 0.0, 1.0, 2.0]
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = counted(values, 20)
    monkeypatch.setattr(module, "_AT_ONCE", 64)
    torch.testing.assert_close(counted(values, 20), whole, rtol=1e-12, atol=1e-9)


def test_tensorboard_gets_them_counted(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoardCallback(folder=tmp_path)
    trainer(arguments(max_steps=2), callbacks=[board, Histograms("2 steps", of=["weights"], bins=5)]).fit()
    (file,) = tmp_path.rglob("events.out.*")
    events = accumulator.EventAccumulator(str(file.parent))
    events.Reload()
    (event,) = events.Histograms("weights/0.weight")
    assert event.step == 2
    assert event.histogram_value.num == 48
    assert sum(event.histogram_value.bucket) == 48


def test_a_model_without_activations_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer(arguments(max_steps=2), callbacks=[Histograms("1 step", only="0.weight")]).fit()
    assert caplog.text.count("Histograms recorded no activations") == 1


class Several(nn.Module):
    """A layer that returns several things."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(6, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, _ = self.inner(inputs.unsqueeze(1))
        return outputs.squeeze(1)


def test_of_several_outputs_it_is_the_first(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    trainer(
        arguments(max_steps=1), model=Several(), callbacks=[JsonlLog(history), Histograms(1, of=["activations"])]
    ).fit()
    (line,) = history_entries(history)
    assert sum(line["activations"]["inner"]["counts"]) == 8 * 2
    assert "weights" not in line


def test_of_a_layer_that_is_called_twice_it_is_the_first_call(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(100 * self.inner(inputs))[:, :2]

    history = tmp_path / "history.jsonl"
    trainer(
        arguments(max_steps=1), model=Twice(), callbacks=[JsonlLog(history), Histograms(1, of=["activations"])]
    ).fit()
    assert history_entries(history)[0]["activations"]["inner"]["high"] < 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Histograms(of="weights"), r"Histograms\(of\) must be a list .*\(got 'weights'\)"),
        (lambda: Histograms(of=["weigths"]), "Did you mean 'weights'"),
        (lambda: Histograms(bins=0), r"Histograms\(bins\) must be .* at least 1 \(got 0\)"),
        (lambda: Histograms("5 stps"), "stps"),
        (lambda: trainer(callbacks=[Histograms(only="weight")]).fit(), "Names like it: "),
    ],
)
def test_bad_options_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrong()
