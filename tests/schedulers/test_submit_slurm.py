"""The job files of `trainer-lib submit slurm`, and what a real SLURM does with them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.schedulers.slurm_cluster import SlurmCluster
from tests.trainer.safety.test_elastic_restarts import uninterrupted
from tests.worlds import run_world
from trainer_lib import ConfigurationError
from trainer_lib.commands.main import main
from trainer_lib.commands.submit.sweep import grid


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINER_LIB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    file = tmp_path / "train.py"
    file.write_text("import sys; print(sys.argv[1:])\n")
    return file


def job_file(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["submit", "slurm", "--dry_run", *words]) == 0
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["submit", "slurm", *words]) == 2
    return capsys.readouterr().err.strip().removeprefix("trainer-lib submit: error: ")


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_job_of_one_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = job_file(
        capsys, "--time", "04:00:00", "--gpus-per-node=8", "--num_processes", "8", "train.py", "--lr", "1e-3"
    )
    assert directives(text) == [
        "job-name=train",
        "nodes=1",
        "ntasks-per-node=1",
        f"output={tmp_path}/slurm_jobs/%x-%j.log",
        "open-mode=append",
        "requeue",
        "signal=USR1@120",
        "time=04:00:00",
        "gpus-per-node=8",
    ]
    assert f"\nsrun {sys.executable} -m trainer_lib launch --num_processes=8 train.py --lr 1e-3\ncode=$?\n" in text
    assert 'case $code in 75 | 138 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac\nexit $code\n' in text
    assert not (tmp_path / "slurm_jobs").exists(), "a dry run writes nothing"


def test_a_job_of_several_machines_takes_the_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("num_machines: 2\nnum_processes: 4\nuse_cpu: true\ndistributed_type: MULTI_CPU\n")
    text = job_file(capsys, "--config_file", "two.yaml", "--max_restarts=1", "train.py")
    assert "nodes=2" in directives(text)
    assert (
        f"srun bash -c 'exec {sys.executable} -m trainer_lib launch --config_file={file} --max_restarts=1 "
        "--num_machines 2 --machine_rank $SLURM_NODEID --main_process_ip $MASTER_ADDR "
        '--main_process_port $MASTER_PORT "$@"\' launch train.py\n'
    ) in text
    assert 'address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)' in text


def test_other_options_of_a_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [
        "--no_requeue",
        "--save_seconds",
        "0",
        "--sbatch",
        "exclusive --mail-type=END",
        "--setup",
        "module load cuda",
    ]
    text = job_file(capsys, *words, "--job_name", "a", "--job_folder", "jobs", "--mem", "64G", "train.py")
    assert directives(text)[3:] == [
        f"output={tmp_path}/jobs/%x-%j.log",
        "open-mode=append",
        "no-requeue",
        "mem=64G",
        "exclusive",
        "mail-type=END",
    ]
    assert "\n\nmodule load cuda\n\n" in text
    assert "scontrol requeue" not in text


def test_values_with_spaces_are_quoted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    words = ["--job_name", "my job", "--sbatch", """comment='a "b" #1' mail-type=END"""]
    written = directives(job_file(capsys, *words, "train.py"))
    assert [written[0], written[3]] == ['job-name="my job"', f'output="{folder}/slurm_jobs/%x-%j.log"']
    assert written[-2:] == [r'comment="a \"b\" #1"', "mail-type=END"]


def test_a_sweep_is_an_array(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sweep", "lr=0.1,0.01 seed=1,2", "--max_tasks=2", "train.py", "--output_dir", "runs/{task}"]
    text = job_file(capsys, *words)
    assert "array=0-3%2" in directives(text)
    assert "    2) task=(--lr 0.01 --seed 1) ;;\n" in text
    assert 'train.py --output_dir runs/"$SLURM_ARRAY_TASK_ID" "${task[@]}"\n' in text


def test_a_grid_has_every_combination() -> None:
    assert grid("lr=0.1,0.01 --seed=1,2")[1:3] == [["--lr", "0.1", "--seed", "2"], ["--lr", "0.01", "--seed", "1"]]
    assert grid("") == []
    with pytest.raises(ConfigurationError, match=r"as in 'lr=0\.1,0\.01 batch_size=8,16' \(got 'lr=0\.1,'\)"):
        grid("lr=0.1,")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partitoin", "x", "train.py"], "Unknown option '--partitoin'. Did you mean '--partition'?"),
        (["--time", "1:00:00"], "No script was given. Name it after the options: trainer-lib submit SCHEDULER SCRIPT."),
        (["nothing.py"], "The script 'nothing.py' is not there (in "),
        (
            ["--machine_rank", "1", "train.py"],
            "--machine_rank has no effect in a job: the scheduler says where it runs",
        ),
        (["--cpus_per_task", "0", "train.py"], "--cpus_per_task must be a whole number of at least 1 (got '0')."),
        (["--mixed_precision", "fp9", "train.py"], "Unknown mixed_precision 'fp9'."),
        (
            ["--sweep", "lr=1,2", "train.py", "--output_dir", "runs"],
            "All 2 tasks of the sweep have the same --output_dir, so a requeued one could resume another one's run.",
        ),
        (["train.py", "--output_dir", "runs/{task}"], "{task} is the number of a task of a sweep. Add --sweep"),
    ],
)
def test_what_is_wrong_is_an_error_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], message: str
) -> None:
    assert error_of(capsys, *words).startswith(message)
    assert not (tmp_path / "slurm_jobs").exists()


def test_other_schedulers_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "slrum", "train.py"]) == 2
    assert "Unknown scheduler 'slrum'. Known: " in capsys.readouterr().err


def test_without_sbatch_the_file_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "There is no program sbatch here. Submit " in error_of(capsys, "train.py")


@pytest.mark.slow
def test_arguments_arrive_as_they_were_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Bash runs the job file, with an `srun` that starts the command once."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"srun": 'exec "$@"', "squeue": "echo N/A", "scontrol": "echo 127.0.0.1"}.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    odd = ["a b", "$HOME", "it's", '"x"', "{task}-*", "", "--eval"]
    text = job_file(capsys, "--no_python", "--sweep", "lr=0.1,1e-3", "printf", "%s\\n", *odd)
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "5"}
    done = subprocess.run(["bash", "-c", text], env=variables, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines() == ["a b", "$HOME", "it's", '"x"', "1-*", "", "--eval", "--lr", "1e-3"], done.stderr


TRAINING = """
import json, os, sys, time
from pathlib import Path
from tests.trainer.tasks import arguments, network, points, trainer
from tests.trainer.safety.test_elastic_restarts import logged_losses
from trainer_lib.events import Callback

