"""Preparing: what comes back, and what is refused."""

import copy
import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, PreparationError
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.optimizer import AcceleratedOptimizer
from trainer_lib.scheduler import AcceleratedScheduler


def _parts() -> tuple[Any, ...]:
    network = toy.model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(*toy.data()), batch_size=4)
    return network, optimizer, schedule, loader


def test_scripts_for_accelerate_read_and_replace_the_lists_of_prepared_objects() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule, loader = accelerator.prepare(*_parts())
    accelerator.register_for_checkpointing(schedule.scheduler)
    assert (accelerator._models, accelerator._optimizers) == ([model], [optimizer])
    assert (accelerator._schedulers, accelerator._dataloaders) == ([schedule], [loader])
    assert accelerator._custom_objects == [schedule.scheduler]
    accelerator._models = accelerator._models[:0]
    assert accelerator.prepared.models == []


def test_everything_comes_back_in_the_order_given() -> None:
    network, optimizer, schedule, loader = _parts()
    marker = object()
    # A schedule before its optimizer: the order is the caller's, not ours.
    s, m, o, other, d = Accelerator(cpu=True).prepare(schedule, network, optimizer, marker, loader)
    assert isinstance(s, AcceleratedScheduler)
    assert isinstance(o, AcceleratedOptimizer)
    assert isinstance(d, DataLoader)
    assert m is network
    assert other is marker
    assert s.optimizers == [o]
    assert o.optimizer is optimizer


def test_one_object_comes_back_alone() -> None:
    network = toy.model()
    assert Accelerator(cpu=True).prepare(network) is network


def test_each_schedule_belongs_to_its_own_optimizer() -> None:
    left, other = toy.model(), toy.model()
    first, second = torch.optim.SGD(left.parameters(), lr=1.0), torch.optim.SGD(other.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(second, 1)
    first, second, schedule = Accelerator(cpu=True).prepare(first, second, schedule)
    assert schedule.optimizers == [second]


def test_what_is_inside_a_prepared_object_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    parts = _parts()
    accelerator.prepare(*parts)
    for part in parts[1:3]:
        with pytest.raises(PreparationError, match="prepared already"):
            accelerator.prepare(part)


def _prepare_all_again(rank: int, size: int) -> list[bool]:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*_parts())
    counts = [len(accelerator._models), len(accelerator._optimizers), len(accelerator._dataloaders)]
    again = accelerator.prepare(*prepared)
    assert counts == [len(accelerator._models), len(accelerator._optimizers), len(accelerator._dataloaders)]
    return [first is second for first, second in zip(prepared, again, strict=True)]


def test_prepared_objects_come_back_as_they_are(everywhere: Any) -> None:
    assert all(all(same) for same in everywhere(_prepare_all_again))


def test_objects_of_another_accelerator_are_refused() -> None:
    other = Accelerator(cpu=True)
    optimizer = other.prepare(_parts()[1])
    with pytest.raises(PreparationError, match="prepared already"):
        Accelerator(cpu=True).prepare(optimizer)
    assert other.prepared.holds(optimizer)


def _prepare_a_model_of_another() -> str:
    other = Accelerator(cpu=True)
    model = other.prepare(toy.model())
    try:
        Accelerator(cpu=True).prepare(model)
    except PreparationError as error:
        assert other.prepared.holds(model)
        return str(error)
    return "nothing was raised"


def test_a_model_in_the_ddp_of_another_accelerator_is_refused() -> None:
    assert all("prepared already" in message for message in run_world(_prepare_a_model_of_another, (), 2, timeout=60))


def test_one_call_with_the_same_object_twice_is_refused() -> None:
    network = toy.model()
    with pytest.raises(PreparationError, match="prepared already"):
        Accelerator(cpu=True).prepare(network, network)


def _prepare_the_inside_again() -> str:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    accelerator.prepare(network)
    try:
        accelerator.prepare(network)
    except PreparationError as error:
        return str(error)
    return "nothing was raised"


def test_the_model_inside_ddp_counts_as_prepared() -> None:
    assert all("prepared already" in message for message in run_world(_prepare_the_inside_again, (), 2, timeout=60))


