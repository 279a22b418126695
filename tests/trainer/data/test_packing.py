"""Packing: every token once, hardly any padding, and the same outputs as for single samples."""

from collections import Counter
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_lib import LossResult, Trainer, TrainingArguments
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.data.packing import PackedDataset, pack

LENGTHS = np.random.default_rng(1).integers(0, 70, 300).tolist()


def _samples() -> list[dict[str, list[int]]]:
    counter = iter(range(1, 10**6))
    return [{"input_ids": [next(counter) for _ in range(length)]} for length in LENGTHS]


@pytest.mark.parametrize("length", [16, 32, 64, 100])
def test_every_token_appears_once(length: int) -> None:
    dataset = PackedDataset(_samples(), length)
    seen = Counter(token for row in dataset for token in row["input_ids"].tolist() if token)
    assert seen == Counter(range(1, sum(LENGTHS) + 1))
    assert dataset.tokens == sum(LENGTHS)


@pytest.mark.parametrize("length", [16, 32, 64, 100])
def test_there_is_hardly_any_padding(length: int) -> None:
    dataset = PackedDataset(_samples(), length)
    assert dataset.fill > 0.97
    assert dataset.fill == sum(LENGTHS) / (len(dataset) * length)


@pytest.mark.parametrize(
    ("lengths", "length", "rows"),
    [
        ([3, 3, 3, 3], 6, 2),
        ([4, 3, 3, 2], 6, 2),
        ([5, 4, 2, 1], 6, 2),
        ([6, 6], 6, 2),
        ([7], 6, 2),
        ([13], 6, 3),
        ([0, 1, 0], 6, 1),
        ([2] * 7, 6, 3),
    ],
)
def test_rows_are_as_few_as_possible(lengths: list[int], length: int, rows: int) -> None:
    pieces, starts = pack(lengths, length)
    assert len(starts) == rows + 1
    sizes = pieces[:, 2] - pieces[:, 1]
    assert all(sizes[first:last].sum() <= length for first, last in pairwise(starts))
    assert Counter(np.repeat(pieces[:, 0], sizes).tolist()) == Counter(np.repeat(range(len(lengths)), lengths).tolist())


def test_the_contents_of_a_row() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 30]},
        {"input_ids": torch.tensor([4, 5]), "labels": torch.tensor([40, 50])},
    ]
    (row,) = PackedDataset(samples, 8, pad_token_id=9, segment_ids=True)
    assert {name: value.tolist() for name, value in row.items()} == {
        "input_ids": [1, 2, 3, 4, 5, 9, 9, 9],
        "labels": [-100, -100, 30, -100, 50, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
        "segment_ids": [1, 1, 1, 2, 2, 0, 0, 0],
    }


def test_a_long_sample_is_split_into_pieces() -> None:
    dataset = PackedDataset([[1, 2, 3, 4, 5, 6, 7], [8]], 3)
    assert [dataset.pieces(index) for index in range(len(dataset))] == [
        [(0, 0, 3)],
        [(0, 3, 6)],
        [(0, 6, 7), (1, 0, 1)],
    ]
    assert [row["labels"].tolist() for row in dataset] == [[-100, 2, 3], [-100, 5, 6], [-100, -100, -100]]
    assert "segment_ids" not in dataset[0]
    assert dataset[-1]["input_ids"].tolist() == dataset[2]["input_ids"].tolist() == [7, 8, 0]
    with pytest.raises(IndexError):
        dataset[3]


def test_hugging_face_datasets_are_packed_alike() -> None:
    table = datasets.Dataset.from_list(_samples())
    rows, expected = PackedDataset(table, 64), PackedDataset(_samples(), 64)
    assert len(rows) == len(expected)
    assert all(torch.equal(rows[index]["input_ids"], expected[index]["input_ids"]) for index in range(len(rows)))


def test_the_logits_of_a_row_are_those_of_its_samples() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    model = LlamaForCausalLM(config).eval()
    samples = [torch.randint(1, 50, (length,)).tolist() for length in (5, 9, 2, 7, 12, 3)]
    dataset = PackedDataset(samples, 16)
    assert len(dataset) < len(samples)
    total = torch.zeros(())
    for batch in DataLoader(dataset, batch_size=3):
        with torch.no_grad():
            logits = model(**batch).logits
        for offset, row in enumerate(logits):
            index = int(total.item()) + offset
            end = 0
            for sample, start, stop in dataset.pieces(index):
                with torch.no_grad():
                    alone = model(torch.tensor([samples[sample][start:stop]])).logits[0]
                torch.testing.assert_close(row[end : end + stop - start], alone, rtol=1e-4, atol=1e-5)
                end += stop - start
        total += len(logits)


@pytest.mark.parametrize("has_loss_fn", [False, True])
def test_a_trainer_separates_the_samples_of_a_row(has_loss_fn: bool) -> None:
    """A model of transformers does not while it fills its cache, as it does unless it is told otherwise."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    samples = [torch.randint(1, 50, (length,)).tolist() for length in (5, 9, 2, 7, 12, 3)]
    with torch.no_grad():
        losses = [model(torch.tensor([each]), labels=torch.tensor([each])).loss * (len(each) - 1) for each in samples]
    expected = float(sum(losses)) / sum(len(each) - 1 for each in samples)

    packed = PackedDataset(samples, 16)
    args = TrainingArguments(
        max_steps=1, learning_rate=1e-12, per_device_train_batch_size=len(packed), progress_bar=False, use_cpu=True
    )
    trainer = Trainer(
        model, args, train_dataset=packed, eval_dataset=packed, loss_fn=shifted_loss if has_loss_fn else None
    )
    metrics = trainer.fit().metrics
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)


def shifted_loss(outputs: Any, labels: Tensor) -> LossResult:
    """Return the sum over the targets, and their number."""
    targets = labels[:, 1:].flatten()
    loss = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets, reduction="sum")
    return LossResult(loss, weight=(targets != -100).sum())


def test_rows_have_as_many_targets_as_the_samples() -> None:
    torch.manual_seed(0)
    samples = [torch.randint(1, 50, (length,)).tolist() for length in (5, 9, 2, 7, 12, 3)]
    valid = sum(int((row["labels"][1:] != -100).sum()) for row in PackedDataset(samples, 16))
    assert valid == sum(len(sample) - 1 for sample in samples)


@pytest.mark.parametrize(
    ("samples", "length", "message"),
    [
        ([], 4, "has no samples"),
        (iter([[1]]), 4, "or no length"),
        ([[], []], 4, "all samples are empty"),
        ([[1]], 1, "length must be"),
        ([{"text": "a"}], 4, "Sample 0 has no field 'input_ids' to pack, only text. Tokenize"),
        (
            [[1], {"input_ids": [1, 2], "labels": [1]}],
            4,
            r"Sample 1 cannot be packed: .* \(2,\) and its labels \(1,\)",
        ),
        ([[[1], [2]]], 4, r"Sample 0 cannot be packed: its tokens have shape \(2, 1\)"),
    ],
)
def test_unpackable_data_is_refused(samples: Any, length: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PackedDataset(samples, length)
