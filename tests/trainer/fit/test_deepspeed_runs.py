"""Runs of a Trainer with DeepSpeed: the numbers of one process, checkpoints, and the arguments beside its config."""

import importlib
import json
import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.strategies.test_deepspeed import needs_deepspeed
from tests.trainer.fit.test_sequence_parts import llama
from tests.trainer.fit.test_sharded_runs import assert_same, run
from tests.trainer.tasks import arguments, trainer
from trainer_lib import ConfigurationError, DeepSpeedPlugin, UnsupportedError
from trainer_lib.callbacks import EMA
from trainer_lib.events import Callback, Run
from trainer_lib.launchers import ProcessFailedError, run_forked
from trainer_lib.trainer.fit.accelerator_setup.deepspeed_arguments import deepspeed_plugin

CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture(scope="module")
def package() -> Any:
    """Import DeepSpeed once, for all forked processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # imports inductor
        return importlib.import_module("deepspeed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let runs have stage 3, or all stages with `--soak`."""
    if "stage" in metafunc.fixturenames:
        metafunc.parametrize("stage", [0, 1, 2, 3] if metafunc.config.getoption("--soak") else [3])


def config(stage: int) -> dict[str, Any]:
    """Return a config of one stage."""
    return {**CONFIG, "zero_optimization": {"stage": stage, "overlap_comm": True}}


class Killed(Callback):
    """Kills its process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_runs_resume_bit_by_bit_and_have_the_numbers_of_ddp(stage: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "weight_decay": 0.1}

    def sharded(folder: str, dies_at: int | None, resume: str) -> Any:
        return run(tmp_path / folder, dies_at, deepspeed=config(stage), resume=resume, **options)

    def replicated() -> Any:
        return run(None, **options)

    expected = run_forked(replicated, (), 2, timeout=100)
    whole = run_forked(sharded, ("whole", None, "never"), 2, timeout=100)
    for actual in whole:
        assert_same(actual, expected[0])
    assert run_forked(sharded, ("parts", 3, "never"), 2, timeout=100) == [None, None]
    assert run_forked(sharded, ("parts", None, "auto"), 2, timeout=100) == whole


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_a_run_that_was_killed_resumes_in_the_same_and_in_other_worlds(tmp_path: Path) -> None:
    def fit(folder: Path, stage: int | None, step: int | None, resume: str) -> Any:
        options: dict[str, Any] = {} if stage is None else {"deepspeed": config(stage)}
        size = 8 // int(os.environ["WORLD_SIZE"])
        args = arguments(
            save_every=2, output_dir=folder, resume=resume, per_device_train_batch_size=size, log_every=1, **options
        )
        made = trainer(args, callbacks=[] if step is None else [Killed(step)])
        made.fit()
        assert isinstance(made.run.model, nn.Module)
        state = made.accelerator.get_state_dict(made.run.model)
        return {name: value.clone() for name, value in state.items()}

    expected = run_forked(fit, (tmp_path / "whole", 3, None, "never"), 2, timeout=100)[0]
    with pytest.raises(ProcessFailedError):
        run_forked(fit, (tmp_path / "killed", 3, 7, "never"), 2, timeout=100)
    for name, stage, processes in (("same", 3, 2), ("other stage", 1, 2), ("one process", None, 1)):
        shutil.copytree(tmp_path / "killed", tmp_path / name)
        actual = run_forked(fit, (tmp_path / name, stage, None, "auto"), processes, timeout=100)[0]
        assert list(actual) == list(expected)
        tolerance = 0.0 if name == "same" else 1e-5
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, rtol=tolerance, atol=tolerance / 10)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_a_model_of_transformers_trains_in_shards_as_in_replicas() -> None:
    def losses(**options: Any) -> list[float]:
        made = trainer(
            arguments(max_steps=3, log_every=1, per_device_train_batch_size=2, **options), loss_fn=None, **llama()
        )
        return [entry["loss"] for entry in made.fit().history if "loss" in entry]

    def both() -> tuple[list[float], list[float]]:
        return losses(), losses(deepspeed=config(3))

    for replicated, sharded in run_forked(both, (), 2, timeout=100):
        assert len(sharded) == 3
        assert sharded == pytest.approx(replicated, rel=1e-6)


def test_arguments_fill_what_is_auto_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    args = arguments(deepspeed=tmp_path / "ds.json", gradient_accumulation_steps=3, weight_decay=0.1)
    plugin = deepspeed_plugin(args, 2)
    assert plugin.filled["train_batch_size"] == 2 * 3 * plugin.filled["train_micro_batch_size_per_gpu"]
    assert (plugin.filled["optimizer.params.lr"], plugin.filled["optimizer.params.weight_decay"]) == (0.05, 0.1)
    assert (plugin.gradient_clipping, plugin.gradient_accumulation_steps) == (1.0, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gradient_clipping": 2.0}, "gradient_clipping is 2.0 in the DeepSpeed config and 1.0 in the arguments"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, "optimizer.params.lr is 1.0 .* and 0.05 in the arg"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type is 'Lamb' .* and optimizer='adamw' in the arguments"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad .* not known here"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}},
            "warmup_num_steps is 5 in the",
        ),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type is 'OneCycle' .* and lr_scheduler='linear' in the arg"),
    ],
)
def test_a_config_that_contradicts_the_arguments_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        deepspeed_plugin(arguments(deepspeed={**CONFIG, **values}), 2)


def test_arguments_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="deepspeed and fsdp are both given"):
        arguments(deepspeed={}, fsdp=True)
    with pytest.raises(ConfigurationError, match="deepspeed must be the path of a JSON file, a dict or a"):
        arguments(deepspeed=3)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        arguments(deepspeed="missing.json")
    plugin = DeepSpeedPlugin({"bf16": {"enabled": True}})
    assert plugin.agreed_precision(None) == plugin.agreed_precision("bf16") == "bf16"
    with pytest.raises(ConfigurationError, match=r"bf16.enabled is True in the DeepSpeed config, and mixed"):
        plugin.agreed_precision("no")


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_averages_of_weights_are_refused_where_the_optimizer_trains_shards() -> None:
    def train(stage: int) -> str:
        args = arguments(max_steps=1, deepspeed=config(stage))
        try:
            trainer(args, callbacks=[EMA()]).fit()
        except UnsupportedError as error:
            return str(error)
        return "trained"

    assert run_forked(train, (0,), 2, timeout=100) == ["trained"] * 2
    for stage in (1, 2, 3):
        for message in run_forked(train, (stage,), 2, timeout=100):
            assert message.startswith("EMA averages weights of the model, and the optimizers train none of them"), stage
