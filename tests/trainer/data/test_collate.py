"""Batches of samples: as torch makes them, with what it lacks, and errors that name the field."""

import collections
import dataclasses
import datetime
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from transformers import BatchEncoding, DataCollatorWithPadding, PreTrainedTokenizerFast

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


def _equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            _equal(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            _equal(left, right)
    else:
        assert one == other


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
def test_as_torch(samples: list[Any]) -> None:
    _equal(collate(samples), default_collate(samples))


def test_texts_are_a_list() -> None:
    _equal(collate([(1, "a"), (2, "b")]), [torch.tensor([1, 2]), ["a", "b"]])


def test_floats_are_of_the_type_that_models_have() -> None:
    _equal(collate([0.5, 1.5]), torch.tensor([0.5, 1.5]))
    _equal(collate([Point(0.5, 1), Point(1.5, 2)]), Point(torch.tensor([0.5, 1.5]), torch.tensor([1, 2])))  # type: ignore[arg-type]


def test_lists_of_numbers_are_rows() -> None:
    _equal(collate([{"ids": [1, 2, 3]}, {"ids": [4, 5, 6]}]), {"ids": torch.tensor([[1, 2, 3], [4, 5, 6]])})
    _equal(collate([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]]))
    _equal(collate([[[0.5], [1]], [[2], [3]]]), torch.tensor([[[0.5], [1.0]], [[2.0], [3.0]]]))
    _equal(collate([{"boxes": []}, {"boxes": []}]), {"boxes": torch.zeros(2, 0)})


def test_texts_stay_lists_whatever_their_number() -> None:
    _equal(collate([{"words": ["a", "b"]}, {"words": ["c"]}]), {"words": [["a", "b"], ["c"]]})


def test_dataclasses_stay_dataclasses() -> None:
    batch = collate([Sample(torch.ones(2), [1, 2], "a"), Sample(torch.zeros(2), [3, 4], "b")])
    assert type(batch) is Sample
    _equal(batch.image, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    _equal(batch.tokens, torch.tensor([[1, 2], [3, 4]]))
    assert batch.name == ["a", "b"]


def test_mappings_keep_what_else_they_have() -> None:
    first = BatchEncoding({"x": torch.ones(1)}, n_sequences=1)
    batch = collate([first, BatchEncoding({"x": torch.zeros(1)})])
    assert (type(batch), batch.n_sequences) == (BatchEncoding, 1)
    _equal(batch["x"], torch.tensor([[1.0], [0.0]]))
    _equal(first["x"], torch.ones(1))


def test_columns_give_the_batch_that_collating_their_samples_gives() -> None:
    columns: dict[str, Any] = {
        "x": torch.arange(10.0).view(5, 2),
        "y": np.arange(5, dtype=np.int32),
        "half": np.ones((5, 1), np.float16),
        "text": np.array(list("abcde")),
        "ids": [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]],
    }
    for given in (columns, tuple(columns.values()), columns["x"], columns["y"]):
        one_by_one = Columns(given)
        at_once = one_by_one.gathering()
        _equal(collate(at_once.__getitems__([3, 1])), collate(one_by_one.__getitems__([3, 1])))
        assert len(at_once.__getitems__([3, 1])) == 2
        _equal(at_once.__getitems__([3, 1])[1], one_by_one[1])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [torch.ones(2), torch.ones(3)],
            r"The samples cannot be put into a batch: the shapes differ \(\(2,\) and \(3,\)\)",
        ),
        ([{"ids": [1]}, {"ids": [1, 2]}], r"field 'ids' cannot .* the lengths differ \(1 and 2\)\. Pass collate_fn"),
        ([({"a": [[1]]}, 1), ({"a": [[1], [2]]}, 1)], r"field '0\.a' cannot .*lengths differ"),
        ([(1, 2), (1,)], r"The samples cannot .*lengths differ \(2 and 1\)"),
        ([{"a": 1}, {"a": None}], r"field 'a' cannot .*several types \(int and NoneType\)"),
        ([{"a": 1, "b": 1}, {"a": 1}], "not all samples have 'b'"),
        ([{"a": 1}, 3], "not all samples have 'a'"),
        ([{"a": None}], r"field 'a' cannot be put into a batch: NoneType is no tensor, array, number or text"),
        ([{"day": datetime.date(2020, 1, 1)}], r"field 'day' .*datetime\.date is no tensor"),
        ([np.array(["a"])], "found <U1"),
        ([2**70], "Overflow"),
        ([[[1, "a"]]], "cannot be put into a batch"),
        ([(torch.ones(1), 1), 3], "several types"),
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


