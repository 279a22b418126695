"""Accumulation: windows equal one big batch, in any order of the verbs, on one process and several."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, GradientAccumulationPlugin


def _loader(samples: int, batch_size: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    inputs, targets, _ = toy.data()
    return DataLoader(TensorDataset(inputs[:samples], targets[:samples]), batch_size=batch_size)


def _windows(samples: int, batch_size: int, steps: int, style: str = "zero last") -> list[list[torch.Tensor]]:
    """Return the gradients of each update over one pass; the weights never move, so each can be made by hand."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    network = toy.model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    network, optimizer, loader = accelerator.prepare(network, optimizer, _loader(samples, batch_size))
    updates: list[list[torch.Tensor]] = []
    gradients: list[torch.Tensor] = []
    for inputs, targets in loader:
        with accelerator.accumulate(network):
            if style == "zero first":
                optimizer.zero_grad()
            accelerator.backward(toy.losses(network, inputs, targets).mean())
            if style != "step outside":
                optimizer.step()
            if style == "zero last":
                gradients = toy.gradients(network)
                optimizer.zero_grad()
        if style == "step outside":
            optimizer.step()
        if style != "zero last":
            gradients = toy.gradients(network)
        if accelerator.sync_gradients:
            updates.append(gradients)
        if style == "step outside":
            optimizer.zero_grad()
    return updates


@pytest.mark.parametrize("style", ["zero last", "zero first", "step outside"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 100])
def test_each_window_equals_one_big_batch(steps: int, style: str) -> None:
    updates = _windows(samples=40, batch_size=4, steps=steps, style=style)
    size = min(4 * steps, 40)
    expected = [toy.mean_gradients(list(range(start, min(start + size, 40)))) for start in range(0, 40, size)]
    assert len(updates) == len(expected)
    for ours, theirs in zip(updates, expected, strict=True):
        toy.assert_same(ours, theirs)


def test_without_accumulate_each_loss_counts_as_a_part_of_the_update() -> None:
    """As scripts do that count their micro-batches themselves."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, _ = toy.data()
    for start in (0, 24):
        accelerator.backward(toy.losses(network, inputs[start : start + 24], targets[start : start + 24]).mean())
    optimizer.step()
    toy.assert_same(toy.gradients(network), toy.mean_gradients(list(range(48))))
    optimizer.zero_grad()
    assert not toy.gradients(network)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_windows_on_several_processes_equal_one_big_batch(processes: int, steps: int) -> None:
    batch_size = 8 // processes
    results = run_world(_windows, (40, batch_size, steps), processes, timeout=60)
    size = 8 * steps
    expected = [toy.mean_gradients(list(range(start, min(start + size, 40)))) for start in range(0, 40, size)]
    for updates in results:
        assert len(updates) == len(expected)
        for ours, theirs in zip(updates, expected, strict=True):
            toy.assert_same(ours, theirs)


def test_a_window_may_go_on_into_the_next_pass() -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    loader = accelerator.prepare(_loader(16, 4))
    updating = []
    for _ in range(3):
        for _ in loader:
            with accelerator.accumulate():
                updating.append(accelerator.sync_gradients)
    assert updating == [False, False, True] * 4


def test_gradients_of_a_discarded_window_do_not_leak_into_the_next() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, _ = toy.data()
    for start in (0, 4):
        with accelerator.accumulate(network):
            accelerator.backward(toy.losses(network, inputs[start : start + 4], targets[start : start + 4]).mean())
            if accelerator.sync_gradients:
                optimizer.zero_grad()  # instead of a step
    for start in (8, 12):
        with accelerator.accumulate(network):
            accelerator.backward(toy.losses(network, inputs[start : start + 4], targets[start : start + 4]).mean())
            optimizer.step()
    toy.assert_same(toy.gradients(network), toy.mean_gradients(list(range(8, 16))))


def _no_sync_traffic(sync_each_batch: bool) -> list[bool]:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    network = accelerator.prepare(toy.model())
    inputs, targets, _ = toy.data()
    mine = slice(accelerator.process_index * 4, accelerator.process_index * 4 + 4)
    equal = []
    for _ in range(2):
        with accelerator.accumulate(network):
            accelerator.backward(toy.losses(network, inputs[mine], targets[mine]).mean())
        both = accelerator.gather(toy.gradients(network)[0].flatten()[None])
        equal.append(torch.equal(both[0], both[1]))
    return equal


@pytest.mark.parametrize(("sync_each_batch", "expected"), [(False, [False, True]), (True, [True, True])])
def test_gradients_travel_once_a_window_unless_asked(sync_each_batch: bool, expected: list[bool]) -> None:
    assert run_world(_no_sync_traffic, (sync_each_batch,), 2, timeout=60) == [expected, expected]


def test_two_models_that_take_turns_each_keep_their_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = accelerator.prepare(toy.model(0), toy.model(1))
    seen = []
    for _ in range(4):
        with accelerator.accumulate(first):
            seen.append(("one", accelerator.sync_gradients))
        with accelerator.accumulate(second):
            seen.append(("other", accelerator.sync_gradients))
    assert seen == [("one", False), ("other", False), ("one", True), ("other", True)] * 2


def test_the_number_of_steps_can_change_between_windows() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.gradient_accumulation_steps = 3
    updating = []
    for _ in range(3):
        with accelerator.accumulate():
            updating.append(accelerator.sync_gradients)
    assert updating == [False, False, True]


def _sync_forced() -> tuple[bool, bool]:
    accelerator = Accelerator(cpu=True)
    network = accelerator.prepare(toy.model())
    inputs, targets, _ = toy.data()
    mine = slice(accelerator.process_index * 4, accelerator.process_index * 4 + 4)

    def gradients_agree() -> bool:
        both = accelerator.gather(torch.cat([g.flatten() for g in toy.gradients(network)])[None])
        return torch.equal(both[0], both[1])

    with accelerator.no_sync(network):
        first = toy.losses(network, inputs[mine], targets[mine]).mean()
        second = toy.losses(network, inputs[mine] + 1, targets[mine]).mean()
        accelerator.backward(first)
        local = gradients_agree()
        with accelerator.trigger_sync_in_backward(network):
            accelerator.backward(second)
    return local, gradients_agree()


def test_a_reduction_can_be_forced_after_a_forward_in_no_sync() -> None:
    assert run_world(_sync_forced, (), 2, timeout=60) == [(False, True)] * 2


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", True])
def test_impossible_numbers_of_steps_are_refused(steps: object) -> None:
    with pytest.raises(ConfigurationError, match="whole number of at least 1"):
        Accelerator(cpu=True, gradient_accumulation_steps=steps)  # type: ignore[arg-type]


def test_two_contradicting_numbers_of_steps_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="contradict"):
        Accelerator(
            cpu=True,
            gradient_accumulation_steps=3,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        )


def test_the_launcher_may_give_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 5


def test_gradient_of_ones_own_is_divided_like_the_loss() -> None:
    """`backward` passes it on to torch, with a loss of one number and of several."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, _ = toy.data()
    for start in (0, 4):
        with accelerator.accumulate(network):
            losses = toy.losses(network, inputs[start : start + 4], targets[start : start + 4])
            loss, gradient = (losses.mean(), torch.tensor(1.0)) if start else (losses, torch.full_like(losses, 1 / 4))
            accelerator.backward(loss, gradient=gradient)
            optimizer.step()
    toy.assert_same(toy.gradients(network), toy.mean_gradients(list(range(8))))


