"""Which samples the batch in hand holds: against datasets whose samples are their own index, or place in the stream."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler

from tests.data_loader.reference import Numbers, SizedStream, Stream, worlds
from tests.data_loader.test_tails import Backwards
from tests.worlds import run_world
from trainer_lib import Accelerator, DataLoaderConfiguration
from trainer_lib.data_loader import skip_first_batches
from trainer_lib.data_loader.order import sample_ids


class Restless(Backwards):
    """A sampler that draws from everybody's random numbers."""

    def __iter__(self):
        return iter(torch.randperm(len(self.dataset)).tolist())


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__(), key=lambda batch: int(batch[0])))


def _loaders() -> dict[str, DataLoader[Any]]:
    numbers = Numbers(11)
    return {
        "in order": DataLoader(numbers, batch_size=3),
        "shuffled": DataLoader(numbers, batch_size=3, shuffle=True),
        "shuffled, by workers": DataLoader(numbers, batch_size=3, shuffle=True, num_workers=2),
        "own sampler": DataLoader(numbers, batch_size=3, sampler=Restless(numbers)),
        "weighted": DataLoader(numbers, batch_size=3, sampler=WeightedRandomSampler([1.0] * 11, 20)),
        "own batches": DataLoader(numbers, batch_sampler=list(BatchSampler(SequentialSampler(numbers), 3, False))),
        "samples alone": DataLoader(numbers, batch_size=None, shuffle=True),
        "stream": DataLoader(Stream(11), batch_size=3),
        "sized stream, by a worker": DataLoader(SizedStream(11), batch_size=3, num_workers=1),
        "stream of batches": DataLoader(Stream(11), batch_size=None),
    }


def _real(loader: Any, batch: Any) -> list[int]:
    held = [batch] if isinstance(batch, int) else batch.tolist()
    return held if loader.rows is None else held[: loader.rows.real]


def _check(loader: Any, passes: int = 1) -> None:
    for _ in range(passes):
        for batch in loader:
            assert loader.sample_ids() == _real(loader, batch)


@pytest.mark.parametrize("kind", _loaders())
@pytest.mark.parametrize("even", [True, False])
def test_the_batch_in_hand_is_told(kind: str, even: bool) -> None:
    for loader in worlds(_loaders()[kind], 1 if "worker" in kind else 2, even_batches=even):
        drawn = torch.random.get_rng_state()
        _check(loader, passes=2)
        assert torch.equal(drawn, torch.random.get_rng_state())
        for batch in loader:  # left in the middle, and continued
            assert loader.sample_ids() == _real(loader, batch)
            break
        _check(loader)
        _check(skip_first_batches(loader, 1))


@pytest.mark.parametrize("block", [2, 4, 6])
def test_batches_are_told_across_what_is_looked_up_at_once(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_ids, "_BLOCK", block)
    for loader in worlds(_loaders()["shuffled"], 2):
        _check(loader, passes=2)
        loader.set_epoch(0)
        _check(loader)


class FromArray(Backwards):
    """A sampler that yields numbers of numpy or torch, as many do."""

    def __init__(self, order: Any) -> None:
        super().__init__(range(len(order)))
        self.order = order

    def __iter__(self):
        return iter(self.order)


@pytest.mark.parametrize("order", [np.array([3, 1, 0, 2]), torch.tensor([3, 1, 0, 2])], ids=["numpy", "torch"])
def test_samples_are_plain_numbers(order: Any) -> None:
    (loader,) = worlds(DataLoader(Numbers(4), batch_size=2, sampler=FromArray(order)), 1)
    samples = [sample for _ in loader for sample in loader.sample_ids()]
    assert [(type(sample), sample) for sample in samples] == [(int, 3), (int, 1), (int, 0), (int, 2)]


def test_slices_of_ready_batches_are_told() -> None:
    for loader in worlds(
        DataLoader(Numbers(12), batch_sampler=[[3, 1, 4, 2], [5, 9, 2, 6], [0, 7, 8]]), 2, split_batches=True
    ):
        _check(loader, passes=2)


def test_what_has_an_order_of_its_own_says_so() -> None:
    numbers = Numbers(6)
    once = DataLoader(numbers, batch_size=2, sampler=iter(range(6)))  # type: ignore[arg-type]
    for loader in (*worlds(OwnLoader(numbers, batch_size=2, shuffle=True), 1), *worlds(once, 1)):
        assert loader.sample_ids() is None
        assert [loader.sample_ids() for _ in loader] == [None] * 3


def test_what_is_sent_by_the_first_process_is_told_by_all() -> None:
    def read() -> None:
        for split in (False, True):
            config = DataLoaderConfiguration(dispatch_batches=True, split_batches=split)
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            for dataset in (Numbers(11), Stream(11)):
                size, shuffle = 4 if split else 2, isinstance(dataset, Numbers)
                _check(accelerator.prepare(DataLoader(dataset, batch_size=size, shuffle=shuffle)))
            accelerator.free_memory()

    run_world(read, (), 2, timeout=60)
