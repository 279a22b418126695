"""Scripts as users of Accelerate write them run on one process and on two, and give the numbers they should.

Each script in `loops/` also runs with Accelerate, when `trainer_lib` is replaced by `accelerate` in its text. Figures
that are said to be Accelerate's were taken that way.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.launched import PYTHON_PATH, run_as_script
from tests.worlds import run_world
from trainer_lib.commands.main import main

ROOT = Path(__file__).parent.parent
Loop = Callable[..., dict[str, Any]]


def close(values: Any, rel: float = 1e-5) -> Any:
    """Allow for rounding: sums over halves are rounded elsewhere than sums of the whole, and updates amplify it."""
    return pytest.approx(values, rel=rel, abs=1e-7)


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    """Run a script by its name on so many forked processes, which need not import torch, and return its figures."""

    def run(name: str, processes: int, *arguments: Any) -> dict[str, Any]:
        figures = tmp_path / "figures.json"
        figures.unlink(missing_ok=True)
        script = [str(part) for part in (ROOT / "tests" / "loops" / f"{name}.py", "--figures", figures, *arguments)]
        run_world(run_as_script, (script,), processes, timeout=100)
        return json.loads(figures.read_text())

    return run


@pytest.mark.slow
@pytest.mark.launch
def test_a_script_under_the_launcher(
    tmp_path: Path, loop: Loop, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tmp_path / "launched.json"
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.chdir(ROOT)
    options = ["--cpu", "--num_processes", "2", "--num_cpu_threads_per_process", "1"]
    code = main(["launch", *options, "tests/loops/gradient_accumulation.py", "--figures", str(figures)])
    assert code == 0, capfd.readouterr().err
    assert json.loads(figures.read_text()) == loop("gradient_accumulation", 2)


def test_gradient_accumulation(loop: Loop) -> None:
    alone, together = loop("gradient_accumulation", 1), loop("gradient_accumulation", 2)
    # 22 batches an epoch are 5 windows of 4 and one of 2.
    assert (len(alone["losses"]), len(alone["norms"])) == (44, 12)
    assert max(alone["norms"]) > 0.3
    assert alone["accuracies"][1] > 0.75
    for name, values in alone.items():
        assert together[name] == close(values), name


def test_automatic_gradient_accumulation(loop: Loop) -> None:
    # As much as 128 samples fit on the one process, and on both of two together no more than 32.
    alone, together = (loop("automatic_gradient_accumulation", n, "--fits", fits) for n, fits in ((1, 128), (2, 32)))
    assert (alone["tried"], alone["steps"]) == ([128], 1)
    assert (together["tried"], together["steps"]) == ([128, 64, 32], 4)
    assert together["losses"] == close(alone["losses"])
    assert alone["losses"][-1] == close(2.343092918395996, rel=1e-4)  # Accelerate's


@pytest.mark.slow
def test_autoregressive_gradient_accumulation(loop: Loop) -> None:
    alone, together = loop("autoregressive_gradient_accumulation", 1), loop("autoregressive_gradient_accumulation", 2)
    assert together["losses"] == close(alone["losses"])
    assert alone["losses"][-1] == close(3.364671468734741, rel=1e-4)  # Accelerate's
    # Up in 2 updates, and down to nothing in the other 6.
    rates = [0, 0.5, *(rest / 6 for rest in range(6, 0, -1)), 0]
    for figures in (alone, together):
        assert [*figures["rates"], figures["last_rate"]] == pytest.approx([0.005 * rate for rate in rates])


def test_multi_process_metrics(loop: Loop) -> None:
    alone, together = loop("multi_process_metrics", 1), loop("multi_process_metrics", 2)
    assert alone["names"] == together["names"] == [f"point {number}" for number in range(101)]
    assert alone["confusion"] == together["confusion"] == [[57, 1], [0, 43]]  # Accelerate's
    assert alone["count"] == together["count"] == 101
    assert together["loss"] == close(alone["loss"])


def test_checkpointing_every_few_steps(loop: Loop, tmp_path: Path) -> None:
    whole = loop("checkpointing", 2, "--output_dir", tmp_path, "--checkpointing_steps", 7)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_14", "step_21", "step_28", "step_7"]
    # In the middle of an epoch and, as two batches make an update, of an update.
    resumed = loop("checkpointing", 2, "--resume_from_checkpoint", tmp_path / "step_21")
    assert resumed["start"] == [2, 1]
    assert resumed["losses"] == {f"2.{batch}": whole["losses"][f"2.{batch}"] for batch in range(1, 10)}
    assert (resumed["weights"], resumed["rate"]) == (whole["weights"], whole["rate"])


def test_checkpointing_under_automatic_names(loop: Loop, tmp_path: Path) -> None:
    whole = loop("checkpointing", 1)
    saving = ["--output_dir", tmp_path, "--checkpointing_steps", "automatic", "--total_limit", 1]
    first = loop("checkpointing", 1, *saving, "--epochs", 2)
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["checkpoint_1"]
    resumed = loop("checkpointing", 1, *saving, "--resume_from_checkpoint", "latest")
    assert resumed["start"] == [2, 0]
    assert {**first["losses"], **resumed["losses"]} == whole["losses"]
    assert (resumed["weights"], resumed["rate"]) == (whole["weights"], whole["rate"])
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["checkpoint_2"]


def test_early_stopping(loop: Loop) -> None:
    alone, together = loop("early_stopping", 1), loop("early_stopping", 2)
    assert alone["stopped"]
    assert together["stopped"]
    assert together["steps"] == [*alone["steps"], *alone["steps"]]
    assert alone["steps"][0] < 160  # the batches of all 20 epochs
    assert together["losses"] == close(alone["losses"])


@pytest.mark.slow
def test_local_sgd(loop: Loop) -> None:
    alone, together = loop("local_sgd", 1), loop("local_sgd", 2)
    # 8 batches an epoch, with an average after the 3rd and the 6th, and at the end.
    at_averages = [spread for number, spread in enumerate(together["spreads"]) if number % 9 in (2, 5, 8)]
    between = [spread for number, spread in enumerate(together["spreads"]) if number % 9 not in (2, 5, 8)]
    assert at_averages == [0] * 6
    assert min(between) > 1e-3
    assert alone["spreads"] == [0] * 18
    assert alone["losses"][-1] == close(0.40730834007263184, rel=1e-4)  # Accelerate's
    assert together["losses"][-1] == close(0.4195106029510498, rel=1e-4)  # Accelerate's


@pytest.mark.slow
def test_ddp_comm_hook(loop: Loop) -> None:
    alone, together = loop("ddp_comm_hook", 1), loop("ddp_comm_hook", 2)
    assert together["weights_agree"]
    assert together["losses"] == close(alone["losses"], rel=1e-3)
    assert together["losses"] != close(alone["losses"], rel=2e-6)  # the hook did its work


@pytest.mark.slow
def test_fsdp(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = loop("fsdp", 1, "--output_dir", tmp_path / "alone", "--plugin", "--state_dict_type", "FULL_STATE_DICT")
    together = loop("fsdp", 2, "--output_dir", tmp_path / "together", "--plugin")
    assert alone["distributed_type"] == together["distributed_type"] == "FSDP"
    assert (alone["held"], together["held"]) == (3524, 3524 / 2)
    assert together["losses"] == close(alone["losses"])
    assert together["norms"] == close(alone["norms"])
    assert together["shapes"] == alone["shapes"]
    assert alone["losses"][-1] == close(1.1471788883209229, rel=1e-4)  # Accelerate's, of the model as a whole
    assert alone["norms"][-1] == close(0.6572439074516296, rel=1e-4)  # Accelerate's
    saved = {name: tensor.tolist() for name, tensor in load_file(tmp_path / "together/weights.safetensors").items()}
    assert saved == together["weights"]

    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    }.items():
        monkeypatch.setenv(name, value)
    resumed = loop(
        "fsdp", 2, "--output_dir", tmp_path / "resumed", "--resume_from_checkpoint", tmp_path / "together/epoch_0"
    )
    assert (resumed["distributed_type"], resumed["held"]) == ("FSDP", 3524 / 2)
    assert resumed["losses"] == together["losses"][6:]
    assert resumed["norms"] == together["norms"][3:]
    assert resumed["weights"] == together["weights"]


@pytest.mark.slow
def test_profiler(loop: Loop, tmp_path: Path) -> None:
    alone = loop("profiler", 1, "--output_dir", tmp_path / "alone")
    together = loop("profiler", 2, "--output_dir", tmp_path / "together")
    assert together["losses"] == close(alone["losses"])
    # Two cycles, of which two batches each are looked at, and each batch goes through two layers.
    assert (alone["reports_of_all"], together["reports_of_all"]) == ([2], [2, 2])
    for figures, batch_size in ((alone, 32), (together, 16)):
        flops = 2 * 2 * batch_size * (16 * 32 + 32 * 2)
        assert [(report["calls"], report["flops"]) for report in figures["reports"]] == [(4, flops)] * 2
        assert all(report["has_memory"] and "aten::addmm" in report["table"] for report in figures["reports"])
    traces = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*.json"))
    assert traces == ["alone/profile_0.json", "together/profile_0.json", "together/profile_1.json"]
    for trace in traces:
        events = [event for event in json.loads((tmp_path / trace).read_text())["traceEvents"] if event["ph"] == "X"]
        layers = [event for event in events if event["name"] == "aten::addmm"]
        assert len(layers) == alone["calls"] == together["calls"] == 20
        assert all("Input Dims" in event["args"] for event in layers)


@pytest.mark.slow
def test_memory(loop: Loop) -> None:
    alone, together = loop("memory", 1), loop("memory", 2)
    # Each time nine tenths, as with Accelerate.
    assert alone["tried"] == together["tried"] == [100, 90, 81, 72]
    assert (alone["every"], together["every"]) == ([[72, 0]], [[72, 0]] * 2)
    for figures in (alone, together):
        assert figures["alive"] == 0
        assert figures["released"] == [None, None]
    assert alone["loss"] == close(1.2346223592758179, rel=1e-4)  # Accelerate's
    assert together["loss"] == close(2.8182806968688965, rel=1e-4)  # Accelerate's, of its first process


@pytest.mark.slow
def test_cross_validation(loop: Loop) -> None:
    alone, together = loop("cross_validation", 1), loop("cross_validation", 2)
    assert alone["tested"] == together["tested"] == 297
    assert together["accuracies"] == alone["accuracies"]
    assert together["test_accuracy"] == alone["test_accuracy"]
    assert together["first_logits"] == close(alone["first_logits"], rel=1e-4)
    assert min(*alone["accuracies"], alone["test_accuracy"]) > 0.7


@pytest.mark.slow
def test_compiled(loop: Loop, tmp_path: Path) -> None:
    alone = loop("compiled", 1, "--output_dir", tmp_path / "alone")
    together = loop("compiled", 2, "--output_dir", tmp_path / "together")
    assert together["losses"] == close(alone["losses"])
    assert alone["losses"][-1] == close(0.7063624858856201, rel=1e-4)  # Accelerate's
    for figures, folder in ((alone, tmp_path / "alone"), (together, tmp_path / "together")):
        assert figures["equal"]
        assert figures["kind"] == "Sequential"
        assert figures["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        parts = sorted(path.name for path in folder.glob("*.safetensors"))
        assert parts == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(figures["names"])
