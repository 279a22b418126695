"""Kills at any moment and at every step of a save: the older or the newer checkpoint is intact."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import toy
from tests.faults.conftest import Trials
from tests.faults.harness import Diary, Found, Lives, killer, lines, moments
from tests.faults.injuries import killed, killed_after, steps_of, to_try
from tests.faults.ledger import Ledger
from tests.faults.trainings import Training, loaded, sharded, state_of, train, trained
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import forget_world, run_world
from trainer_lib import load_checkpoint_in_model
from trainer_lib.checkpointing.format.layout import replaced_beside
from trainer_lib.checkpointing.load.find import open_state, verify_state
from trainer_lib.checkpointing.save.retention import automatic_states
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.launchers import ProcessFailedError
from trainer_lib.tensor_files.file_contents import Tensors

# -- at any moment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "make", "processes", "few", "background"),
    [
        pytest.param("one process", trained, 1, 6, False, id="one-at once", marks=pytest.mark.slow),
        pytest.param("one process", trained, 1, 6, True, id="one-in the background", marks=pytest.mark.slow),
        pytest.param("two processes", trained, 2, 4, False, id="two-at once"),
        pytest.param("two processes", trained, 2, 4, True, id="two-in the background", marks=pytest.mark.slow),
        pytest.param("two processes, shards", sharded, 2, 2, False, id="shards-at once", marks=pytest.mark.slow),
        pytest.param(
            "two processes, shards", sharded, 2, 2, True, id="shards-in the background", marks=pytest.mark.slow
        ),
    ],
)
def test_killed_at_any_moment_the_newest_state_is_whole(
    kind: str,
    make: Callable[..., Training],
    processes: int,
    few: int,
    background: bool,
    tmp_path: Path,
    trials: Trials,
    ledger: Ledger,
) -> None:
    when = moments(trials(few, 24), seed=processes + 10 * background)
    findings = Lives(make, processes, background).killed(tmp_path, when)
    ledger.note("kills", f"{kind}, saving {'in the background' if background else 'at once'}", **findings.counts())
    assert findings.complaints == []
    assert (findings.unloadable, findings.resumed, findings.equal) == (0, len(when), len(when))
    assert findings.inside > 0 or len(when) < 10  # a few may all come between two saves


class Writes(Callback):
    """Keeps the diary of a run."""

    def __init__(self, path: Path) -> None:
        self.diary = Diary(path)

    def on_fit_begin(self, run: Run) -> None:
        self.diary.note("loaded", run.state.step)

    def on_step_end(self, run: Run) -> None:
        self.diary.note("step", run.state.step)

    def on_save_begin(self, run: Run, folder: Path) -> None:
        self.diary.note("saving", run.state.step)

    def on_save_end(self, run: Run, folder: Path) -> None:
        self.diary.note("saved", int(folder.name[-8:]))


SAVE_EVERY = 2


def a_run(folder: Path, processes: int, steps: int, **options: Any) -> list[Any]:
    """Train, and return all that has to be equal to the bit."""
    model = network(dropout=0.3)
    args = arguments(
        output_dir=folder / "runs",
        max_steps=steps,
        per_device_train_batch_size=8 // processes,
        log_every=5,
        save_every=SAVE_EVERY,
        keep_last=2,
        **options,
    )
    diary = Writes(folder / f"diary_{os.environ.get('RANK', '0')}")
    result = trainer(args, model=model, train_dataset=points(77), callbacks=[diary]).fit()
    timeless = [
        {name: value for name, value in entry.items() if not name.endswith(("_per_second", "data_wait"))}
        for entry in result.history
    ]
    return [result.state.step, timeless, [parameter.tolist() for parameter in model.parameters()]]


@pytest.mark.parametrize(
    ("processes", "background"),
    [
        pytest.param(1, False, id="1-at once", marks=pytest.mark.slow),
        pytest.param(1, True, id="1-in the background", marks=pytest.mark.slow),
        pytest.param(2, False, id="2-at once", marks=pytest.mark.slow),
        pytest.param(2, True, id="2-in the background", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_again_and_again_is_the_run_that_nobody_disturbed(
    processes: int, background: bool, tmp_path: Path, trials: Trials, ledger: Ledger
) -> None:
    when = moments(trials(2, 16), seed=processes)
    steps = len(when) * (50, 25)[processes - 1]  # which last until the last kill
    options: dict[str, Any] = {"save_in_background": background}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run_world(lambda: a_run(tmp_path / "whole", processes, steps, **options), (), processes, timeout=120)
    findings = Found()

    def saves() -> bool:
        return any((tmp_path / "parts" / "runs").glob("*/checkpoints/*.partial"))

    for number, moment in enumerate(when):
        diary = tmp_path / "parts" / f"diary_{number % processes}"
        with killer(diary, saves, moment), pytest.raises(ProcessFailedError, match="SIGKILL"):
            run_world(
                lambda: a_run(tmp_path / "parts", processes, steps, resume="auto", **options), (), processes, timeout=90
            )
        findings.kills += 1
        (checkpoints,) = (tmp_path / "parts" / "runs").glob("*/checkpoints")
        committed = sorted(checkpoints.glob("checkpoint-????????"))
        for path in committed:
            verify_state(path)
        begun = [entry["number"] for entry in lines(diary) if entry["what"] == "saving"][-1]
        findings.inside += begun > int(committed[-1].name[-8:])
    parts = run_world(
        lambda: a_run(tmp_path / "parts", processes, steps, resume="auto", **options), (), processes, timeout=120
    )
    findings.resumed, most_lost = what_was_lost(lines(tmp_path / "parts" / "diary_0"))
    findings.equal = findings.kills if parts == whole else 0
    row = f"a Trainer's run, {('one process', 'two processes')[processes - 1]}, "
    ledger.note("kills", row + ("in the background" if background else "at once"), **findings.counts())
    assert parts == whole
    assert findings.resumed == len(when)
    assert findings.inside > 0 or len(when) < 10  # a few may all come between two saves
    # What is saved behind the training is there before the next one begins.
    assert most_lost <= SAVE_EVERY * (1 + background)
    assert len(list((tmp_path / "parts" / "runs").iterdir())) == 1


def what_was_lost(diary: list[dict[str, Any]]) -> tuple[int, int]:
    """Return how often a run resumed from the last commit that it knew of, or a later one; and lost steps."""
    resumed, most, committed, made = 0, 0, 0, 0
    for line in diary:
        if line["what"] == "saved":
            committed = line["number"]
        elif line["what"] == "step":
            made = line["number"]
        elif line["what"] == "loaded" and made:
            resumed += line["number"] >= committed
            most = max(most, made - line["number"])
    return resumed, most


# -- at every step of a save -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [False, True])
def test_a_kill_at_any_step_leaves_the_older_or_the_newer_checkpoint_intact(
    automatic: bool, tmp_path: Path, ledger: Ledger
) -> None:
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
        project = Path(str(accelerator.project_configuration.project_dir))
        accelerator.save_state(None if automatic else project / "state")

    project = save_in("whole")
    number = accelerator.save_iteration
    steps = steps_of(save)
    accelerator.project_configuration.iteration = number
    assert {"fsync", "mkdir", "rename", "unlink", "rmdir"} <= set(steps)
    is_newer: list[bool] = []
    for at in to_try(steps):
        project = save_in(str(at))
        killed(save, at)
        state = loaded(project, None if automatic else project / "state")
        assert state in (older, newer), f"killed at step {at}: {steps[at]}"
        is_newer.append(state == newer)
        # What is being deleted is never taken for a state.
        for path in automatic_states(project / "checkpoints").values():
            open_state(path)
    # At some step the newer one is there, and from then on it stays.
    assert is_newer == sorted(is_newer)
    assert not is_newer[0]
    assert is_newer[-1]
    kills = len(is_newer)
    ledger.note("kills", "one process, at each step of a save", kills=kills, inside=kills, resumed=kills, equal=kills)


@pytest.mark.slow
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
        forget_world()
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
        run_world(body, timeout=60)
    open_state(tmp_path / "state")
    model = toy.model()
    load_checkpoint_in_model(model, tmp_path / "state", strict=True)
    assert [value.sum().item() for value in model.state_dict().values()] == json.loads((tmp_path / "older").read_text())


# -- at every step of an export --------------------------------------------------------------------------------------


class Exported:
    """A folder with weights in several files of equal names, and the weights that replace them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.accelerator, model, optimizer = trained(folder / "project")
        self.model = model
        self.older = self.saved(folder / "older")
        train(self.accelerator, model, optimizer)
        self.newer = self.saved(folder / "newer")

    def saved(self, folder: Path) -> dict[str, Any]:
        """Save the weights of now in files of a few bytes, and return them."""
        self.save(folder)
        return {name: value.tolist() for name, value in self.accelerator.unwrap_model(self.model).state_dict().items()}

    def save(self, folder: Path) -> None:
        """Save the weights of now."""
        self.accelerator.save_model(self.model, folder, max_shard_size=16)

    def copied(self, name: str) -> Path:
        """Return a copy of the older weights."""
        return Path(shutil.copytree(self.folder / "older", self.folder / name))


