"""Saves that are cut short: killed at every step of the way, out of disk, without permission. Nothing is lost."""

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import toy
from tests.conftest import forget
from trainer_lib import Accelerator, CheckpointError, ProjectConfiguration, load_checkpoint_in_model
from trainer_lib.checkpointing.agreement import together
from trainer_lib.checkpointing.layout import replaced_beside
from trainer_lib.checkpointing.reader import open_state
from trainer_lib.checkpointing.retention import automatic_states
from trainer_lib.foundation.errors import UnwritableError
from trainer_lib.launchers import ProcessFailedError, run_forked
from trainer_lib.modules.state import module_state

# What changes the disk or waits for it. Between two of these nothing changes there, but for bytes of files that are
# not part of a state yet.
STEPS = ("fsync", "mkdir", "rename", "rmdir", "unlink", "link", "replace")


def killed_after(steps: int) -> list[str]:
    """Have this process killed at its `steps`-th step from now, and return the names of those it has made."""
    made: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def step(*arguments: Any, **options: Any) -> Any:
            if len(made) == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            made.append(name)
            return real(*arguments, **options)

        return step

    for name in STEPS:
        setattr(os, name, counted(name))
    return made


def trained(project: Path, updates: int = 1, **options: Any) -> tuple[Accelerator, Any, Any]:
    configuration = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, **options)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model = toy.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer, updates)
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: Any, optimizer: Any, updates: int = 1) -> None:
    inputs, targets, _ = toy.data()
    for _ in range(updates):
        accelerator.backward(toy.losses(model, inputs, targets).mean())
        optimizer.step()
        optimizer.zero_grad()


def state_of(accelerator: Accelerator) -> list[float]:
    return [value.sum().item() for value in module_state(accelerator.unwrap_model(accelerator._models[0])).values()]


def loaded(project: Path, folder: Path | None = None) -> list[float]:
    """Return what a fresh script finds."""
    forget()
    accelerator, *_ = trained(project, updates=0)
    accelerator.load_state(folder)
    return state_of(accelerator)


def killed(save: Callable[[], Any], steps: int) -> None:
    """Run a save in a fork that is killed at one of its steps."""
    child = os.fork()
    if child == 0:
        try:
            killed_after(steps)
            save()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def steps_of(save: Callable[[], Any]) -> list[str]:
    """Return the steps of a whole save."""
    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, getattr(os, name))  # to be undone
        made = killed_after(10**6)
        save()
    return made


def to_try(steps: list[str]) -> list[int]:
    """Return the steps to be killed at: all but those that come between two of the same kind."""
    ends = {0, len(steps) - 1}
    same = {at for at in range(1, len(steps) - 1) if steps[at - 1] == steps[at] == steps[at + 1]}
    return sorted((set(range(len(steps))) - same) | ends)


@pytest.mark.parametrize("automatic", [False, True])
def test_killed_at_any_step_the_older_or_the_newer_state_is_whole(automatic: bool, tmp_path: Path) -> None:
    accelerator, model, optimizer = trained(tmp_path / "base", total_limit=2)
    for _ in range(2):
        train(accelerator, model, optimizer)
        accelerator.save_state(None if automatic else tmp_path / "base" / "state")
    if not automatic:
        (tmp_path / "base" / "state" / "notes").write_text("foreign")
    older = state_of(accelerator)
    train(accelerator, model, optimizer)
    newer = state_of(accelerator)

    def save_in(name: str) -> Path:
        shutil.copytree(tmp_path / "base", tmp_path / name)
        accelerator.project_configuration.project_dir = tmp_path / name
        return tmp_path / name

    def save() -> None:
        project = Path(accelerator.project_configuration.project_dir or "")
        accelerator.save_state(None if automatic else project / "state")

    project = save_in("whole")
    number = accelerator.save_iteration
    steps = steps_of(save)
    accelerator.project_configuration.iteration = number
    assert {"fsync", "mkdir", "rename", "unlink", "rmdir"} <= set(steps)
    found: list[bool] = []
    for at in to_try(steps):
        project = save_in(str(at))
        killed(save, at)
        state = loaded(project, None if automatic else project / "state")
        assert state in (older, newer), f"killed at step {at}: {steps[at]}"
        found.append(state == newer)
        # What is being deleted is never taken for a state.
        for path in automatic_states(project / "checkpoints").values():
            open_state(path)
    # At some step the newer one is there, and from then on it stays.
    assert found == sorted(found)
    assert not found[0]
    assert found[-1]


def test_what_is_no_state_never_takes_the_place_of_one_that_a_kill_left_beside_it(tmp_path: Path) -> None:
    accelerator, model, optimizer = trained(tmp_path / "base")
    folder = Path(accelerator.save_state(tmp_path / "base" / "state"))
    folder.rename(replaced_beside(folder))
    folder.mkdir()
    (folder / "notes").write_text("foreign")
    older = state_of(accelerator)
    train(accelerator, model, optimizer)
    newer = state_of(accelerator)
    shutil.copytree(tmp_path / "base", tmp_path / "whole")
    steps = steps_of(lambda: accelerator.save_state(tmp_path / "whole" / "state"))
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["state"]
    for at in to_try(steps):
        shutil.copytree(tmp_path / "base", tmp_path / str(at))
        place = tmp_path / str(at) / "state"
        killed(lambda place=place: accelerator.save_state(place), at)
        assert loaded(tmp_path, place) in (older, newer), f"killed at step {at}: {steps[at]}"


