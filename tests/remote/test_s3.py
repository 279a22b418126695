"""Checkpoints and runs behind `s3://`, against a server: complete or absent, whatever fails."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpointing.test_sharded import SHARDED, assert_same, engine
from tests.checkpointing.test_sharded import run as run_sharded
from tests.faults.trainings import train, trained
from tests.launched import PYTHON_PATH
from tests.remote.conftest import made
from tests.remote.peer import Line
from tests.trainer.checkpoints.test_resume import run
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import forget_world
from trainer_lib import CheckpointError, RunInUseError, Trainer
from trainer_lib.checkpointing.load.find import open_state, verify_state
from trainer_lib.commands.main import main
from trainer_lib.events import Callback, Run
from trainer_lib.filesystem.remote_paths import RemotePath, path_at
from trainer_lib.foundation.errors import UnwritableError
from trainer_lib.launchers import run_forked
from trainer_lib.runs.run_lease import Lease

pytestmark = [
    pytest.mark.server,
    # aiohttp's, of a download that is cut.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <function Connection.__del__:pytest.PytestUnraisableExceptionWarning"
    ),
]

LARGE = 2 << 20  # so many numbers that a save is cut in the middle of them


def files(url: str) -> list[str]:
    """Return the names of all files behind a URL."""
    folder = path_at(url)
    assert isinstance(folder, RemotePath)
    return sorted(folder.sizes())


def flip(url: str) -> None:
    """Flip a bit in the middle of a file."""
    path = path_at(url)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def weights(model: Any) -> list[Any]:
    return [parameter.detach().tolist() for parameter in model.parameters()]


@pytest.mark.slow
def test_states_are_saved_replaced_damaged_and_loaded(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model, optimizer = trained(bucket + "/project", total_limit=2)  # type: ignore[arg-type]
    for _ in range(3):
        train(accelerator, model, optimizer, 1)
        accelerator.save_state(background=True)
    accelerator.wait_for_save()
    saved = weights(model)
    names = {name.split("/")[1] for name in files(f"{bucket}/project")}
    assert names == {"checkpoint_1", "checkpoint_2"}
    train(accelerator, model, optimizer, 1)
    # A state of the same name takes the place of the one before, and files of other people stay.
    path_at(f"{bucket}/project/checkpoints/checkpoint_2/notes.txt").write_text("mine")
    accelerator.save_state(f"{bucket}/project/checkpoints/checkpoint_2")
    left = files(f"{bucket}/project/checkpoints")
    assert "checkpoint_2/notes.txt" in left
    assert not any("replaced" in name or "partial" in name for name in left)
    newest = weights(model)
    assert newest != saved
    train(accelerator, model, optimizer, 1)
    accelerator.load_state()
    assert weights(model) == newest
    flip(f"{bucket}/project/checkpoints/checkpoint_2/model.safetensors")
    assert main(["checkpoint", "verify", f"{bucket}/project"]) == 1
    assert main(["checkpoint", "verify", f"{bucket}/project/checkpoints/checkpoint_1"]) == 0
    with pytest.raises(CheckpointError, match=r"s3://.*checkpoint_2 is damaged: model.safetensors has the checksum"):
        accelerator.load_state(f"{bucket}/project/checkpoints/checkpoint_2")
    accelerator.load_state("latest")
    assert "It is now called checkpoint_2.damaged. Loading s3://" in caplog.text
    assert "checkpoint_2.damaged/manifest.json" in files(f"{bucket}/project/checkpoints")
    assert "secret-of-a-test" not in caplog.text


@pytest.mark.slow
def test_two_ranks_save_and_one_resumes(bucket: str) -> None:
    def both() -> Any:
        accelerator, model, _ = trained(f"{bucket}/two", updates=2)  # type: ignore[arg-type]
        accelerator.save_state(background=True)
        accelerator.wait_for_save()
        return weights(model)

    def loaded() -> Any:
        accelerator, model, _ = trained(f"{bucket}/two", updates=0)  # type: ignore[arg-type]
        accelerator.load_state()
        return weights(model)

    first, second = run_forked(both, timeout=60)
    assert first == second
    assert run_forked(loaded, timeout=60) == [first, first]
    assert open_state(path_at(f"{bucket}/two/checkpoints/checkpoint_0")).world_size == 2
    assert loaded() == first


@pytest.mark.slow
def test_a_misspelt_bucket_is_not_created(bucket: str) -> None:
    for write in (
        lambda path: path.write_bytes(b"a"),
        lambda path: path.create(b"a"),
        lambda path: path.put(Path(__file__)),
    ):
        with pytest.raises(FileNotFoundError):
            write(path_at(f"{bucket}-misspelt/folder/file"))
    assert not path_at(f"{bucket}-misspelt").exists()


def test_shards(bucket: str) -> None:
    state: Any = f"{bucket}/shards/state"
    runs = run_forked(lambda: run_sharded(engine(SHARDED), 3, {2: state}), timeout=60)
    again = run_forked(lambda: run_sharded(engine(SHARDED), 3, load=state), timeout=60)
    for first, second in zip(again, runs, strict=True):
        assert_same(first, second)
    assert sum("model.shards/" in name for name in files(state)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_resumes_from_s3_on_an_empty_disk(processes: int, bucket: str, tmp_path: Path) -> None:
    def train(folder: Any, dies_at: int | None = None, resume: str = "never") -> list[Any]:
        def each() -> Any:
            return run(folder, {"num_train_epochs": 1, "save_every": 3}, points(100), dies_at, resume=resume)

        return run_forked(each, num_processes=processes, timeout=60)

    whole, *_ = train(tmp_path / "whole")
    parts = f"{bucket}/parts"
    assert train(parts, 5) == [None] * processes
    (name,) = {name.split("/")[0] for name in files(parts)}
    torn = path_at(f"{parts}/{name}/checkpoints/checkpoint-00000099")
    (torn / "partial.json").write_text('["model.safetensors"]')
    (torn / "model.safetensors").write_text("of a save that was killed")
    assert train(parts, resume="auto") == [whole] * processes
    assert not any("checkpoint-00000099" in name for name in files(parts))
    history = path_at(f"{parts}/{name}/history.jsonl").read_text()
    assert history.count('"resumed"') == 1
    assert history.count('"event": "log", "step": 4,') == 1
    assert '"finished"' in path_at(f"{parts}/{name}/run.json").read_text()
    model = network(dropout=0.3)
    Trainer.from_checkpoint(f"{parts}/{name}", model)
    assert weights(model) == whole[3]


def large() -> torch.nn.Module:
    model = network()
    model.register_buffer("ballast", torch.rand(LARGE))
    return model


class Cuts(Callback):
    """Has the line cut in the save after step 4, and mended after that."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 4:
            self._line.cut_after(3 << 20)
        elif self._line.is_cut.is_set():
            self._line.mend()


