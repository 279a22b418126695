"""Several GPUs: NCCL, DDP, FSDP2 with offload, SyncBatchNorm, checkpoints of shards, failures and hangs."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.ranks import launch_on_gpus, run_on_gpus
from tests.gpu.training import Report, network, train
from tests.trainer.tasks import arguments, points, trainer
from trainer_lib import Accelerator
from trainer_lib.events import Callback, Run
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.trainer.safety.hang_watchdog import EXIT_CODE
from trainer_lib.utils import FullyShardedDataParallelPlugin, gather_object

pytestmark = pytest.mark.gpus

OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, 2 micro-batches": {"gradient_accumulation_steps": 2},
    "fsdp": {"fsdp_plugin": {}},
    "fsdp, kept whole": {"fsdp_plugin": {"reshard_after_forward": False}},
    "fsdp, offloaded": {"fsdp_plugin": {"cpu_offload": True}},
    "fsdp, recomputed": {"fsdp_plugin": {"activation_checkpointing": True}},
}


def _trained(options: dict[str, Any], **more: Any) -> Report:
    plugin = options.get("fsdp_plugin")
    if plugin is not None:
        options = {**options, "fsdp_plugin": FullyShardedDataParallelPlugin(**plugin, min_num_params=2000)}
    return train(torch.optim.AdamW, **options, **more)


def _case(name: str, precision: str = "no") -> Report:
    return _trained(OPTIONS[name], mixed_precision=precision)


def _alone(name: str, precision: str = "no") -> Report:
    options = {key: value for key, value in OPTIONS[name].items() if key != "fsdp_plugin"}
    return _trained(options, mixed_precision=precision)


@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_train_as_one(name: str, tmp_path: Path) -> None:
    (expected,) = run_on_gpus(_alone, tmp_path / "one", name)
    reports = run_on_gpus(_case, tmp_path / "two", name, num_processes=2)
    for report in reports:
        assert report.device == "cuda"
        assert "nccl" in report.backend
        assert report.losses == pytest.approx(expected.losses, rel=1e-5)
        assert report.norms == pytest.approx(expected.norms, rel=1e-5)
    for key, value in reports[0].weights.items():
        torch.testing.assert_close(value, expected.weights[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp, offloaded"])
def test_16_bits_are_close_to_those_of_one_rank(name: str, precision: str, tmp_path: Path) -> None:
    (expected,) = run_on_gpus(_alone, tmp_path / "one", name, precision)
    for report in run_on_gpus(_case, tmp_path / "two", name, precision, num_processes=2):
        assert report.losses == pytest.approx(expected.losses, abs=2e-2)


def _compressed(hook: str) -> list[float]:
    return train(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)]).losses


@pytest.mark.parametrize("hook", ["bf16", "fp16", "power_sgd"])
def test_compressed_gradients_train(hook: str, tmp_path: Path) -> None:
    """torch's hook for bf16 needs NCCL."""
    for losses in run_on_gpus(_compressed, tmp_path, hook, num_processes=2):
        assert losses[-1] < losses[0]


def _collectives() -> dict[str, Any]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    mine = torch.arange(3, device=accelerator.device) + 3 * rank
    accelerator.wait_for_everyone()
    return {
        "device": str(accelerator.device),
        "gather": accelerator.gather(mine).tolist(),
        "no dimension": accelerator.gather(torch.tensor(float(rank), device=accelerator.device)).tolist(),
        "bf16": accelerator.gather(mine.bfloat16()).tolist(),
        "bool": accelerator.gather(mine > 2).tolist(),
        "mean": accelerator.reduce(mine.float(), "mean").tolist(),
        "max": accelerator.reduce(mine, "max").tolist(),
        "padded": accelerator.pad_across_processes(mine[: 2 + rank]).tolist(),
        "objects": gather_object([{"rank": rank}]),
        "on the CPU": accelerator.gather(mine.cpu()).tolist(),
    }


