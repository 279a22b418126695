"""`save_state(layout="accelerate")` writes what Accelerate loads, and it continues with our losses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpointing.third_party.loops import EPOCH, Loop, ours, theirs
from tests.worlds import run_world
from trainer_lib import Accelerator, CheckpointError, ConfigurationError, ProjectConfiguration
from trainer_lib.foundation.errors import UnsupportedError

pytest.importorskip("accelerate")


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("models", [1, 2])
def test_accelerate_continues_bit_by_bit(tmp_path: Path, models: int, safe: bool) -> None:
    """After an epoch, with dropout and a shuffled order."""
    loop = Loop(ours(), models, dropout=0.3, shuffle=True)
    loop.train(2 * EPOCH)
    loop.accelerator.save_state(tmp_path / "saved", layout="accelerate", safe_serialization=safe)
    seen, expected = loop.seen.values, loop.train(EPOCH + 2)
    with theirs() as accelerator:
        loop = Loop(accelerator, models, dropout=0.3, shuffle=True)
        accelerator.load_state(str(tmp_path / "saved"))
        assert loop.seen.values["seen"] == seen["seen"] == 2 * EPOCH
        assert torch.equal(loop.seen.values["last"], seen["last"])
        assert loop.train(EPOCH + 2) == expected


def test_accelerate_continues_in_an_epoch_where_the_loop_skips(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(ours(), models=3)
    loop.train(2)
    loop.accelerator.save_state(tmp_path / "saved", layout="accelerate")
    expected = loop.train(8, skip=2)
    assert "Saved for Accelerate: model, model_1, model_2, optimizer, optimizer_1," in caplog.text
    assert "Not saved: sampler (Accelerate does not record the position in the data: skip batches" in caplog.text
    names = [f"{kind}{number}" for kind in ("model", "optimizer", "scheduler") for number in ("", "_1", "_2")]
    assert {path.stem for path in (tmp_path / "saved").iterdir()} == {
        *names,
        "random_states_0",
        "custom_checkpoint_0",
    }
    with theirs() as accelerator:
        loop = Loop(accelerator, models=3)
        accelerator.load_state(str(tmp_path / "saved"))
        assert accelerator.step == 2  # the count of backward passes
        assert loop.train(8, skip=2) == expected


@pytest.mark.slow
def test_two_ranks_of_accelerate_continue_with_ddp(tmp_path: Path) -> None:
    def write() -> list[float]:
        loop = Loop(ours(), models=2, dropout=0.3, ranks=2)
        loop.train(EPOCH)
        loop.accelerator.save_state(tmp_path / "saved", layout="accelerate")
        return loop.train(EPOCH + 2)

    def read() -> list[float]:
        with theirs() as accelerator:
            loop = Loop(accelerator, models=2, dropout=0.3, ranks=2)
            accelerator.load_state(str(tmp_path / "saved"))
            return loop.train(EPOCH + 2)

    expected = run_world(write)
    assert expected[0] != expected[1]
    assert run_world(read, OMP_NUM_THREADS="1") == [pytest.approx(losses, rel=1e-6) for losses in expected]


def test_it_loads_here_too_and_replaces_itself(tmp_path: Path) -> None:
    loop = Loop(ours(), shuffle=True)
    for models in (1, 1):
        loop.train(EPOCH)
        loop.accelerator.save_state(tmp_path / "saved", layout="accelerate")
        (tmp_path / "saved" / "vocab.txt").write_text(str(models))
    (tmp_path / "saved" / "optimizer_1.bin").touch()  # of a training with another optimizer
    loop.accelerator.save_state(tmp_path / "saved", layout="accelerate")
    assert not (tmp_path / "saved" / "optimizer_1.bin").exists()
    assert (tmp_path / "saved" / "vocab.txt").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    expected = loop.train(EPOCH)
    loop = Loop(ours(), shuffle=True)
    loop.accelerator.load_state(tmp_path / "saved")
    assert loop.train(EPOCH) == expected


def test_a_state_of_this_library_and_one_of_accelerate_replace_each_other(tmp_path: Path) -> None:
    loop = Loop(ours())
    for layout, has_manifest in (("trainer_lib", True), ("accelerate", False), ("trainer_lib", True)):
        loop.accelerator.save_state(tmp_path / "saved", layout=layout)
        assert (tmp_path / "saved" / "manifest.json").exists() == has_manifest
        assert (tmp_path / "saved" / "optimizer.bin").exists() != has_manifest
        loop.accelerator.load_state(tmp_path / "saved")


def test_an_older_one_beside_its_place_is_found(tmp_path: Path) -> None:
    """Where a kill came between the two renames."""
    loop = Loop(ours())
    loop.accelerator.save_state(tmp_path / "saved", layout="accelerate")
    (tmp_path / "saved").rename(tmp_path / "saved.replaced")
    loop.accelerator.load_state(tmp_path / "saved")


def test_automatic_names_and_their_limit(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(ours(project_config=project))
    for _ in range(3):
        loop.accelerator.save_state(layout="accelerate")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]


def test_hooks_are_called(tmp_path: Path) -> None:
    calls: list[Any] = []

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        calls.append([list(state) for state in weights])
        torch.save(weights.pop(), Path(folder) / "mine.bin")

    loop = Loop(ours())
    loop.accelerator.register_save_state_pre_hook(save)
    loop.train(2)
    loop.accelerator.save_state(tmp_path / "saved", layout="accelerate")
    expected = loop.train(3, skip=2)
    assert calls == [[["0.weight", "0.bias", "3.weight", "3.bias"]]]
    assert not (tmp_path / "saved" / "model.safetensors").exists()

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "mine.bin"))

    with theirs() as accelerator:
        loop = Loop(accelerator)
        accelerator.register_load_state_pre_hook(load)
        accelerator.load_state(str(tmp_path / "saved"))
        assert loop.train(3, skip=2) == expected


class Tied(nn.Module):
    """A model that shares a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_shared_weights(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_state(tmp_path / "saved", layout="accelerate")
    with theirs() as accelerator:
        other = accelerator.prepare(Tied())
        accelerator.load_state(str(tmp_path / "saved"))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_accelerate_reads_the_index_of_save_model(tmp_path: Path) -> None:
    from accelerate import load_checkpoint_in_model

    loop = Loop(ours())
    loop.accelerator.save_model(loop.models[0], tmp_path, max_shard_size=200)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 2))
    load_checkpoint_in_model(other, str(tmp_path))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in loop.models[0].state_dict().items())


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"layout": "acelerate"}, ConfigurationError, r"layout of save_state 'acelerate'.*mean 'accelerate'"),
        ({"background": True}, UnsupportedError, "does not work with background=True: a thread cannot"),
        ({"max_shard_size": "1MB"}, UnsupportedError, "does not work with max_shard_size: Accelerate reads each"),
        ({"output_dir": "memory://bucket/state"}, UnsupportedError, "does not work with memory://bucket/state"),
    ],
)
def test_what_the_layout_cannot_be_written_with(
    tmp_path: Path, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    loop = Loop(ours())
    with pytest.raises(kind, match=words):
        loop.accelerator.save_state(**{"output_dir": tmp_path / "saved", "layout": "accelerate", **options})
    assert list(tmp_path.iterdir()) == []


class Extra(nn.Linear):
    """A model with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


def test_values_that_cannot_be_written(tmp_path: Path) -> None:
    loop = Loop(ours())
    loop.seen.values["error"] = ValueError("nothing plain")
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\['error'\] is a builtins.ValueError"):
        loop.accelerator.save_state(tmp_path / "saved", layout="accelerate")
    assert list(tmp_path.iterdir()) == []
    loop.accelerator.save_state(tmp_path / "saved", layout="accelerate", allow_pickle=True)
    with theirs() as accelerator:
        other = Loop(accelerator)
        accelerator.load_state(str(tmp_path / "saved"))
        assert repr(other.seen.values["error"]) == "ValueError('nothing plain')"
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Extra(2, 2))
    with pytest.raises(UnsupportedError, match=r"no tensor \(_extra_state\).* Give safe_serialization=False"):
        accelerator.save_state(tmp_path / "extra", layout="accelerate")
    accelerator.save_state(tmp_path / "extra", layout="accelerate", safe_serialization=False)
    accelerator.load_state(tmp_path / "extra")
