"""Columns that the model does not take: an error, or dropped as Hugging Face's Trainer does."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.tasks import arguments
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.foundation.errors import ConfigurationError


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layer(features)
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def rows(with_text: bool = True) -> list[dict[str, Any]]:
    features = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    samples = [{"features": row, "labels": int(row.sum() > 0)} for row in features]
    return (
        [{**sample, "text": "x" * index, "id": object()} for index, sample in enumerate(samples)]
        if with_text
        else samples
    )


def of_transformers(**options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.TrainingArguments(
            output_dir="unused", max_steps=4, use_cpu=True, save_strategy="no", report_to=[], **options
        )


def losses(args: Any, data: Any) -> list[float]:
    own_arguments = args if isinstance(args, TrainingArguments) else TrainingArguments.from_transformers(args)
    quiet = dataclasses.replace(own_arguments, progress_bar=False, log_every=1, output_dir=None, save_every=None)
    trainer = Trainer(Classifier(), quiet, train_dataset=data)
    return [entry["loss"] for entry in trainer.fit().history if "loss" in entry]


def test_a_column_that_the_model_does_not_take_is_an_error_that_names_the_option() -> None:
    with pytest.raises(ConfigurationError, match=r"has 'text', 'id', which Classifier.forward .*unused_columns"):
        Trainer(Classifier(), arguments(max_steps=1), train_dataset=[{**row, "id": 0} for row in rows()]).fit()


@pytest.mark.parametrize("as_columns", [False, True])
def test_unused_columns_change_no_loss(as_columns: bool) -> None:
    def data(with_text: bool) -> Any:
        samples = rows(with_text)
        if not as_columns:
            return samples
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        return {**columns, "features": torch.stack(columns["features"])}

    without = losses(arguments(max_steps=4), data(False))
    assert losses(arguments(max_steps=4, remove_unused_columns=True), data(True)) == without
    assert len(without) == 4


def test_arguments_of_hugging_face_drop_unused_columns_by_default() -> None:
    assert losses(of_transformers(), rows()) == losses(of_transformers(), rows(with_text=False))
    trainer = Trainer(Classifier(), of_transformers(), train_dataset=rows())
    assert trainer.args.remove_unused_columns
    assert not TrainingArguments.from_transformers(of_transformers(remove_unused_columns=False)).remove_unused_columns


def test_evaluations_and_predictions_drop_unused_columns() -> None:
    args = arguments(remove_unused_columns=True)
    trainer, bare = (Trainer(Classifier(), args, eval_dataset=rows(with_text)) for with_text in (True, False))
    assert trainer.evaluate() == bare.evaluate()
    assert (trainer.predict(rows()).predictions == bare.predict(rows(with_text=False)).predictions).all()


def test_dropping_all_columns_is_an_error() -> None:
    trainer = Trainer(Classifier(), arguments(remove_unused_columns=True), train_dataset=[{"text": "a"}] * 8)
    with pytest.raises(
        ConfigurationError, match=r"drops all columns: the dataset has text, and the model takes features"
    ):
        trainer.fit()
