"""Resuming with another world size: each sample once, in the same order, with the same losses."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.accelerator import toy
from tests.faults.ledger import Ledger
from tests.trainer.safety import test_elastic_restarts as task
from tests.trainer.safety.test_elastic_restarts import Layout, fit
from tests.worlds import run_world
from trainer_lib import Accelerator

PASSES = 2
GLOBAL = 8  # samples an update, so 6 updates a pass


class Samples(Dataset[tuple[Any, ...]]):
    """The toy's samples, with their numbers."""

    def __init__(self) -> None:
        self.inputs, self.targets, _ = toy.data()

    def __len__(self) -> int:
        return toy.SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.inputs[index], self.targets[index], index


class Stream(IterableDataset[tuple[Any, ...]]):
    """The same, one after the other and without a length."""

    def __iter__(self) -> Any:
        samples = Samples()
        return (samples[index] for index in range(toy.SAMPLES))


def trains(layout: Layout, data: Any, num_workers: int, **options: Any) -> Any:
    """Return an engine with what it trains."""
    torch.manual_seed(0)
    _, batch, steps = layout
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    model = toy.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    is_sized = not isinstance(data, IterableDataset)
    loader = DataLoader(data, batch_size=batch, shuffle=is_sized, num_workers=num_workers)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def updates(engine: Any, last: int, save_at: int | None = None, folder: Path | None = None) -> list[Any]:
    """Train up to an update; return for each the loss, the learning rate and the samples of all processes."""
    accelerator, model, optimizer, loader, schedule = engine
    made: list[Any] = []
    done = schedule.last_epoch
    losses, numbers = 0.0, []
    while True:
        for inputs, targets, index in loader:
            with accelerator.accumulate(model):
                loss = toy.losses(model, inputs, targets).mean()
                accelerator.backward(loss)
                numbers += accelerator.gather(index).tolist()
                losses += accelerator.reduce(loss.detach(), "mean").item() * len(inputs) * accelerator.num_processes
                if accelerator.sync_gradients:
                    made.append((losses / GLOBAL, optimizer.param_groups[0]["lr"], sorted(numbers)))
                    losses, numbers = 0.0, []
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done == save_at:
                    accelerator.save_state(folder)
                if done == last:
                    return made


def whole(layout: Layout, data: Any, saves_at: list[int], folder: Path) -> list[Any]:
    """Train all passes, and save a state in the middle of one and at its end."""
    engine = trains(layout, data, 0)
    last = PASSES * toy.SAMPLES // GLOBAL
    made: list[Any] = []
    for at in [*saves_at, last]:
        made += updates(engine, at, at, folder / str(at))
        if at != last:  # to the start of the loop again, as after a restart
            engine[0].load_state(folder / str(at))
    return made


def resumed(layout: Layout, data: Any, folder: Path, places: list[tuple[int, int]]) -> list[list[Any]]:
    """Resume from each of these updates, with this number of workers."""
    made: list[list[Any]] = []
    for at, num_workers in places:
        engine = trains(layout, data, num_workers)
        engine[0].load_state(folder / str(at))
        made.append(updates(engine, PASSES * toy.SAMPLES // GLOBAL))
        engine[0].free_memory()
    return made


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 0
    for (loss, rate, numbers), (other, other_rate, other_numbers) in zip(ours, theirs, strict=True):
        assert numbers == other_numbers
        assert loss == pytest.approx(other, rel=1e-6)
        assert rate == other_rate


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((1, 8, 1), (2, 4, 1), id="1 to 2"),
        pytest.param((2, 4, 1), (1, 8, 1), id="2 to 1", marks=pytest.mark.slow),
        pytest.param((2, 4, 1), (4, 2, 1), id="2 to 4", marks=pytest.mark.slow),
        pytest.param((4, 2, 1), (2, 4, 1), id="4 to 2", marks=pytest.mark.slow),
        pytest.param((1, 8, 1), (1, 4, 2), id="smaller batches", marks=pytest.mark.slow),
        pytest.param((2, 2, 2), (1, 8, 1), id="2 accumulating to 1", marks=pytest.mark.slow),
    ],
)
def test_each_sample_comes_once_with_the_same_losses(
    before: Layout, after: Layout, states: "States", ledger: Ledger
) -> None:
    _, alone = states.of((1, GLOBAL, 1))
    folder, first = states.of(before)
    assert_same(first, alone)
    assert sorted(number for _, _, numbers in alone[:6] for number in numbers) == list(range(toy.SAMPLES))
    places = [(2, 0), (6, 0), (2, 2)]
    for process in run_world(resumed, (after, Samples(), folder, places), after[0], timeout=60):
        for (at, _), made in zip(places, process, strict=True):
            assert_same(made, alone[at:])
    row = f"a loop, {described(before)} to {described(after)}"
    ledger.note("worlds", row, compared=len(places), same_samples=len(places), same_losses=len(places))