def test_after_a_kill_the_next_save_works_and_clears_up(tmp_path: Path) -> None:
    accelerator, model, optimizer = trained(tmp_path / "base", total_limit=2)
    for _ in range(2):
        train(accelerator, model, optimizer)
        accelerator.save_state()
    steps = steps_of(accelerator.save_state)
    number = accelerator.save_iteration
    for at in (1, 9, len(steps) - 3):
        project = tmp_path / str(at)
        shutil.copytree(tmp_path / "base", project)
        accelerator.project_configuration.project_dir = project
        accelerator.project_configuration.iteration = number
        killed(accelerator.save_state, at)
        forget()
        again, *_ = trained(project, total_limit=2)
        again.load_state()
        again.save_state()
        again.save_state()
        names = sorted(path.name for path in (project / "checkpoints").iterdir())
        assert names == [f"checkpoint_{again.save_iteration - 2}", f"checkpoint_{again.save_iteration - 1}"]


@pytest.mark.parametrize(("rank", "at"), [(0, 8), (1, 1)])
def test_one_of_two_processes_killed_inside_a_save_leaves_the_older_state(rank: int, at: int, tmp_path: Path) -> None:
    def body() -> None:
        accelerator, model, optimizer = trained(tmp_path)
        accelerator.save_state(tmp_path / "state")
        if accelerator.is_main_process:
            (tmp_path / "older").write_text(json.dumps(state_of(accelerator)))
        train(accelerator, model, optimizer)
        if accelerator.process_index == rank:
            killed_after(at)
        accelerator.save_state(tmp_path / "state")

    with pytest.raises(ProcessFailedError):
        run_forked(body, timeout=60)
    open_state(tmp_path / "state")
    model = toy.model()
    load_checkpoint_in_model(model, tmp_path / "state", strict=True)
    assert [value.sum().item() for value in model.state_dict().values()] == json.loads((tmp_path / "older").read_text())


# -- errors of the disk ----------------------------------------------------------------------------------------------


def said_on_failure(project: Path, spoil: Callable[[Path], None], rank: int) -> tuple[str, list[float], list[float]]:
    """Save, have saving fail on one process, and return what each process was told, and what it loads then."""
    accelerator, model, optimizer = trained(project)
    accelerator.save_state(project / "state")
    before = state_of(accelerator)
    train(accelerator, model, optimizer)
    if accelerator.process_index == rank:
        spoil(project)
    with pytest.raises(UnwritableError) as told:
        accelerator.save_state(project / "state")
    unlimited()
    train(accelerator, model, optimizer)  # training goes on
    accelerator.load_state(project / "state")
    return str(told.value), before, state_of(accelerator)


def full_disk(project: Path) -> None:
    # Files may not grow beyond it. (The signal that comes with it is one that Python ignores.)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))


def unlimited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def failing_disk(project: Path) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    os.fsync = fail  # type: ignore[assignment]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            full_disk,
            r"(model|random_states)\S* could not be written: File too large. This process's part of",
        ),
        (failing_disk, r"could not be written: Input/output error"),
    ],
)
def test_a_full_or_failing_disk_on_one_process_is_told_on_all(
    spoil: Callable[[Path], None], reason: str, rank: int, tmp_path: Path
) -> None:
    runs = run_forked(said_on_failure, (tmp_path, spoil, rank), timeout=60)
    for process, (said, before, after) in enumerate(runs):
        assert re.search(reason, said), said
        assert ("save_state failed on process" in said) == (process != rank)
        assert "are free there. What was saved before is as it was." in said
        assert before == after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


def test_what_is_not_only_the_disks_fault_is_laid_to_it_by_no_process(tmp_path: Path) -> None:
    def body() -> str:
        group = trained(tmp_path, updates=0)[0].group
        with pytest.raises(CheckpointError) as told, together(group, "save_state"):
            raise (UnwritableError, CheckpointError)[group.rank]("no")
        return type(told.value).__name__

    assert run_forked(body, (), 2, timeout=60) == ["CheckpointError", "CheckpointError"]


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/sys").is_dir(), reason="root may write anywhere")
def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    accelerator, *_ = trained(tmp_path)
    read_only = Path("/proc/sys") if os.geteuid() == 0 else tmp_path
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"state.partial could not be written: \w"):
        accelerator.save_state(read_only / "state")


def test_pickled_weights_fail_as_clearly(tmp_path: Path) -> None:
    def body() -> str:
        accelerator, *_ = trained(tmp_path)
        full_disk(tmp_path)
        with pytest.raises(CheckpointError) as told:
            accelerator.save_state(tmp_path / "state", safe_serialization=False)
        unlimited()
        return str(told.value)

    (said,) = run_forked(body, num_processes=1, timeout=60)
    assert "pytorch_model.bin could not be written: File too large" in said
    assert list(tmp_path.iterdir()) == []
