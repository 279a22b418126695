"""Full, failing, read-only and forbidden disks: the error names the cause, and no checkpoint is lost."""

import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.faults.conftest import SmallDisk
from tests.faults.injuries import failing_disk, full_disk, unlimited
from tests.faults.ledger import Ledger
from tests.faults.trainings import Dies, digest, one_run, sharded, state_of, train, trained, warned
from tests.launched import PYTHON_PATH
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator, CheckpointError, ConfigurationError, UnsavedError, load_checkpoint_in_model
from trainer_lib.callbacks import CsvLog, Provenance
from trainer_lib.checkpointing.load.find import verify_state
from trainer_lib.collectives.agreement import raise_on_all_ranks
from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import UnwritableError
from trainer_lib.processes.exit_codes import exit_code_of
from trainer_lib.utils import load

# -- an engine -------------------------------------------------------------------------------------------------------


def saves_on_a_full_disk(make: Any, disk: SmallDisk, background: bool) -> tuple[str, bool, list[str]]:
    """Save, have the disk filled up, save again; return what was told, if all was as before, and what is there."""
    accelerator, model, optimizer = make(disk.folder)
    accelerator.save_state()
    saved = digest(accelerator)
    train(accelerator, model, optimizer)
    if accelerator.is_main_process:
        disk.fill(leave=3000)
    accelerator.wait_for_everyone()

    def save() -> None:
        accelerator.save_state(background=background)
        accelerator.wait_for_save()

    with pytest.raises(UnwritableError) as error:
        save()
    accelerator.wait_for_everyone()
    left = sorted(path.name for path in (disk.folder / "checkpoints").iterdir())
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        disk.empty()
    accelerator.wait_for_everyone()
    train(accelerator, model, optimizer)  # training continues
    verify_state(Path(accelerator.save_state()))
    accelerator.load_state(disk.folder / "checkpoints" / "checkpoint_0")
    return str(error.value), digest(accelerator) == saved, left


