"""Batches in which rows are not samples, such as concatenated sequences, train like one big batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.trainer.fit.test_exact_updates import Gradients, arguments, train
from tests.worlds import run_world
from trainer_lib import ConfigurationError, Trainer
from trainer_lib.state.gradient_state import Rows
from trainer_lib.trainer.data.batch_rows import count_rows, real_rows, take_rows

Sequence = tuple[Tensor, Tensor]


def sequences(count: int) -> list[Sequence]:
    """Tokens and labels of different lengths, some of them a single token long."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    return [
        (torch.randint(11, (n,), generator=generator), torch.randint(5, (n,), generator=generator)) for n in lengths
    ]


def concatenate(samples: list[Sequence]) -> dict[str, Tensor]:
    """Concatenate samples: tensors of shape (tokens,)."""
    columns = zip(("tokens", "labels"), zip(*samples, strict=True), strict=True)
    return {name: torch.cat(tensors) for name, tensors in columns}


def concatenate_in_one_row(samples: list[Sequence]) -> dict[str, Tensor]:
    """Concatenate samples in one row: tensors of shape (1, tokens), and where each sample begins."""
    joined = concatenate(samples)
    starts = torch.tensor([0, *(len(tokens) for tokens, _ in samples)]).cumsum(0)
    return {**{name: tensor[None] for name, tensor in joined.items()}, "starts": starts}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 5)

    def forward(self, tokens: Tensor, labels: Tensor, starts: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(tokens))
        return {"loss": cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}


class Listed(Dataset[Sequence]):
    def __init__(self, count: int) -> None:
        self.samples = sequences(count)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sequence:
        return self.samples[index]


class Streamed(IterableDataset[Sequence]):
    def __init__(self, count: int) -> None:
        self.samples = sequences(count)

    def __iter__(self) -> Any:
        return iter(self.samples)


def one_big_batch(count: int, size: int) -> Gradients:
    model, expected, samples = Tagger(), Gradients(), sequences(count)
    for start in range(0, count, size):
        model.zero_grad()
        loss = model(**concatenate(samples[start : start + size]))["loss"]
        loss.backward()
        expected.steps.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        expected.losses.append(loss.item())
    return expected


@pytest.mark.parametrize("collate", [concatenate, pytest.param(concatenate_in_one_row, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Listed, Streamed])
@pytest.mark.parametrize(
    ("count", "processes"),
    [(22, 2), (17, 2), (26, 3), (13, 3), (1, 2)],
    ids=["half a batch short", "a rank without samples", "a rank short", "two ranks short", "one sample"],
)
def test_joined_samples_train_as_one_big_batch(collate: Any, kind: Any, count: int, processes: int) -> None:
    def body() -> Gradients:
        options = arguments(gradient_accumulation_steps=2, lr_scheduler="constant")
        return train(Trainer(Tagger(), options, train_dataset=kind(count), collate_fn=collate))

    expected = one_big_batch(count, 8 * processes)
    for actual in run_world(body, (), processes, timeout=60):
        assert actual.losses == pytest.approx(expected.losses, rel=1e-6)
        for gradients, others in zip(actual.steps, expected.steps, strict=True):
            for gradient, other in zip(gradients, others, strict=True):
                torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("workers", [0, 2])
def test_joined_samples_of_a_ready_loader_train_as_one_big_batch(workers: int) -> None:
    def body() -> Gradients:
        loader = DataLoader(Listed(19), batch_size=4, collate_fn=concatenate_in_one_row, num_workers=workers)
        return train(Trainer(Tagger(), arguments(), train_dataset=loader))

    expected = one_big_batch(19, 8)
    for actual in run_world(body, (), 2, timeout=60):
        assert actual.losses == pytest.approx(expected.losses, rel=1e-6)


def test_only_a_rank_without_samples_collates_repeats() -> None:
    """A rank without samples of its own collates two, which BatchNorm needs; other ranks repeat none."""

    def body() -> list[int]:
        sizes: list[int] = []

        def collate(samples: list[Sequence]) -> dict[str, Tensor]:
            sizes.append(len(samples))
            return concatenate(samples)

        train(Trainer(Tagger(), arguments(), train_dataset=Listed(11), collate_fn=collate))
        return sizes

    assert run_world(body, (), 3, timeout=60) == [[4], [4], [3]]
    assert run_world(lambda: [body()], (), 2, timeout=60) == [[[4, 3]], [[4, 2]]]


def test_evaluations_do_not_repeat_joined_samples() -> None:
    def body(shards: bool) -> float:
        trainer = Trainer(Tagger(), arguments(fsdp=shards), collate_fn=concatenate_in_one_row)
        return trainer.evaluate(Listed(21))["eval_loss"]

    expected = one_big_batch(21, 21).losses[0]
    assert body(False) == pytest.approx(expected, rel=1e-6)
    for shards in (False, True):
        assert run_world(body, (shards,), 2, timeout=60) == pytest.approx([expected] * 2, rel=1e-6)


def test_repeated_rows_are_removed_only_from_batches_with_one_row_per_sample() -> None:
    rows = Rows(total=4, real=3)
    assert real_rows({"x": torch.arange(4), "scale": torch.ones(1)}, rows)["x"].tolist() == [0, 1, 2]
    assert real_rows(torch.arange(4), Rows(total=4, real=0)).tolist() == [0, 1]
    with pytest.raises(
        ConfigurationError, match=r"1 of the 4 samples.*has 9 rows, so collate_fn does not return one row"
    ):
        real_rows(torch.arange(9), rows)
    with pytest.raises(ConfigurationError, match="has no rows"):
        real_rows(torch.tensor(1.0), rows)
    assert real_rows(torch.arange(9), Rows(total=4, real=0)).tolist() == list(range(9))  # its weight is 0


def test_lists_with_one_item_per_sample_are_cut_as_rows() -> None:
    boxes = [{"boxes": torch.ones(number, 4)} for number in (3, 1, 3)]
    images = [torch.full((3, 4, 4 + index), float(index)) for index in range(3)]  # as many channels as samples
    for batch in ((tuple(images), tuple(boxes)), {"images": images, "labels": boxes}):
        assert count_rows(batch) == 3
        cut_images, cut_boxes = list(
            take_rows(batch, 1, 3).values() if isinstance(batch, dict) else take_rows(batch, 1, 3)
        )
        assert [float(image.mean()) for image in cut_images] == [1, 2]
        assert [len(target["boxes"]) for target in cut_boxes] == [1, 3]
    masks = {
        "pixels": torch.ones(2, 3, 4, 4),
        "masks": [torch.ones(2, 4, 4), torch.ones(1, 4, 4)],
        "flat": torch.ones(1),
    }
    assert [len(value) for value in take_rows(masks, 1, 2).values()] == [1, 1, 1]
    assert take_rows(masks, 1, 2)["masks"][0].shape == (1, 4, 4)


def test_lists_of_columns_are_cut_by_column() -> None:
    columns: tuple[list[Tensor], Tensor] = [torch.ones(2, 3), torch.arange(2)], torch.arange(2)
    assert count_rows(columns) == 2
    (first, second), labels = take_rows(columns, 1, 2)
    assert (first.shape, second.tolist(), labels.tolist()) == ((1, 3), [1], [1])
    fields = {"inputs": torch.ones(4, 2)}, {"targets": torch.ones(4)}
    assert count_rows(fields) == 4
    assert take_rows(fields, 0, 1)[1]["targets"].tolist() == [1]
    assert count_rows(((torch.ones(4, 2), torch.ones(9)), torch.ones(4))) == 4  # the second is no column
