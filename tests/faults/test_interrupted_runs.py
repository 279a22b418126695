"""An interrupted run of the Trainer that is resumed equals an uninterrupted one, to the bit, for many settings."""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from tests.faults.ledger import Ledger
from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator, DataLoaderConfiguration
from trainer_lib.callbacks import EarlyStopping
from trainer_lib.trainer.result import FitResult

datasets = pytest.importorskip("datasets")

SAMPLES = 43  # which fill no last batch


# -- data ------------------------------------------------------------------------------------------------------------


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Points that are somewhere else each time, by all generators there are."""

    def __init__(self) -> None:
        self.inputs, self.targets = points(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        somewhere = torch.rand(1) + random.random() + float(np.random.rand())
        return self.inputs[index] + 0.1 * somewhere, self.targets[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Points one after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(list(zip(*points(SAMPLES), strict=True)))


class SizedStream(Stream):
    """The same, of a known length."""

    def __len__(self) -> int:
        return SAMPLES


class DrawingStream(Stream):
    """The same, in an order and with positions that are drawn again in each epoch."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = points(SAMPLES)
        for index in torch.randperm(SAMPLES).tolist():
            yield inputs[index] + 0.1 * torch.rand(1) + 0.1 * random.random(), targets[index]


def rows() -> Any:
    """Return points as a dataset of Hugging Face's library."""
    inputs, targets = points(SAMPLES)
    return datasets.Dataset.from_dict({"inputs": inputs.tolist(), "targets": targets.tolist()})


def collated(samples: list[Any]) -> tuple[Tensor, Tensor]:
    if isinstance(samples[0], tuple):  # of the evaluation
        return default_collate(samples)
    return torch.tensor([sample["inputs"] for sample in samples]), torch.tensor(
        [sample["targets"] for sample in samples]
    )


def moved(row: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": [value + 0.1 for value in row["inputs"]]}


# -- runs ------------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "num_train_epochs": 2,
    "log_every": 4,  # so that a log spans a restart
    "eval_every": 3,
    "save_every": 2,
    "global_batch_size": 8,
    "warmup": 3,
    "lr_scheduler": "cosine",
}
LEFT_OUT = object()


@dataclass(frozen=True)
class Case:
    """A run, and where it is interrupted.

    Args:
        dies_at: The step after which it ends; on one process, a pass has 6 of them.
        options: Arguments besides the usual ones.
        then: The settings that change when the run is resumed.
        data: Makes the data.
        parts: Makes what else the Trainer is given.
        processes: On how many it is tried.
    """

    dies_at: int = 9
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    then: dict[str, Any] = field(default_factory=dict[str, Any])
    data: Callable[[], Any] = lambda: points(SAMPLES)
    parts: Callable[[], dict[str, Any]] = dict
    processes: tuple[int, ...] = (1,)


def seeded() -> dict[str, Any]:
    configuration = DataLoaderConfiguration(seed_each_sample=True)
    return {"accelerator": Accelerator(cpu=True, dataloader_config=configuration)}


def own_schedule() -> dict[str, Any]:
    return {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)}


STREAMED: dict[str, Any] = {"lr_scheduler": "constant"}  # of which no length is known
OF_ROWS: dict[str, Any] = {"collate_fn": collated}
BOTH = (1, 2)

