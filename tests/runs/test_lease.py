"""Tests of the run lease, with real processes and real kills."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, trainer
from tests.worlds import run_world
from trainer_lib import RunInUseError
from trainer_lib.events import Modifier, Run
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.runs import run_lease as leases
from trainer_lib.runs.run_lease import Lease, is_leased

Holder = Callable[[Path], "subprocess.Popen[str]"]

HOLDS = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from trainer_lib.runs.run_lease import Lease

    Lease(Path(sys.argv[1])).acquire()
    print("held", flush=True)
    time.sleep(60)
""")

TRAINS = textwrap.dedent("""
    import sys, time
    from tests.trainer.tasks import arguments, trainer
    from trainer_lib.events import Callback

    class Waits(Callback):
        def on_step_end(self, run):
            if run.state.step == 5:
                run.accelerator.wait_for_save()
                print("held", flush=True)
                time.sleep(60)

    trainer(arguments(output_dir=sys.argv[1], save_every=2), callbacks=[Waits()]).fit()
""")


@pytest.fixture
def start() -> Iterator[Callable[[str, Path], "subprocess.Popen[str]"]]:
    """Return what starts a program that says when it holds a lease; it is killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(program: str, folder: Path) -> "subprocess.Popen[str]":
        process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert any(line == "held\n" for line in process.stdout)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def lease_files(folder: Path) -> list[str]:
    return [path.name for pattern in ("lease-*.json", "*/lease-*.json") for path in folder.glob(pattern)]


def test_a_living_program_keeps_its_lease_and_a_killed_one_loses_it_at_once(tmp_path: Path, start: Any) -> None:
    holder = start(HOLDS, tmp_path)
    assert is_leased(tmp_path)
    with pytest.raises(RunInUseError, match=rf"another program, process {holder.pid} on .*, trains it"):
        Lease(tmp_path).acquire()
    holder.send_signal(signal.SIGKILL)  # and not waited for: a zombie is dead, too
    began = time.monotonic()
    while Path(f"/proc/{holder.pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < began + 10
    began = time.monotonic()
    with Lease(tmp_path) as lease:
        lease.acquire()
        assert time.monotonic() < began + leases.STALE_AFTER / 2
        assert lease.loss() is None
        assert lease_files(tmp_path) == ["lease-00000002.json"]
    assert lease_files(tmp_path) == []
    assert not is_leased(tmp_path)


def test_a_clock_that_is_set_meanwhile_makes_no_living_program_look_dead(tmp_path: Path, start: Any) -> None:
    """Linux tells when the machine started by the clock of now, so it tells another time once the clock is set."""
    stat = Path("/proc/stat").read_text()
    set_back = tmp_path / "stat"
    set_back.write_text(re.sub(r"btime (\d+)", lambda match: f"btime {int(match[1]) - 3600}", stat))
    program = ["sh", "-c", 'mount --bind "$0" /proc/stat && exec "$@"', str(set_back), sys.executable, "-c"]
    asks = "import sys; from pathlib import Path; from trainer_lib.runs.run_lease import is_leased\n"
    asks += "print(is_leased(Path(sys.argv[1])))"
    start(HOLDS, tmp_path / "run")
    told = subprocess.run(
        ["unshare", "--mount", *program, asks, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    if "mount" in told.stderr or "unshare" in told.stderr:
        pytest.skip(f"nothing can be mounted here: {told.stderr.strip()}")
    assert (told.stdout, told.stderr) == ("True\n", "")


def test_a_program_that_was_killed_while_it_created_its_lease_leaves_no_file(tmp_path: Path) -> None:
    dies = "sys.addaudithook(lambda event, _: os.kill(os.getpid(), 9) if event == 'os.link' else None)"
    killed = subprocess.run([sys.executable, "-c", f"import os, sys; {dies}\n{HOLDS}", str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with Lease(tmp_path) as lease:
        lease.acquire()
        assert [path.name for path in tmp_path.iterdir()] == ["lease-00000001.json"]


@pytest.mark.slow
def test_a_second_program_that_resumes_a_run_is_refused_until_the_first_is_gone(tmp_path: Path, start: Any) -> None:
    first = start(TRAINS, tmp_path)
    (folder,) = tmp_path.iterdir()
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    for resume in ("auto", folder):
        with pytest.raises(RunInUseError, match=f"The run {folder} is in use"):
            trainer(arguments(output_dir=tmp_path, save_every=2, resume=resume)).fit()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before
    first.kill()
    first.wait()
    result = trainer(arguments(output_dir=tmp_path, save_every=2, resume="auto")).fit()
    assert (result.state.step, result.status) == (10, "finished")
    assert list(tmp_path.iterdir()) == [folder]
    assert lease_files(tmp_path) == []


@pytest.mark.slow
def test_two_ranks_are_refused_alike(tmp_path: Path, start: Any) -> None:
    with pytest.raises(InterruptedError):
        trainer(arguments(output_dir=tmp_path, save_every=2), callbacks=[Dies(5)]).fit()
    (folder,) = tmp_path.iterdir()
    start(HOLDS, folder)

    def body() -> str:
        try:
            trainer(arguments(output_dir=tmp_path, save_every=2, resume="auto")).fit()
        except RunInUseError as error:
            return str(error)
        return ""

    first, second = run_world(body, ())
    assert "is in use" in first
    assert second == f"fit failed on rank 0: {first}"


def _take(folder: Path, begin: Any, outcomes: Any) -> None:
    begin.wait()
    lease = Lease(folder)
    try:
        lease.acquire()
    except RunInUseError:
        outcomes.put(False)
    else:
        outcomes.put(True)
    time.sleep(60)


@pytest.mark.slow
def test_at_most_one_of_several_programs_takes_over_a_lease(tmp_path: Path) -> None:
    context = get_context("fork")
    dead = context.Process(target=os._exit, args=(0,))
    dead.start()
    dead.join()
    for trial in range(4):
        folder = tmp_path / str(trial)
        folder.mkdir()
        content = {**leases._this_process(), "pid": dead.pid, "token": "dead"}
        (folder / "lease-00000003.json").write_text(json.dumps(content))
        begin, outcomes = context.Event(), context.Queue()
        takers = [context.Process(target=_take, args=(folder, begin, outcomes)) for _ in range(4)]
        try:
            for taker in takers:
                taker.start()
            begin.set()
            won = [outcomes.get(timeout=30) for _ in takers]
            assert sum(won) <= 1
            assert len(lease_files(folder)) <= 1 + (not any(won))
        finally:
            for taker in takers:
                taker.kill()
                taker.join()


def elsewhere(folder: AnyPath) -> AnyPath:
    """Write the lease of a process on another machine, and return its file."""
    file = folder / "lease-00000001.json"
    if isinstance(folder, Path):
        folder.mkdir(exist_ok=True)
    file.write_text(json.dumps({"pid": 1, "host": "another", "boot": "?", "began": 0, "token": "other"}))
    return file


@pytest.fixture(params=["disk", pytest.param("memory", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    """Return the folder of a run, on a disk and in an object store."""
    return tmp_path / "run" if request.param == "disk" else path_at(f"memory://{tmp_path.name}/run")


def test_a_process_that_cannot_be_asked_is_followed_once_it_gives_no_sign_of_life(
    folder: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "STALE_AFTER", 1.0)
    elsewhere(folder)
    began = time.monotonic()
    with Lease(folder) as lease:
        lease.acquire()
        assert 0.5 < time.monotonic() - began < 60
        assert lease.is_held
        with pytest.raises(RunInUseError, match="is in use"):
            Lease(folder).acquire()
    assert list(folder.glob("*")) == []


def test_a_remote_process_with_a_heartbeat_keeps_its_lease(folder: AnyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "STALE_AFTER", 30.0)
    file = elsewhere(folder)
    beat = threading.Timer(0.5, lambda: file.write_bytes(file.read_bytes()))
    beat.start()
    with pytest.raises(RunInUseError, match="process 1 on another"):
        Lease(folder).acquire()
    beat.join()


def test_the_heartbeat_renews_the_lease(folder: AnyPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT", 0.05)
    with Lease(folder) as lease:
        lease.acquire()
        (file,) = folder.glob("lease-*.json")
        first = file.stat().st_mtime
        until = time.monotonic() + 10
        while file.stat().st_mtime == first:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert lease.loss() is None
    assert not any(thread.name.startswith("lease of") for thread in threading.enumerate())


class LosesLease(Modifier):
    """Has another program take the run over after a step, while this one seems dead."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 3:
            assert isinstance(run.folder, Path)
            (file,) = run.folder.glob("lease-*.json")
            file.unlink()
            (run.folder / "lease-00000002.json").write_text('{"token": "of another"}')
            (run.folder / "run.json").write_text("of another")


