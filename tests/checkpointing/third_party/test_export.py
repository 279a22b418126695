"""`trainer-lib checkpoint convert --to`: checkpoints of this library continue in Accelerate and in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpointing.test_foreign import language_trainer, the_model
from tests.checkpointing.third_party.fsdp_loops import TheirFsdp
from tests.checkpointing.third_party.loops import EPOCH, Loop, ours, theirs
from tests.checkpointing.third_party.test_fsdp import prepared, train
from tests.checkpointing.third_party.trainers import SAVED_AT, logged, set_dropout, their_state, their_trainer
from tests.worlds import run_world
from trainer_lib import CheckpointError, ConfigurationError
from trainer_lib.checkpointing.third_party.export_checkpoint import export
from trainer_lib.commands.main import main
from trainer_lib.foundation.errors import UnsupportedError

pytest.importorskip("transformers")


def our_run(folder: Path, dropout: bool = True, **options: Any) -> tuple[Path, dict[int, float]]:
    """Train with this library, and return the checkpoint of the step `SAVED_AT` and the losses after it."""
    trainer = language_trainer(output_dir=folder, save_every=SAVED_AT, **options)
    set_dropout(the_model(trainer), dropout)
    result = trainer.fit()
    return Path(result.state.checkpoints[0]["path"]), logged(trainer, SAVED_AT)


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_transformers_continues_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], weight_decay: float) -> None:
    saved, expected = our_run(tmp_path / "runs", weight_decay=weight_decay)
    target = tmp_path / "theirs" / f"checkpoint-{SAVED_AT}"
    assert main(["checkpoint", "convert", str(saved), str(target), "--to", "transformers"]) == 0
    report = capsys.readouterr().out
    assert f"(step {SAVED_AT}) is in {target} for transformers." in report
    assert (
        "written: config.json, model.safetensors, optimizer.pt, rng_state.pth, scheduler.pt, trainer_state.json"
        in report
    )
    assert "without sampler: transformers skips the batches of the epoch by the number of steps" in report
    assert "without training_args.bin: a pickled class" in report
    with their_state():
        theirs = their_trainer(tmp_path / "theirs", weight_decay=weight_decay)
        theirs.train(resume_from_checkpoint=str(target))
        assert logged(theirs, SAVED_AT) == pytest.approx(expected, rel=1e-5)
        assert list(expected) == [8, 9, 10]
        assert [entry["step"] for entry in theirs.state.log_history if "loss" in entry] == list(range(1, 11))


def test_the_state_of_the_run_is_read(tmp_path: Path) -> None:
    from transformers import TrainerState

    saved, _ = our_run(tmp_path / "runs")
    export(saved, tmp_path / "out", "transformers")
    state = TrainerState.load_from_json(str(tmp_path / "out" / "trainer_state.json"))
    assert (state.global_step, state.epoch, state.max_steps, state.num_train_epochs) == (7, 1.4, 10, 2)
    assert [entry["step"] for entry in state.log_history] == list(range(1, 8))
    assert state.best_metric is None


@pytest.mark.slow
def test_two_ranks_of_transformers_continue_a_run(tmp_path: Path) -> None:
    def write() -> tuple[Path, dict[int, float]]:
        return our_run(tmp_path / "runs", gradient_accumulation_steps=1)

    def read() -> dict[int, float]:
        with their_state():
            theirs = their_trainer(tmp_path / "theirs", ranks=2)
            theirs.train(resume_from_checkpoint=str(target))
            return logged(theirs, SAVED_AT)

    saved, expected = run_world(write)[0]
    target = tmp_path / "theirs" / f"checkpoint-{SAVED_AT}"
    export(saved, target, "transformers")
    assert (target / "rng_state_1.pth").is_file()
    assert run_world(read, OMP_NUM_THREADS="1")[0] == pytest.approx(expected, rel=1e-5)


def test_accelerate_continues_a_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(ours(), models=2, dropout=0.3, shuffle=True)
    loop.train(EPOCH)
    loop.accelerator.save_state(tmp_path / "saved")
    expected = loop.train(EPOCH + 2)
    arguments = ["checkpoint", "convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "accelerate"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["left_out"].keys() == {"sampler", "engine"}
    assert len(report["written"]) == 8
    with theirs() as accelerator:
        loop = Loop(accelerator, models=2, dropout=0.3, shuffle=True)
        accelerator.load_state(str(tmp_path / "out"))
        assert loop.seen.values["seen"] == EPOCH
        assert loop.train(EPOCH + 2) == expected
    assert main(arguments) == 2
    assert "exists already. Give --overwrite to replace it" in capsys.readouterr().err
    (tmp_path / "out" / "optimizer_7.bin").touch()
    assert main([*arguments, "--overwrite"]) == 0
    assert not (tmp_path / "out" / "optimizer_7.bin").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "saved"]


@pytest.mark.slow
def test_accelerate_continues_shards(tmp_path: Path) -> None:
    def write() -> list[float]:
        accelerator, model, optimizer = prepared("SHARDED_STATE_DICT")
        train(accelerator, model, optimizer, 0, 3)
        accelerator.save_state(tmp_path / "saved")
        return train(accelerator, model, optimizer, 3, 6)

    def read() -> list[float]:
        with theirs():
            fsdp = TheirFsdp("SHARDED_STATE_DICT")
            fsdp.load(tmp_path / "out")
            return fsdp.train(3, 6)

    expected = run_world(write)
    result = export(tmp_path / "saved", tmp_path / "out", "accelerate")
    assert {"pytorch_model_fsdp_0", "optimizer_0", "model.safetensors"} < set(result.written)
    assert run_world(read, OMP_NUM_THREADS="1") == [pytest.approx(losses, rel=1e-5) for losses in expected]


def test_a_run_becomes_a_state_of_accelerate_without_its_counts(tmp_path: Path) -> None:
    saved, _ = our_run(tmp_path / "runs")
    result = export(saved, tmp_path / "out", "accelerate")
    assert "custom_checkpoint_0.pkl" not in result.written
    assert result.left_out["the run"] == "Accelerate has no counts, history and callbacks of a Trainer's run"


def test_what_cannot_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(ours())
    saved, out = tmp_path / "saved", tmp_path / "out"
    loop.accelerator.save_state(saved)
    with pytest.raises(UnsupportedError, match="saved by a loop of yours, without the counts of a run"):
        export(saved, out, "transformers")
    with pytest.raises(ConfigurationError, match=r"layout 'transformer'.*mean 'transformers'"):
        export(saved, out, "transformer")
    with pytest.raises(ConfigurationError, match=r"is a URL\. Convert to a folder on this machine"):
        export(saved, "memory://bucket/out", "accelerate")
    for options, words in (
        (["--to", "accelerate", "--epochs", "1"], "--epochs has no effect with --to"),
        (["--overwrite"], "--overwrite needs --to"),
    ):
        assert main(["checkpoint", "convert", str(saved), str(out), *options]) == 2
        assert words in capsys.readouterr().err
    (saved / "optimizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"optimizer.json"):
        export(saved, out, "accelerate")
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest"):
        export(saved, out, "accelerate")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_groups_that_transformers_does_not_have(tmp_path: Path) -> None:
    from trainer_lib import ParameterGroup

    saved, _ = our_run(tmp_path / "runs", parameter_groups=[ParameterGroup("*wte*", learning_rate=0.1)])
    with pytest.raises(UnsupportedError, match="3 parameter groups with the learning rates"):
        export(saved, tmp_path / "out", "transformers")
