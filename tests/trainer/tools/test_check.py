"""`Trainer.check` and `trainer-lib check`: what holds is proved, what is wrong is named, and nothing is left behind."""

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, IterableDataset

from tests.launched import PYTHON_PATH
from tests.trainer.tasks import arguments, network, points, trainer
from tests.trainer.tools.test_sandbox import assert_same, outcome, state
from tests.worlds import run_world
from trainer_lib import Modifier, Trainer
from trainer_lib.commands.main import main
from trainer_lib.trainer.tools.checkpoint_differences import differences
from trainer_lib.trainer.tools.learning_rate_curve import learning_rates


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put temporary folders where the tests look for what is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class DropsAlways(nn.Module):
    """A model that draws random numbers in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(dropout(x, 0.5, training=True))


class CountsInSecret(nn.Module):
    """A model whose output depends on a number that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.layer(x) * (1 + self.calls)


class Noise:
    """A transform that continues to read numbers."""

    def __init__(self) -> None:
        self.numbers = iter(np.random.default_rng(0).random(1000).tolist())

    def __call__(self, row: Any) -> Any:
        return row + next(self.numbers)


class OwnNoise(Dataset[Any]):
    """A dataset whose transform has a position that no checkpoint holds."""

    def __init__(self) -> None:
        self.inputs, self.sides = points()
        self.transform = Noise()

    def __len__(self) -> int:
        return len(self.sides)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.inputs[index]), self.sides[index]


class GoesOnReading(IterableDataset[Any]):
    """A stream that does not begin again where a pass begins, and cannot say where it is."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        inputs, sides = points(400)
        while self.position < len(sides):
            self.position += 1
            yield inputs[self.position - 1], sides[self.position - 1]


class Forgets(Modifier):
    """A callback whose state cannot be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise KeyError("counts")


class Breaks(Modifier):
    """A callback that fails in the evaluation."""

    def on_evaluate_batch_begin(self, run: Any) -> None:
        raise ZeroDivisionError("no positives")


def with_nan() -> Any:
    inputs, sides = points()
    return inputs.fill_(math.nan), sides


def stages(model_trainer: Trainer) -> dict[str, Any]:
    return {stage.name: stage for stage in model_trainer.check().stages}


@pytest.mark.usefixtures("temporary")
def test_what_holds_is_proved_and_the_run_after_it_is_the_run_without_it(tmp_path: Path) -> None:
    def whole(output_dir: Path | None) -> Trainer:
        options: dict[str, Any] = {} if output_dir is None else {"output_dir": output_dir, "save_every": "3 steps"}
        args = arguments(num_train_epochs=3, gradient_accumulation_steps=2, log_every=1, **options)
        return trainer(args, model=network(0.2), eval_dataset=points(16), metrics=["accuracy"])

    expected = outcome(plain := whole(None))
    plain.accelerator.free_memory()
    checked = whole(tmp_path / "runs")
    before = state(checked)
    report = checked.check()
    assert_same(state(checked), before)
    assert report.passed, str(report)
    assert list(tmp_path.iterdir()) == []
    assert [(stage.name, stage.passed) for stage in report.stages] == [
        ("training", True),
        ("evaluation", True),
        ("checkpoint", True),
        ("resume", True),
    ]
    assert report.stages[-1].text.startswith("bit for bit the uninterrupted run: weights, optimizer state")
    assert (report.batch_size, report.per_device_batch_size, report.accumulation) == (16, 8, 2)
    assert (report.samples_per_epoch, report.steps_per_epoch, report.steps) == (40, 3, 9)
    assert report.counts == {"evaluations": 3, "saves": 3}
    parts = sum(report.seconds[name] * count for name, count in (("step", 9), ("evaluation", 3), ("save", 3)))
    assert report.seconds["total"] == pytest.approx(parts)
    weights = sum(parameter.numel() for parameter in network().parameters()) * 4
    assert (report.memory["weights"], report.memory["gradients"]) == (weights, weights)
    assert report.memory["optimizer"] == 2 * weights + 4 * 4  # two moments, and the step of each parameter
    assert report.memory["activations"] >= 8 * (6 + 8) * 4
    assert len(str(report).splitlines()) < 24
    assert json.loads(json.dumps(report.to_dict()))["passed"] is True
    assert_same(outcome(checked), expected)