def test_a_program_that_lost_its_run_writes_nothing_more(tmp_path: Path) -> None:
    model_trainer = trainer(arguments(output_dir=tmp_path, save_every=2), callbacks=[LosesLease()])
    with pytest.raises(RunInUseError, match="was taken over by another program"):
        model_trainer.fit()
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint-00000002"]
    assert (folder / "run.json").read_text() == "of another"
    assert lease_files(folder) == ["lease-00000002.json"]


class LosesFolder(Modifier):
    """Has somebody delete all runs after a step."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 3 and run.is_main_process:
            assert isinstance(run.folder, Path)
            shutil.rmtree(run.folder.parent)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_folder_that_is_deleted_while_a_run_trains_is_created_again(
    processes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "runs"

    def body() -> None:
        args = arguments(output_dir=root, save_every=2, log_every=1, max_steps=5, save_in_background=False)
        assert trainer(args, callbacks=[LosesFolder()]).fit().state.status == "finished"

    if processes == 1:
        body()
        assert "was deleted while the run trains. It is created again." in caplog.text
    else:
        run_world(body, (), processes)
    (folder,) = root.iterdir()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "checkpoint-00000004",
        "checkpoint-00000005",
    ]
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "log"] == [3, 4, 5]
    assert lines[-1]["event"] == "ended"
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    assert lease_files(root) == []


@pytest.mark.parametrize("ends", ["finished", "failed"])
def test_the_lease_is_released_at_every_end(ends: str, tmp_path: Path) -> None:
    class Sees(Modifier):
        seen = 0

        def on_step_end(self, run: Run) -> None:
            assert isinstance(run.folder, Path)
            self.seen += len(lease_files(run.folder))

    sees = Sees()
    model_trainer = trainer(arguments(output_dir=tmp_path), callbacks=[sees, *([Dies(5)] if ends == "failed" else [])])
    try:
        model_trainer.fit()
    except InterruptedError:
        assert ends == "failed"
    assert sees.seen >= 5
    assert lease_files(tmp_path) == []
