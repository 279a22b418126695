"""A checkpoint with NaN or Inf does not count for retention, the best evaluation, rewind and resume."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.faults.trainings import Dies
from tests.trainer.fit.test_sharded_runs import layers, plugin
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib.callbacks import EMA
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.commands.main import main
from trainer_lib.events import Modifier, Run
from trainer_lib.filesystem.remote_paths import path_at
from trainer_lib.runs import find_runs
from trainer_lib.tensor_files.finite_check import nonfinite_tensors


class Breaks(Modifier):
    """Fills a buffer that no loss depends on with NaN or Inf, from a step on."""

    def __init__(self, at: int, value: float = math.nan) -> None:
        self._at, self._value = at, value

    def on_step_end(self, run: Run) -> None:
        prepared: Any = run.model
        if run.state.step >= self._at:
            dict(run.accelerator.unwrap_model(prepared).named_buffers())["seen"].fill_(self._value)


def model() -> nn.Module:
    """Return a network with a buffer, and with a mask of -Inf as attention uses."""
    module = network()
    module.register_buffer("seen", torch.zeros(3))
    module.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    return module


def broken(folder: Any, dies_at: int | None = None, at: int = 5, **options: Any) -> Any:
    """Train for ten steps, with a non-finite buffer from the fifth on; return the trainer."""
    callbacks = [Breaks(at), *([] if dies_at is None else [Dies(dies_at)])]
    settings = {"save_every": 2, "eval_every": 2, "keep_last": 1, **options}
    args = arguments(output_dir=folder, max_steps=10, **settings)
    model_trainer = trainer(args, model=model(), eval_dataset=points(16), callbacks=callbacks)
    try:
        model_trainer.fit()
    except InterruptedError:
        return model_trainer
    return model_trainer


def test_a_nonfinite_value_is_found_at_any_position() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        big = torch.full((1 << 19,), torch.finfo(dtype).max, dtype=dtype)
        assert nonfinite_tensors({"big": big, "low": -big, "none": big[:0], "count": torch.ones(2).long()}) == {}
        for value in (math.nan, math.inf, -math.inf):
            for place in (0, 1 << 18, -1):
                broken_tensor = big.clone()
                broken_tensor[place] = value
                fault = "nan" if math.isnan(value) else "inf"
                faults = nonfinite_tensors({"flat": broken_tensor, "transposed": broken_tensor.view(2, -1).T})
                assert faults == {"flat": fault, "transposed": fault}
    assert nonfinite_tensors({"complex": torch.tensor([1j, complex(0, math.inf)])}) == {"complex": "inf"}


@pytest.mark.parametrize("in_background", [True, False])
def test_no_good_checkpoint_is_deleted_for_it_and_it_is_never_the_best(
    in_background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_trainer = broken(tmp_path, save_in_background=in_background)
    (folder,) = tmp_path.glob("*/checkpoints")
    best = model_trainer.state.best
    assert best is not None
    assert best.step in (2, 4)
    kept = {path.name[-2:] for path in folder.iterdir()}
    assert kept == {"04", "10", f"{best.step:02}"}
    assert read_manifest(folder / "checkpoint-00000010").nonfinite == ["seen"]
    assert read_manifest(folder / "checkpoint-00000004").nonfinite == []
    warnings = [line for line in caplog.messages if "has tensors with NaN or Inf: seen" in line]
    assert len(warnings) == 3


def test_a_buffer_outside_of_the_state_dict_makes_a_checkpoint_nonfinite_too(tmp_path: Path) -> None:
    module = model()
    module.register_buffer("seen", torch.zeros(3), persistent=False)
    module.register_buffer("shown", torch.full((2,), -math.inf), persistent=False)
    args = arguments(output_dir=tmp_path, max_steps=10, save_every=2, eval_every=2, keep_last=1)
    model_trainer = trainer(args, model=module, eval_dataset=points(16), callbacks=[Breaks(5)])
    model_trainer.fit()
    (found_run,) = find_runs(tmp_path)
    assert [path.name[-2:] for path in found_run.run.checkpoints()] == ["04", "10"]
    assert read_manifest(found_run.run.checkpoint(4)).nonfinite == []
    assert read_manifest(found_run.run.checkpoint(10)).nonfinite == ["seen"]
    best = model_trainer.state.best
    assert best is not None
    assert best.step == 4


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_resumes_from_the_newest_good_checkpoint(processes: int, tmp_path: Path) -> None:
    def body() -> list[list[int]]:
        broken(tmp_path, dies_at=9)
        steps = Steps()
        model_trainer = trainer(
            arguments(output_dir=tmp_path, save_every=2, keep_last=1, resume="auto", max_steps=10),
            model=model(),
            callbacks=[steps],
        )
        model_trainer.fit()
        return [
            steps.seen,
            [entry["step"] for entry in model_trainer.state.checkpoints if "nonfinite" not in entry][-1:],
        ]

    assert run_world(body, (), processes) == [[[4], [10]]] * processes
    (found_run,) = find_runs(tmp_path)
    assert read_manifest(found_run.run.checkpoint(10)).nonfinite == []


class Steps(Modifier):
    """Records the steps that training begins at."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_fit_begin(self, run: Run) -> None:
        self.seen.append(run.state.step)