def test_an_optimizer_of_another_model_is_refused() -> None:
    stranger = torch.optim.SGD(toy.model().parameters(), lr=0.1)
    with pytest.raises(PreparationError, match=r"4 of the 4 parameters of this SGD .* shape \(16, 8\)"):
        Accelerator(cpu=True).prepare(toy.model(), stranger)


def test_an_optimizer_may_be_prepared_without_a_model() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert Accelerator(cpu=True).prepare(optimizer).optimizer is optimizer


def test_device_placement_is_one_value_for_each_object() -> None:
    with pytest.raises(ConfigurationError, match="one value for each of the 2 objects"):
        Accelerator(cpu=True).prepare(toy.model(), toy.model(), device_placement=[True])


def test_a_model_stays_where_it_is_on_request() -> None:
    class Anchored(nn.Linear):
        def to(self, *args: object, **kwargs: object) -> "Anchored":
            raise AssertionError("moved")

    Accelerator(cpu=True, device_placement=False).prepare(Anchored(1, 1))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Anchored(1, 1), device_placement=[False])
    with pytest.raises(AssertionError, match="moved"):
        accelerator.prepare(Anchored(1, 1))


def _spread() -> str:
    network = toy.model()
    network.hf_device_map = {"0": "cpu", "2": "disk"}  # pyright: ignore[reportArgumentType]
    try:
        Accelerator(cpu=True).prepare(network)
    except PreparationError as error:
        return str(error)
    return "prepared"


def test_a_model_spread_over_devices_is_for_one_process() -> None:
    assert _spread() == "prepared"
    assert all("device_map" in message for message in run_world(_spread, (), 2, timeout=60))


