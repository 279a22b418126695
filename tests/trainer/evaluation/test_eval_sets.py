"""Tests of what is evaluated: all rows of a loader, and dicts as one set or as several."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, Trainer

ROWS = TensorDataset(*points(37))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


class Unfilled:
    """A batch sampler that leaves out two rows itself."""

    drop_last = True

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(first, first + 5)) for first in range(0, 35, 5)])

    def __len__(self) -> int:
        return 7


def evaluated(make: Callable[[], Any]) -> tuple[int, float]:
    """Return how many rows are predicted, and the loss of all."""
    model_trainer = trainer()
    return len(model_trainer.predict(make()).predictions), model_trainer.evaluate(make())["eval_loss"]


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: DataLoader(ROWS, 5, drop_last=True), 37),
        (lambda: DataLoader(Stream(), 5, drop_last=True), 37),
        (lambda: DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 5, drop_last=True)), 37),
        (lambda: DataLoader(ROWS, batch_sampler=Unfilled()), 35),
    ],
    ids=["rows", "stream", "batch sampler", "batch sampler of a user"],
)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_drop_last_leaves_out_no_row(make: Callable[[], Any], rows: int, processes: int) -> None:
    inputs, targets = points(37)
    loss = cross_entropy(network()(inputs[:rows]), targets[:rows]).item()
    for metrics, of_all in run_world(evaluated, (make,), processes):
        assert metrics == rows
        assert of_all == pytest.approx(loss, rel=1e-6)


def test_drop_last_is_told_once_with_the_number(caplog: pytest.LogCaptureFixture) -> None:
    model_trainer = trainer(eval_dataset=DataLoader(ROWS, 5, drop_last=True))
    for _ in range(2):
        model_trainer.evaluate()
    assert caplog.text.count("has drop_last=True, which would leave out its last 2 samples") == 1
    model_trainer.evaluate(DataLoader(TensorDataset(*points(40)), 5, drop_last=True))
    assert caplog.text.count("drop_last") == 1


# -- dicts of arrays ---------------------------------------------------------------------------------------------------


class Coder(nn.Module):
    """Learns to give back what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Any:
        return {"loss": (self.layer(inputs) - inputs).square().mean()}


def names_of(train: Any, sets: Any, model: nn.Module | None = None) -> list[str]:
    model_trainer = Trainer(model or Coder(), arguments(), train_dataset=train, eval_dataset=sets)
    return sorted(model_trainer.evaluate())


ROW, FEW = points(40)[0], points(8)[0]


@pytest.mark.parametrize("kind", [lambda rows: rows, lambda rows: rows.numpy(), DataLoader])
def test_arrays_by_name_are_sets_where_training_has_one_array(kind: Callable[[Tensor], Any]) -> None:
    names = names_of(kind(ROW), {"a": FEW, "b": FEW[:3]})
    assert names == ["eval_a_loss", "eval_b_loss"]


@pytest.mark.parametrize(
    "train",
    [{"inputs": ROW}, [{"inputs": row} for row in ROW], DataLoader([{"inputs": row} for row in ROW])],  # type: ignore[arg-type]
)
def test_arrays_by_name_are_columns_where_training_has_these(train: Any) -> None:
    assert names_of(train, {"inputs": FEW}) == ["eval_loss"]
    assert names_of(train, {"inputs": FEW.tolist()}) == ["eval_loss"]
    assert names_of(train, {"a": [{"inputs": row} for row in FEW]}) == ["eval_a_loss"]


def test_columns_that_the_model_takes_by_name() -> None:
    assert names_of((ROW,), {"inputs": FEW}) == ["eval_loss"]
    assert names_of(None, {"inputs": np.ones((4, 6), np.float32)}) == ["eval_loss"]


@pytest.mark.parametrize(
    ("train", "value"),
    [
        ((ROW,), {"a": FEW, "b": FEW}),
        (TensorDataset(ROW), {"a": FEW, "b": FEW}),
        ({"inputs": ROW}, {"a": FEW, "b": FEW}),
        (ROW, {"inputs": FEW}),
    ],
)
def test_what_can_be_read_in_two_ways_is_an_error_that_names_both(train: Any, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"either one set with these columns, or \d sets with these names"):
        names_of(train, value)


def test_the_error_says_how_to_say_which() -> None:
    both = {"a": FEW, "b": FEW}
    with pytest.raises(ConfigurationError) as raised:
        names_of((ROW,), both)
    assert 'name the set: eval_dataset={"test": {…}}' in str(raised.value)
    assert "{'a': TensorDataset(inputs, labels), …}" in str(raised.value)
    assert names_of((ROW,), {name: TensorDataset(rows) for name, rows in both.items()}) == [
        "eval_a_loss",
        "eval_b_loss",
    ]
    assert names_of((ROW,), {"test": {"inputs": FEW}}) == ["eval_test_loss"]
    model_trainer = Trainer(Coder(), arguments(), train_dataset=(ROW,))
    with pytest.raises(ConfigurationError, match=r"evaluate\(dataset\) is a dict of arrays, 'a' and 'b'"):
        model_trainer.evaluate(both)