CASES = {
    "in the middle of the first epoch": Case(3, processes=BOTH),
    "in the middle of the second epoch": Case(processes=BOTH),
    "at the end of an epoch": Case(6, {"save_every": 3}, processes=BOTH),
    "after the end of an epoch": Case(7, {"save_every": 3}),
    "before the last step": Case(11, {"save_every": 5}),
    "saved in the foreground": Case(options={"save_in_background": False}, processes=BOTH),
    "without shuffling": Case(options={"shuffle": False}),
    "without accumulation": Case(15, {"global_batch_size": 4}, processes=BOTH),
    "accumulation across the end of an epoch": Case(4, {"global_batch_size": 16}),
    "sgd with momentum, no clipping": Case(
        options={"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.9}, "max_grad_norm": None}
    ),
    "bf16": Case(options={"mixed_precision": "bf16"}),
    "a linear schedule": Case(options={"lr_scheduler": "linear"}),
    "ReduceLROnPlateau": Case(options={"lr_scheduler": "plateau", "warmup": LEFT_OUT}),
    "a custom schedule": Case(options={"lr_scheduler": LEFT_OUT, "warmup": LEFT_OUT}, parts=own_schedule),
    "two workers": Case(options={"num_workers": 2}, processes=BOTH),
    "two workers, then none": Case(options={"num_workers": 2}, then={"num_workers": 0}),
    "no workers, then two": Case(then={"num_workers": 2}),
    "data that draws random numbers": Case(data=Drawing, processes=BOTH),
    "the same in workers, each sample seeded": Case(
        options={"num_workers": 2, "seed_each_sample": True}, data=Drawing, processes=BOTH
    ),
    "the same, then without workers": Case(
        options={"num_workers": 2}, then={"num_workers": 0}, data=Drawing, parts=seeded, processes=BOTH
    ),
    "a stream": Case(3, STREAMED, data=Stream, processes=BOTH),
    "a stream, in a later epoch": Case(options=STREAMED, data=Stream, processes=BOTH),
    "a stream that a worker reads": Case(options={**STREAMED, "num_workers": 1}, data=Stream),
    "a stream of a known length": Case(data=SizedStream, processes=BOTH),
    "a stream that draws random numbers": Case(options=STREAMED, data=DrawingStream),
    "a stream that draws random numbers in two workers": Case(
        options={**STREAMED, "num_workers": 2}, data=DrawingStream
    ),
    "a Hugging Face dataset": Case(data=lambda: rows().map(moved), parts=lambda: OF_ROWS),
    "a Hugging Face dataset in workers": Case(options={"num_workers": 2}, data=rows, parts=lambda: OF_ROWS),
    "a Hugging Face stream": Case(
        options=STREAMED, data=lambda: rows().to_iterable_dataset(4).map(moved), parts=lambda: OF_ROWS, processes=BOTH
    ),
    "a Hugging Face stream with a shuffle buffer": Case(
        options=STREAMED,
        data=lambda: rows().to_iterable_dataset(4).shuffle(seed=3, buffer_size=11),
        parts=lambda: OF_ROWS,
        processes=BOTH,
    ),
    "the same, in a worker": Case(
        options={**STREAMED, "num_workers": 1},
        data=lambda: rows().to_iterable_dataset(4).shuffle(seed=3, buffer_size=11),
        parts=lambda: OF_ROWS,
    ),
}


def outcome(result: FitResult, model: nn.Module) -> list[Any]:
    """Return what has to be equal to the bit."""
    timed = ("_per_second", "data_wait")
    timeless = [{name: value for name, value in entry.items() if not name.endswith(timed)} for entry in result.history]
    return [timeless, result.state.best, result.state.samples, [p.detach().tolist() for p in model.parameters()]]


def run(folder: Path, case: Case, dies: bool = False, **options: Any) -> list[Any] | None:
    """Train, to the end or up to where the case is interrupted."""
    model = network(dropout=0.3)
    callbacks = [EarlyStopping("eval_loss", patience=50), *([Dies(case.dies_at)] if dies else [])]
    settings = {"per_device_train_batch_size": 4 // int(os.environ["WORLD_SIZE"]), **OPTIONS, **case.options, **options}
    args = arguments(output_dir=folder, **{name: value for name, value in settings.items() if value is not LEFT_OUT})
    parts = {"train_dataset": case.data(), "eval_dataset": points(10), **case.parts()}
    model_trainer = trainer(args, model=model, callbacks=callbacks, **parts)
    try:
        return outcome(model_trainer.fit(), model)
    except InterruptedError:
        return None
    finally:
        model_trainer.accelerator.free_memory()  # and the workers of its loaders


# The cases that `make test` runs: each covers what no other case does. The rest runs with `make test-all`.
DAILY = {
    1: {
        "in the middle of the first epoch",
        "at the end of an epoch",
        "saved in the foreground",
        "accumulation across the end of an epoch",
        "bf16",
        "data that draws random numbers",
        "a stream, in a later epoch",
        "a stream that draws random numbers",
        "a Hugging Face stream with a shuffle buffer",
    },
    2: {
        "without accumulation",
        "a stream",
    },
}
NUMBERS = {1: "one process", 2: "two processes"}


@pytest.mark.parametrize(
    ("processes", "name"),
    [
        pytest.param(
            processes,
            name,
            id=f"{NUMBERS[processes]}, {name}",
            marks=[] if name in DAILY[processes] else pytest.mark.slow,
        )
        for processes in BOTH
        for name, case in CASES.items()
        if processes in case.processes
    ],
)
def test_an_interrupted_run_is_the_run_without_a_break(
    processes: int, name: str, tmp_path: Path, ledger: Ledger
) -> None:
    def train(folder: str, **options: Any) -> list[Any]:
        return run_world(lambda: run(tmp_path / folder, CASES[name], **options), (), processes, timeout=120)

    whole = train("whole", save_every="never", keep_best=0)  # saves nothing, so that saving is seen to change nothing
    assert train("parts", dies=True) == [None] * processes
    assert train("parts", resume="auto", **CASES[name].then) == whole
    ledger.note("runs", f"{name}, {NUMBERS[processes]}", compared=1, equal=1)
