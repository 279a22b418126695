"""What Accelerate's `save_state` wrote loads here, and training continues with the losses of the writer."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpointing.third_party.loops import EPOCH, Loop, ours, theirs
from tests.worlds import run_world
from trainer_lib import CheckpointError, ProjectConfiguration

pytest.importorskip("accelerate")


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("models", [1, 2])
def test_a_saved_epoch_continues_bit_by_bit(tmp_path: Path, safe: bool, models: int) -> None:
    """With dropout and a shuffled order, which draw from the generators that the checkpoint holds."""
    with theirs() as accelerator:
        loop = Loop(accelerator, models, dropout=0.3, shuffle=True)
        loop.train(2 * EPOCH)
        accelerator.save_state(str(tmp_path / "saved"), safe_serialization=safe)
        seen, expected = loop.seen.values, loop.train(EPOCH + 2)
    torch.manual_seed(99)
    loop = Loop(ours(), models, dropout=0.3, shuffle=True)
    loop.accelerator.load_state(tmp_path / "saved")
    assert loop.seen.values["seen"] == 2 * EPOCH
    assert torch.equal(loop.seen.values["last"], seen["last"])
    assert loop.train(EPOCH + 2) == expected


def test_the_rest_of_an_epoch_continues_where_the_loop_skips(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with theirs() as accelerator:
        loop = Loop(accelerator)
        loop.train(2)
        accelerator.save_state(str(tmp_path))
        expected = loop.train(8, skip=2)
    loop = Loop(ours())
    loop.accelerator.load_state(tmp_path)
    assert "has no sampler: the prepared one keeps its state (the position in the data is not recorded" in caplog.text
    assert loop.train(8, skip=2) == expected


def _dataloader_config(**options: Any) -> Any:
    from accelerate.utils import DataLoaderConfiguration

    return DataLoaderConfiguration(**options)


def test_a_seedable_order_continues_by_its_epoch(tmp_path: Path) -> None:
    from trainer_lib import DataLoaderConfiguration

    with theirs(dataloader_config=_dataloader_config(use_seedable_sampler=True)) as accelerator:
        loop = Loop(accelerator, shuffle=True)
        loop.train(EPOCH + 2)
        accelerator.save_state(str(tmp_path))
        loop.loader.set_epoch(1)
        expected = loop.train(3, skip=2, epoch=1)
    loop = Loop(ours(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)), shuffle=True)
    loop.accelerator.load_state(tmp_path)
    assert loop.train(3, skip=2, epoch=1) == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata
def test_a_stateful_loader_continues_where_it_was(tmp_path: Path) -> None:
    """Accelerate's StatefulDataLoader records the batches of the epoch, so the loop skips none."""
    with theirs(dataloader_config=_dataloader_config(use_stateful_dataloader=True)) as accelerator:
        loop = Loop(accelerator)
        expected: list[float] = []
        for index, (batch, targets) in enumerate(loop.loader):
            expected.append(loop.step(batch, targets))
            if index == 2:
                accelerator.save_state(str(tmp_path))
        expected += loop.train(3)
    loop = Loop(ours())
    loop.accelerator.load_state(tmp_path)
    assert loop.train(2 + 3) == expected[3:]


def test_automatic_naming_continues_with_the_newest(tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration as TheirConfiguration

    project = TheirConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    with theirs(project_config=project) as accelerator:
        loop = Loop(accelerator, shuffle=True)
        for _ in range(2):
            loop.train(EPOCH)
            accelerator.save_state()
        expected = loop.train(EPOCH)
    project_config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    loop = Loop(ours(project_config=project_config), shuffle=True)
    loop.accelerator.load_state()
    assert loop.train(EPOCH) == expected
    assert Path(loop.accelerator.save_state()).name == "checkpoint_2"


def test_hooks_load_what_hooks_saved(tmp_path: Path) -> None:
    """As with adapters: the hook of the save takes the weights out, and the hook of the load the models."""

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        assert len(models) == len(weights) == 1
        torch.save(weights.pop(), Path(folder) / "mine.bin")

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "mine.bin"))

    with theirs() as accelerator:
        loop = Loop(accelerator, shuffle=True)
        accelerator.register_save_state_pre_hook(save)
        loop.train(EPOCH)
        accelerator.save_state(str(tmp_path))
        expected = loop.train(EPOCH)
    loop = Loop(ours(), shuffle=True)
    with pytest.raises(CheckpointError, match="has no weights of model: a save hook removed them"):
        loop.accelerator.load_state(tmp_path)
    loop.accelerator.register_load_state_pre_hook(load)
    loop.accelerator.load_state(tmp_path)
    assert loop.train(EPOCH) == expected


@pytest.mark.slow
def test_two_ranks_continue_with_ddp(tmp_path: Path) -> None:
    def write() -> list[float]:
        with theirs() as accelerator:
            loop = Loop(accelerator, models=2, dropout=0.3, ranks=2)
            loop.train(EPOCH)
            accelerator.save_state(str(tmp_path))
            accelerator.wait_for_everyone()
            return loop.train(EPOCH + 2)

    def read() -> list[float]:
        loop = Loop(ours(), models=2, dropout=0.3, ranks=2)
        loop.accelerator.load_state(tmp_path)
        assert loop.seen.values["seen"] == EPOCH
        return loop.train(EPOCH + 2)

    expected = run_world(write, OMP_NUM_THREADS="1")
    assert expected[0] != expected[1]
    assert run_world(read) == [pytest.approx(losses, rel=1e-6) for losses in expected]


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    with theirs() as accelerator:
        Loop(accelerator)
        accelerator.save_state(str(tmp_path / "saved"))
    torch.save({"state": Payload(tmp_path / "ran")}, tmp_path / "saved" / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"optimizer.bin is refused, and no code in it was run"):
        Loop(ours()).accelerator.load_state(tmp_path / "saved")
    assert not (tmp_path / "ran").exists()