def test_state_of_an_optimizer_survives_preparing() -> None:
    network = toy.model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    network(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    prepared = Accelerator(cpu=True).prepare(optimizer)
    assert torch.equal(prepared.state_dict()["state"][0]["exp_avg"], before)


def test_all_is_let_go_and_other_settings_may_follow() -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    network, optimizer, _, _ = first.prepare(*_parts())
    with pytest.raises(ConfigurationError, match="free_memory"):
        Accelerator(cpu=True, mixed_precision="no")
    assert first.free_memory(network, optimizer) == [None, None]
    second = Accelerator(cpu=True, mixed_precision="no")
    assert (second.mixed_precision, second.gradient_accumulation_steps) == ("no", 1)
    second.prepare(*_parts())


def test_a_copy_of_a_model_shares_the_accelerator_that_it_holds() -> None:
    model = torch.nn.Linear(2, 1)
    model.accelerator = accelerator = Accelerator(cpu=True)  # type: ignore[assignment]
    copied = copy.deepcopy(model)
    assert copied.accelerator is accelerator
    assert copied.weight is not model.weight


def test_the_same_engine_can_start_over_after_free_memory() -> None:
    accelerator = Accelerator(cpu=True)
    parts = _parts()
    for _ in range(2):
        network, optimizer, _, _ = accelerator.prepare(*parts)
        accelerator.backward(network(torch.ones(1, 8)).sum())
        optimizer.step()
        accelerator.clear()


def test_free_memory_ends_the_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    updating: list[bool] = []
    for _ in range(2):
        for _ in range(2):
            with accelerator.accumulate():
                updating.append(accelerator.sync_gradients)
        accelerator.free_memory()
        updating.append(accelerator.sync_gradients)
    assert updating == [False, False, True] * 2


def test_two_engines_with_the_same_settings_work_side_by_side() -> None:
    first, second = Accelerator(cpu=True, mixed_precision="bf16"), Accelerator(cpu=True, mixed_precision="bf16")
    assert first.state.mixed_precision == second.state.mixed_precision
    assert first.device == second.device


def test_batches_of_a_prepared_loader_can_be_skipped() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(_parts()[3])
    rest = [batch[0] for batch in accelerator.skip_first_batches(loader, 10)]
    toy.assert_same(rest, [batch[0] for batch in loader][10:], rtol=0)


def test_an_accelerator_is_shared_by_copies_and_refuses_to_be_pickled() -> None:
    accelerator = Accelerator(cpu=True)
    assert copy.copy(accelerator) is copy.deepcopy(accelerator) is accelerator
    with pytest.raises(UnsupportedError, match=r"cannot be pickled, so a dataset or function .* must not hold it"):
        pickle.dumps(accelerator)


def _by_hand() -> tuple[list[torch.Tensor], float]:
    network, optimizer, schedule, _ = _parts()
    inputs, targets, _ = toy.data()
    for _ in range(2):
        toy.losses(network, inputs[:8], targets[:8]).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return toy.parameters(network), optimizer.param_groups[0]["lr"]


def _prepare_again_after_free_memory(rank: int, size: int) -> tuple[list[torch.Tensor], float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = toy.model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(*toy.data()[:2]), batch_size=4 // size)
    parts: list[Any] = [network, optimizer, schedule, loader]
    for _ in range(2):
        parts = accelerator.prepare(*parts)
        model, optimizer, schedule, loader = parts
        assert model is network or model.module is network
        for inputs, targets in islice(loader, 3):  # the third one begins a window that does not end
            with accelerator.accumulate(model):
                accelerator.backward(toy.losses(model, inputs, targets).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.free_memory()
        assert (accelerator._models, accelerator._optimizers, accelerator._schedulers) == ([], [], [])
    return toy.parameters(network), optimizer.param_groups[0]["lr"]


def test_what_free_memory_released_is_prepared_again(everywhere: Any) -> None:
    weights, rate = _by_hand()
    for result in everywhere(_prepare_again_after_free_memory):
        assert result[1] == rate
        torch.testing.assert_close(result[0], weights, rtol=1e-6, atol=1e-7)


def _train(accelerator: Accelerator, parts: Any, micro_batches: int) -> Any:
    model, optimizer, schedule, loader = parts = accelerator.prepare(*parts)
    for inputs, targets in islice(loader, micro_batches):
        with accelerator.accumulate(model):
            accelerator.backward(toy.losses(model, inputs, targets).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return parts


def _continue_with_others(frees: bool) -> Callable[[int, int], tuple[list[torch.Tensor], float]]:
    def body(rank: int, size: int) -> tuple[list[torch.Tensor], float]:
        network = toy.model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        parts: Any = [network, optimizer, schedule, DataLoader(TensorDataset(*toy.data()[:2]), batch_size=4 // size)]
        settings: list[tuple[dict[str, Any], int]] = [
            ({"mixed_precision": "bf16"}, 0),
            ({"gradient_accumulation_steps": 2}, 2),
            ({}, 1),
        ]
        for options, micro_batches in settings:
            accelerator = Accelerator(cpu=True, **options)
            parts = _train(accelerator, parts, micro_batches)
            assert parts[0] is network or parts[0].module is network
            assert parts[2].optimizers == accelerator._optimizers == [parts[1]]
            if frees:
                accelerator.free_memory()
            del accelerator
        assert parts[3].state_dict()["epoch"] == 1
        return toy.parameters(network), parts[2].get_last_lr()[0]

    return body


@pytest.mark.parametrize("frees", [True, False], ids=["freed", "gone"])
def test_another_accelerator_continues_with_what_an_earlier_one_prepared(everywhere: Any, frees: bool) -> None:
    network = toy.model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    inputs, targets, _ = toy.data()
    for samples in (8, 4):
        toy.losses(network, inputs[:samples], targets[:samples]).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for weights, rate in everywhere(_continue_with_others(frees)):
        assert rate == schedule.get_last_lr()[0]
        torch.testing.assert_close(weights, toy.parameters(network), rtol=1e-6, atol=1e-7)


def test_a_released_wrapper_is_refused_once_its_optimizer_is_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = _parts()[1]
    wrapper = accelerator.prepare(optimizer)
    accelerator.free_memory()
    with pytest.raises(PreparationError, match="prepared already"):
        accelerator.prepare(wrapper, optimizer)
    accelerator.prepare(optimizer)
    with pytest.raises(PreparationError, match="prepared already"):
        accelerator.prepare(wrapper)