def test_nccl_gathers_and_reduces(tmp_path: Path) -> None:
    for rank, found in enumerate(run_on_gpus(_collectives, tmp_path, num_processes=2)):
        assert found == {
            "device": f"cuda:{rank}",
            "gather": [0, 1, 2, 3, 4, 5],
            "no dimension": [0.0, 1.0],
            "bf16": [0, 1, 2, 3, 4, 5],
            "bool": [False] * 3 + [True] * 3,
            "mean": [1.5, 2.5, 3.5],
            "max": [3, 4, 5],
            "padded": [0, 1, 0] if rank == 0 else [3, 4, 5],
            "objects": [{"rank": 0}, {"rank": 1}],
            "on the CPU": [0, 1, 2, 3, 4, 5],
        }


def _normalized(ranks: int) -> tuple[list[float], Tensor]:
    inputs, targets = points(64)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1).add_(torch.linspace(-0.3, 0.3, parameter.numel()).reshape(parameter.shape))
    args = arguments(
        use_cpu=False,
        sync_batchnorm=True,
        per_device_train_batch_size=16 // ranks,
        shuffle=False,
        log_every=1,
        max_steps=4,
    )
    fit = trainer(args, model=model, train_dataset=(inputs, targets))
    history = fit.fit().history
    statistics: Any = fit.unwrapped_model.state_dict()
    return [entry["loss"] for entry in history if "loss" in entry], statistics["1.running_var"].cpu()


def test_synchronized_batchnorm_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    ((losses, variance),) = run_on_gpus(_normalized, tmp_path / "one", 1)
    for of_rank, statistics in run_on_gpus(_normalized, tmp_path / "two", 2, num_processes=2):
        assert of_rank == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(statistics, variance, rtol=1e-5, atol=1e-6)


def _saved(name: str, folder: Path) -> Report:
    return _trained(OPTIONS[name], model=network(dropout=0.2), save=folder)


def _resumed(name: str, folder: Path) -> Report:
    return _trained(OPTIONS[name], model=network(dropout=0.2), load=folder)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp, offloaded"])
def test_runs_of_two_ranks_resume_bit_by_bit(name: str, tmp_path: Path) -> None:
    whole = run_on_gpus(_saved, tmp_path / "whole", name, tmp_path / "state", num_processes=2)
    resumed = run_on_gpus(_resumed, tmp_path / "rest", name, tmp_path / "state", num_processes=2)
    for first, second in zip(whole, resumed, strict=True):
        assert second.losses == first.losses[4:]


def _fitted(folder: Path, **options: Any) -> list[float]:
    args = arguments(
        use_cpu=False, output_dir=folder, save_every=2, log_every=1, shuffle=False, schedule_steps=8,
        fsdp=FullyShardedDataParallelPlugin(min_num_params=30), **options,
    )  # fmt: skip
    return [entry["loss"] for entry in trainer(args, train_dataset=points(160)).fit().history if "loss" in entry]


def _started(folder: Path) -> list[float]:
    return _fitted(folder, max_steps=4, per_device_train_batch_size=8)


def _continued(folder: Path, ranks: int) -> list[float]:
    return _fitted(folder, max_steps=8, per_device_train_batch_size=16 // ranks, resume="extend")


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_saved_in_the_background_are_loaded_by_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    run_on_gpus(_started, tmp_path / "first", tmp_path / "runs", num_processes=2)
    for losses in run_on_gpus(_continued, tmp_path / "then", tmp_path / "runs", ranks, num_processes=ranks):
        assert len(losses) == 8
        assert losses[-1] < losses[0]


def _fails() -> None:
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        raise ArithmeticError("rank 1 fails")
    accelerator.reduce(torch.ones(1, device=accelerator.device))


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    done = launch_on_gpus(_fails, tmp_path, num_processes=2, timeout=120)
    assert done.returncode != 0
    assert "rank 1 fails" in done.stderr


class Waits(Callback):
    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 3 and not run.is_main_process:
            threading.Event().wait()


def _hangs(folder: Path) -> None:
    args = arguments(use_cpu=False, output_dir=folder, hang_timeout=10.0, max_steps=8)
    trainer(args, train_dataset=points(160), callbacks=[Waits()]).fit()


def test_a_rank_that_hangs_is_named_while_nccl_waits(tmp_path: Path) -> None:
    """The other rank waits in a kernel, which no Python code can interrupt."""
    done = launch_on_gpus(_hangs, tmp_path / "call", tmp_path / "runs", num_processes=2, timeout=120)
    assert done.returncode == EXIT_CODE
    assert "rank 1 hangs." in done.stderr