def described(layout: Layout) -> str:
    """Return a layout in words."""
    processes, batch, steps = layout
    return f"{processes} × {batch}" + (f" × {steps} accumulated" if steps > 1 else "")


class States:
    """States in the middle of a pass and at its end, by the layouts of what saved them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Layout, list[Any]] = {}

    def of(self, layout: Layout) -> tuple[Path, list[Any]]:
        """Return the folder of states, and the updates of all passes."""
        folder = self._folder / "_".join(map(str, layout))
        if layout not in self._made:
            self._made[layout] = run_world(whole, (layout, Samples(), [2, 6], folder), layout[0], timeout=60)[0]
        return folder, self._made[layout]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> States:
    return States(tmp_path_factory.mktemp("states"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param((1, 8, 1), (2, 4, 1), marks=pytest.mark.slow), ((2, 4, 1), (1, 8, 1))],
)
def test_so_does_a_stream_without_a_length(before: Layout, after: Layout, tmp_path: Path, ledger: Ledger) -> None:
    first = run_world(whole, (before, Stream(), [2, 6], tmp_path), before[0], timeout=60)[0]
    for process in run_world(resumed, (after, Stream(), tmp_path, [(2, 1), (6, 1)]), after[0], timeout=60):
        assert_same(process[0], first[2:])
        assert_same(process[1], first[6:])
    row = f"a loop over a stream, {described(before)} to {described(after)}"
    ledger.note("worlds", row, compared=2, same_samples=2, same_losses=2)


# -- what is each process's own ----------------------------------------------------------------------------------------


def drawn(folder: Path, loads: bool) -> tuple[float, list[str]]:
    """Return what a process draws next, before a save or after a load, and the messages it logged."""
    messages: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("trainer_lib").addHandler(Keeps())
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(100 + accelerator.process_index)
    if loads:
        accelerator.load_state(folder)
    else:
        accelerator.save_state(folder)
    return torch.rand(1).item(), messages


@pytest.mark.slow
def test_processes_that_were_there_go_on_drawing_and_new_ones_derive_theirs(tmp_path: Path) -> None:
    saved = [number for number, _ in run_world(drawn, (tmp_path / "state", False), 2, timeout=60)]
    results = run_world(drawn, (tmp_path / "state", True), 4, timeout=60)
    numbers = [number for number, _ in results]
    assert numbers[:2] == saved
    assert len(set(numbers)) == 4
    assert [number for number, _ in run_world(drawn, (tmp_path / "state", True), 4, timeout=60)] == numbers
    (line,) = results[0][1]
    assert "was saved with world size 2 and is loaded with world size 4" in line
    assert "New ranks (2 to 3) derive their random generators from (seed, rank, step)." in line
    (alone,) = run_world(drawn, (tmp_path / "state", True), 1, timeout=60)
    assert alone[0] == saved[0]
    assert "New ranks" not in alone[1][0]


def unfinished(folder: Path, loads: bool) -> Any:
    """Save after one micro-batch of two; or load that, and tell what an update is then made from."""
    engine = trains((1, 4, 2), Samples(), 0)
    accelerator, model, optimizer, loader, _ = engine
    if loads:
        accelerator.load_state(folder)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not optimizer.holds_gradients
    sizes: list[bool] = []
    for inputs, targets, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(toy.losses(model, inputs, targets).mean())
            sizes.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
        if not loads:
            accelerator.save_state(folder)
            return None
        if len(sizes) == 4:
            return sizes
    return None


def test_an_unfinished_window_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_world(unfinished, (tmp_path / "state", False), 2, timeout=60)
    assert unfinished(tmp_path / "state", True) == [False, True, False, True]
    assert "within an accumulation window (1 micro-batches) by another number of ranks" in caplog.text


# -- shards ------------------------------------------------------------------------------------------------------------


def sharded(layout: Layout, folder: Path, at: int | None) -> list[Any]:
    from trainer_lib import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")
    engine = trains(layout, Samples(), 0, fsdp_plugin=plugin)
    if at is None:
        engine[0].load_state(folder)
        return updates(engine, 8)
    return updates(engine, 8, at, folder)


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param((2, 4, 1), (4, 2, 1), marks=pytest.mark.slow), ((4, 2, 1), (2, 4, 1))],
)
def test_shards_fit_another_world(before: Layout, after: Layout, tmp_path: Path, ledger: Ledger) -> None:
    first = run_world(sharded, (before, tmp_path / "state", 4), before[0], timeout=120)[0]
    for made in run_world(sharded, (after, tmp_path / "state", None), after[0], timeout=120):
        assert_same(made, first[4:])
    row = f"a loop with shards, {described(before)} to {described(after)}"
    ledger.note("worlds", row, compared=1, same_samples=1, same_losses=1)


# -- the Trainer -------------------------------------------------------------------------------------------------------


def saved_all_along(layout: Layout, folder: Path, **options: Any) -> list[Any]:
    """Return the logged losses of a run that saves after each update."""
    return task.logged_losses(fit(layout, output_dir=folder, save_every=1, keep_last=None, **options))


def gone_on(layout: Layout, run: Path, places: list[tuple[int, int]]) -> list[list[Any]]:
    """Resume from each of these updates, with this number of workers."""
    return [
        task.logged_losses(fit(layout, run / "checkpoints" / f"checkpoint-{step:08d}", num_workers=num_workers))
        for step, num_workers in places
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((1, 16, 1), (2, 8, 1), id="1 to 2", marks=pytest.mark.slow),
        pytest.param((2, 8, 1), (1, 16, 1), id="2 to 1"),
        pytest.param((2, 8, 1), (4, 4, 1), id="2 to 4", marks=pytest.mark.slow),
        pytest.param((4, 4, 1), (2, 4, 2), id="4 to 2 that accumulate", marks=pytest.mark.slow),
        pytest.param((1, 16, 1), (1, 8, 2), id="smaller batches", marks=pytest.mark.slow),
    ],
)
def test_at_an_equal_global_batch_losses_and_rates_are_the_same(
    before: Layout, after: Layout, runs: "Runs", ledger: Ledger
) -> None:
    run, whole = runs.of(before)
    places = [(3, 0), (5, 0), (8, 2)]  # in the middle of a pass, at its end, in the middle of the next
    for made in run_world(gone_on, (after, run, places), after[0], timeout=90):
        for entries in made:
            assert [entry[:2] for entry in entries] == [entry[:2] for entry in whole]
            assert [entry[2] for entry in entries] == [entry[2] for entry in whole]
            assert [entry[3] for entry in entries] == pytest.approx([entry[3] for entry in whole], rel=1e-6)
    row = f"the Trainer, {described(before)} to {described(after)}"
    ledger.note("worlds", row, compared=len(places), same_samples=len(places), same_losses=len(places))


class Runs:
    """Runs that saved after each update, by their layouts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Layout, tuple[Path, list[Any]]] = {}

    def of(self, layout: Layout) -> tuple[Path, list[Any]]:
        """Return the folder of a run, and its logged losses."""
        if layout not in self._made:
            place = self._folder / "_".join(map(str, layout))
            made = run_world(saved_all_along, (layout, place), layout[0], timeout=60)[0]
            self._made[layout] = next(place.iterdir()), made
        return self._made[layout]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))
