"""`validation_split`: the same held-out rows each time, which are not trained on."""

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
    """Return the indices of a dataset's rows."""
    indices: set[int] = set()
    for index in range(len(data)):
        sample = data[index]
        row: Any = next(iter(sample.values())) if isinstance(sample, dict) else sample[0]
        indices |= set(torch.nonzero((torch.as_tensor(row) == ROWS).all(1)).flatten().tolist())
    return indices


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
    assert rows_of(runs[1].eval_dataset) == held_out  # for every seed


def test_held_out_rows_are_evaluated_and_not_trained_on() -> None:
    seen: list[Tensor] = []

    class RecordingTrainer(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> Any:
            if model.training:
                seen.append(batch[0])
            return super().compute_loss(model, batch)

    split_trainer = RecordingTrainer(
        network(),
        arguments(validation_split=0.25, num_train_epochs=1),
        train_dataset=(ROWS, TARGETS),
        loss_fn=torch.nn.functional.cross_entropy,
    )
    metrics = split_trainer.fit().metrics
    held_out = sorted(rows_of(split_trainer.eval_dataset))
    assert len(torch.cat(seen)) == 30
    assert not rows_of(list(zip(torch.cat(seen), strict=True))) & set(held_out)
    loss = torch.nn.functional.cross_entropy(network_like(split_trainer)(ROWS[held_out]), TARGETS[held_out])
    assert metrics["eval_loss"] == pytest.approx(loss.item(), rel=1e-6)


def network_like(split_trainer: Trainer) -> Any:
    return split_trainer.unwrapped_model.eval()


def test_all_ranks_and_a_resumed_run_hold_out_the_same_rows(tmp_path: Path) -> None:
    def body() -> tuple[set[int], float]:
        options: dict[str, Any] = {"validation_split": 0.25, "output_dir": tmp_path, "max_steps": 4}
        trainer(arguments(**options)).fit()
        split_trainer = trainer(arguments(**{**options, "max_steps": 6, "seed": 5}, resume="extend"))
        return rows_of(split_trainer.eval_dataset), split_trainer.fit().metrics["eval_loss"]

    first, second = run_world(body)
    assert first == second
    assert len(first[0]) == 10


def test_another_share_is_refused_on_resume(tmp_path: Path) -> None:
    trainer(arguments(validation_split=0.25, output_dir=tmp_path, max_steps=2)).fit()
    (checkpoint,) = tmp_path.glob("*/checkpoints/checkpoint-00000002")
    with pytest.raises(ConfigurationError, match="cannot be resumed with a changed validation_split"):
        trainer(arguments(validation_split=0.5, output_dir=tmp_path, max_steps=4)).fit(resume=checkpoint)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(ROWS, TARGETS, strict=True))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"train_dataset": Stream()},
            UnsupportedError,
            "train_dataset is a Stream, which is iterable. Give eval_dataset",
        ),
        ({"train_dataset": DataLoader([1, 2])}, ConfigurationError, "train_dataset is a DataLoader. Give its dataset"),  # type: ignore[arg-type]
        ({"train_dataset": points(1)}, ConfigurationError, "needs at least two samples, and train_dataset has 1"),
        ({"eval_dataset": points(4)}, ConfigurationError, "and eval_dataset=… both set the evaluation data"),
    ],
)
def test_unsplittable_data_is_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        trainer(arguments(validation_split=0.5), **options)


def test_a_split_needs_a_train_dataset() -> None:
    class DerivedTrainer(Trainer):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(ROWS, TARGETS), 8)

    with pytest.raises(ConfigurationError, match="holds out rows of train_dataset, but no train_dataset is given"):
        DerivedTrainer(network(), arguments(validation_split=0.5), loss_fn=torch.nn.functional.cross_entropy).fit()


@pytest.mark.parametrize("share", [0, 1, 1.5, -0.1, "a tenth", True])
def test_shares_are_between_0_and_1(share: Any) -> None:
    with pytest.raises(ConfigurationError, match="validation_split must be a number between 0 and 1"):
        arguments(validation_split=share)


def test_sample_weights_cannot_be_split() -> None:
    with pytest.raises(ConfigurationError, match="sample_weights has a weight for each row"):
        arguments(validation_split=0.5, sample_weights=[1.0] * 40)
