"""Batches of a TensorDataset are read column by column, and are what torch makes of its samples."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from trainer_lib.data_loader import prepare_data_loader
from trainer_lib.data_loader.readers import row_batches

ROWS = 11


def tensors() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    wide = torch.randn(5, ROWS, 3).transpose(0, 1)  # rows that are no block of memory
    return wide, torch.arange(ROWS), torch.randn(ROWS).to(torch.bfloat16), torch.arange(ROWS) > 4


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


def as_dict(samples: list[Any]) -> dict[str, Any]:
    return {"rows": default_collate(samples)}


@pytest.mark.parametrize(
    ("dataset", "options", "by_column"),
    [
        (TensorDataset(*tensors()), {"shuffle": True}, True),
        (TensorDataset(*tensors()), {"num_workers": 1}, True),
        (TensorDataset(tensors()[0]), {"num_workers": 1, "sampler": [3, -1, 0]}, True),
        (TensorDataset(*tensors()), {"sampler": [torch.tensor(2), torch.tensor(0)]}, True),
        (TensorDataset(tensors()[0]), {"sampler": [3, -1, 0]}, True),
        (Subset(TensorDataset(*tensors()), [7, 2, 9]), {"shuffle": True}, True),
        (Doubled(*tensors()), {}, False),
        (TensorDataset(*tensors()), {"batch_sampler": [[[0, 1], [2, 3]]], "batch_size": 1, "num_workers": 1}, False),
        (Subset(Subset(TensorDataset(*tensors()), [7, 2, 9]), [2, 1]), {}, False),
        (TensorDataset(*tensors()), {"collate_fn": as_dict}, False),
        (TensorDataset(*tensors()), {"batch_size": None}, False),
    ],
)
def test_batches_are_those_of_torch(
    dataset: Any, options: dict[str, Any], by_column: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    read = row_batches.read_batch

    def noting(*args: Any) -> Any:
        made.append(read(*args))
        return made[-1]

    monkeypatch.setattr("trainer_lib.data_loader.bad_samples.guarded_dataset.read_batch", noting)
    passes: list[list[Any]] = []
    for prepared in (False, True):
        torch.manual_seed(3)
        settings: dict[str, Any] = {"batch_size": 4} | options
        loader: Any = DataLoader(dataset, **settings)
        passes.append(list(prepare_data_loader(loader, num_processes=1) if prepared else loader))
    plain, ours = passes
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert [type(batch) for batch in ours] == [type(batch) for batch in plain]
    if not options.get("num_workers"):
        assert any(batch is not None for batch in made) == by_column


def test_what_is_set_later_counts() -> None:
    loader: Any = prepare_data_loader(DataLoader(TensorDataset(torch.arange(4)), batch_size=2), num_processes=1)
    loader.collate_fn = as_dict
    assert [batch["rows"][0].tolist() for batch in loader] == [[0, 1], [2, 3]]
    loader.collate_fn = default_collate
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_sample_beyond_the_data_is_named() -> None:
    loader: Any = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, sampler=[0, 4])  # type: ignore[arg-type]
    with pytest.raises(IndexError) as error:
        list(prepare_data_loader(loader, num_processes=1))
    assert "In sample 4." in error.value.__notes__


def test_gradients_reach_tensors_that_need_them() -> None:
    rows = torch.ones(4, requires_grad=True)
    (batch,) = prepare_data_loader(DataLoader(TensorDataset(rows), batch_size=4), num_processes=1)
    batch[0].sum().backward()
    assert rows.grad is not None
