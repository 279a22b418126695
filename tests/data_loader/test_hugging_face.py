"""Datasets of Hugging Face's library: in memory, streaming, shuffled, split among processes."""

import json
import random
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.data_loader.reference import flat, worlds
from tests.worlds import run_world
from trainer_lib import PartialState
from trainer_lib.data_loader import prepare_data_loader

datasets = pytest.importorskip("datasets")

SIZE = 40


def _rows() -> Any:
    return datasets.Dataset.from_dict({"id": list(range(SIZE)), "text": [f"text {index}" for index in range(SIZE)]})


def _doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "double": 2 * row["id"]}


def _dataset(kind: str) -> Any:
    if kind == "in memory":
        return _rows()
    stream = _rows().to_iterable_dataset(num_shards=4)
    if kind == "mapped":
        return stream.map(_doubled, remove_columns=["text"])
    if kind == "shuffled":
        return stream.shuffle(seed=3, buffer_size=7)
    return stream


def _ids(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def _loader(kind: str, batch_size: int, num_workers: int = 0) -> DataLoader[Any]:
    shuffles: dict[str, Any] = {"shuffle": True} if kind == "in memory" else {}
    return DataLoader(_dataset(kind), batch_size=batch_size, num_workers=num_workers, **shuffles)


KINDS = ["in memory", "streaming", "mapped", "shuffled"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_does_not_depend_on_the_world(kind: str) -> None:
    (alone,) = worlds(_loader(kind, 8), 1, data_seed=5)
    pair = worlds(_loader(kind, 4), 2, data_seed=5)
    orders = []
    for _ in range(2):
        orders.append(_ids(alone))
        assert sorted(flat(orders[-1])) == list(range(SIZE))
        assert [left + right for left, right in zip(*map(_ids, pair), strict=True)] == orders[-1]
    # Datasets that shuffle have another order in each epoch.
    assert (orders[0] != orders[1]) == (kind in ("in memory", "shuffled"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [1, 2])
def test_every_position_can_be_gone_on_from(kind: str, processes: int) -> None:
    def prepared() -> Any:
        return worlds(_loader(kind, 3), processes, data_seed=5)[-1]

    loader = prepared()
    passes = [_ids(loader), _ids(loader), _ids(loader)]
    for done in range(len(passes[1])):
        saving, resumed = prepared(), prepared()
        saving.set_epoch(1)
        list(islice(saving, done))
        resumed.load_state_dict(json.loads(json.dumps(saving.state_dict())))
        assert [_ids(resumed), _ids(resumed)] == [passes[1][done:], passes[2]], done


@pytest.mark.parametrize("kind", ["streaming", "mapped"])
def test_a_stream_is_gone_on_from_by_its_own_state(kind: str) -> None:
    def prepared() -> Any:
        return worlds(_loader(kind, 1), 2)[1]

    whole = prepared()
    passes = [_ids(whole) for _ in range(3)]
    saving, resumed = prepared(), prepared()
    list(islice(saving, 18))
    state = json.loads(json.dumps(saving.state_dict()))
    assert state["bookmark"]["position"] == 32
    resumed.load_state_dict(state)
    assert [_ids(resumed), _ids(resumed), _ids(resumed)] == [passes[0][18:], *passes[1:]]


def test_its_tail_is_filled_with_its_first_samples_all_the_same() -> None:
    def prepared() -> Any:
        return worlds(DataLoader(_dataset("mapped").take(39), batch_size=1), 2)[1]

    whole = _ids(prepared())
    assert whole[-1] == [0]
    saving, resumed = prepared(), prepared()
    list(islice(saving, 18))
    resumed.load_state_dict(saving.state_dict())
    resumed.set_epoch(0)
    assert _ids(resumed) == whole[18:]
    resumed.set_epoch(0)
    assert _ids(resumed) == whole


def test_a_shuffle_buffer_is_filled_again_since_its_state_leaves_it_out() -> None:
    (loader,) = worlds(_loader("shuffled", 1), 1)
    list(islice(loader, 20))
    assert loader.state_dict()["bookmark"] is None


def test_workers_read_its_shards() -> None:
    loaders = worlds(_loader("streaming", 3, num_workers=2), 2)
    batches = [[(batch["id"].tolist(), loader.rows) for batch in loader] for loader in loaders]
    assert len(batches[0]) == len(batches[1])
    real = [
        sample
        for rank_batches in batches
        for ids, rows in rank_batches
        for sample in ids[: 3 if rows is None else rows.real]
    ]
    assert sorted(real) == list(range(SIZE))


def _split(num_shards: int) -> list[tuple[list[int], Any]]:
    from datasets.distributed import split_dataset_by_node

    state = PartialState()
    stream = _rows().take(22).to_iterable_dataset(num_shards=num_shards)
    stream = split_dataset_by_node(stream, rank=state.process_index, world_size=state.num_processes)
    loader = prepare_data_loader(DataLoader(stream, batch_size=4))
    return [(batch["id"].tolist(), loader.rows) for batch in loader]


@pytest.mark.parametrize("num_shards", [2, 3])
def test_a_dataset_split_by_node_is_not_shared_out_again(num_shards: int) -> None:
    results = run_world(_split, (num_shards,), 2, timeout=60)
    assert len(results[0]) == len(results[1])
    real = [
        [sample for ids, rows in rank_batches for sample in ids[: 4 if rows is None else rows.real]]
        for rank_batches in results
    ]
    assert sorted(flat(real)) == list(range(22))
    # By halves if the shards go into two, else sample by sample.
    assert real[0] == (list(range(11)) if num_shards == 2 else list(range(0, 22, 2)))


def _with_a_draw(batch: Any) -> Any:
    return {"id": batch["id"], "draw": [random.random() for _ in batch["id"]]}


def test_an_augmentation_on_the_fly_depends_on_the_sample_only_if_seeded() -> None:
    def prepared(batch_size: int, num_workers: int) -> Any:
        rows = _rows().with_transform(_with_a_draw)
        loader = DataLoader(rows, batch_size=batch_size, shuffle=True, num_workers=num_workers)
        return prepare_data_loader(
            loader, num_processes=1, process_index=0, data_seed=5, low_memory_shuffle=True, seed_each_sample=True
        )

    def drawn(loader: Any) -> list[tuple[int, float]]:
        return [
            pair for batch in loader for pair in zip(batch["id"].tolist(), batch["draw"].tolist(), strict=True)
        ]  # fmt: skip

    alone = drawn(prepared(8, 0))
    assert len({draw for _, draw in alone}) == SIZE
    assert drawn(prepared(5, 0)) == alone == drawn(prepared(8, 1))
