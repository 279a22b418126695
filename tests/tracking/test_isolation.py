"""Tests that a failing or hanging tracker never stops a run, delays its end, or loses values that can be kept."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from tests.faults.injuries import files_limited_to
from tests.launched import PYTHON_PATH
from tests.tracking.misbehaving import Misbehaving, steps, taken
from trainer_lib.commands.main import main
from trainer_lib.tracking import GeneralTracker, Patience, TrackerGroup, register_tracker_class
from trainer_lib.tracking.delivery.entries import Entry
from trainer_lib.tracking.delivery.replay import find
from trainer_lib.tracking.delivery.sender import ChildDelivery
from trainer_lib.tracking.delivery.spool import Spool, read_spool

ROOT = Path(__file__).parents[2]
QUICK = Patience(linger=0.02, call=0.5, finish=1.0, working=0.0, first_pause=0.05, longest_pause=0.2)
HANGS = replace(QUICK, call=0.1, finish=0.3)  # for what never answers
PATIENT = Patience(linger=0.02, finish=30.0, first_pause=0.05, longest_pause=0.2)

register_tracker_class(Misbehaving)


def group(folder: Path, patience: Patience = QUICK, token: str | None = None, **options: Any) -> TrackerGroup:
    options = {"path": str(folder / "taken"), **options}
    return TrackerGroup("misbehaving", "project", folder, {"misbehaving": options}, patience=patience, token=token)


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def stalls(trackers: TrackerGroup, count: int = 200) -> float:
    """Return how long a step is held up, but for what other programs on the machine do."""
    durations: list[float] = []
    for step in range(count):
        begun = time.perf_counter()
        trackers.log({"loss": 1.0 / (step + 1), "step_seconds": 0.1}, step=step)
        durations.append(time.perf_counter() - begun)
    return sorted(durations)[-3]


def spooled(folder: Path) -> list[int]:
    file = folder / "spool" / "misbehaving.jsonl"
    has_header = file.exists() and file.stat().st_size  # which is written after the file was made
    return [json.loads(line)["step"] for line in read_spool(file)[1]] if has_header else []


@pytest.mark.parametrize("apart", [False, True], ids=["thread", "process"])
@pytest.mark.parametrize("where", ["start", "log"])
@pytest.mark.parametrize("kind", ["raise", "hang"])
def test_undelivered_values_are_kept(
    tmp_path: Path, kind: str, where: str, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    patience = PATIENT if kind == "raise" else HANGS
    trackers = group(tmp_path, patience, how=f"{kind} in {where}", apart=apart)
    assert stalls(trackers) < 0.05
    begun = time.monotonic()
    trackers.finish()
    assert time.monotonic() - begun < (30 if kind == "raise" else 3)
    assert spooled(tmp_path) == list(range(200))
    assert steps(tmp_path / "taken") == []
    messages = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("fails, and training continues" in line for line in messages) <= 1
    assert "200 points are kept in" in messages[-1]
    assert len(messages) <= 2


def test_a_tracker_that_hangs_at_the_end_is_killed(tmp_path: Path) -> None:
    for apart in (False, True):
        folder = tmp_path / str(apart)
        folder.mkdir()
        trackers = group(folder, replace(PATIENT, finish=0.3, working=0.0), how="hang in finish", apart=apart)
        trackers.log({"loss": 1.0}, step=1)
        until(lambda folder=folder: steps(folder / "taken") == [1])
        begun = time.monotonic()
        trackers.finish()
        assert time.monotonic() - begun < 3
        assert not spooled(folder)


def test_a_slow_tracker_gets_all_values(tmp_path: Path) -> None:
    trackers = group(tmp_path, PATIENT, how="slow")
    assert stalls(trackers, 25) < 0.05
    trackers.finish("interrupted")
    assert steps(tmp_path / "taken") == list(range(25))
    assert taken(tmp_path / "taken")[-1] == {"finished": "interrupted"}


@pytest.mark.parametrize("apart", [False, True], ids=["thread", "process"])
def test_kept_values_are_sent_when_the_tracker_recovers(
    tmp_path: Path, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    away = tmp_path / "away"
    trackers = group(tmp_path, PATIENT, how="away", apart=apart)
    trackers.log({"loss": 0.0}, step=0)
    until(lambda: steps(tmp_path / "taken") == [0])
    away.touch()
    for step in range(1, 40):
        trackers.log({"loss": float(step)}, step=step)
    until(lambda: spooled(tmp_path) == list(range(1, 40)))
    away.unlink()
    until(lambda: steps(tmp_path / "taken") == list(range(40)))
    trackers.log({"loss": 40.0}, step=40)
    trackers.finish()
    assert steps(tmp_path / "taken") == list(range(41))
    assert not (tmp_path / "spool" / "misbehaving.jsonl").exists()
    assert len(caplog.records) == 1
    assert "ConnectionError: nobody is there" in caplog.records[0].message


@pytest.mark.parametrize("how", ["die in log", "die in start"])
def test_its_process_is_started_again(tmp_path: Path, how: str) -> None:
    trackers = group(tmp_path, PATIENT, how=how, apart=True, token="same")
    for step in range(10):
        trackers.log({"loss": float(step)}, step=step)
    trackers.finish()
    spool = tmp_path / "spool" / "misbehaving.jsonl"
    if spool.exists():  # the end came before the second try
        assert main(["track", "replay", str(tmp_path)]) == 0
    assert sorted(set(steps(tmp_path / "taken"))) == list(range(10))
    assert {record["started"] for record in taken(tmp_path / "taken") if "started" in record} == {"same"}


def test_its_process_ends_with_the_run(tmp_path: Path) -> None:
    trackers = group(tmp_path, PATIENT, apart=True)
    (handle,) = trackers.trackers
    trackers.log({"loss": 0.0}, step=0)
    until(lambda: steps(tmp_path / "taken") == [0])
    delivery: Any = handle.delivery_worker.delivery
    assert isinstance(delivery, ChildDelivery)
    process: Any = delivery._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    trackers.log({"loss": 1.0}, step=1)
    until(lambda: steps(tmp_path / "taken") == [0, 1])
    again: Any = delivery._process
    assert again.pid != process.pid
    trackers.finish()
    assert taken(tmp_path / "taken")[-1] == {"finished": "finished"}
    assert again.poll() is not None


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    patience = Patience(linger=30.0, finish=10.0, capacity=100)  # so that nothing is taken before the end
    trackers = group(tmp_path, patience)
    assert stalls(trackers, 1000) < 0.05
    (handle,) = trackers.trackers
    assert len(handle.delivery_worker._queue) <= 1000
    trackers.finish()
    assert steps(tmp_path / "taken") == list(range(1000))


def test_without_a_folder_values_are_kept_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"misbehaving": {"path": str(tmp_path / "taken"), "how": "raise in log"}}
    trackers = TrackerGroup("misbehaving", "project", None, options, patience=QUICK)
    for step in range(5):
        trackers.log({"loss": 1.0}, step=step)
    trackers.finish()
    assert "5 points are lost" in caplog.messages[-1]
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_a_rejected_value_does_not_block_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = group(tmp_path, PATIENT)
    trackers.log({"loss": 0.0}, step=0)
    trackers.log({"poison": 1.0}, step=1)
    trackers.log({"loss": 2.0}, step=2)
    until(lambda: steps(tmp_path / "taken") == [0, 2])
    trackers.finish()
    assert "1 points are lost" in caplog.messages[-1]


@pytest.mark.parametrize("apart", [False, True], ids=["thread", "process"])
def test_a_rejected_last_value_does_not_block_others(tmp_path: Path, apart: bool) -> None:
    trackers = group(tmp_path, PATIENT, apart=apart)
    trackers.log({"loss": 0.0}, step=0)
    trackers.log({"poison": 1.0}, step=1)
    trackers.log({"loss": 2.0}, step=2)
    trackers.finish()
    assert steps(tmp_path / "taken") == [0, 2]
    assert spooled(tmp_path) == []


def test_a_value_that_cannot_be_read_does_not_hurt_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = group(tmp_path, PATIENT)
    (handle,) = trackers.trackers
    handle.log_images({"drawing": "a text"}, step=0)
    trackers.log({"loss": 1.0}, step=1)
    trackers.finish()
    assert steps(tmp_path / "taken") == [1]
    assert "cannot take drawing (TypeError: an image must be" in caplog.messages[0]
    assert "1 points are lost" in caplog.messages[-1]


def test_an_unsupported_text_is_told_with_what_the_tracker_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Misbehaving, "takes_texts", False)
    trackers = group(tmp_path, PATIENT)
    trackers.log({"phase": "warm-up", "loss": 1.0}, step=1)
    trackers.finish()
    assert "phase, which is a str: the value is left out. log takes numbers; images" in caplog.messages[0]


def test_the_spool_of_an_earlier_program_is_sent_for_the_same_run(tmp_path: Path) -> None:
    first = group(tmp_path, QUICK, how="raise in log", token="a")
    first.log({"loss": 0.0}, step=0)
    first.finish()
    other = group(tmp_path, QUICK, how="raise in log", token="b")
    other.log({"loss": 5.0}, step=5)
    other.finish()
    again = group(tmp_path, PATIENT, token="a")
    again.log({"loss": 1.0}, step=1)
    again.finish()
    assert steps(tmp_path / "taken") == [0, 1]
    assert [file.name for file in (tmp_path / "spool").glob("*.jsonl")] == ["misbehaving-2.jsonl"]


def test_two_of_a_name_have_a_file_each(tmp_path: Path) -> None:
    both = [group(tmp_path, QUICK, how="raise in log", token=token) for token in "ab"]
    for number, trackers in enumerate(both):
        trackers.log({"loss": 0.0}, step=number)
    for trackers in both:
        trackers.finish()
    files = sorted((tmp_path / "spool").glob("*.jsonl"))
    assert [file.name for file in files] == ["misbehaving-2.jsonl", "misbehaving.jsonl"]
    assert sorted(json.loads(line)["step"] for file in files for line in read_spool(file)[1]) == [0, 1]


def test_the_replay_command_sends_kept_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = group(tmp_path, QUICK, how="away", token="t")
    (tmp_path / "away").touch()
    trackers.store_init_configuration({"learning_rate": 0.1, "api_key": "secret"})
    for step in range(3):
        trackers.log({"loss": float("nan"), "accuracy": 0.5}, step=step)
    trackers.finish()
    assert main(["track", "replay", str(tmp_path), "--dry-run"]) == 0
    assert "misbehaving: 4 entries wait in" in capsys.readouterr().out
    assert main(["track", "replay", str(tmp_path)]) == 1  # still away
    assert "ConnectionError: nobody is there" in capsys.readouterr().err
    (tmp_path / "away").unlink()
    assert main(["track", "replay", str(tmp_path), "--tracker", "other"]) == 0
    assert capsys.readouterr().out == "Nothing waits.\n"
    assert main(["track", "replay", str(tmp_path)]) == 0
    assert "misbehaving: 4 entries are sent" in capsys.readouterr().out
    calls = taken(tmp_path / "taken")
    assert calls[0] == {"started": "t", "project": "project"}
    assert calls[1] == {"settings": {"learning_rate": 0.1, "api_key": "***"}}
    assert steps(tmp_path / "taken") == [0, 1, 2]
    assert not list((tmp_path / "spool").glob("*.jsonl"))
    assert main(["track", "replay", str(tmp_path / "nowhere")]) == 2
    assert main(["track", "replay"]) == 2


class Threads(GeneralTracker):
    """Says where it is called."""

    name = "threads"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[str, Any, int]] = []

    @property
    def tracker(self) -> Any:
        return self.called

    def start(self) -> None:
        self.called.append(("start", None, os.getpid()))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.called.append(("log", (values, step, kwargs), os.getpid()))


def test_a_tracker_object_gets_values_as_they_were_logged(tmp_path: Path) -> None:
    import numpy as np
    import torch

    mine = Threads()
    trackers = TrackerGroup(mine, "project", tmp_path, patience=PATIENT)
    total, array, nested = torch.tensor(1.0), np.ones(2), {"a": torch.tensor([1, 2])}
    values: dict[str, Any] = {"total": total, "array": array, "nested": nested, "text": "t", "nothing": None}
    trackers.log(values, step=3, kwargs={"threads": {"commit": True}})
    total += 1
    array += 1
    nested["a"] += 1
    values["total"] = 5.0
    trackers.finish()
    assert [call[0] for call in mine.called] == ["start", "log"]
    value, step, kwargs = mine.called[1][1]
    assert (step, kwargs, value["text"], value["nothing"]) == (3, {"commit": True}, "t", None)
    assert value["total"].item() == 1.0
    assert value["array"].tolist() == [1.0, 1.0]
    assert value["nested"]["a"].tolist() == [1, 2]


class Slow(GeneralTracker):
    """Takes a while for each value, and counts how often it got it."""

    name = "slow"
    requires_logging_directory = False
    took: ClassVar[list[int | None]] = []
    may_go_on: ClassVar[threading.Event] = threading.Event()
    refused: ClassVar[range] = range(0)

    def __init__(self, run_name: str = "") -> None:
        super().__init__()

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        """Do nothing."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if step in self.refused:
            raise ConnectionError("nobody is there")
        self.took.append(step)
        if step == 5:
            self.may_go_on.wait(30)


