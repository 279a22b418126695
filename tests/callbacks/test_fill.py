"""The share of positions that are no padding, in the log."""

from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import LambdaCallback, Throughput
from trainer_lib.events import Run


def test_the_fill_of_batches_is_logged_since_the_last_log() -> None:
    throughput, run = Throughput(fill=True), Run()
    throughput.on_fit_begin(run)
    for row in ([1, 1, 0, 0], [1, 1, 1, 1]):
        run.batch = {"attention_mask": torch.tensor([row])}
        throughput.on_micro_batch_end(run)
    values: dict[str, float] = {}
    throughput.on_log(run, values)
    assert values["fill"] == 6 / 8
    values.clear()
    throughput.on_log(run, values)
    assert "fill" not in values


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return {"loss": (self.embedding(input_ids)[..., 0] * attention_mask).mean()}


def padded(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(sample["input_ids"]) for sample in samples], batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long()}


def test_batches_of_similar_length_are_fuller_and_the_log_says_so() -> None:
    data = [{"input_ids": [1 + row % 2] * (1 + 7 * row % 64)} for row in range(64)]
    fills: list[Any] = []
    for is_grouped in (True, False):
        args = TrainingArguments(
            group_by_length=is_grouped, per_device_train_batch_size=4, max_steps=16, log_every=16, use_cpu=True
        )
        noted = LambdaCallback(on_log=lambda run, values: fills.append(values.get("fill")))
        Trainer(Tokens(), args, train_dataset=data, collate_fn=padded, callbacks=[noted]).fit()
    assert len(fills) == 2
    # Four groups of 16 samples, each sorted: of 4 neighbours the shortest has nearly the length of the longest.
    assert fills[0] > 0.75
    assert fills[1] is None