class NonfiniteState(Modifier):
    """Fills the first moment of a weight with NaN on one rank while a checkpoint is saved, from a step on."""

    def __init__(self, at: int, parameter: int = 0, rank: int = 0) -> None:
        self._at, self._parameter, self._rank, self._whole = at, parameter, rank, torch.empty(0)

    def on_step_end(self, run: Run) -> None:
        if run.state.step >= self._at and run.accelerator.process_index == self._rank:
            self._whole = self._moment(run).clone()
            self._moment(run).fill_(math.nan)

    def on_step_begin(self, run: Run) -> None:
        if self._whole.numel():
            self._moment(run).copy_(self._whole)

    def _moment(self, run: Run) -> torch.Tensor:
        states = list(run.optimizer.optimizer.state.values())
        moment = states[self._parameter]["exp_avg"]
        return getattr(moment, "_local_tensor", moment)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_nan_in_the_optimizer_state_makes_a_checkpoint_nonfinite(
    in_background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(
        output_dir=tmp_path, max_steps=10, save_every=2, eval_every=2, keep_last=1, save_in_background=in_background
    )
    model_trainer = trainer(args, eval_dataset=points(16), callbacks=[NonfiniteState(5)])
    model_trainer.fit()
    best = model_trainer.state.best
    assert best is not None
    assert best.step in (2, 4)
    (found_run,) = find_runs(tmp_path)
    assert {path.name[-2:] for path in found_run.run.checkpoints()} == {"04", "10", f"{best.step:02}"}
    assert read_manifest(found_run.run.checkpoint(10)).nonfinite == ["optimizer.0.weight.exp_avg"]
    assert found_run.run.newest_checkpoint() == found_run.run.checkpoint(4)
    warnings = [line for line in caplog.messages if "has tensors with NaN or Inf: optimizer.0.weight.exp_avg." in line]
    assert len(warnings) == 3


def test_a_nan_in_the_shards_of_one_rank_is_recorded_on_all_ranks(tmp_path: Path) -> None:
    def body() -> list[list[str]]:
        args = arguments(output_dir=tmp_path, max_steps=4, save_every=2, fsdp=plugin())
        model_trainer = trainer(args, model=layers(), callbacks=[NonfiniteState(4, parameter=2, rank=1)])
        model_trainer.fit()
        return [entry.get("nonfinite", []) for entry in model_trainer.state.checkpoints]

    assert run_world(body, (), 2) == [[[], ["optimizer.1.0.weight.exp_avg"]]] * 2
    (found_run,) = find_runs(tmp_path)
    assert read_manifest(found_run.run.checkpoint(4)).nonfinite == ["optimizer.1.0.weight.exp_avg"]


class Overflows(nn.Module):
    """Has a weight in fp16 whose gradient of 20000 is finite, and whose squared gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = network(), nn.Parameter(torch.ones(3, dtype=torch.float16))
        self.scale.register_hook(lambda gradient: torch.full_like(gradient, 2e4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) + self.scale.float().sum() * 0


def test_an_infinite_second_moment_warns_once_and_the_checkpoint_is_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"save_every": 2, "keep_last": 1, "max_grad_norm": None, "weight_decay": 0.0}
    overflows, scales = Overflows(), list[list[float]]()

    class RecordsScale(Modifier):
        def on_step_end(self, run: Run) -> None:
            scales.append(overflows.scale.tolist())

    trainer(arguments(output_dir=tmp_path, max_steps=6, **options), model=overflows, callbacks=[RecordsScale()]).fit()
    assert scales[1:] == [scales[0]] * 5  # after the overflow it never moves, as the warning says
    (found_run,) = find_runs(tmp_path)
    (checkpoint,) = found_run.run.checkpoints()
    assert checkpoint.name.endswith("06")
    assert read_manifest(checkpoint).nonfinite == []
    warnings = [line for line in caplog.messages if "optimizer states with Inf: optimizer.scale.exp_avg_sq." in line]
    assert len(warnings) == 1
    assert "infinite_states" in found_run.run.history_file.read_text()


def test_it_does_not_count_on_remote_storage_either(tmp_path: Path) -> None:
    broken(f"memory://{tmp_path.name}")
    (found_run,) = find_runs(path_at(f"memory://{tmp_path.name}"))
    assert [path.name[-2:] for path in found_run.run.checkpoints()][-2:] == ["04", "10"]
    assert read_manifest(found_run.run.checkpoint(10)).nonfinite == ["seen"]
    assert found_run.run.newest_checkpoint() == found_run.run.checkpoint(4)


def test_a_mask_of_infinities_is_finite_enough_with_and_without_averaged_weights(tmp_path: Path) -> None:
    model_trainer = trainer(arguments(output_dir=tmp_path), model=model(), callbacks=[EMA(0.5)])
    result = model_trainer.fit()
    assert result.last_checkpoint is not None
    assert read_manifest(result.last_checkpoint).nonfinite == []


class Bounded(nn.Module):
    """A network with a bound of Inf, in a module that the model has twice."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.bound = network(), nn.Module()
        self.bound.register_buffer("upper", torch.tensor(math.inf))
        self.likelihood = nn.ModuleDict({"bound": self.bound})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.network(inputs)


def test_infinities_of_a_module_that_has_two_names_are_finite_enough(tmp_path: Path) -> None:
    result = trainer(arguments(output_dir=tmp_path, max_steps=1), model=Bounded()).fit()
    assert result.last_checkpoint is not None
    assert read_manifest(result.last_checkpoint).nonfinite == []


class Poisons(Modifier):
    """Returns a loss of NaN, once."""

    has_done = False

    def on_loss(self, run: Run) -> None:
        if run.state.step == 8 and not self.has_done:
            self.has_done = True
            assert run.loss_sum is not None
            run.loss_sum = run.loss_sum * math.nan


def test_rewind_loads_a_good_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    class Heals(Breaks):
        def on_load_end(self, run: Run, folder: Path) -> None:
            self._at = 100
            assert folder.name == "checkpoint-00000004"

    args = arguments(output_dir=tmp_path, save_every=2, on_nonfinite="rewind")
    model_trainer = trainer(args, model=model(), callbacks=[Heals(5), Poisons()])
    assert model_trainer.fit().status == "finished"
    assert model_trainer.state.skipped == 1


def test_the_checkpoint_commands_show_nonfinite_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken(tmp_path)
    capsys.readouterr()
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert "not finite: seen" in capsys.readouterr().out
    main(["checkpoint", "list", str(tmp_path), "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert [(state["status"], state["nonfinite"]) for state in listed][-2:] == [
        ("complete", []),
        ("not finite", ["seen"]),
    ]
    assert listed[-2]["kept"][0] == "newest"
    assert main(["checkpoint", "verify", str(tmp_path), "--all"]) == 0
    assert "not finite: seen" in capsys.readouterr().out
