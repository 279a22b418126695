"""The Trainer reads shuffled data in the order of Hugging Face's own Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.trainer import hugging_face
from trainer_lib import Trainer, TrainingArguments

SIZE, EPOCHS = 22, 3


class Reporting(torch.nn.Module):
    """A model that writes down the samples that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def forward(self, number: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.seen.append(number.tolist())
        return {"loss": (self.weight * number).mean()}


def _rows() -> list[dict[str, Any]]:
    return [{"number": torch.tensor(float(index)), "labels": torch.tensor(0)} for index in range(SIZE)]


def _theirs(folder: Path, **options: Any) -> list[list[int]]:
    model = Reporting()
    arguments = hugging_face.their_arguments(
        folder, num_train_epochs=EPOCHS, train_sampling_strategy="random", gradient_accumulation_steps=1, **options
    )
    transformers.Trainer(model, arguments, train_dataset=_rows()).train()  # type: ignore[arg-type]
    return model.seen


def _ours(folder: Path, epochs: int = EPOCHS, callbacks: Any = (), **options: Any) -> list[list[int]]:
    model = Reporting()
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=4, use_cpu=True,
        optimizer="sgd", progress_bar=False, report_to=[], **options,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=_rows(), callbacks=list(callbacks)).fit()
    return model.seen


@pytest.mark.parametrize("options", [{}, {"seed": 7}, {"seed": 7, "data_seed": 11}])
def test_shuffled_data_comes_in_hugging_faces_order(tmp_path: Path, options: dict[str, Any]) -> None:
    assert _ours(tmp_path / "ours", **options) == _theirs(tmp_path / "theirs", **options)


def test_a_computed_order_is_another_one(tmp_path: Path) -> None:
    ours, theirs = _ours(tmp_path / "ours", low_memory_shuffle=True), _theirs(tmp_path / "theirs")
    assert ours != theirs
    assert [sorted(number for batch in epoch for number in batch) for epoch in (ours[:6], theirs[:6])] == [
        list(range(SIZE))
    ] * 2
