"""Samples of GPT: where they begin and end, splits, and blends."""

from pathlib import Path
from typing import Any

import pytest

from trainer_lib.data_loader.megatron_lm.gpt_samples import (
    BlendedSamples,
    GPTSamples,
    gpt_datasets,
    split_bounds,
    weighted_paths,
)
from trainer_lib.data_loader.megatron_lm.indexed_dataset import IndexedDataset, write_indexed_dataset
from trainer_lib.foundation.errors import ConfigurationError


def written(path: Path, lengths: list[int], first: int = 0) -> str:
    """Write a dataset whose tokens are consecutive numbers; a length of 0 is an empty sequence."""
    documents: list[Any] = []
    for length in lengths:
        documents.append([list(range(first, first + length))])
        first += length
    write_indexed_dataset(path, documents)
    return str(path)


def test_samples_cover_all_tokens_and_overlap_by_one(tmp_path: Path) -> None:
    lengths = [1, 0, 9, 2, 0, 0, 5, 1, 4, 0]
    for seq_length in (1, 2, 3, 7, 21):
        samples = GPTSamples(IndexedDataset(written(tmp_path / "text", lengths)), seq_length)
        assert len(samples) == 21 // seq_length
        expected = [list(range(i * seq_length, (i + 1) * seq_length + 1)) for i in range(len(samples))]
        assert [sample["text"].tolist() for sample in samples] == expected
        with pytest.raises(IndexError, match=f"There are {len(samples)} samples"):
            samples[len(samples)]


def test_splits_are_those_of_megatron_lm(tmp_path: Path) -> None:
    assert split_bounds("949,50,1") == [(0.0, 0.949), (0.949, 0.999), (0.999, 1.0)]
    prefix = written(tmp_path / "text", [3] * 20)
    splits: Any = gpt_datasets([(1.0, prefix)], "8,2", 2)
    train, validation, test = (list(part) if part else part for part in splits)
    assert train is not None
    assert validation is not None
    assert train[-1]["text"].tolist() == [44, 45, 46]  # the first 16 sequences have the tokens up to 47
    assert validation[0]["text"].tolist() == [48, 49, 50]
    assert test is None


def test_a_blend_is_even_and_ends_with_the_first_dataset(tmp_path: Path) -> None:
    first, second = (written(tmp_path / name, [10] * 10, begin) for name, begin in (("a", 0), ("b", 1000)))
    blend: Any = gpt_datasets(weighted_paths([3, first, 1, second]), "1", 4)[0]
    owners = ["b" if sample["text"][0] >= 1000 else "a" for sample in blend]
    assert (owners.count("a"), owners.count("b")) == (24, 8)
    for begin in range(0, 32, 4):
        assert owners[begin : begin + 4].count("b") == 1
    assert len({int(sample["text"][0]) for sample in blend}) == 32


def test_paths_have_weights_or_none() -> None:
    assert weighted_paths("text") == [(1.0, "text")]
    assert weighted_paths(["a", "b"]) == [(1.0, "a"), (1.0, "b")]
    assert weighted_paths(["0.5", "a", "1.5", "b"]) == [(0.5, "a"), (1.5, "b")]


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    for splits in ("a,b", "1,2,3,4", "0,0", "-1,2", ""):
        with pytest.raises(ConfigurationError, match="splits_string must have one to three sizes"):
            split_bounds(splits)
    with pytest.raises(ConfigurationError, match="data_path must be the path"):
        weighted_paths(None)
    with pytest.raises(ConfigurationError, match=r"The weight of a dataset must be a finite number above 0 \(got 0"):
        weighted_paths(["0", "a"])
    prefix = written(tmp_path / "text", [3, 3])
    with pytest.raises(ConfigurationError, match=r"text has no sample of seq_length=6 in one of the splits '1'"):
        gpt_datasets([(1.0, prefix)], "1", 6)
    with pytest.raises(ConfigurationError, match="The weight of a dataset"):
        BlendedSamples([[1], [2]], [1, -1])
