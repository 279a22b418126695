"""Ranks that hold parts of one replica read the same batches, and count once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator, DataLoaderConfiguration, ParallelismConfig, set_seed
from trainer_lib.events import Callback
from trainer_lib.options.base import KwargsHandler
from trainer_lib.state import PartialState
from trainer_lib.strategies import register_strategy, registry
from trainer_lib.strategies.ddp.ddp import DDP


@dataclass
class WholeModelKwargs(KwargsHandler):
    """Each rank keeps the whole model, also where the mesh says that two share one."""


class WholeModel(DDP):
    """DDP over all ranks: those of one replica have equal gradients, so the means stay the same."""

    def __init__(self, group: Any, device: torch.device, options: Any = None) -> None:
        super().__init__(group, device)


class Numbers(IterableDataset[int]):
    """Eleven numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


def accelerator(**options: Any) -> Accelerator:
    register_strategy(WholeModelKwargs)(WholeModel)
    config = ParallelismConfig(dp_replicate_size=PartialState(cpu=True).num_processes // 2, tp_size=2)
    return Accelerator(cpu=True, parallelism_config=config, kwargs_handlers=[WholeModelKwargs()], **options)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    registry._registered.pop(WholeModelKwargs, None)


def _reading(dispatches: bool, iterable: bool) -> Any:
    torch.manual_seed(PartialState(cpu=True).process_index)  # rank 0's shuffle counts
    engine = accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    dataset: Any = Numbers() if iterable else range(11)
    loader = engine.prepare(DataLoader(dataset, batch_size=2, shuffle=not iterable))
    batches, gathered = [], []
    for batch in loader:
        batches.append(batch.tolist())
        gathered += engine.gather_for_metrics(batch).tolist()
    objects = engine.gather_for_metrics([f"rank {engine.process_index}"], use_gather_object=True)
    with engine.split_between_processes(list(range(5))) as part:
        pass
    set_seed(3, device_specific=True)
    return batches, gathered, objects, part, torch.initial_seed()


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("dispatches", [False, True])
def test_ranks_of_a_replica_read_the_same_batches(dispatches: bool, iterable: bool) -> None:
    first, second, third, fourth = run_world(_reading, (dispatches, iterable), 4)
    assert (first[0], third[0]) == (second[0], fourth[0])
    assert first[0] != third[0]
    for _, gathered, *_ in (first, second, third, fourth):
        assert sorted(gathered) == list(range(11)), "each sample once"
    assert (first[2], second[2]) == (["rank 0", "rank 2"], ["rank 1", "rank 3"])
    assert [part for *_, part, _ in (first, second, third, fourth)] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
    assert [seed for *_, seed in (first, second, third, fourth)] == [3, 3, 4, 4]


class Stops(Callback):
    """Asks on one rank only to end the run."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, run: Any) -> None:
        if run.accelerator.process_index == self.rank and run.state.step == self.step:
            run.control.stop = True


class Rows:
    """A metric that counts rows; ranks merge theirs."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, predictions: Any, labels: Any) -> None:
        del labels
        self.count += len(predictions)

    def merge(self, others: list["Rows"]) -> None:
        self.count += sum(other.count for other in others)

    def compute(self) -> float:
        return float(self.count)


def _fit(replicas: int, **options: Any) -> Any:
    args = arguments(
        max_steps=None, num_train_epochs=2, log_every=1, per_device_train_batch_size=8 // replicas, shuffle=True,
        gradient_accumulation_steps=2, max_grad_norm=0.5, **options,
    )  # fmt: skip
    engine = accelerator() if PartialState(cpu=True).num_processes > replicas else None
    model_trainer = trainer(
        args,
        train_dataset=points(43),
        eval_dataset=points(21),
        metrics={"accuracy": "accuracy", "rows": Rows()},
        compute_metrics=lambda pair: {"gathered": float(len(pair[0]))},
        accelerator=engine,
        callbacks=[Stops(rank=3, step=4)],
    )
    result = model_trainer.fit()
    losses = [(entry["loss"], entry["grad_norm"]) for entry in result.history if "loss" in entry]
    evaluated, predicted = model_trainer.evaluate(), model_trainer.predict(points(5))
    state = model_trainer.run.state
    return losses, evaluated, len(predicted.predictions), (state.step, state.samples)


def test_a_run_counts_replicas_not_ranks() -> None:
    (expected,) = run_world(_fit, (1,), 1)
    for actual in run_world(_fit, (2,), 4):
        assert actual[0] == [pytest.approx(pair, rel=1e-6) for pair in expected[0][: len(actual[0])]]
        assert actual[1]["eval_rows"] == actual[1]["eval_gathered"] == 21, "of the evaluation set, each once"
        assert actual[3][0] == 5, "rank 3 asks after its fourth update, and the fifth tells the others"
    alone = run_world(_fit, (1,), 2)  # one replica of two ranks
    for actual in alone:
        assert [pair[0] for pair in actual[0]] == [pytest.approx(pair[0], rel=1e-6) for pair in expected[0]]
        assert actual[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-6)
        assert actual[2:] == expected[2:]
