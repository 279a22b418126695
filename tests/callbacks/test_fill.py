"""The share of positions that are no padding, in the log."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.faults.trainings import Dies
from tests.worlds import run_world
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import LambdaCallback


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


def fills(folder: Path | None = None, *callbacks: Any, **options: Any) -> list[float]:
    """Return the fill in each log of a run over 48 samples of 1 to 8 tokens."""
    data = [{"input_ids": [1] * (1 + 3 * row % 8)} for row in range(48)]
    settings: dict[str, Any] = {
        "group_by_length": True, "global_batch_size": 8, "per_device_train_batch_size": 4, "max_steps": 6,
        "log_every": 3, "save_every": 2, "use_cpu": True, "progress_bar": False,
    }  # fmt: skip
    if folder is None:
        del settings["save_every"]
    args = TrainingArguments(output_dir=folder, **{**settings, **options})
    result = Trainer(Tokens(), args, train_dataset=data, collate_fn=padded, callbacks=[*callbacks]).fit()
    return [entry["fill"] for entry in result.history]


def test_the_fill_is_the_share_of_tokens_since_the_last_log_over_all_ranks() -> None:
    counts: list[tuple[int, int]] = []

    def count(run: Any) -> None:
        mask = run.batch["attention_mask"]
        counts.append((int(mask.sum()), mask.numel()))

    alone = fills(None, LambdaCallback(on_micro_batch_end=count))
    of_logs = [counts[:6], counts[6:]]
    assert alone == [sum(tokens for tokens, _ in log) / sum(size for _, size in log) for log in of_logs]
    for rank in run_world(fills):
        assert rank == pytest.approx(alone)


def test_a_resumed_run_logs_the_fill_of_all_batches_since_the_last_log(tmp_path: Path) -> None:
    expected = fills(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        fills(tmp_path / "parts", Dies(5), on_exception="raise")
    assert fills(tmp_path / "parts", resume="auto") == expected
