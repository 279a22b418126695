"""The number of workers that `num_workers="auto"` chooses."""

import time

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.trainer.tasks import arguments, points, trainer
from trainer_lib.trainer.data import worker_count
from trainer_lib.trainer.data.worker_count import measured_workers


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.002)
        return torch.tensor([index])


def test_slow_samples_get_workers_and_fast_ones_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_count.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert measured_workers(Slow(), 4, torch.stack).workers == 2  # one core stays for training
    monkeypatch.setattr(worker_count, "_HANDOVER", 10.0)
    assert measured_workers(Slow(), 4, torch.stack).workers == 0
    assert measured_workers(iter([1]), 4, list) == (0, "the dataset cannot be read by index")


def test_a_collate_fn_that_draws_leaves_the_generators() -> None:
    before = torch.get_rng_state()
    measured_workers(Slow(), 4, lambda samples: torch.rand(len(samples)))
    assert torch.equal(torch.get_rng_state(), before)


def test_options_of_workers_fall_away_where_none_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_count, "_HANDOVER", 10.0)
    given = arguments(max_steps=1, num_workers="auto", prefetch_factor=4, persistent_workers=True)
    assert trainer(given, train_dataset=points(16)).fit().state.step == 1


def test_the_banner_says_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(arguments(max_steps=1, num_workers="auto"), train_dataset=points(16)).fit()
    assert "by num_workers='auto': a batch takes" in capsys.readouterr().err
