"""Signals: runs save at once, all ranks end with the same exit code, and the resumed run is equal to the bit."""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.faults.conftest import Trials
from tests.faults.ledger import Ledger
from tests.launched import run_launched
from tests.trainer.checkpoints.test_resume import outcome
from tests.trainer.fit.test_sharded_runs import layers, plugin
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, Interrupted, Trainer
from trainer_lib.callbacks import EarlyStopping
from trainer_lib.checkpointing.format.layout import is_committed
from trainer_lib.checkpointing.save.writer import CheckpointWriter
from trainer_lib.events import Callback, Run
from trainer_lib.launchers import ProcessFailedError, run_forked
from trainer_lib.processes.ports import free_port
from trainer_lib.trainer.safety import deadline

PATIENCE = 5.0  # seconds that a step, a save and the end may take on a busy machine

OPTIONS: dict[str, Any] = {
    "num_train_epochs": 4,
    "log_every": 4,  # so that a log spans a restart
    "eval_every": 3,
    "save_every": 5,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
    "warmup": 3,
    "lr_scheduler": "cosine",
    "resume": "auto",
}


class Asks(Callback):
    """Sends signals to its own process, in time, from another thread.

    Args:
        at: After which step.
        signals: Which, each with the seconds to wait.
        event: In which event.
    """

    def __init__(self, at: int, signals: Sequence[tuple[int, float]], event: str = "on_step_end") -> None:
        self.at, self.signals = at, signals
        self.asked_at: float | None = None
        self._to_come: list[threading.Timer] = []
        setattr(self, event, self._ask)

    def _ask(self, run: Run, *details: Any) -> None:
        if run.state.step < self.at or self.asked_at is not None:
            return
        self.asked_at = time.monotonic()
        for number, seconds in self.signals:
            if seconds:
                self._to_come.append(threading.Timer(seconds, os.kill, (os.getpid(), number)))
                self._to_come[-1].start()
            else:
                os.kill(os.getpid(), number)

    def on_fit_end(self, run: Run) -> None:
        for timer in self._to_come:  # the run has ended by the signal to the other process, and leaves them to others
            timer.cancel()


class Slow(Callback):
    """Takes its time with each step."""

    def on_step_begin(self, run: Run) -> None:
        time.sleep(0.004)


def life(folder: Path | None, asks: Asks | None = None, **options: Any) -> list[Any]:
    """Train until asked to end, or to the end; return what came of it, which is equal to the bit, or what ended it."""
    callbacks = [EarlyStopping("eval_loss", patience=50), Slow(), *([] if asks is None else [asks])]
    settings = {**OPTIONS, "output_dir": folder, **options}
    if folder is None:
        settings.update(resume="never", save_every=None)
    data = {"train_dataset": points(75), "eval_dataset": points(10)}
    model_trainer = trainer(arguments(**settings), model=network(dropout=0.3), callbacks=callbacks, **data)
    try:
        return outcome(model_trainer.fit(), model_trainer.unwrapped_model)
    except Interrupted as stop:
        if asks is not None and asks.asked_at is not None:
            assert time.monotonic() < asks.asked_at + PATIENCE
        return [stop.code, stop.reason, stop.result.state.step]


def lives(
    folder: Path, asks: Sequence[Asks | None], processes: int, is_fresh: bool = False, **options: Any
) -> list[list[Any]]:
    """Return what each process of a life was told, or came to; in fresh processes where the test patches something."""

    def live() -> list[Any]:
        return life(folder, asks[int(os.environ["RANK"])], **options)

    return (run_forked if is_fresh else run_world)(live, (), processes, timeout=90)


@pytest.fixture(scope="module")
def whole() -> Callable[[int], list[Any]]:
    """Return what makes what a run comes to that nobody disturbs, once for each number of processes."""
    known: dict[int, list[Any]] = {}

    def run(processes: int) -> list[Any]:
        if processes not in known:
            known[processes] = run_world(lambda: life(None), (), processes, timeout=90)
        return known[processes]

    return run


