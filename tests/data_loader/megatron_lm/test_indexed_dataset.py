"""Indexed datasets: the bytes of Megatron-LM's files, and what is wrong with damaged ones."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from trainer_lib.data_loader.megatron_lm.indexed_dataset import IndexedDataset, write_indexed_dataset
from trainer_lib.foundation.errors import ConfigurationError

DOCUMENTS = [[[5, 6, 7], [8]], [[9, 10]]]


def test_the_files_have_the_bytes_that_megatron_lm_writes(tmp_path: Path) -> None:
    write_indexed_dataset(tmp_path / "text", DOCUMENTS, vocab_size=100)
    assert (tmp_path / "text.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 9, 10)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3)
    index += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8) + struct.pack("<3q", 0, 2, 3)
    assert (tmp_path / "text.idx").read_bytes() == index


@pytest.mark.parametrize("vocab_size", [100, None])
def test_sequences_are_read_as_they_were_written(tmp_path: Path, vocab_size: int | None) -> None:
    write_indexed_dataset(tmp_path / "text", DOCUMENTS, vocab_size)
    dataset = pickle.loads(pickle.dumps(IndexedDataset(str(tmp_path / "text"))))
    assert [sequence.tolist() for sequence in dataset] == [[5, 6, 7], [8], [9, 10]]
    assert dataset.tokens(0, 1, 9).tolist() == [6, 7]
    assert dataset[-1].tolist() == [9, 10]
    assert (dataset.document_indices.tolist(), dataset.sequence_modes) == ([0, 2, 3], None)


def test_megatron_core_reads_and_writes_the_same_files(tmp_path: Path) -> None:
    core = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    numbers = np.random.default_rng(0)
    documents = [[numbers.integers(0, 90, size).tolist() for size in (3, 1)] for _ in range(5)]
    for vocab_size in (100, None):
        write_indexed_dataset(tmp_path / "ours", documents, vocab_size)
        builder = core.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), core.DType.optimal_dtype(vocab_size))
        for document in documents:
            builder.add_document(np.concatenate(document), [len(sequence) for sequence in document])
        builder.finalize(str(tmp_path / "theirs.idx"))
        for ending in ("bin", "idx"):
            assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
        theirs = core.IndexedDataset(str(tmp_path / "ours"))
        assert [s.tolist() for s in theirs] == [s.tolist() for s in IndexedDataset(tmp_path / "theirs")]


def test_the_modes_of_a_multimodal_dataset_are_read(tmp_path: Path) -> None:
    write_indexed_dataset(tmp_path / "text", DOCUMENTS)
    with (tmp_path / "text.idx").open("ab") as file:
        file.write(bytes([0, 1, 0]))
    modes = IndexedDataset(tmp_path / "text").sequence_modes
    assert modes is not None
    assert modes.tolist() == [0, 1, 0]


def test_what_is_wrong_with_files_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.idx cannot be read: No such file"):
        IndexedDataset(tmp_path / "none")
    write_indexed_dataset(tmp_path / "text", DOCUMENTS)
    index, tokens = (tmp_path / "text.idx").read_bytes(), (tmp_path / "text.bin").read_bytes()
    (tmp_path / "text.bin").write_bytes(tokens[:-1])
    with pytest.raises(ConfigurationError, match=r"text\.bin is cut off: its index needs 24 bytes \(the file has 23\)"):
        IndexedDataset(tmp_path / "text")
    for damaged, message in (
        (index[:-1], "is damaged: 3 sequences and 3 documents take"),
        (index[:5], "is no index of a dataset of Megatron-LM"),
        (index[:17] + b"\x09" + index[18:], "type 9"),
        (b"TNTIDX\x00\x00" + index, "old format"),
    ):
        (tmp_path / "text.idx").write_bytes(damaged)
        with pytest.raises(ConfigurationError, match=message):
            IndexedDataset(tmp_path / "text")
    with pytest.raises(ConfigurationError, match=r"Tokens must be at least 0 and below 8 \(got \[8\]\)"):
        write_indexed_dataset(tmp_path / "other", DOCUMENTS, vocab_size=8)