WRONG: list[Any] = [
    pytest.param({"model": DropsAlways}, "evaluation", "the second evaluation of the same batches differs: eval_loss"),
    pytest.param({"train_dataset": with_nan}, "training", "in the first update: "),
    pytest.param({"train_dataset": OwnNoise}, "resume", "the model gets other batches after a resume"),
    pytest.param({"train_dataset": GoesOnReading}, "resume", "the model gets other batches after a resume"),
    pytest.param({"callbacks": lambda: [Forgets()]}, "resume", "the checkpoint cannot be loaded: "),
    pytest.param({"model": CountsInSecret}, "resume", "is not that of the uninterrupted run: weights (layer."),
    pytest.param({"callbacks": lambda: [Breaks()]}, "evaluation", "ZeroDivisionError: no positives"),
]


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize(("parts", "stage", "text"), WRONG)
def test_what_is_wrong_is_named(parts: dict[str, Any], stage: str, text: str, tmp_path: Path) -> None:
    options = {name: make() for name, make in parts.items()}
    args = arguments(output_dir=tmp_path / "runs", max_steps=20)
    report = trainer(args, eval_dataset=points(16), **options).check()
    assert not report.passed
    assert [failure for failure in report.failures if failure.startswith(stage) and text in failure], str(report)
    assert "Check FAILED" in str(report)
    assert " 0 bytes each" not in str(report)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize(("keep_best", "output"), [(1, "up to 4 checkpoints stay"), (0, "no checkpoints")])
def test_the_best_is_counted_where_nothing_else_is_saved(tmp_path: Path, keep_best: int, output: str) -> None:
    args = arguments(output_dir=tmp_path / "runs", save_every="never", keep_best=keep_best)
    assert output in str(trainer(args, eval_dataset=points(16)).check())


def test_ranks_come_to_the_same_report(tmp_path: Path) -> None:
    def body() -> Any:
        options: dict[str, Any] = {"eval_dataset": points(16)}
        good = trainer(arguments(output_dir=tmp_path / "runs"), **options)
        report = good.check()
        good.accelerator.free_memory()
        bad = trainer(arguments(output_dir=tmp_path / "runs"), train_dataset=OwnNoise(), **options)
        return report.passed, report.batch_size, report.steps_per_epoch, bad.check().failures[0][:40]

    expected = (True, 16, 3, "resume: the model gets other batches aft")
    assert run_world(body, num_processes=2) == [expected] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_shards_are_compared(tmp_path: Path) -> None:
    def body() -> Any:
        args = arguments(output_dir=tmp_path / "runs", fsdp=True)
        model_trainer = trainer(args, model=CountsInSecret())
        return [stage.text for stage in model_trainer.check().stages if stage.name in ("checkpoint", "resume")]

    for saved, resumed in run_world(body, num_processes=2):
        assert ": weights, optimizer state" in saved
        assert "is not that of the uninterrupted run: weights (layer." in resumed


def test_the_curve_is_the_learning_rates_of_the_run() -> None:
    def one_cycle(optimizer: Any) -> Any:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=11)

    cosine: dict[str, Any] = {"lr_scheduler": "cosine", "warmup": 3}
    for settings, scheduler in ((cosine, None), (dict[str, Any](), one_cycle)):
        model_trainer = trainer(arguments(max_steps=10, log_every=1, **settings), scheduler=scheduler)
        report = model_trainer.check()
        history = model_trainer.fit().history
        rates = report.learning_rates["default"]
        assert len(rates) == 10
        # A log shows the rate after the schedule's step, which is that of the next update.
        assert rates[1:] == pytest.approx([entry["learning_rate"] for entry in history][:-1], rel=1e-6)
        model_trainer.accelerator.free_memory()