@pytest.mark.parametrize("is_spooled_first", [False, True])
def test_the_values_that_a_slow_tracker_accepted_are_not_sent_again(is_spooled_first: bool, tmp_path: Path) -> None:
    """It is cut in the sixth of twenty values; none comes after the one that was being accepted."""
    register_tracker_class(Slow)
    Slow.took, Slow.may_go_on, Slow.refused = [], threading.Event(), range(20 if is_spooled_first else 0)
    trackers = TrackerGroup("slow", "project", tmp_path, patience=replace(QUICK, finish=0.3))
    for step in range(20):
        trackers.log({"loss": 1.0}, step=step)
    if is_spooled_first:
        until((tmp_path / "spool" / "slow.jsonl").exists)
        Slow.refused = range(0)
    until(lambda: len(Slow.took) == 6)
    trackers.finish()
    kept = [json.loads(line)["step"] for line in read_spool(tmp_path / "spool" / "slow.jsonl")[1]]
    Slow.may_go_on.set()
    until(lambda: not any(thread.name == "tracker slow" for thread in threading.enumerate()))
    assert Slow.took == [0, 1, 2, 3, 4, 5]
    assert kept == list(range(5, 20))  # whether it accepts the sixth is unknown

    Slow.refused = range(12, 13)
    assert main(["track", "replay", str(tmp_path)]) == 1
    assert Slow.took[6:] == list(range(5, 12))
    Slow.refused = range(0)
    assert main(["track", "replay", str(tmp_path)]) == 0
    assert Slow.took[6:] == list(range(5, 20))


