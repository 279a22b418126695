"""Copies of background saves that overlap with the next window: checkpoints are the same, byte by byte."""

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import nn

from tests.imports import SAVING, as_if_not_imported
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import FullyShardedDataParallelPlugin, PartialState
from trainer_lib.callbacks import EMA
from trainer_lib.checkpointing.format import snapshot
from trainer_lib.checkpointing.format.layout import is_committed
from trainer_lib.checkpointing.format.overlapped_copies import OverlappedCopies
from trainer_lib.checkpointing.load.find import verify_state
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.launchers import ProcessFailedError, run_forked


class LateCopies(OverlappedCopies):
    """Copies that begin only when training waits for them; or, without a wait, when it has changed the weights."""

    made: ClassVar[int] = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        LateCopies.made += 1
        self._may_begin = threading.Event()

    def run(self) -> bool:
        self._may_begin.wait(0.7)
        return super().run()

    def wait(self) -> None:
        self._may_begin.set()
        super().wait()


@contextmanager
def late_copies() -> Generator[None]:
    LateCopies.made = 0
    with mock.patch.object(snapshot, "OverlappedCopies", LateCopies):
        yield


class EvaluatesInWindow(Modifier):
    """Evaluates with averaged weights while the copies of a save are under way."""

    changes_weights = False

    def __init__(self, evaluate: Any) -> None:
        self._evaluate = evaluate

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 4:
            self._evaluate()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))


def checkpoints(folder: Path, *callbacks: Callback, network: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    """Train, saving every second step, and return the files of the checkpoints that do not tell the time."""
    args = arguments(output_dir=folder, max_steps=7, save_every=2, keep_last=9, seed=1, **options)
    fitted = trainer(
        args, model=network or model(), callbacks=list(callbacks), eval_dataset=points(16), train_dataset=points(96)
    )
    if callbacks:
        fitted.events.add(EvaluatesInWindow(fitted.evaluate))
    fitted.fit()
    (root,) = folder.glob("*/checkpoints")
    files = sorted(root.rglob("*"))
    timeless = [path for path in files if path.suffix == ".safetensors" or "optimizer" in path.name]
    return {str(path.relative_to(root)): path.read_bytes() for path in timeless if path.is_file()}


def assert_same_in_background(tmp_path: Path, overlapped: int, *callbacks: type[Callback], **options: Any) -> None:
    made = [kind(0.9) for kind in callbacks for _ in range(2)]  # type: ignore[call-arg]
    expected = checkpoints(tmp_path / "now", *made[::2], save_in_background=False, **options)
    with late_copies():
        actual = checkpoints(tmp_path / "behind", *made[1::2], save_in_background=True, **options)
        assert LateCopies.made == overlapped
    assert len({name.split("/")[0] for name in expected}) >= 4
    assert actual.keys() == expected.keys()
    assert [name for name in actual if actual[name] != expected[name]] == []


def test_checkpoints_copied_during_the_next_window_are_the_same(tmp_path: Path) -> None:
    assert_same_in_background(tmp_path, 4, EMA, gradient_accumulation_steps=2, eval_every=3)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True])
def test_checkpoints_of_two_processes_are_the_same(tmp_path: Path, is_sharded: bool) -> None:
    def body() -> None:
        plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT") if is_sharded else None
        writes = is_sharded or PartialState().is_main_process
        assert_same_in_background(tmp_path, 3 if writes else 0, fsdp=plugin)

    run_world(body, num_processes=2)


class MemoryAtFirstSave(Callback):
    """Looks at the memory for copies, before the first save."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_save_begin(self, run: Run, folder: Any) -> None:
        del folder
        self.sizes.append(run.accelerator.checkpoints.background.snapshots.memory.size)


def test_the_memory_of_the_first_save_is_allocated_before_it(tmp_path: Path) -> None:
    watch = MemoryAtFirstSave()
    checkpoints(tmp_path, watch)
    weights = list(model().parameters())
    padded = sum(-(-weight.nbytes // 64) * 64 for weight in weights)
    assert watch.sizes[0] == 3 * padded + 64 * len(weights)  # weights, two moments, and the step of each
    assert len(set(watch.sizes[1:])) == 1


class ImportedAtSave(Callback):
    """Notes at each save whether the modules that save are there."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_save_begin(self, run: Run, folder: Any) -> None:
        del run, folder
        self.seen.append(SAVING in sys.modules)


def test_modules_that_save_are_imported_before_the_first_save_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_not_imported(SAVING, monkeypatch)
    trainer(arguments(max_steps=3, save_every=None)).fit()
    assert SAVING not in sys.modules
    watch = ImportedAtSave()
    checkpoints(tmp_path, watch)
    assert watch.seen[0]


class Killed(LateCopies):
    """Copies of the second checkpoint during which the process is killed."""

    def run(self) -> bool:
        if LateCopies.made == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run()


@pytest.mark.fault("a kill while a background save copies tensors")
def test_a_kill_during_the_copies_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    def train() -> None:
        LateCopies.made = 0
        with mock.patch.object(snapshot, "OverlappedCopies", Killed):
            checkpoints(tmp_path)

    with pytest.raises(ProcessFailedError):
        run_forked(train, num_processes=1, timeout=60)
    (root,) = tmp_path.glob("*/checkpoints")
    verify_state(root / "checkpoint-00000002")
    assert [path.name for path in root.iterdir() if is_committed(path)] == ["checkpoint-00000002"]


class Shifts(nn.Module):
    """A model that changes a weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            self.layer.weight.mul_(0.99)
        return self.layer(inputs)


class ShiftsData(Shifts):
    """A model that changes a weight where torch does not count it."""

    def forward(self, inputs: torch.Tensor) -> Any:
        self.layer.weight.data.mul_(0.99)
        return self.layer(inputs)


class ChangesWeights(Modifier):
    def on_step_begin(self, run: Run) -> None:
        for weight in run.trained_parameters:
            weight.data.mul_(0.99)


def test_weights_that_something_else_changes_are_copied_at_once(tmp_path: Path) -> None:
    expected = checkpoints(tmp_path / "1", network=Shifts(), save_in_background=False)
    with late_copies():
        torch.manual_seed(1)
        assert checkpoints(tmp_path / "2", network=Shifts()).keys() == expected.keys()
        checkpoints(tmp_path / "3", ChangesWeights())
        assert LateCopies.made == 0


def test_weights_that_a_forward_changes_uncounted_are_copied_at_once(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = checkpoints(tmp_path / "now", network=ShiftsData(), save_in_background=False)
    with late_copies():
        torch.manual_seed(1)
        actual = checkpoints(tmp_path / "behind", network=ShiftsData())
        assert actual == expected
        assert LateCopies.made == 0


def test_weights_that_the_backward_updates_are_copied_at_once(tmp_path: Path) -> None:
    assert_same_in_background(tmp_path, 0, optimizer_in_backward=True, max_grad_norm=None)


class ClampsOnce(Callback):
    """An observer that changes a weight, which observers must not do."""

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 4:
            next(iter(run.trained_parameters)).detach().clamp_(-0.01, 0.01)


def test_a_weight_that_changes_while_it_is_copied_fails_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with late_copies():
        saved = checkpoints(tmp_path, ClampsOnce())
    assert "changed weights before the next update" in caplog.text
    assert {name.split("/")[0][-1] for name in saved} == {"2", "6", "7"}
    assert LateCopies.made == 2  # those of steps 2 and 4; later ones are copied at once
