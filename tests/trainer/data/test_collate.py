"""Collating samples: as torch does, with padding, dataclasses and errors that name the field."""

import collections
import dataclasses
import datetime
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from transformers import BatchEncoding, DataCollatorWithPadding, PreTrainedTokenizerFast

from tests.data_loader.reference import assert_batches_equal
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.data.collate import PaddingCollate, collate
from trainer_lib.trainer.data.datasets import Columns
from trainer_lib.trainer.data.packing import PackedDataset


class Point(NamedTuple):
    """A sample with names."""

    x: float
    y: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample that is a dataclass."""

    image: torch.Tensor
    tokens: list[int]
    name: str

    def __post_init__(self) -> None:
        assert isinstance(self.name, str)


@pytest.mark.parametrize(
    "samples",
    [
        [torch.arange(3), torch.arange(3) + 1],
        [np.arange(3), np.arange(3) + 1],
        [np.float64(1.5), np.float64(2.5)],
        [np.int16(1), np.int16(2)],
        [1, 2],
        [True, False],
        ["a", "b"],
        [b"a", b"b"],
        [(torch.ones(2), 1), (torch.zeros(2), 2)],
        [[torch.ones(2), 1], [torch.zeros(2), 2]],
        [{"x": torch.ones(2), "y": 1}, {"x": torch.zeros(2), "y": 0}],
        [{"deep": {"x": (1, torch.ones(1))}}, {"deep": {"x": (2, torch.ones(1))}}],
        [collections.OrderedDict(x=1), collections.OrderedDict(x=2)],
    ],
)
def test_batches_are_those_of_torchs_default_collate(samples: list[Any]) -> None:
    assert_batches_equal(collate(samples), default_collate(samples))


def test_texts_become_a_list() -> None:
    assert_batches_equal(collate([(1, "a"), (2, "b")]), [torch.tensor([1, 2]), ["a", "b"]])


def test_floats_take_torchs_default_dtype() -> None:
    assert_batches_equal(collate([0.5, 1.5]), torch.tensor([0.5, 1.5]))
    assert_batches_equal(collate([Point(0.5, 1), Point(1.5, 2)]), Point(torch.tensor([0.5, 1.5]), torch.tensor([1, 2])))  # type: ignore[arg-type]


def test_lists_of_numbers_become_rows() -> None:
    assert_batches_equal(
        collate([{"ids": [1, 2, 3]}, {"ids": [4, 5, 6]}]), {"ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}
    )
    assert_batches_equal(collate([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]]))
    assert_batches_equal(collate([[[0.5], [1]], [[2], [3]]]), torch.tensor([[[0.5], [1.0]], [[2.0], [3.0]]]))
    assert_batches_equal(collate([{"boxes": []}, {"boxes": []}]), {"boxes": torch.zeros(2, 0)})


def test_lists_of_texts_may_differ_in_length() -> None:
    assert_batches_equal(collate([{"words": ["a", "b"]}, {"words": ["c"]}]), {"words": [["a", "b"], ["c"]]})


def test_dataclasses_stay_dataclasses() -> None:
    batch = collate([Sample(torch.ones(2), [1, 2], "a"), Sample(torch.zeros(2), [3, 4], "b")])
    assert type(batch) is Sample
    assert_batches_equal(batch.image, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert_batches_equal(batch.tokens, torch.tensor([[1, 2], [3, 4]]))
    assert batch.name == ["a", "b"]


def test_mappings_keep_their_attributes() -> None:
    first = BatchEncoding({"x": torch.ones(1)}, n_sequences=1)
    batch = collate([first, BatchEncoding({"x": torch.zeros(1)})])
    assert (type(batch), batch.n_sequences) == (BatchEncoding, 1)
    assert_batches_equal(batch["x"], torch.tensor([[1.0], [0.0]]))
    assert_batches_equal(first["x"], torch.ones(1))


def test_reading_columns_gives_the_same_batch_as_collating_samples() -> None:
    columns: dict[str, Any] = {
        "x": torch.arange(10.0).view(5, 2),
        "y": np.arange(5, dtype=np.int32),
        "half": np.ones((5, 1), np.float16),
        "text": np.array(list("abcde")),
        "ids": [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]],
    }
    for data in (columns, tuple(columns.values()), columns["x"], columns["y"]):
        by_sample = Columns(data)
        by_column = by_sample.with_batched_reads()
        assert_batches_equal(collate(by_column.__getitems__([3, 1])), collate(by_sample.__getitems__([3, 1])))
        assert len(by_column.__getitems__([3, 1])) == 2
        assert_batches_equal(by_column.__getitems__([3, 1])[1], by_sample[1])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [torch.ones(2), torch.ones(3)],
            r"The samples cannot be collated: the shapes differ \(\(2,\) and \(3,\)\)",
        ),
        ([{"ids": [1]}, {"ids": [1, 2]}], r"field 'ids' cannot .* the lengths differ \(1 and 2\)\. Pass collate_fn"),
        ([{"input_ids": [1]}, {"input_ids": [1, 2]}], r"lengths differ .* A tokenizer given as processing_class pads"),
        ([({"a": [[1]]}, 1), ({"a": [[1], [2]]}, 1)], r"field '0\.a' cannot .*lengths differ"),
        ([(1, 2), (1,)], r"The samples cannot .*lengths differ \(2 and 1\)"),
        ([{"a": 1}, {"a": None}], r"field 'a' cannot .*the types differ \(int and NoneType\)"),
        ([{"a": 1, "b": 1}, {"a": 1}], "not all samples have 'b'"),
        ([{"a": 1}, 3], "not all samples have 'a'"),
        ([{"a": None}], r"field 'a' cannot be collated: NoneType is not a tensor, array, number or text"),
        ([{"day": datetime.date(2020, 1, 1)}], r"field 'day' .*datetime\.date is not a tensor"),
        ([np.array(["a"])], "found <U1"),
        ([2**70], "Overflow"),
        ([[[1, "a"]]], "cannot be collated"),
        ([(torch.ones(1), 1), 3], "the types differ"),
        ([Sample(torch.ones(1), [1], "a"), Sample(torch.ones(1), [1, 2], "a")], "field 'tokens'"),
    ],
)
def test_errors_name_the_field_and_what_differs(samples: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        collate(samples)
    assert "collate_fn" in str(caught.value)


# -- with a tokenizer ------------------------------------------------------------------------------------------------


def _tokenizer(side: str = "right", pad: str | None = "[PAD]") -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"[PAD]": 0, "a": 1, "b": 2, "c": 3}, unk_token="c"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, padding_side=side)


def test_padding_equals_that_of_transformers() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "label": 0},
        {"input_ids": [1], "attention_mask": [1], "label": 1},
    ]
    for side in ("right", "left"):
        expected = DataCollatorWithPadding(_tokenizer(side))([dict(sample) for sample in samples])
        assert_batches_equal(
            collate_with(_tokenizer(side), samples),
            {name: expected[name] for name in ("input_ids", "attention_mask", "labels")},
        )


def collate_with(processing_class: Any, samples: list[Any]) -> Any:
    return PaddingCollate(processing_class)(samples)


def test_padding_keeps_all_fields() -> None:
    samples: list[Any] = [
        {"input_ids": [1, 2], "labels": [5, 6], "text": "a", "weight": 0.5, "image": torch.ones(2)},
        {"input_ids": [3], "labels": [7], "text": "b", "weight": 1.5, "image": torch.zeros(2)},
    ]
    batch = collate_with(_tokenizer("left"), samples)
    assert_batches_equal(
        batch,
        {
            "input_ids": torch.tensor([[1, 2], [0, 3]]),
            "labels": torch.tensor([[5, 6], [-100, 7]]),
            "text": ["a", "b"],
            "weight": torch.tensor([0.5, 1.5]),
            "image": torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
            "attention_mask": torch.tensor([[1, 1], [0, 1]]),
        },
    )
    tensors = [{name: torch.tensor(sample[name]) for name in ("input_ids", "labels")} for sample in samples]
    right = collate_with(_tokenizer(), tensors)
    assert_batches_equal(right["input_ids"], torch.tensor([[1, 2], [3, 0]]))
    assert_batches_equal(right["labels"], torch.tensor([[5, 6], [7, -100]]))


def test_multi_label_targets_stay_floats() -> None:
    samples = [{"input_ids": [1, 2], "labels": [0.0, 1.0]}, {"input_ids": [3], "labels": [1.0, 0.0]}]
    assert_batches_equal(collate_with(_tokenizer(), samples)["labels"], torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


def test_padded_labels_keep_their_fractions() -> None:
    samples: list[Any] = [{"input_ids": [1, 2], "labels": [0.25, 1.5]}, {"input_ids": [3], "labels": [0.75]}]
    batch = collate_with(_tokenizer(), samples)
    assert_batches_equal(batch["labels"], torch.tensor([[0.25, 1.5], [0.75, -100.0]]))
    samples = [{"input_ids": [1], "labels": []}, {"input_ids": [3], "labels": [7]}]  # [] alone would be floats
    assert_batches_equal(collate_with(_tokenizer(), samples)["labels"], torch.tensor([[-100], [7]]))


def test_two_fields_of_labels_keep_their_names() -> None:
    samples = [{"input_ids": [1, 2], "label": 1, "labels": 2}, {"input_ids": [3], "label": 3, "labels": 4}]
    batch = collate_with(_tokenizer(), samples)
    assert_batches_equal([batch["label"], batch["labels"]], [torch.tensor([1, 3]), torch.tensor([2, 4])])


def test_a_processor_pads_with_its_tokenizer() -> None:
    class Processor:
        tokenizer = _tokenizer()

    batch = collate_with(Processor(), [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    assert_batches_equal(batch["input_ids"], torch.tensor([[1, 2], [3, 0]]))


def test_samples_without_tokens_or_of_equal_length_are_not_padded() -> None:
    class Processor:
        """A processor without a tokenizer."""

    pixels = [{"pixels": torch.ones(2)}, {"pixels": torch.ones(2)}]
    assert_batches_equal(collate_with(_tokenizer(), pixels), collate(pixels))
    even = [{"input_ids": [1, 2], "label": 1}, {"input_ids": [3, 4], "label": 0}]
    expected = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([1, 0])}
    assert_batches_equal(collate_with(_tokenizer(pad=None), even), expected)
    assert_batches_equal(collate_with(Processor(), even), collate(even))


def test_a_batch_has_the_same_names_with_and_without_padding() -> None:
    even = [{"input_ids": [1, 2], "label": 1}, {"input_ids": [3, 4], "label": 0}]
    ragged = [{"input_ids": [1, 2], "label": 1}, {"input_ids": [3], "label": 0}]
    assert set(collate_with(_tokenizer(), even)) == set(collate_with(_tokenizer(), ragged))


def test_packed_rows_get_no_attention_mask() -> None:
    rows = PackedDataset([[1, 2, 3], [1, 2]], 5)
    assert_batches_equal(collate_with(_tokenizer(), [rows[0]]), collate([rows[0]]))


@pytest.mark.parametrize(
    ("options", "samples", "message"),
    [
        (
            {"pad": None},
            [{"input_ids": [1, 2]}, {"input_ids": [1]}],
            r"no padding token\. Set one: tokenizer\.pad_token",
        ),
        ({}, [{"input_ids": [1, 2], "spans": [1]}, {"input_ids": [1], "spans": [1, 2]}], "field 'spans' cannot"),
        ({}, [{"input_ids": [1, 2], "x": 1}, {"input_ids": [1]}], "not all samples have 'x'"),
    ],
)
def test_padding_errors_name_the_cause(options: dict[str, Any], samples: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        collate_with(_tokenizer(**options), samples)
