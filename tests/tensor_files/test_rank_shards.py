"""Sharded tensors: any region is read back, also by torch's own reader."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.rank_shards import Chunk, read_shards, read_whole, shard_content, shard_file
from trainer_lib.tensor_files.safetensors import write_tensors

GRID = torch.arange(35.0).view(7, 5)


def written(folder: Path) -> Path:
    """Write a grid in three uneven parts, a scalar on one process, and a second name for a vector."""
    vector = torch.arange(4)
    for rank, (start, end) in enumerate([(0, 3), (3, 6), (6, 7)]):
        chunks = {"grid": Chunk(GRID[start:end], [start, 0])}
        if rank == 1:
            chunks["scalar"] = Chunk(torch.tensor(2.5, dtype=torch.float64), [])
        if rank < 2:
            half = vector[2 * rank : 2 * rank + 2]
            chunks |= {"vector": Chunk(half, [2 * rank]), "again": Chunk(half, [2 * rank])}
        shard_content(chunks).write(folder / shard_file(rank))
    return folder


def test_everything_is_put_together(tmp_path: Path) -> None:
    result = read_whole(written(tmp_path))
    assert torch.equal(result["grid"], GRID)
    assert result["scalar"].item() == 2.5
    assert result["scalar"].dtype is torch.float64
    assert result["vector"].tolist() == [0, 1, 2, 3]
    assert result["again"] is result["vector"]


@pytest.mark.parametrize("rows", [(0, 7), (2, 4), (5, 7), (6, 7), (3, 3)])
@pytest.mark.parametrize("columns", [(0, 5), (1, 3)])
def test_any_region_is_read_wherever_the_parts_end(
    rows: tuple[int, int], columns: tuple[int, int], tmp_path: Path
) -> None:
    saved = read_shards(written(tmp_path))["grid"]
    assert (saved.shape, saved.dtype) == ((7, 5), torch.float32)
    region = saved.read((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
    assert torch.equal(region, GRID[slice(*rows), slice(*columns)])


def test_torchs_reader_reads_the_files(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as checkpoint

    written(tmp_path)
    state: dict[str, Tensor] = {"grid": torch.zeros(7, 5), "vector": torch.zeros(4, dtype=torch.int64)}
    reader = checkpoint.HuggingFaceStorageReader(str(tmp_path))
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        checkpoint.load(state, storage_reader=reader)
    assert torch.equal(state["grid"], GRID)
    assert state["vector"].tolist() == [0, 1, 2, 3]


def test_a_missing_shard_raises(tmp_path: Path) -> None:
    (written(tmp_path) / shard_file(0)).unlink()
    saved = read_shards(tmp_path)["grid"]
    with pytest.raises(CheckpointError, match=r"'grid' is incomplete: the files in .* hold 20 of 35 values"):
        saved.read()
    assert torch.equal(saved.read((3, 0), (4, 5)), GRID[3:])


@pytest.mark.parametrize("offsets", ["{", "[]", '{"grid": 3}', '{"grid": {"saved_offsets": [0]}}'])
def test_damage_is_told(tmp_path: Path, offsets: str) -> None:
    write_tensors({"grid": GRID}, tmp_path / "one.safetensors", {"DCP_SHARDING_INFO": offsets})
    with pytest.raises(CheckpointError, match="is damaged"):
        read_shards(tmp_path)
    (tmp_path / "one.safetensors").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_shards(tmp_path)
