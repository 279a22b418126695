"""A presentation, and an article on sharding: loops with an early `zero_grad`, `no_sync`, empty models, FSDP."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerate_docs.training import assert_plain, loss_function, parts
from tests.accelerator import toy
from tests.launched import PYTHON_PATH
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)

# What these pages show and what is not covered here.
NOT_COVERED = {
    "accelerate config": "answers to questions on a terminal: tests/commands/test_questionnaire.py",
    "accelerate launch --multi_gpu --nproc_per_node=2": "needs two GPUs; the launcher is tested on CPU ranks",
}

# Each rank writes a line at once, so that lines do not mix where output is unbuffered.
SCRIPT = """
from trainer_lib import Accelerator
accelerator = Accelerator()
print(f"process {accelerator.process_index} of {accelerator.num_processes}\\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.launch
def test_torchrun_starts_a_world(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2", "--standalone"]
    variables = {**os.environ, "PYTHONPATH": PYTHON_PATH, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*command, "script.py"], capture_output=True, text=True, check=True, timeout=120, env=variables
    )
    assert sorted(done.stdout.split("\n")[:2]) == ["process 0 of 2", "process 1 of 2"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_loop_that_zeroes_gradients_first_trains_as_in_plain_pytorch(num_processes: int) -> None:
    def body() -> Any:
        accelerator = Accelerator()
        model, optimizer, dataloader, scheduler = parts(6 // num_processes)
        dataloader, model, optimizer, scheduler = accelerator.prepare(dataloader, model, optimizer, scheduler)
        for batch in dataloader:
            optimizer.zero_grad()
            inputs, targets = batch
            assert inputs.device == accelerator.device
            outputs = model(inputs)
            loss = loss_function(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
        return toy.parameters(model), scheduler.get_last_lr()[0]

    for weights, rate in _quietly(body, num_processes):
        assert_plain(weights, rate, batch_size=6)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_accumulation_keeps_gradients_that_an_early_zero_grad_would_drop(num_processes: int) -> None:
    def body() -> Any:
        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, dataloader, scheduler = accelerator.prepare(*parts(6 // num_processes))
        for batch in dataloader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                inputs, targets = batch
                outputs = model(inputs)
                loss = loss_function(outputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
        return toy.parameters(model), scheduler.get_last_lr()[0]

    for weights, rate in _quietly(body, num_processes):
        assert_plain(weights, rate, batch_size=24)


def test_no_sync_by_hand_adds_up_the_gradients_of_all_batches() -> None:
    def body() -> list[torch.Tensor]:
        accelerator = Accelerator()
        model, _, dataloader, _ = parts(6)
        ddp_model, dataloader = accelerator.prepare(model, dataloader)
        for index, batch in enumerate(dataloader):
            inputs, targets = batch
            if index != (len(dataloader) - 1):
                with accelerator.no_sync(ddp_model):
                    accelerator.backward(loss_function(ddp_model(inputs), targets))
            else:
                accelerator.backward(loss_function(ddp_model(inputs), targets))
        return [gradient / len(dataloader) for gradient in toy.gradients(model)]

    inputs, targets, _ = toy.data()
    whole = toy.model()
    loss_function(whole(inputs), targets).backward()
    for gradients in run_world(body):
        toy.assert_same(gradients, toy.gradients(whole), rtol=1e-5)


def test_an_empty_model_gets_its_weights_from_a_state_dict(tmp_path: Path) -> None:
    torch.save(toy.model().state_dict(), tmp_path / "checkpoint.bin")
    with init_empty_weights():
        my_model = toy.model()
    assert all(parameter.is_meta for parameter in my_model.parameters())
    my_model.load_state_dict(torch.load(tmp_path / "checkpoint.bin", weights_only=True), assign=True)
    toy.assert_same(toy.parameters(my_model), toy.parameters(toy.model()), rtol=0)


def test_a_sharded_checkpoint_is_loaded_and_dispatched(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(toy.model(), str(tmp_path / "sharded-weights"), max_shard_size="500")
    assert len(list(tmp_path.glob("sharded-weights/*.safetensors"))) > 1
    with init_empty_weights():
        my_model = toy.model()
    my_model = load_checkpoint_and_dispatch(my_model, tmp_path / "sharded-weights", device_map="auto")
    toy.assert_same(toy.parameters(my_model), toy.parameters(toy.model()), rtol=0)


def test_fsdp_takes_torchs_configurations_of_state_dicts(tmp_path: Path) -> None:
    def body() -> list[Any]:
        from torch.distributed.fsdp.fully_sharded_data_parallel import FullOptimStateDictConfig, FullStateDictConfig

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fsdp_plugin = FullyShardedDataParallelPlugin(
                state_dict_config=FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
                optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
            )
        accelerator = Accelerator(fsdp_plugin=fsdp_plugin)
        model, optimizer, loader, _ = parts(3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        local = [parameter.to_local().shape for parameter in model.parameters()]
        for inputs, targets in loader:
            accelerator.backward(loss_function(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        return [str(accelerator.distributed_type), local[0], list(state.values())]

    ranks = run_world(body)
    model, optimizer, loader, _ = parts(6)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()
        optimizer.step()
    for kind, local, weights in ranks:
        assert (kind, local) == ("FSDP", (8, 8))
        toy.assert_same(weights, toy.parameters(model), rtol=1e-5)


def _quietly(body: Any, num_processes: int) -> list[Any]:
    """Run a body without the warning that schedules step once per update."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_world(body, num_processes=num_processes)
