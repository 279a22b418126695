"""The search for a batch size: what fits, on one process and on two, with torch's own error of memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, PartialState, Trainer
from trainer_lib.callbacks import SAM, Freeze
from trainer_lib.foundation.errors import NoExecutableBatchSizeError


class Limited(nn.Module):
    """A network that runs out of memory at more rows than fit, and keeps how many it was given."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.layer, self.limit = nn.Linear(6, 2), limit
        self.given: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(len(x))
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.layer(x)


def limited(limit: int, samples: int = 200, **options: Any) -> tuple[Trainer, Limited]:
    model = Limited(limit)
    return trainer(arguments(**options), model=model, train_dataset=points(samples)), model


def test_batches_double_until_one_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    model_trainer, model = limited(40, per_device_train_batch_size=8)
    assert model_trainer.find_batch_size() == 32
    assert model.given[:7] == [8, 8, 16, 16, 32, 32, 64]
    assert model.given[7] == 32  # the rest of the update that did not fit
    assert capsys.readouterr().err == ""


def test_batches_are_halved_where_the_first_does_not_fit() -> None:
    model_trainer, model = limited(20, per_device_train_batch_size=96)
    assert model_trainer.find_batch_size() == 12
    assert model.given[:4] == [96, 48, 24, 12]
    with pytest.raises(NoExecutableBatchSizeError, match="a single sample did not fit"):
        limited(0)[0].find_batch_size()


def test_no_more_is_tried_than_there_is() -> None:
    assert limited(1000, samples=70)[0].find_batch_size() == 64
    assert limited(1000, samples=5)[0].find_batch_size() == 5
    assert limited(1000)[0].find_batch_size(largest=33) == 32
    model_trainer, model = limited(1000, samples=64, per_device_train_batch_size="auto")
    assert model_trainer.find_batch_size(updates=3) == 64
    assert model.given == [64] * 3


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 4}, {"global_batch_size": 64}])
def test_gradients_are_there_while_a_batch_is_computed_if_updates_have_several(options: dict[str, int]) -> None:
    model_trainer, model = limited(1000, per_device_train_batch_size=8, **options)
    assert model_trainer.find_batch_size(largest=16) == 16
    assert model.given == [8] * 4 + [16] * 4


@pytest.mark.slow
def test_processes_agree_on_what_fits_all() -> None:
    def find() -> Any:
        rank = PartialState(cpu=True).process_index
        grown, model = limited(20 if rank else 1000, per_device_train_batch_size=4)
        size = grown.find_batch_size()
        grown.accelerator.free_memory()
        shrunk, _ = limited(1000 if rank else 3, per_device_train_batch_size=16)
        halved = shrunk.find_batch_size()
        shrunk.accelerator.free_memory()
        scarce, _ = limited(1000, samples=70)  # 35 for each
        return size, halved, scarce.find_batch_size(), model.given[:6]

    first, second = run_world(find, (), 2, timeout=60)
    assert first[:3] == second[:3] == (16, 2, 32)
    assert first[3] == [4, 4, 8, 8, 16, 16]


def test_what_spares_memory_for_a_while_takes_no_part() -> None:
    model_trainer = trainer(callbacks=[Freeze("0.*", until="1 epoch")])
    seen: list[bool] = []
    model_trainer.model[0].weight.register_hook(lambda gradient: seen.append(True))  # type: ignore[index]
    model_trainer.find_batch_size(largest=8)
    assert seen == [True, True]


def test_what_cannot_be_tried_is_refused() -> None:
    class Stepping(Trainer):
        def training_step(self, model: Any, batch: Any) -> None: ...

    for model_trainer, options, message in (
        (trainer(), {"largest": 0}, "largest must be a whole number of at least 1"),
        (trainer(), {"updates": 1}, "updates must be a whole number of at least 2"),
        (trainer(train_dataset=DataLoader(points()[0])), {}, "a DataLoader has its batch size already"),  # type: ignore[arg-type]
        (
            Stepping(nn.Linear(6, 2), arguments(), train_dataset=points()),
            {},
            "training_step would run once for each part",
        ),
        (trainer(callbacks=[SAM()]), {}, "SAM does not support split batches"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            model_trainer.find_batch_size(**options)
