"""Tests of `validation_split`: the same rows each time, which are not trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, Trainer, UnsupportedError

ROWS, TARGETS = points(40)


def rows_of(data: Any) -> set[int]:
    """Return which rows a dataset has."""
    found: set[int] = set()
    for index in range(len(data)):
        sample = data[index]
        row: Any = next(iter(sample.values())) if isinstance(sample, dict) else sample[0]
        found |= set(torch.nonzero((torch.as_tensor(row) == ROWS).all(1)).flatten().tolist())
    return found


def huggingface() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"rows": ROWS.tolist(), "labels": TARGETS.tolist()})


@pytest.mark.parametrize(
    "make",
    [
        lambda: (ROWS, TARGETS),
        lambda: {"rows": ROWS, "labels": TARGETS},
        lambda: TensorDataset(ROWS, TARGETS),
        lambda: list(zip(ROWS, TARGETS, strict=True)),
        huggingface,
    ],
    ids=["tuple", "columns", "dataset", "list", "hugging face"],
)
def test_rows_are_held_out_of_all_kinds_of_data(make: Any) -> None:
    runs = [trainer(arguments(validation_split=0.1, seed=seed), train_dataset=make()) for seed in (1, 2)]
    trained, held_out = rows_of(runs[0].train_dataset), rows_of(runs[0].eval_dataset)
    assert (len(trained), len(held_out)) == (36, 4)
    assert not trained & held_out
    assert rows_of(runs[1].eval_dataset) == held_out  # whatever the seed


def test_they_are_evaluated_and_not_trained_on() -> None:
    seen: list[Tensor] = []

    class Sees(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> Any:
            if model.training:
                seen.append(batch[0])
            return super().compute_loss(model, batch)

    one = Sees(
        network(),
        arguments(validation_split=0.25, num_train_epochs=1),
        train_dataset=(ROWS, TARGETS),
        loss_fn=torch.nn.functional.cross_entropy,
    )
    metrics = one.fit().metrics
    held_out = sorted(rows_of(one.eval_dataset))
    assert len(torch.cat(seen)) == 30
    assert not rows_of(list(zip(torch.cat(seen), strict=True))) & set(held_out)
    loss = torch.nn.functional.cross_entropy(network_like(one)(ROWS[held_out]), TARGETS[held_out])
    assert metrics["eval_loss"] == pytest.approx(loss.item(), rel=1e-6)


def network_like(one: Trainer) -> Any:
    return one.unwrapped_model.eval()


def test_processes_hold_out_the_same_and_a_resume_too(tmp_path: Path) -> None:
    def body() -> tuple[set[int], float]:
        options: dict[str, Any] = {"validation_split": 0.25, "output_dir": tmp_path, "max_steps": 4}
        trainer(arguments(**options)).fit()
        one = trainer(arguments(**{**options, "max_steps": 6, "seed": 5}, resume="extend"))
        return rows_of(one.eval_dataset), one.fit().metrics["eval_loss"]

    first, second = run_world(body)
    assert first == second
    assert len(first[0]) == 10


def test_another_share_is_refused_on_resume(tmp_path: Path) -> None:
    trainer(arguments(validation_split=0.25, output_dir=tmp_path, max_steps=2)).fit()
    (checkpoint,) = tmp_path.glob("*/checkpoints/checkpoint-00000002")
    with pytest.raises(ConfigurationError, match="with another validation_split"):
        trainer(arguments(validation_split=0.5, output_dir=tmp_path, max_steps=4)).fit(resume=checkpoint)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(ROWS, TARGETS, strict=True))


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (
            {"train_dataset": Stream()},
            UnsupportedError,
            "train_dataset is a Stream, which is iterable. Give eval_dataset",
        ),
        ({"train_dataset": DataLoader([1, 2])}, ConfigurationError, "train_dataset is a DataLoader. Give its dataset"),  # type: ignore[arg-type]
        ({"train_dataset": points(1)}, ConfigurationError, "needs two samples or more, and train_dataset has 1"),
        ({"eval_dataset": points(4)}, ConfigurationError, "and eval_dataset=… both say what is evaluated"),
    ],
)
def test_what_cannot_be_split(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        trainer(arguments(validation_split=0.5), **given)


def test_there_has_to_be_something_to_split() -> None:
    class Own(Trainer):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(ROWS, TARGETS), 8)

    with pytest.raises(ConfigurationError, match="holds out rows of train_dataset, and none is given"):
        Own(network(), arguments(validation_split=0.5), loss_fn=torch.nn.functional.cross_entropy).fit()


@pytest.mark.parametrize("share", [0, 1, 1.5, -0.1, "a tenth", True])
def test_shares_are_between_0_and_1(share: Any) -> None:
    with pytest.raises(ConfigurationError, match="validation_split must be a number between 0 and 1"):
        arguments(validation_split=share)


def test_weights_of_samples_do_not_go_with_it() -> None:
    with pytest.raises(ConfigurationError, match="sample_weights has a weight for each row"):
        arguments(validation_split=0.5, sample_weights=[1.0] * 40)
