"""Tests of the class attributes by which the trainer asks callbacks what they are."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from trainer_lib import Callback, Trainer, TrainingArguments
from trainer_lib.foundation.errors import ConfigurationError

DATA = (torch.ones(8, 2), torch.zeros(8, 2))


class Saver(Callback):
    saves_checkpoints: ClassVar[bool] = True


class Judge(Callback):
    needs_evaluation: ClassVar[bool] = True

    @property
    def monitored_metric(self) -> str:
        return "eval_los"


class Unsplittable(Callback):
    supports_batch_splitting: ClassVar[bool] = False


class HistoryWriter(Callback):
    writes_history: ClassVar[bool] = True


def trainer(callback: Callback, output_dir: str | None = None, **options: object) -> Trainer:
    args = TrainingArguments(max_steps=1, output_dir=output_dir, save_every=None)
    return Trainer(
        nn.Linear(2, 2),
        args,
        train_dataset=DATA,
        loss_fn=nn.functional.mse_loss,
        callbacks=[callback],
        **options,  # type: ignore[arg-type]
    )


def test_a_user_callback_that_saves_checkpoints_needs_an_output_dir() -> None:
    with pytest.raises(ConfigurationError, match="Saver saves checkpoints and needs a folder"):
        trainer(Saver()).fit()


def test_a_user_callback_that_needs_evaluation_is_refused_without_data() -> None:
    with pytest.raises(ConfigurationError, match="Judge needs evaluations"):
        trainer(Judge()).fit()


def test_the_metric_of_a_user_callback_is_checked_before_training() -> None:
    with pytest.raises(ConfigurationError, match=r"Judge\(metric='eval_los'\).*Did you mean 'eval_loss'"):
        trainer(Judge(), eval_dataset=DATA).fit()


def test_the_batch_size_finder_refuses_a_user_callback_that_does_not_support_split_batches() -> None:
    with pytest.raises(ConfigurationError, match="Unsplittable does not support split batches"):
        trainer(Unsplittable()).find_batch_size()


@pytest.mark.parametrize(("callback", "is_written"), [(HistoryWriter(), False), (Callback(), True)])
def test_a_user_callback_that_writes_the_history_replaces_the_default_writer(
    tmp_path: Path, callback: Callback, is_written: bool
) -> None:
    trainer(callback, output_dir=str(tmp_path)).fit()
    assert bool(list(tmp_path.rglob("history.jsonl"))) is is_written
