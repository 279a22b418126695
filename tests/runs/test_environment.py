"""Tests of the recorded machine, git commit and command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainer_lib
from tests.trainer.tasks import arguments, trainer
from trainer_lib.events import Modifier, Run
from trainer_lib.runs import read_run
from trainer_lib.runs.report.report_data import contents
from trainer_lib.runs.report.report_page import find_runs
from trainer_lib.runs.run_environment import script_commit


def _git(folder: Path, *words: str) -> str:
    options = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *options, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_of_the_script_and_changes_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("1")
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert script_commit() is None
    _git(tmp_path, "init", "-q")
    assert script_commit() is None
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "First")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert script_commit() == commit
    assert _recorded_commit(tmp_path / "runs") == commit
    script.write_text("2")
    assert script_commit() == f"{commit} (with changes)"


def test_a_file_name_that_is_no_text_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("1")
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")
    Path(odd).write_text("1")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "config", "core.quotepath", "false")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "First")
    Path(odd).write_text("2")
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert script_commit() == f"{_git(tmp_path, 'rev-parse', 'HEAD')} (with changes)"


_SCRIPT = """
from torch import nn, ones
from datasets import mine
from trainer_lib import Trainer, TrainingArguments

args = TrainingArguments(max_steps=1, use_cpu=True, output_dir="runs")
trainer = Trainer(nn.Linear(2, 1), args, train_dataset=mine, loss_fn=nn.MSELoss())
print("step", trainer.fit().state.step, "datasets" in trainer.model_card())
"""


def test_a_script_may_have_a_module_with_the_name_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "datasets.py").write_text("from torch import ones\nmine = ones(4, 2), ones(4, 1)")
    packages = tmp_path / "packages"  # all that are installed here, without `datasets`
    packages.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith(("datasets", "evaluate")) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    here = Path(trainer_lib.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{packages}"}
    command = [sys.executable, "-S", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 1 False" in done.stdout


def _recorded_commit(output_dir: Path) -> str:
    trainer(arguments(output_dir=output_dir, max_steps=1)).fit()
    (folder,) = output_dir.iterdir()
    facts = read_run(folder, None).facts
    assert facts["status"] == "finished"
    return facts["environment"]["commit"]


class Fails(Modifier):
    def on_step_end(self, run: Run) -> None:
        raise ValueError("too wide")


def test_a_run_keeps_its_command_and_the_traceback_of_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1", "--hub_token", "secret"])
    with pytest.raises(ValueError, match="too wide"):
        trainer(arguments(output_dir=tmp_path), callbacks=[Fails()]).fit()
    (folder,) = tmp_path.iterdir()
    assert read_run(folder, None).facts["environment"]["command"] == "train.py --lr 0.1 --hub_token '***'"
    (run,) = contents(find_runs([folder]))["runs"]
    assert run["traceback"].startswith("Traceback (most recent call last):\n")
    assert run["traceback"].endswith("ValueError: too wide\n")
    assert ["Processes", "1"] in run["figures"]


def test_a_run_that_ended_well_after_a_failure_has_no_traceback(tmp_path: Path) -> None:
    options = {"output_dir": tmp_path, "save_every": 1, "resume": "auto", "save_in_background": False}

    class FailsLate(Modifier):
        def on_step_begin(self, run: Run) -> None:
            if run.state.step == 4:
                raise ValueError("too wide")

    with pytest.raises(ValueError, match="too wide"):
        trainer(arguments(**options), callbacks=[FailsLate()]).fit()
    trainer(arguments(**options)).fit()
    (run,) = contents(find_runs(list(tmp_path.iterdir())))["runs"]
    assert run["status"] == "finished"
    assert run["traceback"] == ""
