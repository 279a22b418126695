"""Tests of requests to a running run, by file and by signal."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR, SequentialLR, StepLR

from tests.callbacks.by_hand import OPTIONS, RATE, assert_equal, loop, resumed, weights
from tests.callbacks.loops import folder_of
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import Trainer
from trainer_lib.callbacks import LiveControl, ask_run
from trainer_lib.callbacks.live_control import _change_rate, _refusal
from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError


class Asks(Modifier):
    """Asks the run for something, as somebody outside would, in the middle of an update."""

    def __init__(self, asked: dict[int, tuple[str, ...]]) -> None:
        self._asked = asked

    def on_step_begin(self, run: Run) -> None:
        if requests := self._asked.get(run.state.step + 1):
            assert run.folder is not None
            for request in requests:  # one call each, of which none may be lost
                ask_run(run.folder, request)


class Rates(Modifier):
    """Keeps the rate of each update."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_begin(self, run: Run) -> None:
        self.rates.append(float(run.optimizer.param_groups[0]["lr"]))


def history(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder_of(folder) / "history.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def in_folder(folder: Path, **options: Any) -> Any:
    return arguments(output_dir=folder, **options)


def test_a_file_is_read_once_and_its_requests_are_carried_out_at_that_update(tmp_path: Path) -> None:
    control = LiveControl(seconds=0.0)
    asked = {2: ("evaluate", "save"), 3: ("log",), 5: ("learning_rate=0.01", "stop")}
    args = in_folder(tmp_path, eval_every="never", save_every="never", log_every=100)
    result = trainer(args, eval_dataset=points(), callbacks=[control, Asks(asked)]).fit()
    assert (result.status, result.state.step) == ("stopped", 5)
    assert result.state.reason == "a LiveControl request"
    expected = [[2, "evaluate"], [2, "save"], [3, "log"], [5, "learning_rate 0.01"], [5, "stop"]]
    assert control.requests == expected
    assert [[line["step"], line["asked"]] for line in history(tmp_path, "control")] == expected
    changed = history(tmp_path, "control")[3]
    assert (changed["was"], changed["factor"]) == pytest.approx((0.025, 0.4))
    assert [line["step"] for line in history(tmp_path, "evaluation")] == [2]
    assert [line["step"] for line in history(tmp_path, "save")] == [2]
    assert [line["step"] for line in history(tmp_path, "log")] == [2, 3, 5]
    assert not any("live_control" in line for line in history(tmp_path, "log"))
    assert list((folder_of(tmp_path)).glob("control*")) == []


def test_impossible_requests_are_refused_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ask"
    file.write_text("sav\nevaluate\nlearning_rate -1\nsave\n")
    (tmp_path / "ask.txt").write_text("stop\n")  # not ours
    control = LiveControl(seconds=0.0, file=file)
    result = trainer(arguments(max_steps=3), callbacks=[control]).fit()
    assert (result.status, result.state.step) == ("finished", 3)
    assert control.requests == [[1, "evaluate"], [1, "save"]]
    for words in (
        "Unknown request 'sav'. Known: evaluate, learning_rate 1e-4, log, save, stop. Did you mean 'save'?",
        "The learning rate must be above 0",
        "refuses the request 'evaluate': there is no eval_dataset",
        "refuses the request 'save': there is no output_dir to save in",
    ):
        assert words in caplog.text
    assert (tmp_path / "ask.txt").exists()
    assert _refusal(Run(), "learning_rate 1") == "one rate cannot apply to 0 optimizers"
    still = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.0)
    assert _refusal(Run(optimizers={"default": still}), "learning_rate 1") == (  # type: ignore[dict-item]
        "the rate and the schedule's base rate are 0, so they cannot be scaled"
    )