@pytest.mark.parametrize(
    ("who", "row"),
    [
        pytest.param((0,), "to the main process", marks=pytest.mark.slow),
        ((1,), "to the other process"),
        pytest.param((0, 1), "to both, up to 100 ms apart", marks=pytest.mark.slow),
    ],
)
def test_signals_to_one_process_or_both(
    tmp_path: Path, trials: Trials, ledger: Ledger, whole: Any, who: tuple[int, ...], row: str
) -> None:
    chance = random.Random(len(row))
    for number in range(trials(1, 17)):
        which = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT][(number + len(row)) % 3]
        at, apart = chance.randrange(1, 17), chance.uniform(0, 0.1)
        delays = dict(zip(who, chance.sample([0.0, apart], len(who)), strict=True))
        asks = [Asks(at, [(which, delays[rank])]) if rank in who else None for rank in range(2)]
        first, second = lives(tmp_path / f"{number}", asks, 2)
        resumed = lives(tmp_path / f"{number}", [None, None], 2)
        is_agreed, is_equal = first == second and first[:2] == [128 + which, which.name], resumed == whole(2)
        ledger.note("stops", f"{which.name} {row}", asked=1, agreed=int(is_agreed), equal=int(is_equal))
        assert is_agreed, (number, which, at, delays, first, second)
        assert first[2] >= at
        assert is_equal, (number, which, at, delays, first)


@pytest.mark.parametrize("which", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_alone_the_step_under_way_is_the_last(tmp_path: Path, which: signal.Signals, whole: Any) -> None:
    ((*ends, step),) = lives(tmp_path, [Asks(7, [(which, 0)])], 1)
    assert (ends, step) == ([128 + which, which.name], 7)
    assert lives(tmp_path, [None], 1) == whole(1)


def test_one_signal_after_the_other_is_one_request(tmp_path: Path, whole: Any) -> None:
    """A terminal sends it to all processes, and a launcher passes it on."""
    both = [Asks(7, [(signal.SIGTERM, 0), (signal.SIGTERM, 0.01), (signal.SIGINT, 0.02)]) for _ in range(2)]
    first, second = lives(tmp_path, both, 2)
    assert first == second == [143, "SIGTERM", first[2]]
    assert lives(tmp_path, [None, None], 2) == whole(2)


@pytest.mark.parametrize(
    ("processes", "in_background"),
    [
        pytest.param(1, True, id="behind the training", marks=pytest.mark.slow),
        pytest.param(1, False, id="by the training"),
        pytest.param(2, False, id="where one process waits for the other", marks=pytest.mark.slow),
    ],
)
def test_a_second_signal_inside_the_save_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, in_background: bool, whole: Any
) -> None:
    write = CheckpointWriter.write

    def endless(saving: CheckpointWriter, *files: Any) -> None:
        if int(saving.target.name[-8:]) > 6:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            if os.environ["RANK"] == "0":
                (tmp_path / "began").touch()
                time.sleep(60)
        write(saving, *files)

    asks = [Asks(7, [(signal.SIGTERM, 0)]) for _ in range(processes)]
    with monkeypatch.context() as patched:
        patched.setattr("trainer_lib.trainer.safety.signals.SAME_REQUEST", 0.05)
        patched.setattr(CheckpointWriter, "write", endless)
        began = time.monotonic()
        with pytest.raises(ProcessFailedError) as caught:
            lives(tmp_path / "runs", asks, processes, is_fresh=True, save_in_background=in_background)
        assert time.monotonic() < began + 30
    assert caught.value.exit_code == 143
    assert (tmp_path / "began").exists()
    (run,) = (tmp_path / "runs").iterdir()
    committed = sorted(path.name for path in (run / "checkpoints").iterdir() if is_committed(path))
    assert committed[-1] == "checkpoint-00000006"
    assert lives(tmp_path / "runs", [None] * processes, processes) == whole(processes)


@pytest.mark.slow
def test_a_deadline_leaves_just_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any) -> None:
    write = CheckpointWriter.write

    def slowly(saving: CheckpointWriter, *files: Any) -> None:
        time.sleep(0.4)
        write(saving, *files)

    def live(ends: float) -> tuple[list[Any], float]:
        return life(tmp_path, deadline=ends, save_in_background=False), time.time()

    with monkeypatch.context() as patched:
        patched.setattr(deadline, "_MARGIN", 0.8)
        patched.setattr(CheckpointWriter, "write", slowly)
        ends = time.time() + 3.0
        ((code, reason, step), first), ((*other_end, _), second) = run_forked(live, (ends,), 2, timeout=90)
    assert (code, other_end) == (75, [75, reason])
    assert reason.startswith("the deadline at ")
    assert 0 < step < 20
    assert ends - 2.5 < max(first, second) < ends  # a save, some steps and the margin before it
    assert lives(tmp_path, [None, None], 2) == whole(2)