_SCRIPT = """
import sys, time
from tests.tracking.misbehaving import Misbehaving
from trainer_lib.tracking import TrackerGroup, register_tracker_class
register_tracker_class(Misbehaving)
class Second(Misbehaving):
    name = "second"
register_tracker_class(Second)
folder = sys.argv[1]
options = {"misbehaving": {"path": folder + "/one", "how": "hang in log", "apart": True},
           "second": {"path": folder + "/two", "how": "hang in log"}}
trackers = TrackerGroup(["misbehaving", "second"], "project", folder, options)
for step in range(100):
    trackers.log({"loss": 1.0}, step=step)
    time.sleep(0.01)
print(time.time(), flush=True)  # the last step; what follows is the exit of a program that forgot to end its trackers
"""


@pytest.mark.slow
@pytest.mark.launch
def test_a_program_with_trackers_that_hang_ends_in_ten_seconds(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert time.time() - float(ended.stdout) < 10.0
    assert ended.stderr.count("100 points are kept in") == 2
    assert [len(read_spool(file)[1]) for file in (tmp_path / "spool").glob("*.jsonl")] == [100, 100]


@pytest.mark.launch
def test_the_process_of_a_tracker_needs_no_torch() -> None:
    names = "mlflow comet wandb trackio clearml dvclive swanlab aim tensorboard jsonl_file"
    adapters = ", ".join(f"trainer_lib.tracking.adapters.{name}" for name in names.split())
    modules = f"trainer_lib.tracking.delivery.tracker_process, {adapters}"
    loaded_modules = "{'torch', 'numpy', 'mlflow', 'comet_ml', 'wandb', 'trackio', 'tensorboard'} & set(sys.modules)"
    script = f"import sys, {modules}; print({loaded_modules})"
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout == "set()\n"


@pytest.mark.slow
@pytest.mark.fault("`SIGKILL` for a run whose tracker hangs")
def test_the_process_of_a_tracker_that_hangs_ends_with_the_run(tmp_path: Path) -> None:
    def run(pids: Any) -> None:
        trackers = group(tmp_path, PATIENT, how="hang in log", apart=True)
        (handle,) = trackers.trackers
        trackers.log({"loss": 0.0}, step=0)
        until(lambda: taken(tmp_path / "taken") != [])
        delivery: Any = handle.delivery_worker.delivery
        pids.send(delivery._process.pid)
        threading.Event().wait()

    receiver, sender = get_context("fork").Pipe()
    process = get_context("fork").Process(target=run, args=(sender,))
    process.start()
    tracker = psutil.Process(receiver.recv())
    process.kill()
    process.join()
    _, alive = psutil.wait_procs([tracker], timeout=20)
    for survivor in alive:
        survivor.kill()
    assert not alive


@pytest.mark.fault("a kill between making a spool and writing its first line")
def test_values_that_a_full_disk_does_not_take_are_kept_in_memory_until_it_does(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool" / "a.jsonl", {"format": "trainer_lib.spool"})
    with files_limited_to(10):
        spool.add([Entry("log", {"loss": 1.0}, 1, 0.0, {})])
        assert list((tmp_path / "spool").iterdir()) == []
    spool.add([Entry("log", {"loss": 1.0}, 2, 0.0, {})])
    assert spool.path is not None
    with files_limited_to(spool.path.stat().st_size + 10):
        spool.add([Entry("log", {"loss": 1.0}, step, 0.0, {}) for step in (3, 4)])
        assert [json.loads(line)["step"] for line in read_spool(spool.path)[1]] == [1, 2]
    spool.close()
    assert [json.loads(line)["step"] for line in read_spool(spool.path)[1]] == [1, 2, 3, 4]
    assert (len(spool), spool.lost) == (4, 0)


@pytest.mark.filterwarnings("ignore:Exception in thread")  # of TensorBoard's writer
@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_a_disk_that_is_full_for_a_while_costs_no_values(tmp_path: Path, name: str) -> None:
    trackers = TrackerGroup(name, "project", tmp_path, patience=PATIENT)
    written = tmp_path / ("project.jsonl" if name == "jsonl" else "project")
    trackers.log({"loss": 1.0}, step=0)
    worker = trackers.trackers[0].delivery_worker
    worker.wait_for_start(30)
    until(lambda: not worker.last_error and 0 in _logged(written))
    size = written.stat().st_size if name == "jsonl" else next(written.glob("*tfevents*")).stat().st_size
    with files_limited_to(size + 20):
        for step in range(1, 50):
            trackers.log({"loss": 1.0}, step=step)
        until(lambda: bool(worker.last_error))
    trackers.finish()
    assert worker.missing == 0
    assert sorted(set(_logged(written))) == list(range(50))
    if name == "jsonl":
        assert _logged(written) == list(range(50))


def _logged(path: Path) -> list[int]:
    if path.suffix == ".jsonl":
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = (event for file in sorted(path.glob("*tfevents*")) for event in EventFileLoader(str(file)).Load())
    return [event.step for event in events if event.HasField("summary") and event.summary.value[0].tag == "loss"]


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_tracker_that_ends_its_program_is_one_that_fails(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = group(tmp_path, QUICK, how=f"exit in {where}")
    trackers.log({"loss": 1.0}, step=1)
    if where != "finish":
        until(lambda: "fails, and training continues" in caplog.text)
    trackers.finish()
    assert "SystemExit: not logged in" in caplog.text
    assert spooled(tmp_path) == ([] if where == "finish" else [1])


def test_an_empty_spool_file_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "spool" / "jsonl.jsonl"
    path.parent.mkdir()
    path.touch()
    spool = Spool(path, {"format": "trainer_lib.spool", "tracker": "jsonl", "project": "runs", "token": "same"})
    spool.add([Entry("log", {"loss": 1.0}, 3, 0.0, {})])
    assert spool.path is not None
    assert [json.loads(line)["step"] for line in read_spool(spool.path)[1]] == [3]
    assert [waiting.path for waiting in find(tmp_path)] == [spool.path]


@pytest.mark.parametrize(
    "content", [b'{"format": "trainer_li', bytes(99), b"\xff\xfe\n"], ids=["cut", "zeros", "bytes"]
)
def test_a_damaged_spool_file_costs_only_its_own_values(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "misbehaving.jsonl").write_bytes(content)
    trackers = group(tmp_path, PATIENT)
    trackers.log({"loss": 1.0}, step=1)
    trackers.finish()
    assert steps(tmp_path / "taken") == [1]
    assert (tmp_path / "spool" / "misbehaving.jsonl").read_bytes() == content


def test_texts_that_utf_8_lacks_are_spooled(tmp_path: Path) -> None:
    path, header = tmp_path / "spool.jsonl", {"format": "trainer_lib.spool", "token": "same"}
    spool = Spool(path, header)
    for step in (1, 2):  # the file is written, then added to
        spool.add([Entry("log", {"file": "caf\udce9.png"}, step, 0.0, {})])
    assert [entry.content for entry in Spool(path, header).first(2)] == [{"file": "caf\udce9.png"}] * 2


def test_lines_of_a_spool_survive_a_kill_and_line_separators(tmp_path: Path) -> None:
    path, header = tmp_path / "spool.jsonl", {"format": "trainer_lib.spool", "token": "same"}
    Spool(path, header).add([Entry("log", {"loss": 1.0, "text": "a\u2028b\x85c"}, step, 0.0, {}) for step in range(3)])
    assert [json.loads(line)["step"] for line in read_spool(path)[1]] == [0, 1, 2]
    path.write_bytes(path.read_bytes()[:-5])  # a kill while the last line was written
    Spool(path, header).add([Entry("log", {"loss": 1.0}, 7, 0.0, {})])
    assert [json.loads(line)["step"] for line in read_spool(path)[1]] == [0, 1, 7]
