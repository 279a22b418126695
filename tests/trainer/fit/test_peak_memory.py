"""A Trainer takes the memory of the loop written by hand, counted at each operation, in training and evaluation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.memory_levers import LiveBytes
from tests.trainer.tasks import arguments
from trainer_lib import Trainer

CLASSES, ROWS, BATCH = 4096, 16, 4
RATE = 1e-3


class Scores(nn.Module):
    """Has outputs that are large beside all else, as those of a language model with a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.last(torch.tanh(self.first(inputs)))
        return {"loss": cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


class OwnLoss(Trainer):
    """Computes the loss itself."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        outputs = model(**batch)
        return outputs["loss"], outputs


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 64, 8, generator=generator)
    labels = torch.randint(CLASSES, (ROWS, 64), generator=generator)
    return [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]


def by_hand(precision: str, accumulation: int) -> tuple[int, int]:
    """Return the peak of training and of evaluating."""
    model = Scores()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    with LiveBytes() as live:
        for parameter in model.parameters():
            live.add(parameter)
        for number, batch in enumerate(DataLoader(data(), BATCH), 1):  # pyright: ignore[reportArgumentType]
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(**batch)["loss"]
            (loss / accumulation).backward()
            if number % accumulation == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        trained, live.peak = live.peak, live.live
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            for batch in DataLoader(data(), BATCH):  # pyright: ignore[reportArgumentType]
                loss = model(**batch)["loss"]
    return trained, live.peak


def by_trainer(kind: type[Trainer], precision: str, accumulation: int) -> tuple[int, int]:
    args = arguments(
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=accumulation,
        mixed_precision=precision,
        learning_rate=RATE,
        shuffle=False,
        log_every="never",
    )
    model = Scores()
    trainer = kind(model, args, train_dataset=data())
    with LiveBytes() as live:
        for parameter in model.parameters():
            live.add(parameter)
        trainer.fit()
        trained, live.peak = live.peak, live.live
        trainer.evaluate(data())
    return trained, live.peak


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_trainer_takes_the_memory_of_a_loop_by_hand(precision: str, accumulation: int) -> None:
    trained, evaluated = by_trainer(Trainer, precision, accumulation)
    trained_by_hand, evaluated_by_hand = by_hand(precision, accumulation)
    assert trained <= 1.005 * trained_by_hand
    assert evaluated <= 1.005 * evaluated_by_hand


def test_a_loss_of_ones_own_takes_no_more() -> None:
    trained, _ = by_trainer(OwnLoss, "no", 1)
    assert trained <= 1.005 * by_hand("no", 1)[0]