@pytest.mark.slow
def test_a_save_that_is_cut_fails_alone(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    bucket = made()
    model_trainer = trainer(
        arguments(output_dir=f"{bucket}/runs", max_steps=7, save_every=2, save_in_background=False, keep_last=None),
        model=large(),
        callbacks=[Cuts(line)],
    )
    result = model_trainer.fit()
    assert result.status == "finished"
    assert [step["step"] for step in result.state.checkpoints] == [2, 6, 7]
    (message,) = [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]
    assert re.search(
        rf"{bucket}/runs/.*checkpoint-00000004/.* could not be written: it cannot be reached, after 3 attempts: ",
        message,
    )
    assert not any("checkpoint-00000004" in name or "partial" in name for name in files(f"{bucket}/runs"))


@pytest.mark.slow
def test_a_load_that_is_cut_damages_nothing(line: Line) -> None:
    state = f"{made()}/state"
    accelerator, model, optimizer = trained(state, updates=1)  # type: ignore[arg-type]
    big = accelerator.prepare(large())
    accelerator.save_state()
    saved, before = weights(big), files(state)
    train(accelerator, model, optimizer, 1)
    line.cut_after(3 << 20, "down")
    with pytest.raises(CheckpointError, match=rf"{state}/.* cannot be reached, after 3 attempts"):
        accelerator.load_state()
    line.mend()
    assert files(state) == before
    accelerator.load_state()
    assert weights(big) == saved


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save(line: Line) -> None:
    project = f"{made()}/project"

    def saves() -> None:
        forget_world()
        accelerator, _, _ = trained(project, updates=1)  # type: ignore[arg-type]
        accelerator.prepare(large())
        accelerator.save_state()
        is_saved.set()
        assert is_ready.wait(60)
        accelerator.save_state()

    context = torch.multiprocessing.get_context("fork")
    is_saved, is_ready = context.Event(), context.Event()
    process = context.Process(target=saves)
    process.start()
    assert is_saved.wait(60)
    line.cut_after(3 << 20, stalls=True)
    is_ready.set()
    assert line.has_stalled.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    line.mend()
    assert "checkpoints/checkpoint_1/partial.json" in files(project)
    accelerator, _, _ = trained(project, updates=0)  # type: ignore[arg-type]
    accelerator.prepare(large())
    accelerator.load_state()
    accelerator.save_state()
    for number in range(2):
        verify_state(path_at(f"{project}/checkpoints/checkpoint_{number}"))
    assert not any("partial.json" in name for name in files(project))


@pytest.mark.slow
def test_a_save_in_the_place_of_another_that_is_cut(line: Line) -> None:
    state = f"{made()}/state"
    accelerator, model, optimizer = trained("unused", updates=1)  # type: ignore[arg-type]
    accelerator.prepare(large())
    accelerator.save_state(state)
    saved = weights(model)
    train(accelerator, model, optimizer, 1)
    newer = weights(model)
    line.cut_after(3 << 20)
    with pytest.raises(UnwritableError, match=f"{state}/model_1.safetensors could not be written"):
        accelerator.save_state(state)
    line.mend()
    accelerator.load_state(state)
    assert weights(model) == saved
    train(accelerator, model, optimizer, 1)
    assert weights(model) == newer
    accelerator.save_state(state)
    assert not any("replaced" in name or "partial" in name for name in files(state.rpartition("/")[0] + "/"))
    accelerator.load_state(state)
    assert weights(model) == newer


@pytest.mark.slow
def test_a_line_that_is_cut_for_a_moment(line: Line) -> None:
    state = f"{made()}/state"
    accelerator, model, optimizer = trained("unused", updates=1)  # type: ignore[arg-type]
    accelerator.prepare(large())
    line.cut_after(3 << 20, once=True)
    accelerator.save_state(state)
    saved = weights(model)
    train(accelerator, model, optimizer, 1)
    line.cut_after(3 << 20, "down", once=True)
    accelerator.load_state(state)
    assert weights(model) == saved


ENDS = """
import sys
import torch
from trainer_lib import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(4, 2))
accelerator.save_state(sys.argv[1], background=True)
"""


@pytest.mark.slow
@pytest.mark.launch
def test_a_process_that_ends_waits(bucket: str, port: int) -> None:
    # By a name: looking it up takes a pool of threads, which Python ends early.
    variables = {"AWS_ENDPOINT_URL": f"http://localhost:{port}", "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-c", ENDS, f"{bucket}/state"]
    subprocess.run(command, check=True, env={**os.environ, **variables}, timeout=60)
    verify_state(path_at(f"{bucket}/state"))


@pytest.mark.slow
def test_logs_tell_no_keys(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "trainer_lib")
    trainer(arguments(output_dir=f"{bucket}/runs", max_steps=2)).fit()
    for name in files(f"{bucket}/runs"):
        assert b"secret-of-a-test" not in (path_at(f"{bucket}/runs") / name).read_bytes()
    assert "secret-of-a-test" not in caplog.text


@pytest.mark.slow
def test_of_programs_that_lease_a_run_at_the_same_time_one_wins(bucket: str) -> None:
    def take() -> str:
        time.sleep(1.0 - time.time() % 1.0)  # both at the same moment
        lease = Lease(path_at(f"{bucket}/run"))
        try:
            lease.acquire()
        except RunInUseError as error:
            return str(error)
        time.sleep(2.0)
        lease.release()
        return "held"

    (message,) = {text for text in run_forked(take, num_processes=3, timeout=60) if text != "held"}
    assert f"The run {bucket}/run is in use" in message
    assert files(bucket) == []
