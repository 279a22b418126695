"""Prepared loaders as torchdata's `StatefulDataLoader`."""

import copy
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data_loader.reference import Numbers
from tests.worlds import run_world
from trainer_lib import Accelerator, DataLoaderConfiguration
from trainer_lib.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from trainer_lib.data_loader.stateful_loader import stateful_kind
from trainer_lib.foundation.errors import MissingPackageError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call

SIZE = 21


class Counted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def _prepared(loader: Any, **options: Any) -> Any:
    return prepare_data_loader(loader, num_processes=1, process_index=0, use_stateful_dataloader=True, **options)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: _prepared(DataLoader(Numbers(SIZE), 4)), DataLoaderShard),
        (lambda: _prepared(StatefulDataLoader(Numbers(SIZE), 4)), DataLoaderShard),
        (lambda: _prepared(DataLoader(Counted(), 4)), DataLoaderShard),
        (lambda: _prepared(DataLoader(Numbers(SIZE), 4), dispatch_batches=True), DataLoaderDispatcher),
        (lambda: skip_first_batches(_prepared(DataLoader(Numbers(SIZE), 4)), 0), DataLoaderShard),
        (lambda: copy.copy(_prepared(DataLoader(Numbers(SIZE), 4))), DataLoaderShard),
        (lambda: DataLoaderShard(Numbers(SIZE), use_stateful_dataloader=True, batch_size=4), DataLoaderShard),
        (lambda: DataLoaderDispatcher(Numbers(SIZE), use_stateful_dataloader=True, batch_size=4), DataLoaderDispatcher),
        (lambda: SkipDataLoader(Numbers(SIZE), use_stateful_dataloader=True, batch_size=4), SkipDataLoader),
    ],
)
def test_a_prepared_loader_is_a_stateful_one(make: Callable[[], Any], kind: type[Any]) -> None:
    loader = make()
    assert loader.use_stateful_dataloader
    assert isinstance(loader, StatefulDataLoader)
    assert isinstance(loader, kind)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in DataLoader(Numbers(SIZE), 4)]


def test_it_is_an_option() -> None:
    loader = prepare_data_loader(DataLoader(Numbers(SIZE)), num_processes=1, process_index=0)
    assert not isinstance(loader, StatefulDataLoader)
    assert not loader.use_stateful_dataloader
    assert not Accelerator(cpu=True).use_stateful_dataloader


def test_it_can_be_sent_to_another_process() -> None:
    loader = _prepared(DataLoader(range(6), 2))  # type: ignore[arg-type]
    next(iter(loader))
    again = pickle.loads(pickle.dumps(loader))
    assert type(again) is type(loader)
    assert [batch.tolist() for batch in again] == [[0, 1], [2, 3], [4, 5]]


def test_a_missing_torchdata_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    stateful_kind.cache_clear()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    with pytest.raises(MissingPackageError, match=r'torchdata.*`pip install "trainer_lib\[torchdata\]"`'):
        accelerator.prepare(DataLoader(Numbers(SIZE)))


def _rest_and_resumed(stateful: bool, workers: int, done: int) -> tuple[list[Any], list[Any]]:
    """Return what two epochs yield after `done` batches, and what a new loader yields from that state on."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))

    def loader() -> Any:
        kind, generator = StatefulDataLoader if stateful else DataLoader, torch.Generator().manual_seed(3)
        return accelerator.prepare(kind(Numbers(SIZE), 2, shuffle=True, num_workers=workers, generator=generator))

    saving, batches, state = loader(), [], {}
    assert isinstance(saving, StatefulDataLoader)
    for _ in range(2):
        for batch in saving:
            batches.append(batch.tolist())
            if len(batches) == done:
                state = json.loads(json.dumps(saving.state_dict()))
    resumed = loader()
    resumed.load_state_dict(state)
    return batches[done:], [batch.tolist() for _ in range(2) for batch in resumed]


@pytest.mark.parametrize(
    ("stateful", "num_processes", "workers"),
    [
        *((stateful, num_processes, 0) for stateful in (False, True) for num_processes in (1, 2)),
        pytest.param(False, 2, 2, marks=pytest.mark.slow),
        pytest.param(True, 2, 2, marks=pytest.mark.slow),
        (True, 1, 2),
        pytest.param(False, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_a_state_from_within_an_epoch_is_exact(stateful: bool, num_processes: int, workers: int) -> None:
    for rest, resumed in run_world(lambda: _rest_and_resumed(stateful, workers, 3), num_processes=num_processes):
        assert len(resumed) == (19, 9)[num_processes - 1]
        assert resumed == rest