class WaitsForTheSignal(Callback):
    def on_step_end(self, run):
        if run.state.step == 7 and "SLURM_RESTART_COUNT" not in os.environ:
            Path(f"ready_{run.trainer.accelerator.process_index}").touch()
            ends = time.monotonic() + 60
            while run.control.interruption is None and time.monotonic() < ends:
                time.sleep(0.01)

assert float(os.environ["SLURM_JOB_END_TIME"]) > time.time()
folder = Path(sys.argv[1])
model = network(dropout=0.3)
args = arguments(output_dir=folder, resume="auto", num_train_epochs=3, save_every=100, log_every=3)
result = trainer(args, model=model, train_dataset=points(75), callbacks=[WaitsForTheSignal()]).fit()
weights = [parameter.tolist() for parameter in model.parameters()]
if os.environ["RANK"] == "0":
    Path("result.json").write_text(json.dumps([logged_losses(result), weights, result.state.samples]))
"""


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    ("machines", "interrupt"),
    [
        (1, ["scancel", "--signal=USR1", "{job}"]),
        (1, ["scontrol", "requeue", "{job}"]),
        (2, ["sbatch", "--partition=high", "-N2", "--ntasks-per-node=2", "--output=/dev/null", "--wrap=true"]),
    ],
    ids=["signal", "requeue", "preemption"],
)
def test_an_interrupted_job_is_requeued_and_ends_with_the_same_numbers(
    slurm: SlurmCluster, script: Path, tmp_path: Path, machines: int, interrupt: list[str]
) -> None:
    script.write_text(TRAINING)
    submit = [sys.executable, "-m", "trainer_lib", "submit", "slurm", f"--num_machines={machines}", "--num_processes=2"]
    # The nodes' names are in no name server.
    done = slurm.run(*submit, "--cpu", "--time=10", "train.py", "runs", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    job = done.split()[2].rstrip(":")
    slurm.wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == 2, "both ranks are at the seventh step")
    slurm.run(*(word.format(job=job) for word in interrupt))
    slurm.start_requeued(job)
    state = slurm.wait_for(job, "JobState", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    log = (tmp_path / "slurm_jobs" / f"train-{job}.log").read_text()
    assert state == "COMPLETED", log
    assert slurm.field(job, "Restarts") == "1"
    assert re.search("resumed at step [78]", log), log
    (whole, _) = run_world(uninterrupted, (), 2, timeout=200)
    result: Any = json.loads((tmp_path / "result.json").read_text())
    assert result == json.loads(json.dumps(whole))
    assert len(list((tmp_path / "runs").iterdir())) == 1  # a single run


@pytest.mark.slow
@pytest.mark.launch
def test_a_sweep_runs_once_for_each_combination(slurm: SlurmCluster, script: Path, tmp_path: Path) -> None:
    shutil.copy(script, tmp_path / "arguments.py")
    submit = [sys.executable, "-m", "trainer_lib", "submit", "slurm", "--cpu", "--sweep", "lr=0.1,0.01"]
    job = slurm.run(*submit, "arguments.py", "--output_dir", "runs/{task}").split()[2].rstrip(":")
    logs = [tmp_path / "slurm_jobs" / f"arguments-{job}_{task}.log" for task in range(2)]
    slurm.wait_until(lambda: all(log.exists() and "lr" in log.read_text() for log in logs), "both tasks have printed")
    assert [log.read_text().strip() for log in logs] == [
        str(["--output_dir", f"runs/{task}", "--lr", rate]) for task, rate in enumerate(("0.1", "0.01"))
    ]