def weights_in(folder: Path) -> dict[str, Any]:
    """Return the weights in a folder, as a model gets them."""
    model = toy.model()
    load_checkpoint_in_model(model, folder, strict=True)
    return {name: value.tolist() for name, value in model.state_dict().items()}


def test_a_kill_inside_an_export_never_leaves_a_mixture_of_weights(tmp_path: Path) -> None:
    exported = Exported(tmp_path)
    assert len(list((tmp_path / "older").glob("*.safetensors"))) > 1
    whole = exported.copied("whole")
    steps = steps_of(lambda: exported.save(whole))
    found: list[str] = []
    for at in range(len(steps)):
        folder = exported.copied(str(at))
        killed(lambda folder=folder: exported.save(folder), at)
        try:
            weights = weights_in(folder)
        except CheckpointError:
            found.append("none")  # while the files of the older weights are replaced
        else:
            assert weights in (exported.older, exported.newer), f"killed at step {at}: {steps[at]}"
            found.append("older" if weights == exported.older else "newer")
        exported.save(folder)  # and the next export is whole
        assert weights_in(folder) == exported.newer
        assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "newer").iterdir()}
    assert [name for name, before in zip(found, ["", *found], strict=False) if name != before] == [
        "older",
        "none",
        "newer",
    ]
    # The older weights stay until all of the newer ones are on the disk.
    assert steps[: found.index("none")].count("fsync") >= len(list((tmp_path / "newer").iterdir()))


def test_an_export_that_fails_leaves_the_older_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = Exported(tmp_path)
    folder, write, written = exported.copied("fails"), Tensors.write, list[Path]()

    def fail(self: Tensors, path: Path) -> str:
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        return write(self, path)

    monkeypatch.setattr(Tensors, "write", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        exported.save(folder)
    assert weights_in(folder) == exported.older
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "older").iterdir()}
