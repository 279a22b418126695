"""The command `trainer-lib evaluate`: checkpoints of a run, evaluated by another program, also while it trains."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launched import PYTHON_PATH
from trainer_lib.commands.main import main
from trainer_lib.runs.report.report_data import Source, contents

pytestmark = [pytest.mark.slow, pytest.mark.launch]

SCRIPT = """
import json, os, shutil, sys, time
from tests.trainer.tasks import arguments, network, points, trainer
from trainer_lib.callbacks import EMA, CsvLog
from trainer_lib.events import Callback, Modifier

options = json.loads(sys.argv[1])


class Wait(Callback):
    def on_step_end(self, run):
        ends = time.monotonic() + 120  # a test that fails leaves no training behind
        while run.state.step == options.get("wait_at") and not os.path.exists("evaluations_seen"):
            assert time.monotonic() < ends
            time.sleep(0.05)
        if run.state.step == options.get("dies_at"):
            os._exit(9)


class Delete(Modifier):
    def on_load_begin(self, run, folder):
        if folder.name == "checkpoint-00000005" and os.path.exists("delete"):
            shutil.rmtree(folder)


trainer(
    arguments(output_dir="runs", num_train_epochs=4, save_in_background=False, keep_last=None, **options["arguments"]),
    model=network(0.2),
    eval_dataset={"all": points(), "few": tuple(part[:7] for part in points())},
    metrics=["accuracy"],
    callbacks=[EMA(0.9), CsvLog("history.csv"), Wait(), Delete()],
).fit()
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has the script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [PYTHON_PATH, os.environ.get("PYTHONPATH")])))
    Path("train.py").write_text(SCRIPT)
    return tmp_path


def start(*words: str, eval_every: str = "never", **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, *words, "train.py", json.dumps({"arguments": {"eval_every": eval_every}, **options})]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_evaluation(*words: str, eval_every: str = "never") -> "subprocess.Popen[str]":
    return start("-m", "trainer_lib", "evaluate", "runs", *words, eval_every=eval_every)


def output(process: "subprocess.Popen[str]", code: int = 0) -> str:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == code, text
    return text


def evaluations(file: str) -> dict[int, dict[str, Any]]:
    """Return the metrics by step."""
    (path,) = Path("runs").glob(f"*/{file}")
    written = (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
    entries = list(map(json.loads, written))
    lines = [entry for entry in entries if entry["event"] == "evaluation"]
    return {line["step"]: {name: line[name] for name in line if name.startswith("eval_")} for line in lines}


def until(is_true: Callable[[], bool], *processes: "subprocess.Popen[str]") -> None:
    """Wait until something is true, while processes run."""
    ends = time.monotonic() + 120
    while not is_true():
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < ends
        time.sleep(0.05)


def is_evaluated(step: int) -> bool:
    return bool(list(Path("runs").glob("*/evaluations.jsonl"))) and step in evaluations("evaluations.jsonl")


def test_metrics_are_those_of_evaluations_in_the_run(job: Path) -> None:
    output(start(eval_every="1 epoch"))
    table = Path("history.csv").read_text()
    text = output(start_evaluation(eval_every="1 epoch"))
    within, beside = evaluations("history.jsonl"), evaluations("evaluations.jsonl")
    assert list(beside) == [5, 10, 15, 20]
    assert beside == within, "with the averaged weights, bit by bit"
    assert f"checkpoint-00000005: eval_all_loss {beside[5]['eval_all_loss']:.4g}, " in text
    assert Path("history.csv").read_text() == table, "observers of the script are not called"
    assert "has no checkpoint that is not evaluated yet" in output(start_evaluation(eval_every="1 epoch"))
    (file,) = Path("runs").glob("*/evaluations.jsonl")
    first, *_, last = file.read_text().splitlines(keepends=True)
    file.write_text(first + last)  # on two ranks, those alone that have no line
    text = output(start_evaluation("--cpu", "--num_processes", "2", eval_every="1 epoch"))
    assert [line.partition(":")[0] for line in text.splitlines() if line.startswith("checkpoint-")] == [
        "checkpoint-00000010",
        "checkpoint-00000015",
    ]
    assert evaluations("evaluations.jsonl")[15] == pytest.approx(within[15], rel=1e-6)


def test_a_run_is_watched_while_it_trains_until_it_is_finished(job: Path) -> None:
    training = start(wait_at=12)
    until(lambda: bool(list(Path("runs").glob("*/checkpoints/checkpoint-00000010"))), training)
    watching = start_evaluation("--watch")
    until(lambda: is_evaluated(10), training, watching)
    Path("evaluations_seen").touch()
    output(training)
    output(watching)
    assert list(evaluations("evaluations.jsonl")) == [5, 10, 15, 20]
    assert evaluations("history.jsonl") == {}
    (folder,) = Path("runs").iterdir()
    (run,) = contents([Source.of(folder)])["runs"]
    assert run["status"] == "finished"
    assert [row["step"] for row in run["evaluations"]["rows"]] == [5, 10, 15, 20]
    assert run["curves"]["eval_all_accuracy"]["count"] == 4


def test_deleted_checkpoints_are_left_out_and_ctrl_c_ends_a_watch(job: Path) -> None:
    output(start(dies_at=12), code=9)
    Path("delete").touch()
    watching = start_evaluation("--watch")
    until(lambda: is_evaluated(10), watching)
    watching.send_signal(signal.SIGINT)
    text = output(watching, code=130)
    assert "checkpoint-00000005 was deleted before it was evaluated. A larger keep_last of the run keeps" in text
    assert "Traceback" not in text
    assert list(evaluations("evaluations.jsonl")) == [10]


def test_what_is_no_run_and_a_missing_script_are_errors(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    assert main(["evaluate", "runs", "train.py"]) == 2
    assert "runs is no run. Give the folder of a run, such as output_dir/RUN_ID" in capsys.readouterr().err
    shutil.rmtree("runs")
    output(start(dies_at=6), code=9)
    assert main(["evaluate", "runs", "--watch"]) == 2
    assert "No script was given." in capsys.readouterr().err
    Path("loop.py").write_text("print('a loop of its own')")
    assert main(["evaluate", "runs", "--cpu", "--num_processes", "1", "loop.py"]) == 1
    assert "the script ended without Trainer.fit(), so nothing is evaluated." in capsys.readouterr().err
