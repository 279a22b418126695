"""The command `trainer-lib checkpoint`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpointing.test_sharded import SHARDED, engine, run
from tests.faults.injuries import spoil
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib.commands.main import main
from trainer_lib.runs.run_lease import Lease


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run with three checkpoints, of which the first is the best."""
    options: dict[str, Any] = {"keep_last": None, "metric_for_best": "loss", "greater_is_better": True}
    trainer(arguments(output_dir=tmp_path, num_train_epochs=3, **options), eval_dataset=points(16)).fit()
    return next(tmp_path.iterdir())


def run_command(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, Any]:
    code = main(["checkpoint", *map(str, arguments)])
    text = capsys.readouterr().out
    return code, json.loads(text) if "--json" in arguments else text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, states = run_command(capsys, "list", folder, "--json")
    assert code == 0
    assert [state["step"] for state in states] == [5, 10, 15]
    assert [state["kept"] for state in states] == [["best"], [], ["newest"]]
    assert [state["status"] for state in states] == ["complete"] * 3
    assert all(state["metrics"]["eval_loss"] > 0 and 0 <= state["age"] < 60 for state in states)
    files = (folder / "checkpoints" / "checkpoint-00000005").rglob("*")
    assert states[0]["size"] == sum(path.stat().st_size for path in files)
    for place in (folder.parent, folder / "checkpoints"):
        assert [state["path"] for state in run_command(capsys, "list", place, "--json")[1]] == [
            saved["path"] for saved in states
        ]
    _, text = run_command(capsys, "list", folder)
    assert "checkpoint-00000015  step 15" in text
    assert f"eval_loss {states[2]['metrics']['eval_loss']:.4g}" in text


def test_prune_deletes_what_killed_saves_left_where_none_is_under_way(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = (folder / "checkpoints" / f"checkpoint-000000{step}.partial" for step in (16, 17))
    for path in (old, new):
        path.mkdir()
        (path / "model.safetensors").write_bytes(bytes(2000))
    os.utime(old / "model.safetensors", (0, 0))
    with Lease(folder) as lease:
        lease.acquire()
        assert f"kept {old}" in run_command(capsys, "prune", folder, "--keep-last", "3")[1]
    _, text = run_command(capsys, "prune", folder.parent, "--keep-last", "3")
    assert f"deleted {old} (1.95 KB), left by an interrupted save" in text
    assert f"kept {new} (1.95 KB): a save may be in progress" in text
    assert (old.exists(), new.exists()) == (False, True)
    assert len(names(folder)) == 4


@pytest.mark.parametrize("ending", ["partial", "deleted"])
def test_prune_deletes_what_killed_saves_left_where_there_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    left = tmp_path / "run" / "checkpoints" / f"checkpoint-00000001.{ending}"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(2000))
    assert run_command(capsys, "prune", tmp_path, "--keep-last", "3") == (
        0,
        f"kept {left} (1.95 KB): a save may be in progress\n",
    )
    os.utime(left / "model.safetensors", (0, 0))
    code, text = run_command(capsys, "prune", tmp_path, "--keep-last", "3")
    assert (code, text) == (0, f"deleted {left} (1.95 KB), left by an interrupted save\n")
    assert not left.exists()
    assert run_command(capsys, "prune", tmp_path, "--keep-last", "3") == (1, "")  # there is no state in it


def test_verify_names_the_bad_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(capsys, "verify", folder, "--all")[1].count("whole") == 3
    spoil(folder / "checkpoints" / "checkpoint-00000005" / "model.safetensors")
    assert run_command(capsys, "verify", folder)[0] == 0  # the newest
    code, text = run_command(capsys, "verify", folder, "--all")
    assert code == 1
    assert "DAMAGED" in text
    assert "model.safetensors has the checksum" in text
    code, results = run_command(capsys, "verify", folder / "checkpoints" / "checkpoint-00000005", "--json")
    assert (code, [result["is_whole"] for result in results]) == (1, [False])


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = run_command(capsys, "inspect", folder, "--json")
    assert (code, facts["step"], facts["manifest"]["schema"]) == (0, 15, 3)
    code, text = run_command(capsys, "inspect", folder / "checkpoints" / "checkpoint-00000005")
    assert "saved by 1 process, precision" in text
    assert "model.safetensors" in text


def test_metrics_of_nan_and_inf_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def odd(prediction: Any) -> dict[str, float]:
        del prediction
        return {"odd": float("nan"), "large": float("-inf")}

    args = arguments(output_dir=tmp_path, num_train_epochs=1)
    trainer(args, eval_dataset=points(16), compute_metrics=odd).fit()
    capsys.readouterr()
    assert main(["checkpoint", "list", str(tmp_path), "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (state,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert (state["metrics"]["eval_odd"], state["metrics"]["eval_large"]) == ("NaN", "-Infinity")


def test_prune_keeps_the_newest_the_best_and_the_last_that_is_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(folder / "checkpoints" / "checkpoint-00000015" / "model.safetensors")
    assert run_command(capsys, "prune", folder, "--keep-last", 1)[1] == ""
    assert names(folder) == [f"checkpoint-000000{step}" for step in ("05", "10", "15")]
    (folder / "checkpoints" / "checkpoint-00000015").rename(folder / "checkpoints" / "checkpoint-00000015.damaged")
    assert run_command(capsys, "list", folder, "--json")[1][2]["status"] == "set aside"
    trainer(arguments(output_dir=folder.parent, resume=str(folder), num_train_epochs=4), eval_dataset=points(16)).fit()
    _, text = run_command(capsys, "prune", folder, "--keep-last", 1)
    assert "deleted" in text
    assert "checkpoint-00000015.damaged" in names(folder)
    assert "which was set aside as damaged: --damaged deletes it" in text
    assert names(folder)[-1] == "checkpoint-00000020"
    assert not {"checkpoint-00000010", "checkpoint-00000015"} & set(names(folder))
    left = set(names(folder)) - {"checkpoint-00000015.damaged"}
    _, (gone,) = run_command(capsys, "prune", folder, "--keep-last", 1, "--damaged", "--json")
    assert gone["path"].endswith("checkpoint-00000015.damaged")
    assert set(names(folder)) == left


def test_consolidate_puts_shards_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_world(lambda: run(engine(SHARDED), 1, save={1: tmp_path / "state"})["state"], (), 2, timeout=60)[0]
    assert run_command(capsys, "consolidate", tmp_path / "state", tmp_path / "whole")[0] == 0
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    assert weights.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in weights.items())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["verify", "nowhere"], 1, "There is no checkpoint in"),
        (["prune", "nowhere"], 2, "--keep-last"),
        (["prune", "nowhere", "--keep-last", "0"], 2, "at least 1 (got '0'). `trainer-lib checkpoint prune -h`"),
        (["prune", "nowhere", "--keep-last", "x"], 2, "a whole number of at least 1 (got 'x')"),
        (["lst", "nowhere"], 2, "invalid choice"),
    ],
)
def test_what_is_wrong_is_told(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["checkpoint", *arguments]) == code
    assert words in capsys.readouterr().err
