"""A background save that hangs is named while training continues; nothing waits for it or ends because of it."""

import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.tasks import arguments, points, trainer
from trainer_lib import CheckpointError, PartialState
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.checkpointing.save.background import BackgroundSaves
from trainer_lib.checkpointing.save.writer import CheckpointWriter
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.foundation.errors import UnsavedError
from trainer_lib.launchers import run_forked
from trainer_lib.tensor_files.file_contents import Tensors
from trainer_lib.trainer.safety.save_watch import SaveWatch

TIMEOUT = 1.5
ENOUGH = 4000  # steps that no test makes


class Slow(Modifier):
    """Trains until rank 0 knows that the save hangs, asks for another one, and a few steps later for the end."""

    def __init__(self) -> None:
        self.hung_at: int | None = None

    def on_step_end(self, run: Run) -> None:
        time.sleep(0.02)
        if run.state.step == 3:
            run.control.save = True
        if not run.is_main_process:
            return
        if self.hung_at is None and run.accelerator.checkpoints.background.hang is not None:
            self.hung_at = run.state.step
            run.control.save = True
        if self.hung_at is not None and run.state.step >= self.hung_at + 6:
            run.control.stop = True


class Blocks(Callback):
    """Has a rank write into a pipe that nobody reads."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_fit_begin(self, run: Run) -> None:
        def plant(models: Any, weights: Any, folder: str) -> None:
            if run.state.step < 6 and run.accelerator.process_index == self._rank:
                os.mkfifo(Path(folder, self.file))

        run.accelerator.register_save_state_pre_hook(plant)

    @property
    def file(self) -> str:
        return "optimizer.safetensors" if self._rank == 0 else f"random_states_{self._rank}.safetensors"


def history(folder: Path) -> str:
    (file,) = folder.glob("*/history.jsonl")
    return file.read_text()


@pytest.mark.fault("a background save that hangs in a write while training continues")
@pytest.mark.parametrize(
    ("ranks", "hangs"), [pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(2, 0, marks=pytest.mark.slow), (2, 1)]
)
def test_training_goes_on_and_the_file_is_named(ranks: int, hangs: int, tmp_path: Path) -> None:
    def train() -> tuple[str, int, list[int]]:
        args = arguments(output_dir=tmp_path, max_steps=ENOUGH, save_every=ENOUGH, hang_timeout=TIMEOUT)
        model_trainer = trainer(args, callbacks=[Blocks(hangs), Slow()], train_dataset=points(80))
        with pytest.raises(UnsavedError) as caught:
            model_trainer.fit()
        return str(caught.value), model_trainer.state.step, [entry["step"] for entry in model_trainer.state.checkpoints]

    for error, step, checkpoints in run_forked(train, num_processes=ranks, timeout=60):
        assert 6 <= step < ENOUGH
        assert checkpoints == []
        assert re.search(r"checkpoint-0000000[34] hangs: for ", error)
        assert f"(hang_timeout={TIMEOUT:g}) it has made no progress" in error
        writes = (
            rf"The thread 'save of checkpoint-0000000[34]' writes \S+\.partial/{Blocks(hangs).file} and is in \S+ \("
        )
        assert re.search(writes, error)
        assert "ChecksummedFile.__init__ (checksums.py:" in error
    assert '"not_saved"' in history(tmp_path)


@pytest.mark.slow
@pytest.mark.fault('a save in the background that hangs, with on_save_error="raise"')
def test_a_run_may_end_for_it(tmp_path: Path) -> None:
    def train() -> str:
        args = arguments(
            output_dir=tmp_path, max_steps=ENOUGH, save_every=ENOUGH, hang_timeout=TIMEOUT, on_save_error="raise"
        )
        model_trainer = trainer(args, callbacks=[Blocks(0), Slow()], train_dataset=points(80))
        with pytest.raises(CheckpointError) as caught:
            model_trainer.fit()
        return str(caught.value)

    (error,) = run_forked(train, num_processes=1, timeout=60)
    assert "checkpoint-00000003 hangs: for " in error


@pytest.mark.slow
@pytest.mark.fault("a save in the background that hangs for a while")
def test_one_that_moves_again_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    is_open, write = threading.Event(), CheckpointWriter.write

    def wait(saving: CheckpointWriter, *files: Any) -> None:
        assert is_open.wait(30)
        write(saving, *files)

    monkeypatch.setattr(CheckpointWriter, "write", wait)

    begun: list[int] = []

    class Returns(Slow):
        def on_save_begin(self, run: Run, folder: Any) -> None:
            begun.append(run.state.step)

        def on_step_begin(self, run: Run) -> None:
            if self.hung_at is not None and run.state.step == self.hung_at + 2:
                is_open.set()

    args = arguments(output_dir=tmp_path, max_steps=ENOUGH, save_every=ENOUGH, hang_timeout=TIMEOUT)
    returns = Returns()
    model_trainer = trainer(args, callbacks=[returns], train_dataset=points(80))
    assert model_trainer.fit().status == "stopped"
    assert returns.hung_at is not None
    steps = [entry["step"] for entry in model_trainer.state.checkpoints]
    assert steps == begun == [3, model_trainer.state.step]
    assert [read_manifest(Path(entry["path"])).step for entry in model_trainer.state.checkpoints] == steps
    messages = [line for line in caplog.messages if "Until it ends, no other checkpoint is saved." in line]
    assert len(messages) == 1
    assert "Training continues" in "".join(caplog.messages)


def test_a_save_that_moves_again_is_waited_for(tmp_path: Path) -> None:
    first, moved, second = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        first.wait(30)
        moved.set()
        second.wait(30)

    saves = BackgroundSaves()
    saves.start(tmp_path / "state", work)
    watch = SaveWatch(saves, 1.0)
    watch.look(0.0)
    watch.look(2.0)
    assert saves.hang is not None
    saves.wait_until_released()
    first.set()
    assert moved.wait(30)
    watch.look(3.0)
    assert saves.hang is None
    waits = threading.Thread(target=saves.wait_until_released)
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    second.set()
    saves.wait()
    waits.join(30)
    assert not waits.is_alive()


def test_all_ranks_do_the_same_about_a_save_that_ends_as_it_is_said_to_hang(tmp_path: Path) -> None:
    class Marks(Modifier):
        def on_step_end(self, run: Run) -> None:
            if run.state.step in (3, 6) and run.is_main_process:
                run.control.save = True
            if run.state.step == 6 and not run.is_main_process:
                run.accelerator.checkpoints.background.report_hang("It hangs.")
                threading.Timer(0.5, is_open.set).start()
            if run.state.step == 9:  # by the end of the run, the save has ended
                while run.accelerator.checkpoints.background.is_running:
                    time.sleep(0.01)

    is_open, write = threading.Event(), CheckpointWriter.write

    def wait(self: CheckpointWriter, files: Any) -> None:
        assert PartialState().is_main_process or is_open.wait(30)
        write(self, files)

    def train() -> list[int]:
        CheckpointWriter.write = wait
        args = arguments(output_dir=tmp_path, max_steps=12, save_every=ENOUGH, hang_timeout=None)
        model_trainer = trainer(args, callbacks=[Marks()], train_dataset=points(80))
        model_trainer.fit()
        return [entry["step"] for entry in model_trainer.state.checkpoints]

    assert run_forked(train, num_processes=2, timeout=60) == [[4, 12], [4, 12]]


@pytest.mark.slow
@pytest.mark.fault("an upload in the background that hangs for a while")
def test_an_upload_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_open, write = threading.Event(), Tensors.write

    def wait(content: Tensors, path: Any) -> str:
        assert is_open.wait(30)
        return write(content, path)

    monkeypatch.setattr(Tensors, "write", wait)

    class Watches(Modifier):
        def on_step_end(self, run: Run) -> None:
            time.sleep(0.02)
            run.control.save = run.state.step == 3
            if any("hangs: for" in line for line in caplog.messages):
                is_open.set()
                run.control.stop = True

    folder = f"memory://{tmp_path.name}"
    args = arguments(output_dir=folder, max_steps=ENOUGH, save_every=ENOUGH, hang_timeout=TIMEOUT)
    model_trainer = trainer(args, callbacks=[Watches()], train_dataset=points(80))
    assert model_trainer.fit().status == "stopped"
    assert [entry["step"] for entry in model_trainer.state.checkpoints] == [3, model_trainer.state.step]
    (message,) = [line for line in caplog.messages if "hangs: for" in line]
    assert re.search(rf"The thread 'upload_\d' writes {folder}/\S+/checkpoint-00000003/\S+ and is in ", message)
    assert message.endswith("The next save waits for it.")