@pytest.mark.parametrize(
    ("make", "processes", "background"),
    [
        pytest.param(trained, 1, False, id="one-False"),
        pytest.param(trained, 1, True, id="one-True", marks=pytest.mark.slow),
        pytest.param(trained, 2, False, id="two-False", marks=pytest.mark.slow),
        pytest.param(trained, 2, True, id="two-True"),
        pytest.param(sharded, 2, False, id="shards-False", marks=pytest.mark.slow),
        pytest.param(sharded, 2, True, id="shards-True", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_takes_nothing_from_the_state_before(
    make: Any, processes: int, background: bool, small_disk: SmallDisk, ledger: Ledger
) -> None:
    runs = run_world(saves_on_a_full_disk, (make, small_disk, background), processes, timeout=60)
    for message, is_as_before, left in runs:
        assert re.search(r"checkpoint_1\.partial/\S+ could not be written: No space left on device", message), message
        assert re.search(r"This rank's files need about \S+ KB; \S+ \w+ are free there", message), message
        assert is_as_before
        assert left == ["checkpoint_0"]
    ledger.note("disks", "a file system that is full", injected=1, told=1, whole=1, went_on=1)


ALL = -1  # ranks


def said_on_failure(project: Path, spoil: Callable[[Path], None], rank: int) -> tuple[str, list[float], list[float]]:
    """Save, have saving fail on one process, and return what each process was told, and what it loads then."""
    accelerator, model, optimizer = trained(project)
    accelerator.save_state(project / "state")
    before = state_of(accelerator)
    train(accelerator, model, optimizer)
    fsync = os.fsync
    if rank in (accelerator.process_index, ALL):
        spoil(project)
    with pytest.raises(UnwritableError) as error:
        accelerator.save_state(project / "state")
    unlimited()
    os.fsync = fsync
    train(accelerator, model, optimizer)  # training continues
    accelerator.save_state(project / "next")
    accelerator.load_state(project / "state")
    return str(error.value), before, state_of(accelerator)


@pytest.mark.parametrize("rank", [0, 1, ALL])
@pytest.mark.parametrize(
    ("kind", "spoil", "reason"),
    [
        (
            "a limit on the size of files, on one of two processes",
            full_disk,
            r"(model|random_states)\S* could not be written: File too large. This rank's files need",
        ),
        ("a disk that fails, on one of two processes", failing_disk, r"could not be written: Input/output error"),
    ],
)
def test_a_full_or_failing_disk_on_one_rank_raises_on_all_ranks(
    kind: str, spoil: Callable[[Path], None], reason: str, rank: int, tmp_path: Path, ledger: Ledger
) -> None:
    # The limit must not hit the store of the world as well, on one rank alone.
    store = str(tmp_path.with_name("store")) if rank == ALL else ""
    runs = run_world(said_on_failure, (tmp_path, spoil, rank), timeout=60, TRAINER_LIB_STORE_FILE=store)
    for process, (message, before, after) in enumerate(runs):
        assert re.search(reason, message), message
        assert ("save_state failed on rank" in message) == (rank not in (process, ALL))
        assert "are free there. Earlier checkpoints are unchanged." in message
        assert before == after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next", "state"]
    verify_state(tmp_path / "next")
    if rank != ALL:
        ledger.note("disks", kind, injected=1, told=1, whole=1, went_on=1)


def test_what_is_not_only_the_disks_fault_is_laid_to_it_by_no_process(tmp_path: Path) -> None:
    def body() -> str:
        group = trained(tmp_path, updates=0)[0].group
        with pytest.raises(CheckpointError) as error, raise_on_all_ranks(group, "save_state", CheckpointError):
            raise (UnwritableError, CheckpointError)[group.rank]("no")
        return type(error.value).__name__

    assert run_world(body, (), 2, timeout=60) == ["CheckpointError", "CheckpointError"]


def test_pickled_weights_fail_as_clearly(tmp_path: Path) -> None:
    def body() -> str:
        accelerator, *_ = trained(tmp_path)
        full_disk(tmp_path)
        with pytest.raises(CheckpointError) as error:
            accelerator.save_state(tmp_path / "state", safe_serialization=False)
        unlimited()
        return str(error.value)

    (message,) = run_world(body, num_processes=1, timeout=60)
    assert "pytorch_model.bin could not be written: File too large" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("leave", [0, 9000, 40000])  # the error comes from another part of torch's writer
def test_weights_and_objects_that_do_not_fit_leave_the_earlier_ones(small_disk: SmallDisk, leave: int) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(100, 100)
    weights, file = small_disk.folder / "weights", small_disk.folder / "object"
    accelerator.save_model(model, weights, safe_serialization=False)
    accelerator.save(1, file)
    small_disk.fill(leave)
    with pytest.raises(CheckpointError, match=f"{weights}: the weights .* could not be written: .*No space left"):
        accelerator.save_model(nn.Linear(100, 100), weights, safe_serialization=False)
    for safe in (True, False):
        with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
            accelerator.save(model.state_dict(), file, safe_serialization=safe)
    loaded = nn.Linear(100, 100)
    load_checkpoint_in_model(loaded, weights, strict=True)
    assert torch.equal(loaded.weight, model.weight)
    assert load(file) == 1
    small_disk.empty()
    assert sorted(path.name for path in small_disk.folder.iterdir()) == ["object", "weights"]


class Widened(nn.Module):
    """Repeats a number, the more often the larger it is."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Repeat the numbers of a batch, which are all equal."""
        return inputs.repeat(1, 100 + int(inputs[0, 0]))


@pytest.mark.parametrize(
    "rows", [7000, 9600]
)  # a disk that is full when the parts are joined, and while they are written
def test_predictions_that_do_not_fit_are_an_error_and_leave_nothing(small_disk: SmallDisk, rows: int) -> None:
    def body() -> str:
        inputs = torch.arange(2.0).repeat_interleave(rows // 2)[:, None]
        model_trainer = trainer(arguments(per_device_eval_batch_size=100), model=Widened(), train_dataset=None)
        with pytest.raises(UnwritableError) as error:
            model_trainer.predict((inputs,), to=small_disk.folder / "predictions")
        return str(error.value)

    (message,) = run_world(body, (), 1, timeout=60)
    assert "predictions: the predictions could not be written: No space left on device." in message
    assert list(small_disk.folder.iterdir()) == []


def test_a_read_only_disk_raises_on_save_and_still_loads(small_disk: SmallDisk, ledger: Ledger) -> None:
    def body() -> tuple[str, bool]:
        accelerator, model, optimizer = trained(small_disk.folder)
        folder = accelerator.save_state()
        saved = digest(accelerator)
        train(accelerator, model, optimizer)
        small_disk.make_read_only()
        with pytest.raises(UnwritableError) as error:
            accelerator.save_state()
        accelerator.load_state(folder)
        return str(error.value), digest(accelerator) == saved

    ((message, is_as_before),) = run_world(body, (), 1, timeout=60)
    assert re.search(r"checkpoint_1.partial could not be written: Read-only file system", message)
    assert is_as_before
    ledger.note("disks", "a file system that became read-only", injected=1, told=1, whole=1)


@pytest.fixture
def of_another(tmp_path: Path) -> Iterator[Path]:
    """Return a folder that belongs to another user, where the way to it is open to all."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


_NOBODY = 65534


def test_a_folder_without_permission_raises_and_is_unchanged(of_another: Path, ledger: Ledger) -> None:
    def body() -> tuple[list[str], bool]:
        accelerator, *_ = trained(of_another)
        saved = digest(accelerator)
        accelerator.save_state()
        accelerator.save_state(of_another / "open")
        (of_another / "checkpoints").chmod(0o700)
        (of_another / "open" / "model.safetensors").chmod(0o600)
        messages: list[str] = []
        os.seteuid(_NOBODY)
        try:
            for doing in (
                accelerator.save_state,
                lambda: accelerator.save_state(of_another / "mine"),
                lambda: accelerator.load_state(of_another / "checkpoints" / "checkpoint_0"),
                accelerator.load_state,
                lambda: accelerator.load_state(of_another / "open"),
                lambda: one_run(of_another / "checkpoints"),
            ):
                with pytest.raises((CheckpointError, ConfigurationError)) as error:
                    doing()
                messages.append(str(error.value))
        finally:
            os.seteuid(0)
        return messages, digest(accelerator) == saved

    ((messages, is_as_before),) = run_world(body, (), 1, timeout=60)
    for message in messages:
        assert "Permission denied" in message
        assert str(of_another) in message
    assert is_as_before
    verify_state(of_another / "checkpoints" / "checkpoint_0")
    verify_state(of_another / "open")
    ledger.note(
        "disks", "a folder without write permission", injected=len(messages), told=len(messages), whole=len(messages)
    )


@contextlib.contextmanager
def as_nobody() -> Generator[None]:
    """Return the block in which this process has the rights of no user."""
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_checkpoint_that_may_not_be_read_stops_only_its_own_run(of_another: Path) -> None:
    """It is named, and is not taken for damaged; a new run beside it begins."""
    runs = of_another / "runs"
    one_run(runs)
    (run,) = runs.iterdir()
    newest = run / "checkpoints" / "checkpoint-00000010"
    newest.chmod(0o700)
    for path in (runs, run, run / "checkpoints"):
        path.chmod(0o777)
    reason = r"checkpoint-00000010/manifest.json cannot be read: Permission denied"
    with as_nobody():
        with pytest.raises(CheckpointError, match=reason):
            one_run(runs, resume=str(run))
        one_run(runs)
    verify_state(newest)
    assert sorted(path.name for path in newest.parent.iterdir()) == [f"checkpoint-{step:08d}" for step in (6, 8, 10)]
    assert len(list(runs.iterdir())) == 2


def test_a_run_resumes_in_a_folder_that_it_may_not_write_to(of_another: Path) -> None:
    runs, whole = of_another / "runs", one_run(of_another / "whole")
    one_run(runs, 5)
    (run,) = runs.iterdir()
    for path in (runs, run / "checkpoints"):
        path.chmod(0o777)
    with warned() as warnings, as_nobody():
        assert one_run(runs, resume="auto") == whole
    for text in ("could not be leased", "history.jsonl cannot be written", "How the run ended could not be written"):
        assert sum(text in line for line in warnings) == 1, warnings
    verify_state(run / "checkpoints" / "checkpoint-00000010")


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/sys").is_dir(), reason="root may write anywhere")
def test_a_path_that_cannot_be_written_to_raises(tmp_path: Path) -> None:
    accelerator, *_ = trained(tmp_path)
    read_only = Path("/proc/sys") if os.geteuid() == 0 else tmp_path
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"state.partial could not be written: \w"):
        accelerator.save_state(read_only / "state")


# -- a run -----------------------------------------------------------------------------------------------------------


class FullDisk(Modifier):
    """Fills the disk before a save, and makes room after it.

    Args:
        save: The step of the save.
        rank: The process that does.
        fill: Fills the disk.
        empty: Makes room.
    """

    def __init__(
        self,
        save: int,
        rank: int,
        fill: Callable[[Path], None] = full_disk,
        empty: Callable[[], None] = unlimited,
    ) -> None:
        self._save, self._rank, self._fill, self._empty = save, rank, fill, empty

    def on_save_begin(self, run: Run, folder: Path) -> None:
        if run.accelerator.process_index == self._rank:
            if run.state.step == self._save:
                self._fill(folder)
            else:
                self._empty()
        run.accelerator.wait_for_everyone()

    def on_fit_end(self, run: Run) -> None:
        self._empty()


def continued(folder: Path, in_background: bool, disk: FullDisk) -> tuple[list[int], list[str]]:
    """Train on a disk that is full for a while; return the steps that were saved, and what was warned of."""
    args = arguments(output_dir=folder, save_every=2, max_steps=8, save_in_background=in_background)
    model_trainer = trainer(args, train_dataset=points(64), callbacks=[disk])
    with warned() as warnings:
        model_trainer.fit()
    return [entry["step"] for entry in model_trainer.state.checkpoints], warnings


def assert_went_on(runs: list[tuple[list[int], list[str]]], output: Path, reason: str) -> None:
    for process, (steps, warnings) in enumerate(runs):
        assert steps == [2, 6, 8]
        messages = [line for line in warnings if "Training continues" in line]
        assert len(messages) == (process == 0), warnings
        assert all("could not be written" in line and reason in line for line in messages)
    (folder,) = output.glob("*/checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == [f"checkpoint-0000000{step}" for step in (2, 6, 8)]
    for path in folder.iterdir():
        verify_state(path)


@pytest.mark.parametrize(
    ("rank", "in_background"),
    [
        (1, True),
        (0, False),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_when_one_rank_cannot_write(
    in_background: bool, rank: int, tmp_path: Path, ledger: Ledger
) -> None:
    runs = run_world(continued, (tmp_path, in_background, FullDisk(4, rank)), 2, timeout=60)
    assert_went_on(runs, tmp_path, "File too large")
    ledger.note("disks", "a Trainer, and a limit on one of two processes", injected=1, told=1, whole=1, went_on=1)


@pytest.mark.parametrize("in_background", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_continues_when_the_disk_is_full(in_background: bool, small_disk: SmallDisk, ledger: Ledger) -> None:
    output = small_disk.folder / "runs"
    disk = FullDisk(4, 0, lambda folder: small_disk.fill(leave=3000), small_disk.empty)
    runs = run_world(continued, (output, in_background, disk), 2, timeout=60)
    assert_went_on(runs, output, "No space left on device")
    ledger.note("disks", "a Trainer, and a file system that is full", injected=1, told=1, whole=1, went_on=1)


@pytest.mark.parametrize("in_background", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_full_disk_ends_a_run_that_says_so(in_background: bool, small_disk: SmallDisk, ledger: Ledger) -> None:
    output = small_disk.folder / "runs"

    def body() -> int:
        options: dict[str, Any] = {"on_save_error": "raise", "save_in_background": in_background}
        args = arguments(output_dir=output, save_every=2, max_steps=8, **options)
        disk = FullDisk(4, 0, lambda folder: small_disk.fill(leave=3000), small_disk.empty)
        model_trainer = trainer(args, callbacks=[disk])
        with pytest.raises(UnwritableError, match=r"could not be written: No space left on device"):
            model_trainer.fit()
        return model_trainer.state.step

    assert run_world(body, (), 1, timeout=60)[0] in (4, 5, 6)
    (folder,) = output.glob("*/checkpoints")
    assert [path.name for path in folder.iterdir()] == ["checkpoint-00000002"]
    verify_state(folder / "checkpoint-00000002")
    small_disk.empty()
    whole = run_world(one_run, (small_disk.folder / "whole",), 1, timeout=60)
    assert whole
    ledger.note(
        "disks", 'a Trainer with on_save_error="raise", and a file system that is full', injected=1, told=1, whole=1
    )


class FileInTheWay(Modifier):
    """Puts a plain file where a checkpoint of one step is to be."""

    def __init__(self, save: int) -> None:
        self._save = save

    def on_save_begin(self, run: Run, folder: Path) -> None:
        if run.state.step == self._save and run.is_main_process:
            folder.parent.mkdir(exist_ok=True, parents=True)
            folder.write_text("not a checkpoint")
        run.accelerator.wait_for_everyone()


def goes_around_a_file(output: Path) -> tuple[list[int], list[str]]:
    """Train where plain files have the names of two checkpoints, the last one among them."""
    files = [FileInTheWay(4), FileInTheWay(8)]
    model_trainer = trainer(
        arguments(output_dir=output, save_every=2, max_steps=8), train_dataset=points(64), callbacks=files
    )
    with warned() as warnings, pytest.raises(UnsavedError, match=r"00000008 is a file, and a checkpoint is a folder"):
        model_trainer.fit()
    return [entry["step"] for entry in model_trainer.state.checkpoints], warnings


def test_a_plain_file_of_the_name_of_a_checkpoint_costs_that_checkpoint(tmp_path: Path) -> None:
    for process, (steps, warnings) in enumerate(run_world(goes_around_a_file, (tmp_path,), 2)):
        assert steps == [2, 6]
        assert any("checkpoint-00000004 is a file" in line for line in warnings) == (process == 0)
    (file,) = tmp_path.glob("*/checkpoints/checkpoint-00000004")
    assert file.read_text() == "not a checkpoint"


def ends_unsaved(output: Path, in_background: bool) -> tuple[str, int]:
    """Train on a disk that takes no last checkpoint; return what was raised, and the exit code of a program."""
    disk = FullDisk(8, 0)
    args = arguments(output_dir=output, save_every=3, max_steps=8, save_in_background=in_background)
    model_trainer = trainer(args, train_dataset=points(64), callbacks=[disk])
    try:
        model_trainer.fit()
    except UnsavedError as error:  # not pytest.raises, which keeps frames, and so the process group
        result = error.result
        assert (result.status, result.state.step) == ("unsaved", 8)
        assert [entry["step"] for entry in result.state.checkpoints] == [3, 6]
        return str(error), exit_code_of(error)
    return "", 0


@pytest.mark.parametrize("in_background", [True, False])
def test_a_run_whose_end_is_not_on_disk_is_not_finished(in_background: bool, tmp_path: Path) -> None:
    for warnings, code in run_world(ends_unsaved, (tmp_path / "runs", in_background), 1, timeout=60):
        assert code == 1
        assert "trained all its steps, up to step 8, but its last checkpoint could not be written" in warnings
        assert "File too large" in warnings
        assert "The newest checkpoint: step 6" in warnings
    (file,) = tmp_path.glob("runs/*/run.json")
    assert json.loads(file.read_text())["status"] == "unsaved"

    def resumed() -> list[int]:
        args = arguments(output_dir=tmp_path / "runs", save_every=3, max_steps=8, resume="auto")
        result = trainer(args, train_dataset=points(64)).fit()
        return [result.state.step, *(entry["step"] for entry in result.state.checkpoints)]

    assert run_world(resumed, (), 1, timeout=60) == [[8, 3, 6, 8]]
    assert json.loads(file.read_text())["status"] == "finished"


def test_a_run_resumes_while_the_disk_is_full(small_disk: SmallDisk, ledger: Ledger) -> None:
    output = small_disk.folder / "runs"
    (whole,) = run_world(one_run, (small_disk.folder / "whole",), 1, timeout=60)
    assert run_world(one_run, (output, 5), 1, timeout=60) == [None]
    (folder,) = output.glob("*/checkpoints")
    before = sorted(path.name for path in folder.iterdir())
    small_disk.fill()

    def body() -> tuple[Any, list[str]]:
        model = network(dropout=0.3)
        with warned() as warnings, pytest.raises(UnsavedError, match="step 10, but its last checkpoint could not be"):
            one_run(output, model=model, resume="auto")
        return [parameter.detach().tolist() for parameter in model.parameters()], warnings

    ((weights, said),) = run_world(body, (), 1, timeout=60)
    assert weights == whole
    assert any("No space left on device" in line for line in said), said
    assert sorted(path.name for path in folder.iterdir()) == before
    messages = [line for line in said if "Training continues" in line]
    assert {re.findall(r"checkpoint-0*(\d+)", line)[0] for line in messages} == {"6", "8"}
    ledger.note("disks", "a Trainer's restart on a file system that is full", injected=1, told=1, whole=1, went_on=1)


class DiskOfRestart(Modifier):
    """Gives the disk room again after a step."""

    def __init__(self, step: int, empty: Callable[[], None]) -> None:
        self._step, self._empty = step, empty

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self._step:
            self._empty()


def test_a_run_that_resumes_on_a_full_disk_loses_no_line_of_its_logs(small_disk: SmallDisk) -> None:
    """The disk has room again before the run ends. Lines after the step that it resumes from are removed."""

    def body(name: str, *others: Modifier, **options: Any) -> list[str]:
        folder = small_disk.folder / name
        logs: list[Any] = [CsvLog(folder / "history.csv"), Provenance()]
        args = arguments(output_dir=folder, save_every=4, log_every=1, max_steps=10, **options)
        with warned() as warnings, contextlib.suppress(InterruptedError):
            trainer(args, callbacks=[*logs, *others]).fit()
        return warnings

    def contents(name: str) -> tuple[list[Any], list[Any], list[Any]]:
        (run,) = (path for path in (small_disk.folder / name).iterdir() if path.is_dir())
        lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
        table = csv.DictReader((small_disk.folder / name / "history.csv").read_text().splitlines())
        return (
            [(line["step"], line["loss"]) for line in lines if line["event"] == "log"],
            [(row["step"], row["loss"]) for row in table],
            (run / "provenance" / "process-0.jsonl").read_text().splitlines(),
        )

    run_world(body, ("whole",), 1, timeout=60)
    run_world(body, ("parts", Dies(7)), 1, timeout=60)
    (of_rank_0,) = small_disk.folder.glob("parts/*/provenance/process-0.jsonl")
    of_rank_1 = of_rank_0.with_name("process-1.jsonl")  # of a run on two processes
    of_rank_1.write_bytes(of_rank_0.read_bytes())
    small_disk.fill()
    (warnings,) = run_world(lambda: body("parts", DiskOfRestart(6, small_disk.empty), resume="auto"), (), 1, timeout=60)
    assert [line for line in warnings if "switched off" in line] == []
    for name in ("history.jsonl", "history.csv", "process-0.jsonl"):
        assert sum(f"{name} cannot be written: No space left" in line for line in warnings) == 1, warnings
    assert contents("parts") == contents("whole")
    assert [json.loads(line)["step"] for line in of_rank_1.read_text().splitlines()] == [1, 2, 3, 4]


# -- output ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("output", [">/dev/full 2>&1", ">&- 2>&-", "2>&1 | true"])
def test_a_run_continues_when_nothing_takes_its_output(tmp_path: Path, output: str, processes: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.trainer.tasks import *\n"
        "trainer(arguments(output_dir='runs', progress_bar=None, log_every=2), eval_dataset=points(10)).fit()\n"
    )
    launch = f"-m trainer_lib launch --cpu --num_processes {processes}" if processes > 1 else ""
    command = f"set -o pipefail; {sys.executable} {launch} {script} {output}"
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    subprocess.run(["bash", "-c", command], env=environment, cwd=tmp_path, check=False, timeout=120)
    (run,) = (tmp_path / "runs").glob("*/run.json")
    assert json.loads(run.read_text())["status"] == "finished"


# -- temporary files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "temporary", ["read-only", *(pytest.param(where, marks=pytest.mark.slow) for where in ("in memory", "full"))]
)
def test_nothing_depends_on_where_temporary_files_are(
    temporary: str, tmp_path: Path, elsewhere: Path, request: pytest.FixtureRequest, ledger: Ledger
) -> None:
    other = elsewhere
    if temporary != "in memory":
        disk: SmallDisk = request.getfixturevalue("small_disk")
        other = disk.folder
        disk.fill() if temporary == "full" else disk.make_read_only()
    with tempfile.TemporaryDirectory(dir="/tmp") as on_disk:
        places = [Path(on_disk)] if temporary != "in memory" else [Path(on_disk), elsewhere]
        for number, place in enumerate(places):
            where = other if number == 0 else Path(on_disk)
            assert place.stat().st_dev != where.stat().st_dev

            def body(place: Path = place, where: Path = where) -> bool:
                os.environ["TMPDIR"] = str(where)
                tempfile.tempdir = None
                whole = one_run(place / "whole")
                before = sorted(where.rglob("*"))
                one_run(place / "parts", 5)
                is_same = one_run(place / "parts", resume="auto") == whole
                return is_same and sorted(where.rglob("*")) == before

            assert run_world(body, (), 1, timeout=60) == [True]
            row = "a Trainer with temporary files on another file system"
            ledger.note("disks", row, injected=1, told=0, whole=1, went_on=1)