def test_an_incomplete_file_is_left_until_it_is_complete(tmp_path: Path) -> None:
    file, control = tmp_path / "ask", LiveControl(seconds=0.0, file=tmp_path / "ask")
    control.on_fit_begin(Run())
    file.write_text("")
    assert control._take_requests(file) == []
    file.write_text("sto")
    assert control._take_requests(file) == []
    file.write_text("stop")  # and no end of the line
    assert control._take_requests(file) == []
    assert control._take_requests(file) == ["stop"]
    assert not file.exists()
    control.on_fit_end(Run())


def test_the_rate_is_changed_as_by_hand(tmp_path: Path) -> None:
    rates, model = Rates(), network()
    options: dict[str, Any] = {**OPTIONS, "lr_scheduler": "linear", "per_device_train_batch_size": 8}
    args = in_folder(tmp_path, **options)
    trainer(args, model=model, callbacks=[LiveControl(0.0), Asks({4: ("learning_rate 0.02",)}), rates]).fit()
    expected = [RATE * (10 - step) / 10 for step in range(4)]
    scale = 0.02 / (RATE * 6 / 10)
    expected += [scale * RATE * (10 - step) / 10 for step in range(4, 10)]
    assert rates.rates == pytest.approx(expected, rel=1e-12)

    def set_rate(model: nn.Module, step: int) -> None:  # the loop's own rate is RATE
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= expected[step - 1] / RATE

    by_hand = loop(network(), before=set_rate)
    for name, value in weights(by_hand).items():
        torch.testing.assert_close(weights(model)[name], value, rtol=1e-5, atol=1e-7)