class Awhile(Callback):
    """Counts the batches of evaluations, and takes its time with each."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.batches, self.seconds = 0, seconds

    def on_evaluate_batch_end(self, run: Run) -> None:
        self.batches += 1
        time.sleep(self.seconds)


def accuracy(output: Any) -> dict[str, float]:
    """Return a metric of all rows, which are handed round."""
    predictions, labels = output
    return {"right": float((predictions.argmax(-1) == labels).mean())}


@pytest.mark.parametrize(
    ("who", "batches", "more"),
    [
        pytest.param((True, True), 50, {}, id="each for itself", marks=pytest.mark.slow),
        pytest.param(
            (False, True),
            150,
            {"compute_metrics": accuracy},
            id="where batches are handed round",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_evaluation_is_left_and_made_up_for(
    tmp_path: Path, who: tuple[bool, ...], batches: int, more: dict[str, Any]
) -> None:
    data = {"eval_dataset": points(8 * batches), **more}  # so many batches of a process

    def live(is_asked: bool) -> list[Any]:
        asks = Asks(6, [(signal.SIGTERM, 0.1)], "on_evaluate_begin") if is_asked else None
        awhile = Awhile()
        model = network(dropout=0.3)
        args = arguments(**{**OPTIONS, "output_dir": tmp_path, "eval_every": 6})
        model_trainer = trainer(
            args, model=model, train_dataset=points(75), callbacks=[c for c in (asks, awhile) if c], **data
        )
        try:
            return outcome(model_trainer.fit(), model_trainer.unwrapped_model)
        except Interrupted as stop:
            return [stop.code, stop.result.state.step, awhile.batches]

    first, second = run_world(lambda: live(who[int(os.environ["RANK"])]), (), 2, timeout=90)
    assert first[:2] == second[:2] == [143, 6]
    assert 0 < max(first[2], second[2]) < batches
    again = run_world(lambda: _without_waiting(tmp_path, data), (), 2, timeout=90)
    assert again == run_world(lambda: _without_waiting(tmp_path / "whole", data), (), 2, timeout=90)


def _without_waiting(folder: Path, data: dict[str, Any]) -> list[Any]:
    options = {**OPTIONS, "output_dir": folder, "eval_every": 6}
    model_trainer = trainer(arguments(**options), model=network(dropout=0.3), train_dataset=points(75), **data)
    return outcome(model_trainer.fit(), model_trainer.unwrapped_model)


def test_what_was_owed_is_left_out_where_nothing_is_given_for_it(tmp_path: Path) -> None:
    first = trainer(
        arguments(output_dir=tmp_path, max_steps=6, eval_every=3, save_every=3),
        callbacks=[Asks(3, [(signal.SIGTERM, 0)])],
        eval_dataset=points(10),
    )
    with pytest.raises(Interrupted) as caught:
        first.fit()
    assert "eval_loss" not in caught.value.result.metrics  # that is left for later
    again = trainer(arguments(max_steps=6, resume=str(caught.value.result.last_checkpoint)))
    assert again.fit().state.step == 6


@pytest.mark.slow
def test_sharded_processes_agree_where_to_leave_an_evaluation(tmp_path: Path) -> None:
    def live(folder: Path, is_asked: bool) -> list[Any]:
        asks = Asks(3, [(signal.SIGTERM, 0)], "on_evaluate_begin") if is_asked and os.environ["RANK"] == "1" else None
        counts = Awhile(0)
        options = {"eval_every": 3, "save_every": 2, "max_steps": 6, "log_every": 2, "resume": "auto", "fsdp": plugin()}
        model_trainer = trainer(
            arguments(output_dir=folder, **options),
            model=layers(),
            train_dataset=points(75),
            eval_dataset=points(200),  # 13 batches of a process
            callbacks=[callback for callback in (asks, counts) if callback is not None],
        )
        try:
            return outcome(model_trainer.fit(), nn.Identity())
        except Interrupted as stop:
            return [stop.code, stop.result.state.step, counts.batches]

    assert run_world(live, (tmp_path / "one", True), 2, timeout=90) == [[143, 3, 7]] * 2
    whole = run_world(live, (tmp_path / "whole", False), 2, timeout=90)
    assert run_world(live, (tmp_path / "one", False), 2, timeout=90) == whole


def test_what_is_written_in_the_background_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    write = CheckpointWriter.write

    def slowly(saving: CheckpointWriter, *files: Any) -> None:
        time.sleep(0.2)
        write(saving, *files)

    monkeypatch.setattr(CheckpointWriter, "write", slowly)
    asks = Asks(5, [(signal.SIGUSR1, 0.02)], "on_save_begin")
    ((*ends, step),) = lives(tmp_path, [asks], 1, is_fresh=True, eval_every="never", keep_best=0)
    assert ends == [138, "SIGUSR1"]
    (run,) = tmp_path.iterdir()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        {"checkpoint-00000005", f"checkpoint-{step:08d}"}
    )


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    asks = Asks(0, [(signal.SIGTERM, 0)], "on_fit_begin")
    assert lives(tmp_path, [None, asks], 2) == [[143, "SIGTERM", 0]] * 2
    assert list(tmp_path.glob("*/checkpoints/*")) == []


def test_a_request_in_on_fit_end_ends_its_process_while_another_one_is_still_there(tmp_path: Path) -> None:
    has_ended = tmp_path / "ended"

    class Uploads(Callback):
        def on_fit_end(self, run: Run) -> None:
            latest = time.monotonic() + 30
            while not has_ended.exists() and time.monotonic() < latest:
                time.sleep(0.03)

    def live() -> tuple[Any, bool]:
        callbacks = [Asks(3, [(signal.SIGUSR1, 0)], "on_fit_end")] if os.environ["RANK"] == "1" else [Uploads()]
        model_trainer = trainer(arguments(output_dir=tmp_path / "runs", max_steps=3), callbacks=callbacks)
        try:
            result: Any = model_trainer.fit().status
        except Interrupted as stop:
            result = stop.code, stop.result.status
            has_ended.touch()
        return result, has_ended.exists()

    assert run_world(live, (), 2, timeout=60) == [("finished", True), ((138, "finished"), True)]
    (run,) = tmp_path.glob("runs/*/run.json")
    assert '"status": "finished"' in run.read_text()


@pytest.mark.slow
def test_a_signal_to_the_group_leaves_the_workers_of_the_loader_alone(tmp_path: Path, whole: Any) -> None:
    class Group(Asks):
        def _ask(self, run: Run, *details: Any) -> None:
            if run.state.step >= self.at and self.asked_at is None:
                self.asked_at = time.monotonic()
                os.killpg(0, signal.SIGTERM)

    def live() -> list[Any]:
        os.setsid()
        return life(tmp_path, Group(7, []), num_workers=2)

    assert run_world(live, (), 1, timeout=90) == [[143, "SIGTERM", 7]]
    assert lives(tmp_path, [None], 1, num_workers=2) == whole(1)


# -- one process, this one ---------------------------------------------------------------------------------------------


def ends_at(step: int, which: signal.Signals = signal.SIGTERM, **options: Any) -> Any:
    """Return the trainer of a short run that is asked to end."""
    args = arguments(**{"max_steps": 6, **options})
    return trainer(args, callbacks=[Asks(step, [(which, 0)])])


def test_a_signal_within_an_evaluation_ends_it_before_its_next_batch(tmp_path: Path) -> None:
    """The resumed run evaluates again, and equals one that nobody interrupts."""

    def evaluated(folder: Path, *callbacks: Callback) -> list[Any]:
        args = arguments(output_dir=folder, max_steps=4, eval_every=2, save_every=2, resume="auto")
        model_trainer = trainer(args, model=network(dropout=0.3), eval_dataset=points(40), callbacks=list(callbacks))
        return outcome(model_trainer.fit(), model_trainer.unwrapped_model)

    asks, counts = Asks(2, [(signal.SIGTERM, 0)], "on_evaluate_batch_end"), Awhile(0)
    with pytest.raises(Interrupted) as caught:
        evaluated(tmp_path / "parts", asks, counts)
    assert (caught.value.code, caught.value.result.state.step, counts.batches) == (143, 2, 1)
    assert evaluated(tmp_path / "parts") == evaluated(tmp_path / "whole")


def test_handlers_are_put_back_and_those_of_the_user_are_called_when_all_is_saved(tmp_path: Path) -> None:
    def mine(number: int, frame: Any) -> None:
        (run,) = tmp_path.iterdir()
        assert is_committed(run / "checkpoints" / "checkpoint-00000003")
        raise SystemExit(5)  # in its own way

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)}
    kept = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(SystemExit) as caught:
            ends_at(3, output_dir=tmp_path).fit()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert caught.value.code == 5
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.set_wakeup_fd(-1) == -1


def test_an_ignored_signal_stays_ignored_and_the_banner_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert ends_at(3, signal.SIGHUP).fit().status == "finished"
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "on SIGTERM, SIGINT, SIGUSR1, not on SIGHUP (ignored by this process)" in capsys.readouterr().err


def test_other_signals_on_request() -> None:
    with pytest.raises(Interrupted) as caught:
        ends_at(2, signal.SIGUSR2, stop_signals=["usr2"]).fit()
    assert caught.value.code == 128 + signal.SIGUSR2
    with pytest.raises(KeyboardInterrupt):
        ends_at(2, signal.SIGINT, stop_signals=[]).fit()


def test_in_a_notebook_the_result_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    model_trainer = ends_at(3, signal.SIGINT, output_dir=tmp_path)
    heard: list[str] = []
    model_trainer.events.add(
        type("Heard", (Callback,), {"on_interrupt": lambda self, run: heard.append(run.state.status)})()
    )
    result = model_trainer.fit()
    assert (result.status, result.state.reason, result.state.step) == ("interrupted", "SIGINT", 3)
    assert result.last_checkpoint is not None
    assert heard == ["interrupted"]
    assert model_trainer.evaluate(points(10)).keys() == {"eval_loss"}  # what asked for the end is not asked any more


def test_in_a_notebook_a_second_signal_is_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr("trainer_lib.trainer.safety.signals.SAME_REQUEST", 0.0)

    class Twice(Callback):
        def on_step_end(self, run: Run) -> None:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer(arguments(max_steps=3), callbacks=[Twice()]).fit()


def test_processes_that_a_run_forks_can_be_ended() -> None:
    codes: list[int | None] = []

    def wait_after(is_there: Any) -> None:
        is_there.set()
        while True:  # a handler that is called before `signal.pause` begins would not end it
            time.sleep(0.01)

    class Forks(Callback):
        def on_step_end(self, run: Run) -> None:
            context = get_context("fork")
            is_there = context.Event()
            child = context.Process(target=wait_after, args=(is_there,))
            gc.disable()  # in the child, what tests before this one left could wait for threads that are not there
            child.start()
            gc.enable()
            try:
                assert is_there.wait(60)
                child.terminate()
                child.join(60)
            finally:
                child.kill()
                child.join()
            codes.append(child.exitcode)

    assert trainer(arguments(max_steps=1), callbacks=[Forks()]).fit().status == "finished"
    assert codes == [-signal.SIGTERM]


def test_outside_of_the_main_thread_a_warning_tells_that_nothing_is_caught(caplog: pytest.LogCaptureFixture) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(trainer(arguments(max_steps=2)).fit()))
    thread.start()
    thread.join()
    assert results[0].status == "finished"
    assert "fit runs outside of the main thread, where signals cannot be caught: SIGTERM and SIGINT" in caplog.text


@pytest.mark.parametrize("event", ["on_save_end", "on_fit_end"])
def test_a_request_at_the_end_of_a_finished_run_ends_the_program_all_the_same(tmp_path: Path, event: str) -> None:
    model_trainer = trainer(
        arguments(max_steps=2, output_dir=tmp_path), callbacks=[Asks(2, [(signal.SIGTERM, 0)], event)]
    )
    with pytest.raises(Interrupted) as caught:
        model_trainer.fit()
    assert (caught.value.code, caught.value.result.status) == (143, "finished")


def test_a_deadline_is_that_of_its_job(tmp_path: Path) -> None:
    model_trainer = trainer(arguments(max_steps=2, output_dir=tmp_path, deadline=time.time() + 1000))
    last = model_trainer.fit().last_checkpoint
    assert last is not None
    assert Trainer.from_checkpoint(Path(str(last)), network()).args.deadline is None


def test_without_a_folder_nothing_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Interrupted):
        ends_at(3).fit()
    assert "SIGTERM: the run ends at step 3, and nothing of it is saved." in caplog.text


def test_schedulers_tell_when_a_job_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3))  # less than the margin
    with pytest.raises(Interrupted) as caught:
        trainer(arguments(max_steps=20)).fit()
    assert (caught.value.code, caught.value.result.state.step) == (75, 1)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    assert trainer(arguments(max_steps=2)).fit().status == "finished"
    assert "Training continues without a deadline." in caplog.text
    monkeypatch.setenv("SLURM_JOB_END_TIME", "0")  # none
    assert trainer(arguments(max_steps=2)).fit().status == "finished"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline": "2020-01-01"}, r"deadline='2020-01-01' is in the past \(2020-01-01 00:00:00\)"),
        ({"deadline": 1000}, "deadline=1000 is in the past"),
        ({"deadline": "90 minutes"}, "deadline='90 minutes' is a duration. Give it as max_time"),
        ({"deadline": "tomorrow"}, 'must be a date and time such as "2030-01-31T18:00", seconds since 1970, or "auto"'),
        ({"stop_signals": "SIGTERM"}, r"a list of signals, got 'SIGTERM'\. Give stop_signals=\['SIGTERM'\]"),
        ({"stop_signals": ["SIGKILL"]}, "SIGKILL cannot be caught by a program"),
        ({"stop_signals": ["SIGTREM"]}, "Did you mean 'SIGTERM'"),
    ],
)
def test_invalid_options_raise_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer(arguments(**options))


# -- under launchers ---------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from tests.trainer.tasks import arguments, trainer
from trainer_lib.events import Callback

class Asks(Callback):
    def on_step_end(self, run):
        if run.state.step == 7 and os.environ["RANK"] == "1":
            os.kill(os.getppid() if sys.argv[2] == "launcher" else os.getpid(), getattr(signal, sys.argv[3]))

trainer(arguments(output_dir=sys.argv[1], max_steps=100_000, save_every="1 hour"), callbacks=[Asks()]).fit()
"""


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    ("who", "which", "by_agent"),
    [("launcher", signal.SIGTERM, False), ("rank", signal.SIGUSR1, False), ("rank", signal.SIGUSR1, True)],
)
def test_under_the_launcher_the_exit_code_tells_and_nothing_is_started_again(
    tmp_path: Path, who: str, which: signal.Signals, by_agent: bool
) -> None:
    words = (str(tmp_path / "runs"), who, which.name)
    options = ["--max_restarts", "2"] + ["--rdzv_endpoint", f"127.0.0.1:{free_port()}"] * by_agent
    ended = run_launched(SCRIPT, tmp_path, *words, options=options, timeout=90)
    assert ended.returncode == 128 + which, ended.stderr
    assert ended.stderr.endswith(f"trainer-lib launch: Ended by {which.name}, and all processes with it.\n")
    assert f"{which.name}: the run ends at step" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Starting all processes again" not in ended.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert '"status": "interrupted"' in (run / "run.json").read_text()


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.fault("`SIGKILL` to the launcher before the first save")
def test_ranks_save_and_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    words = (str(tmp_path / "runs"), "launcher", "SIGKILL")
    ended = run_launched(SCRIPT, tmp_path, *words, variables={"TMPDIR": str(tmp_path)}, timeout=90)
    (run,) = (tmp_path / "runs").iterdir()
    assert '"status": "interrupted"' in (run / "run.json").read_text(), ended.stderr
    assert len(list((run / "checkpoints").glob("checkpoint-*/manifest.json"))) == 1, ended.stderr