def test_a_run_that_a_time_ends_takes_no_longer() -> None:
    report = trainer(arguments(max_time="2 s", lr_scheduler="constant"), train_dataset=points(8000)).check()
    assert (report.steps, report.passed) == (None, True)
    assert report.seconds["total"] == 2.0
    assert "; about 2 s in total" in str(report)


@pytest.mark.parametrize("limit", ["overfit_batches", "limit_eval_batches"])
def test_evaluations_are_checked_within_the_limit_of_the_run(limit: str) -> None:
    options: dict[str, Any] = {limit: 3}
    report = trainer(arguments(**options), eval_dataset=points()).check()
    assert report.passed, report.failures
    assert report.counts["evaluations"] == 2


def test_a_curve_without_a_known_length_is_empty() -> None:
    assert learning_rates(None, None, None) == []


def test_a_difference_is_named_with_its_size(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name, value, count in (("one", 1.0, 3), ("other", 1.5, 4)):
        (tmp_path / name / "optimizer.shards").mkdir(parents=True)
        save_file({"bias": torch.full((2,), value)}, tmp_path / name / "optimizer.shards" / "shard-1.safetensors")
        (tmp_path / name / "scaler.bin").write_text(name)
        save_file({"layer.weight": torch.full((2,), value)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "sampler.process_0.json").write_text(json.dumps({"position": count, "seconds": value}))
        (tmp_path / name / "scheduler.json").write_text(json.dumps({"seconds": value, "rate": float("nan")}))
    found = differences(tmp_path / "one", tmp_path / "other")
    assert [str(difference) for difference in found] == [
        "weights (layer.weight by 5.0e-01 relative)",
        "optimizer state (bias by 5.0e-01 relative)",
        "position in the data (position by 3.3e-01 relative)",
        "gradient scaler (scaler.bin)",
    ]


def test_fit_checks_where_the_command_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_LIB_CHECK_REPORT", str(tmp_path / "report.json"))
    model_trainer = trainer(arguments(output_dir=tmp_path / "runs"))
    weights = [parameter.clone() for parameter in model_trainer.model.parameters()]  # type: ignore[union-attr]
    with pytest.raises(SystemExit) as end:
        model_trainer.fit()
    assert end.value.code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert report["text"].startswith("Check passed: Sequential")
    assert not (tmp_path / "runs").exists()
    trained = model_trainer.model.parameters()  # type: ignore[union-attr]
    assert all(torch.equal(*pair) for pair in zip(weights, trained, strict=True))


SCRIPT = """
import sys
import torch
from tests.trainer.tasks import arguments, points, trainer
from tests.trainer.tools.test_check import DropsAlways
print("from the script", sys.argv[1:])
model = DropsAlways() if "bad" in sys.argv else None
if "none" not in sys.argv:
    trainer(arguments(output_dir="runs"), model=model, eval_dataset=points(16)).fit()
    raise AssertionError("fit returned")
"""


@pytest.mark.launch
@pytest.mark.slow
def test_the_command_checks_a_script_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--cpu", "--num_processes", "2", "script.py"]
    alone = ["--cpu", "--num_processes", "1", "script.py"]
    assert main(["check", *options, "--json"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("from the script ['--json']")  # behind the script it is the script's option
    assert "Check passed: Sequential, 74 parameters on 2 processes on cpu" in out
    assert main(["check", "--json", *options, "bad"]) == 1
    captured = capfd.readouterr()
    report = json.loads(captured.out)
    assert report["processes"] == 2
    assert report["failures"][0].startswith("evaluation: the second evaluation")
    assert "from the script" in captured.err
    assert main(["check", *alone, "none"]) == 1
    assert "the script ended without Trainer.fit()" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_what_the_command_is_given_is_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", "--cpu"]) == 2
    assert "No script was given" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "gone.py")]) == 2
    assert "is not there" in capsys.readouterr().err
    assert main(["check", "--help"]) == 0
    assert "two updates, two evaluations" in " ".join(capsys.readouterr().out.split())
