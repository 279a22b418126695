"""Whole weights from checkpoints that DeepSpeed itself wrote on two ranks; DeepSpeed is not needed to read them."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.data.foreign.make_deepspeed import Network
from tests.trainer.tasks import arguments, trainer
from trainer_lib.checkpointing.third_party.deepspeed_shards import fp32_weights
from trainer_lib.commands.main import main
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, UnsupportedError
from trainer_lib.utils.deepspeed import get_fp32_state_dict_from_zero_checkpoint, load_state_dict_from_zero_checkpoint

WRITTEN = Path(__file__).parents[2] / "data" / "foreign" / "deepspeed"
STEP = "global_step3"


class Hostile:
    """Runs code when a careless reader reads a pickle of it."""

    def __reduce__(self) -> Any:
        return exec, ("open('hostile', 'w')",)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a copy of the checkpoint of stage 3."""
    return Path(shutil.copytree(WRITTEN / "stage_3", tmp_path / "saved"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_those_of_the_model(stage: int) -> None:
    expected = load_file(WRITTEN / f"stage_{stage}" / "expected.safetensors")
    weights = fp32_weights(WRITTEN / f"stage_{stage}")
    assert set(weights) == set(Network().state_dict()) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=0)
    assert weights["head.weight"] is weights["emb.weight"], "tied weights are not stored twice"
    assert "deepspeed" not in sys.modules
    trained = fp32_weights(WRITTEN / f"stage_{stage}" / STEP, exclude_frozen=True)
    assert set(weights) - set(trained) == {"frozen.weight", "frozen.bias"}


def test_a_command_writes_them_for_from_pretrained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, target in (("zero-to-fp32", "a"), ("zero_to_fp32", "b")):
        assert main(["checkpoint", verb, str(WRITTEN / "stage_3"), str(tmp_path / target), "--tag", STEP]) == 0
        assert f"are in {tmp_path / target}, in fp32" in capsys.readouterr().out
        Network().load_state_dict(load_file(tmp_path / target / "model.safetensors"), strict=False)
    assert main(["checkpoint", "zero-to-fp32", str(WRITTEN / "stage_3"), str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 14
    assert main(["checkpoint", "zero-to-fp32", str(WRITTEN / "stage_3"), str(tmp_path / "c"), "--tag", "step7"]) == 1
    assert "there is no 'step7'. Checkpoints in it: global_step3" in capsys.readouterr().err


def test_weights_load_into_a_model(checkpoint: Path) -> None:
    model: nn.Module = load_state_dict_from_zero_checkpoint(Network(), str(checkpoint))
    expected = load_file(checkpoint / "expected.safetensors")
    assert torch.equal(model.get_parameter("extra.weight"), expected["extra.weight"])
    assert not torch.equal(Network().get_parameter("extra.weight"), expected["extra.weight"])


def test_so_are_those_of_a_run_of_this_library(tmp_path: Path) -> None:
    made = trainer(arguments(output_dir=tmp_path, max_steps=2, save_every=2))
    made.fit()
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert isinstance(made.run.model, nn.Module)
    for name, value in made.accelerator.get_state_dict(made.run.model).items():
        assert torch.equal(weights[name], value)
    with pytest.raises(ConfigurationError, match="do not record which weights are trained"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)


def test_what_is_missing_or_damaged_is_named(checkpoint: Path) -> None:
    step = checkpoint / STEP
    (optimizer,) = step.glob("*rank_1_*optim_states.pt")
    content = optimizer.read_bytes()
    optimizer.unlink()
    with pytest.raises(CheckpointError, match="was saved by 2 ranks, and has the optim_states of 1"):
        fp32_weights(checkpoint)
    optimizer.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{optimizer.name} cannot be read"):
        fp32_weights(checkpoint)
    optimizer.write_bytes(content)
    next(step.glob("*rank_0_*model_states.pt")).rename(checkpoint / "away")
    with pytest.raises(CheckpointError, match="the model_states of rank 0 are missing"):
        fp32_weights(checkpoint)
    (checkpoint / "latest").unlink()
    with pytest.raises(CheckpointError, match="its file `latest` is missing, and no tag was given"):
        fp32_weights(checkpoint)


def test_shards_of_other_kinds_of_parallelism_are_refused(checkpoint: Path) -> None:
    (checkpoint / STEP / "zero_pp_rank_0_mp_rank_01_model_states.pt").touch()
    with pytest.raises(UnsupportedError, match="tensor, pipeline or expert parallelism"):
        fp32_weights(checkpoint)


def test_no_code_in_a_file_runs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint)
    path = next((checkpoint / STEP).glob("*rank_0_*model_states.pt"))
    torch.save({**torch.load(path, weights_only=True), "more": Hostile()}, path)
    assert len(fp32_weights(checkpoint)) == 14
    assert not (checkpoint / "hostile").exists()
