"""A look at the batches of training: what they hold, as the model gets them, without calling it."""

import base64
import re
import struct
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, PartialState, Trainer
from trainer_lib.callbacks import AccumulationSchedule, Mixup, SequenceLengthWarmup
from trainer_lib.events import Modifier, Run
from trainer_lib.trainer.tools.preview import Part


class Silent(nn.Module):
    """A model that must not be called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, **batch: Any) -> Tensor:
        raise AssertionError("the model is not called")


class Letters:
    """A processor that can decode."""

    def decode(self, tokens: Tensor) -> str:
        return "".join(chr(97 + token) for token in tokens.tolist())


def sentences() -> list[dict[str, Any]]:
    tokens = torch.tensor([[7, 4, 11, 11, 14], [22, 14, 17, 11, 3], [0, 1, 2, 3, 4]])
    labels = tokens.masked_fill(tokens == 11, -100)
    return [
        {"input_ids": token, "labels": two, "text": f"row {n}"}
        for n, (token, two) in enumerate(zip(tokens, labels, strict=True))
    ]


def test_batches_are_those_that_are_trained_on() -> None:
    inputs, sides = points()
    inputs[3, 2] = float("nan")
    model_trainer = trainer(arguments(shuffle=False), model=Silent(), train_dataset=(inputs, sides))
    seen = model_trainer.preview()
    first = seen.batches[0]
    clean = inputs[:8].nan_to_num()
    low, high = clean.min().item(), clean.max().item()
    assert first.parts == [
        Part(name="[0]", kind="float32", shape=(8, 6), device="cpu", low=low, high=high, not_finite=1),
        Part(name="[1]", kind="int64", shape=(8,), device="cpu", low=0.0, high=1.0),
    ]
    assert [batch.rows for batch in seen.batches] == [8, 8]
    for batch, labels in zip(seen.batches, sides.split(8), strict=False):
        assert batch.labels == {side: int((labels == side).sum()) for side in (0, 1)}
    text = repr(seen).splitlines()
    assert text[0] == "batch 1: 8 rows"
    assert text[1] == f"  [0]           float32  [8, 6]  on cpu  {low:.4g} … {high:.4g}  1 NOT FINITE"
    assert text[3] == f"  label counts  {first.labels[0]} × 0, {first.labels[1]} × 1"
    assert len(model_trainer.preview(batches=100).batches) == 5  # those of a pass


def test_shuffled_batches_are_those_of_the_run_and_callbacks_have_changed_them() -> None:
    class Keeps(Modifier):
        order = 10
        batches: list[Tensor] = []  # noqa: RUF012

        def on_micro_batch_begin(self, run: Run) -> None:
            Keeps.batches.append(run.batch[0])

    model_trainer = trainer(
        arguments(max_steps=4, gradient_accumulation_steps=2), callbacks=[Mixup(0.4, num_classes=2), Keeps()]
    )
    seen = model_trainer.preview(3)
    previewed, Keeps.batches = Keeps.batches, []
    assert [part.kind for part in seen.batches[0].parts] == ["float32", "float32"]  # classes are shares by now
    assert seen.batches[0].labels == {}
    assert repr(seen).startswith("batches changed by Mixup, Keeps\nbatch 1: 8 rows\n")
    model_trainer.fit()
    assert len(previewed) == 3
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(previewed, Keeps.batches, strict=False))


def test_tokens_are_shown_as_text_and_schedules_by_step_apply() -> None:
    model_trainer = trainer(
        arguments(shuffle=False, per_device_train_batch_size=1),
        model=Silent(),
        loss_fn=None,
        train_dataset=sentences(),
        processing_class=Letters(),
        collate_fn=torch.utils.data.default_collate,
        callbacks=[SequenceLengthWarmup(2, 5, until="3 steps", multiple_of=1), AccumulationSchedule({0: 1})],
    )
    first, second, third = model_trainer.preview(3).batches
    assert first.texts == {"input_ids": ["he"], "labels": ["he"]}
    assert second.texts == {"input_ids": ["wor"], "labels": ["wor"]}
    assert third.texts == {"input_ids": ["abcd"], "labels": ["abcd"]}
    whole = trainer(
        model=Silent(),
        args=arguments(shuffle=False),
        loss_fn=None,
        train_dataset=sentences(),
        processing_class=Letters(),
        collate_fn=torch.utils.data.default_collate,
    ).preview()
    assert whole.batches[0].texts == {"input_ids": ["hello", "world"], "labels": ["heo", "word"]}
    assert "  input_ids as text  'hello'" in repr(whole)
    assert "text               list of str  [3]" in repr(whole)


def test_a_notebook_shows_images() -> None:
    images = torch.rand(6, 1, 5, 7, generator=torch.Generator().manual_seed(0)) * 4 - 2
    args = arguments(per_device_train_batch_size=6, shuffle=False)
    model_trainer = trainer(
        args, model=nn.Sequential(nn.Flatten(), nn.Linear(35, 2)), train_dataset=(images, torch.arange(6) % 2)
    )
    seen = model_trainer.preview(1)
    page = seen._repr_html_()
    assert "<caption>batch 1: 6 rows</caption>" in page
    assert "float32  [6, 1, 5, 7]  on cpu" in page
    pictures = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)", page)]
    assert [struct.unpack(">II", picture[16:24]) for picture in pictures] == [(7, 5)] * 4  # width and height in a PNG
    expected = (images[0, 0] - images[:4].amin()) / (images[:4].amax() - images[:4].amin())
    torch.testing.assert_close(torch.from_numpy(seen.batches[0].images[0][..., 0]), expected)
    assert "images" not in repr(seen)


def test_each_process_sees_its_own() -> None:
    def see() -> Any:
        rank = PartialState(cpu=True).process_index
        args = arguments(shuffle=False, per_device_train_batch_size=4)
        seen = trainer(
            args, train_dataset=TensorDataset(torch.arange(20.0)[:, None].expand(20, 6), points(20)[1])
        ).preview(3)
        return rank, [(batch.rows, batch.parts[0].low, batch.parts[0].high) for batch in seen.batches]

    first, second = run_world(see, (), 2, timeout=60)
    assert first == (0, [(4, 0.0, 3.0), (4, 8.0, 11.0), (4, 16.0, 19.0)])
    assert second == (1, [(4, 4.0, 7.0), (4, 12.0, 15.0)])  # of the third it has none


def test_a_number_of_batches_is_one_or_more() -> None:
    with pytest.raises(ConfigurationError, match="batches must be a whole number of at least 1"):
        Trainer(nn.Linear(6, 2), arguments(), train_dataset=points()).preview(0)