class AsksItself(LiveControl):
    """Is asked at a step, whatever the run's folder is."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 4:
            assert run.folder is not None
            ask_run(run.folder, "learning_rate 0.003")
        super().on_step_end(run)


@pytest.mark.parametrize("schedule", ["cosine", "plateau"])
def test_a_rate_that_was_changed_survives_a_restart_to_the_bit(tmp_path: Path, schedule: str) -> None:
    whole, gone_on = resumed(lambda: AsksItself(0.0), tmp_path, lr_scheduler=schedule, eval_dataset=points())
    assert_equal(gone_on, whole)
    (other, _) = resumed(lambda: LiveControl(0.0), tmp_path / "unasked", lr_scheduler=schedule, eval_dataset=points())
    assert not torch.equal(whole["0.weight"], other["0.weight"])  # it made a difference


def test_requests_survive_a_restart(tmp_path: Path) -> None:
    first = LiveControl(0.0)
    args: dict[str, Any] = {"save_every": 2, "num_train_epochs": 1}
    trainer(in_folder(tmp_path, **args, max_steps=4), callbacks=[first, Asks({3: ("log",)})]).fit()
    second = LiveControl(0.0)
    trainer(in_folder(tmp_path, **args, resume="extend"), callbacks=[second]).fit()
    assert second.requests == first.requests == [[3, "log"]]


def test_a_signal_to_one_of_two_ranks_reaches_both_at_the_same_step(tmp_path: Path) -> None:
    def body() -> tuple[list[Any], list[float], Any]:
        class Signals(Modifier):
            def on_step_begin(self, run: Run) -> None:
                if run.state.step == 2 and not run.is_main_process:
                    os.kill(os.getpid(), signal.SIGUSR2)
                if run.state.step == 5 and run.is_main_process:
                    assert run.folder is not None
                    ask_run(run.folder, "stop")

        control, rates, model = LiveControl(0.0, on_signal=["learning_rate 0.01", "save"]), Rates(), network()
        args = in_folder(tmp_path, per_device_train_batch_size=4, lr_scheduler="constant", warmup=0)
        result = trainer(args, model=model, callbacks=[control, Signals(), rates]).fit()
        assert result.status == "stopped"
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        return control.requests, rates.rates, weights(model)["0.weight"]

    (requests, rates, weight), other = run_world(body, timeout=60)
    # Heard at the end of step 3, told with the gradients of step 4; asked in step 6, told in step 7.
    assert requests == other[0] == [[4, "learning_rate 0.01"], [4, "save"], [7, "stop"]]
    assert rates == other[1] == pytest.approx([0.05] * 4 + [0.01] * 3)
    assert torch.equal(weight, other[2])
    assert next(line["step"] for line in history(tmp_path, "save")) == 4
    assert [line["asked"] for line in history(tmp_path, "control")] == ["learning_rate 0.01", "save", "stop"]


def test_a_run_that_logs_nothing_by_itself_hears_too(tmp_path: Path) -> None:
    class OwnSteps(Trainer):
        def training_step(self, model: Any, batch: Any) -> None:
            self.backward(cross_entropy(model(batch[0]), batch[1]))

    own_steps = OwnSteps(
        network(),
        in_folder(tmp_path),
        train_dataset=points(),
        callbacks=[LiveControl(0.0), Asks({3: ("stop",)})],
    )
    assert own_steps.fit().state.step == 3


def test_all_that_schedules_make_rates_of_is_scaled() -> None:
    def rates(make: Any, factor: float) -> list[float]:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        schedule, learning_rates = make(optimizer), list[float]()
        for step in range(9):
            optimizer.step()
            schedule.step()
            if step == 3:
                prepared = type("Prepared", (), {"scheduler": schedule})
                run = Run(optimizers={"default": optimizer}, schedulers={"default": prepared})  # type: ignore[dict-item]
                _change_rate(run, factor * optimizer.param_groups[0]["lr"])
            learning_rates.append(float(optimizer.param_groups[0]["lr"]))
        return learning_rates

    def several(optimizer: Any) -> Any:
        parts: list[Any] = [StepLR(optimizer, 2, 0.5), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]
        return SequentialLR(optimizer, parts, milestones=[6])

    makers = [lambda value: OneCycleLR(value, max_lr=1.0, total_steps=12), several, lambda one: StepLR(one, 3, 0.1)]
    for make in makers:
        plain, scaled = rates(make, 1.0), rates(make, 3.0)
        assert scaled == pytest.approx([*plain[:3], *(3 * rate for rate in plain[3:])], rel=1e-9)


def test_outside_the_main_thread_only_the_file_works(tmp_path: Path) -> None:
    def begin(control: LiveControl) -> list[str]:
        messages: list[str] = []

        def body() -> None:
            try:
                control.on_fit_begin(Run())
            except ConfigurationError as error:
                messages.append(str(error))

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return messages

    assert begin(LiveControl(file=tmp_path / "ask")) == []
    assert begin(LiveControl())[0].startswith("LiveControl has no control file and no signal")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: LiveControl(seconds=-1), r"LiveControl\(seconds\) must be .* at least 0 \(got -1\)"),
        (lambda: LiveControl(signal_name="SIGUSR3"), "Unknown signal 'SIGUSR3'.* Did you mean 'SIGUSR"),
        (lambda: LiveControl(signal_name="SIGKILL"), "Unknown signal 'SIGKILL'"),
        (lambda: LiveControl(on_signal="save"), r"LiveControl\(on_signal\) must be a list .*\(got 'save'\)"),
        (lambda: LiveControl(on_signal=[]), "For no signal, give signal_name=None"),
        (lambda: LiveControl(on_signal=["learning_rate"]), "Unknown request 'learning_rate'"),
        (lambda: ask_run("of no run", "save"), "the folder 'of no run' does not exist"),
        (lambda: ask_run(".", "sve"), "Did you mean 'save'"),
        (lambda: trainer(callbacks=[LiveControl(), LiveControl()]), "only one can accept requests from outside"),
        (lambda: trainer(callbacks=[LiveControl(signal_name="SIGUSR1")]).fit(), "'SIGUSR1'.* is also in stop_signals"),
        (lambda: trainer(callbacks=[LiveControl(signal_name=None)]).fit(), "Give output_dir or file="),
    ],
)
def test_bad_options_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrong()