def _steps(accelerator: Accelerator, network: torch.nn.Module, micro_batches: int) -> list[tuple[int, bool]]:
    seen: list[tuple[int, bool]] = []
    for _ in range(micro_batches):
        with accelerator.accumulate(network):
            seen.append((accelerator.step, accelerator.sync_gradients))
    return seen


class _WithOffset(torch.nn.Module):
    """A loss with a summand of its own, whose gradient is a view of that of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.offset = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.zeros(1))
        torch.nn.init.ones_(self.inner.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs).mean() + self.offset.squeeze()


def test_gradients_that_are_views_of_that_of_the_loss_leave_later_losses_alone() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = _WithOffset()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    for _ in range(3):
        for _ in range(2):
            with accelerator.accumulate(network):
                accelerator.backward(network(torch.ones(1, 2)))
                optimizer.step()
                if not accelerator.sync_gradients:
                    continue
                assert [float(gradient.mean()) for gradient in toy.gradients(network)] == [1.0, 1.0, 1.0]
                optimizer.zero_grad(set_to_none=False)  # in place


def test_step_counts_micro_batches_and_moves_the_end_of_the_window(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    network, optimizer = accelerator.prepare(plain := toy.model(), torch.optim.SGD(plain.parameters(), lr=0.0))
    assert accelerator.step == 0
    assert _steps(accelerator, network, 4) == [(1, False), (2, False), (3, True), (4, False)]
    accelerator.step = 8  # in the middle of a window
    assert _steps(accelerator, network, 2) == [(9, True), (10, False)]
    accelerator.step = 0
    assert _steps(accelerator, network, 3) == [(1, False), (2, False), (3, True)]
    accelerator.step = 4
    accelerator.save_state(tmp_path / "saved")
    assert _steps(accelerator, network, 2) == [(5, False), (6, True)]
    accelerator.load_state(tmp_path / "saved")
    assert _steps(accelerator, network, 3) == [(5, False), (6, True), (7, False)]
    with pytest.raises(ConfigurationError, match="step must be a whole number of at least 0, got -1"):
        accelerator.step = -1
    accelerator.step = 1
    inputs, targets, _ = toy.data()
    for start in (0, 4):
        with accelerator.accumulate(network):
            accelerator.backward(toy.losses(network, inputs[start : start + 4], targets[start : start + 4]).mean())
            optimizer.step()  # each loss counts as a third, as in a whole window
    assert accelerator.sync_gradients
    toy.assert_same(toy.gradients(network), [gradient * 2 / 3 for gradient in toy.mean_gradients(list(range(8)))])


def test_step_starts_again_after_a_window_that_the_end_of_the_data_cuts_short() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network, loader = accelerator.prepare(toy.model(), _loader(samples=12, batch_size=4))
    seen: list[tuple[int, bool]] = []
    for _ in range(2):
        for _ in loader:
            seen += _steps(accelerator, network, 1)
    assert seen == [(1, False), (2, True), (0, True)] * 2
