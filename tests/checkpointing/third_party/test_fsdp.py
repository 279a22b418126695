"""Checkpoints of FSDP2 between Accelerate and this library, whole and in shards."""

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.nn.functional import cross_entropy

from tests.checkpointing.third_party.fsdp_loops import KINDS, TheirFsdp, batch, model_and_optimizer
from tests.checkpointing.third_party.loops import theirs
from tests.worlds import run_world
from trainer_lib import Accelerator, CheckpointError, FullyShardedDataParallelPlugin
from trainer_lib.checkpointing.third_party.torch_shards import read_whole

pytest.importorskip("accelerate")


def prepared(kind: str | None) -> tuple[Accelerator, Any, Any]:
    """Return this library's engine, sharded or not."""
    plugin = None if kind is None else FullyShardedDataParallelPlugin(state_dict_type=kind)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return accelerator, *accelerator.prepare(*model_and_optimizer())


def train(accelerator: Accelerator, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses: list[float] = []
    for step in range(first, last):
        inputs, targets = batch(step, accelerator.process_index)
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return a checkpoint of two ranks by Accelerate's functions, and the losses with which they continue."""
    folder, kind = tmp_path_factory.mktemp("fsdp") / "saved", request.param

    def write() -> list[float]:
        with theirs():
            fsdp = TheirFsdp(kind)
            fsdp.train(0, 3)
            fsdp.save(folder)
            return fsdp.train(3, 6)

    return folder, run_world(write, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_fsdp_checkpoints_of_accelerate_continue(saved: tuple[Path, list[Any]], kind: str | None) -> None:
    """Whole and in shards, into a sharded model and into one with DDP."""
    folder, expected = saved

    def read() -> list[float]:
        accelerator, model, optimizer = prepared(kind)
        accelerator.load_state(folder)
        return train(accelerator, model, optimizer, 3, 6)

    assert run_world(read) == [pytest.approx(losses, rel=1e-5) for losses in expected]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_accelerate_continues_with_fsdp(tmp_path: Path, kind: str) -> None:
    def write() -> list[float]:
        accelerator, model, optimizer = prepared(kind)
        train(accelerator, model, optimizer, 0, 3)
        accelerator.save_state(tmp_path / "saved", layout="accelerate")
        return train(accelerator, model, optimizer, 3, 6)

    def read() -> list[float]:
        with theirs():
            fsdp = TheirFsdp(kind)
            fsdp.load(tmp_path / "saved")
            return fsdp.train(3, 6)

    expected = run_world(write)
    assert (tmp_path / "saved" / "pytorch_model_fsdp_0").is_dir() == (kind == "SHARDED_STATE_DICT")
    assert (tmp_path / "saved" / "pytorch_model_fsdp.bin").is_file() == (kind == "FULL_STATE_DICT")
    assert run_world(read, OMP_NUM_THREADS="1") == [pytest.approx(losses, rel=1e-5) for losses in expected]


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _dcp(folder: Path, state: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)


def test_shards_of_an_optimizer_that_keeps_no_state_are_loaded(tmp_path: Path) -> None:
    def engine() -> tuple[Accelerator, Any, Any]:
        plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")
        accelerator, (model, _) = Accelerator(cpu=True, fsdp_plugin=plugin), model_and_optimizer()
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def write() -> list[float]:
        accelerator, model, optimizer = engine()
        train(accelerator, model, optimizer, 0, 2)
        accelerator.save_state(tmp_path / "saved", layout="accelerate")
        return train(accelerator, model, optimizer, 2, 4)

    def read() -> list[float]:
        accelerator, model, optimizer = engine()
        accelerator.load_state(tmp_path / "saved")
        return train(accelerator, model, optimizer, 2, 4)

    assert run_world(write) == run_world(read)


@pytest.mark.parametrize("place", ["metadata", "value"])
def test_a_folder_of_shards_that_would_run_code_is_refused(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "saved"
    payload = Payload(tmp_path / "ran")
    _dcp(folder / "pytorch_model_fsdp_0", {"model": {"weight": torch.ones(2), "extra": payload}})
    if place == "metadata":
        (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(payload))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        read_whole(folder / "pytorch_model_fsdp_0")
    assert not (tmp_path / "ran").exists()


def test_a_damaged_folder_of_shards_is_named(tmp_path: Path) -> None:
    _dcp(tmp_path / "shards", {"model": {"weight": torch.ones(200)}})
    (file,) = (tmp_path / "shards").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="shards cannot be read"):
        read_whole(tmp_path / "shards")
