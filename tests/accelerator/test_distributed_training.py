"""DDP against one process: losses, gradient norms, weights, whatever the loop."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import Accelerator, DistributedDataParallelKwargs


def _train(global_batch: int, steps: int, precision: str, shuffle: bool, epochs: int = 3) -> dict[str, Any]:
    """Train a few passes; return what one process and several must agree on."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, mixed_precision=precision)
    inputs, targets, _ = toy.data()
    loader = DataLoader(
        TensorDataset(inputs, targets),
        batch_size=global_batch // accelerator.num_processes,
        shuffle=shuffle,
        generator=torch.Generator().manual_seed(3),
    )
    network = toy.model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + 0.1 * update))
    network, optimizer, loader, schedule = accelerator.prepare(network, optimizer, loader, schedule)
    losses, norms, rates = [], [], []
    for _ in range(epochs):
        for batch_inputs, batch_targets in loader:
            with accelerator.accumulate(network):
                loss = toy.losses(network, batch_inputs, batch_targets).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(network.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
            rates.append(schedule.get_last_lr()[0])
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "weights": toy.parameters(accelerator.unwrap_model(network)),
    }


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("steps", [1, 4])  # 4 does not divide the 6 batches of a pass: the last window is short
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_train_as_one_does(processes: int, steps: int, shuffle: bool) -> None:
    (alone,) = run_world(_train, (8, steps, "no", shuffle), 1, timeout=60)
    together = run_world(_train, (8, steps, "no", shuffle), processes, timeout=60)
    for result in together:
        assert result["losses"] == pytest.approx(alone["losses"], rel=2e-6)
        assert result["norms"] == pytest.approx(alone["norms"], rel=2e-6)
        assert result["rates"] == alone["rates"]
        toy.assert_same(result["weights"], alone["weights"], rtol=1e-4)
        toy.assert_same(result["weights"], together[0]["weights"], rtol=0)


def test_a_bare_process_and_a_world_of_one_train_alike() -> None:
    bare = _train(8, 4, "no", True)
    (world_of_one,) = run_world(_train, (8, 4, "no", True), 1, timeout=60)
    assert bare["losses"] == world_of_one["losses"]
    toy.assert_same(bare["weights"], world_of_one["weights"], rtol=0)


def test_the_engine_trains_as_the_same_loop_by_hand() -> None:
    result = _train(8, 1, "no", False)
    inputs, targets, _ = toy.data()
    network = toy.model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + 0.1 * update))
    losses = []
    for _ in range(3):
        for start in range(0, 48, 8):
            loss = toy.losses(network, inputs[start : start + 8], targets[start : start + 8]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert result["losses"] == losses
    toy.assert_same(result["weights"], toy.parameters(network), rtol=0)


def test_bf16_on_two_processes_stays_near_one() -> None:
    (alone,) = run_world(_train, (8, 1, "bf16", False), 1, timeout=60)
    for result in run_world(_train, (8, 1, "bf16", False), 2, timeout=60):
        assert result["losses"] == pytest.approx(alone["losses"], rel=2e-2)


def _weights_at_start() -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    network = accelerator.prepare(nn.Linear(4, 4))
    return toy.parameters(network)


def test_all_processes_start_from_the_first_ones_weights() -> None:
    first, second = run_world(_weights_at_start, (), 2, timeout=60)
    toy.assert_same(first, second, rtol=0)


def _unused(find: bool) -> str:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.used(inputs)

    handlers = [DistributedDataParallelKwargs(find_unused_parameters=find, bucket_cap_mb=1)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    network = accelerator.prepare(Half())
    try:
        for _ in range(2):
            accelerator.backward(network(torch.ones(1, 2)).sum())
    except RuntimeError as error:
        return str(error)
    return "trained"


def test_the_options_of_ddp_arrive() -> None:
    assert run_world(_unused, (True,), 2, timeout=60) == ["trained", "trained"]
    assert "find_unused_parameters" in run_world(_unused, (False,), 2, timeout=60)[0]


def _frozen() -> bool:
    accelerator = Accelerator(cpu=True)
    network = nn.Linear(2, 2).requires_grad_(False)
    trained = nn.Linear(2, 2)
    evaluated = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    prepared = accelerator.prepare(network)
    wrapped = accelerator.prepare(trained)
    assert accelerator.unwrap_model(wrapped) is trained
    return prepared is network and wrapped is not trained and type(evaluated) is nn.Linear


def test_only_what_is_trained_is_wrapped() -> None:
    assert run_world(_frozen, (), 2, timeout=60) == [True, True]


def _trigger() -> list[bool]:
    accelerator = Accelerator(cpu=True)
    seen = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert (accelerator.flag_tensor is None) != accelerator.is_last_process
    seen += [accelerator.check_trigger(), accelerator.check_trigger()]
    if accelerator.is_main_process:
        accelerator.flag_tensor = torch.tensor(1)
    return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]


def test_one_process_triggers_all() -> None:
    assert run_world(_trigger, (), 2, timeout=60) == [[False, True, False, True, False]] * 2