def test_samples_are_padded_as_transformers_does() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "label": 0},
        {"input_ids": [1], "attention_mask": [1], "label": 1},
    ]
    for side in ("right", "left"):
        wanted = DataCollatorWithPadding(_tokenizer(side))([dict(sample) for sample in samples])
        _equal(
            collate_with(_tokenizer(side), samples),
            {name: wanted[name] for name in ("input_ids", "attention_mask", "labels")},
        )


def collate_with(processing_class: Any, samples: list[Any]) -> Any:
    return PaddingCollate(processing_class)(samples)


def test_nothing_is_dropped() -> None:
    samples: list[Any] = [
        {"input_ids": [1, 2], "labels": [5, 6], "text": "a", "weight": 0.5, "image": torch.ones(2)},
        {"input_ids": [3], "labels": [7], "text": "b", "weight": 1.5, "image": torch.zeros(2)},
    ]
    batch = collate_with(_tokenizer("left"), samples)
    _equal(
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
    of_tensors = [{name: torch.tensor(one[name]) for name in ("input_ids", "labels")} for one in samples]
    right = collate_with(_tokenizer(), of_tensors)
    _equal(right["input_ids"], torch.tensor([[1, 2], [3, 0]]))
    _equal(right["labels"], torch.tensor([[5, 6], [7, -100]]))


def test_labels_of_several_classes_keep_their_type() -> None:
    samples = [{"input_ids": [1, 2], "labels": [0.0, 1.0]}, {"input_ids": [3], "labels": [1.0, 0.0]}]
    _equal(collate_with(_tokenizer(), samples)["labels"], torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


def test_two_fields_of_labels_keep_their_names() -> None:
    samples = [{"input_ids": [1, 2], "label": 1, "labels": 2}, {"input_ids": [3], "label": 3, "labels": 4}]
    batch = collate_with(_tokenizer(), samples)
    _equal([batch["label"], batch["labels"]], [torch.tensor([1, 3]), torch.tensor([2, 4])])


def test_a_processor_pads_with_its_tokenizer() -> None:
    class Processor:
        tokenizer = _tokenizer()

    batch = collate_with(Processor(), [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    _equal(batch["input_ids"], torch.tensor([[1, 2], [3, 0]]))


def test_what_has_no_tokens_or_one_length_needs_no_padding() -> None:
    class Processor:
        """One that cannot pad."""

    pixels = [{"pixels": torch.ones(2)}, {"pixels": torch.ones(2)}]
    _equal(collate_with(_tokenizer(), pixels), collate(pixels))
    even = [{"input_ids": [1, 2], "label": 1}, {"input_ids": [3, 4], "label": 0}]
    wanted = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([1, 0])}
    _equal(collate_with(_tokenizer(pad=None), even), wanted)
    _equal(collate_with(Processor(), even), collate(even))


def test_a_batch_has_the_same_names_with_and_without_padding() -> None:
    even = [{"input_ids": [1, 2], "label": 1}, {"input_ids": [3, 4], "label": 0}]
    ragged = [{"input_ids": [1, 2], "label": 1}, {"input_ids": [3], "label": 0}]
    assert set(collate_with(_tokenizer(), even)) == set(collate_with(_tokenizer(), ragged))


def test_packed_rows_get_no_mask() -> None:
    rows = PackedDataset([[1, 2, 3], [1, 2]], 5)
    _equal(collate_with(_tokenizer(), [rows[0]]), collate([rows[0]]))


@pytest.mark.parametrize(
    ("options", "samples", "message"),
    [
        (
            {"pad": None},
            [{"input_ids": [1, 2]}, {"input_ids": [1]}],
            r"no token to pad with\. Set one: tokenizer\.pad_token",
        ),
        ({}, [{"input_ids": [1, 2], "spans": [1]}, {"input_ids": [1], "spans": [1, 2]}], "field 'spans' cannot"),
        ({}, [{"input_ids": [1, 2], "x": 1}, {"input_ids": [1]}], "not all samples have 'x'"),
    ],
)
def test_errors_of_padding(options: dict[str, Any], samples: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        collate_with(_tokenizer(**options), samples)
