"""The loop over a prepared loader: its end, its device, loops in loops, loops that are left."""

import gc
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data_loader.reference import Numbers, Stream, flat, read, worlds
from tests.worlds import run_world
from trainer_lib.data_loader import prepare_data_loader
from trainer_lib.state import GradientState


def _prepared(size: int = 10, batch_size: int = 3, dataset: Any = None, **options: Any) -> Any:
    loader = DataLoader(dataset or Numbers(size), batch_size=batch_size)
    return prepare_data_loader(loader, num_processes=1, process_index=0, **options)


def _readers() -> list[Any]:
    return [reader for reader in GradientState().dataloader_references if reader is not None]


@pytest.mark.parametrize("dataset", [None, Stream(10)])
def test_the_last_batch_is_known_while_it_is_in_hand(dataset: Any) -> None:
    loader, state = _prepared(dataset=dataset), GradientState()
    for _ in range(2):
        assert [(loader.end_of_dataloader, state.end_of_dataloader) for _ in loader] == [(False, False)] * 3 + [
            (True, True)
        ]
    assert not state.end_of_dataloader
    assert not loader.end_of_dataloader


def test_samples_are_loaded_when_they_are_asked_for() -> None:
    # Nothing is loaded ahead, so what samples draw at random comes in the order of a plain loop.
    loaded: list[int] = []

    class Noting(Numbers):
        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

    in_hand = [len(loaded) for _ in _prepared(dataset=Noting(10))]
    assert in_hand == [3, 6, 9, 10]


def test_the_loader_being_read_is_the_active_one() -> None:
    outer, inner, state = _prepared(), _prepared(5), GradientState()
    for _ in outer:
        assert state.active_dataloader is outer
        ends = []
        for _ in inner:
            assert _readers() == [outer, inner]
            ends.append(state.end_of_dataloader)
        assert ends == [False, True]
        assert _readers() == [outer]
        assert state.end_of_dataloader == outer.end_of_dataloader
    assert _readers() == []


def test_a_loader_may_be_read_in_a_loop_over_itself() -> None:
    (loader, _) = worlds(DataLoader(Numbers(17), batch_size=3), 2)
    seen = []
    for _ in loader:
        position = loader.state_dict()["position"]
        for _ in loader:
            pass
        seen.append((loader.end_of_dataloader, loader.rows, position))
        assert _readers() == [loader]
    assert seen == [(False, None, 6), (False, None, 12), (True, None, 0)]


@pytest.mark.parametrize("dataset", [None, Stream(10)])
@pytest.mark.parametrize("leave", ["break", "error"])
def test_a_loop_that_is_left_is_no_longer_read(leave: str, dataset: Any) -> None:
    loader = _prepared(dataset=dataset)

    def left() -> None:
        for _ in loader:
            if leave == "break":
                break
            raise ValueError("stop")

    if leave == "error":
        with pytest.raises(ValueError, match="stop"):
            left()
        gc.collect()
    else:
        left()
    assert _readers() == []
    assert not loader.end_of_dataloader
    assert flat(read(loader)) == list(range(10))


def test_an_iterator_may_be_held_until_python_ends() -> None:
    script = """
from torch.utils.data import DataLoader
from trainer_lib import Accelerator
loader = Accelerator(cpu=True).prepare(DataLoader(range(8), batch_size=2, shuffle=True))
batches = iter(loader)
next(batches)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_error_in_a_dataset_comes_through() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 7:
                raise OSError("sample 7")
            return index

    loader = _prepared(dataset=Broken(10))
    seen: list[int] = []

    def collect() -> None:
        for batch in loader:
            seen.extend(batch.tolist())

    with pytest.raises(OSError, match="sample 7"):
        collect()
    assert seen == [0, 1, 2, 3, 4, 5]
    assert _readers() == []
    assert loader.state_dict()["position"] == 6


def test_batches_go_to_the_device_if_asked() -> None:
    # "meta" stands in for an accelerator.
    assert {batch.device.type for batch in _prepared(device="meta", put_on_device=True)} == {"meta"}
    assert {batch.device.type for batch in _prepared(device="meta")} == {"cpu"}


def _synchronized(kinds: list[str] | None, start: int) -> list[float]:
    from trainer_lib import PartialState

    rank = PartialState().process_index
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(10 + rank)
    loader = DataLoader(Numbers(8), batch_size=2, shuffle=True, generator=generator)
    loader = prepare_data_loader(loader, rng_types=kinds)
    next(iter(loader.starting_at(start)))
    return [torch.rand(1).item(), torch.rand(1, generator=generator).item()]


@pytest.mark.parametrize(
    ("kinds", "same"), [(None, [False, True]), (["torch"], [True, True]), (["torch", "generator"], [True, True])]
)
def test_generators_are_synchronized_if_asked_and_those_of_the_order_always(
    kinds: list[str] | None, same: list[bool]
) -> None:
    first, second = run_world(_synchronized, (kinds, 0), 2, timeout=60)
    assert [left == other for left, other in zip(first, second, strict=True)] == same


def test_in_the_middle_of_a_pass_generators_are_those_of_a_checkpoint() -> None:
    first, second = run_world(_synchronized, (["torch"], 1), 2, timeout=60)
    assert first[0] != second[0]


@pytest.mark.parametrize("collate", ["lambda rows: rows", "list", "of_the_script"])
@pytest.mark.parametrize(("context", "is_told"), [("forkserver", True), ("fork", False)])
def test_an_error_while_workers_start_says_what_they_need(
    collate: str, context: str, is_told: bool, tmp_path: Path
) -> None:
    program = textwrap.dedent(f"""
        import multiprocessing
        from torch.utils.data import DataLoader
        from trainer_lib.data_loader import prepare_data_loader
        def of_the_script(rows):
            return rows
        multiprocessing.set_start_method("{context}", force=True)
        list(prepare_data_loader(DataLoader(range(4), num_workers=1, collate_fn={collate}), num_processes=1))
    """)
    (tmp_path / "script.py").write_text(program)
    # Without a file, as in a notebook, workers do not find what the script defines.
    arguments = ["-c", program] if collate == "of_the_script" else [tmp_path / "script.py"]
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == (1 if is_told else 0)
    assert ('Put what the script does under `if __name__ == "__main__":`' in ended.stderr) == is_told
    assert "In the batch of samples" not in ended.stderr


class Drawing(Numbers):
    """Random numbers."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(())


def test_workers_draw_other_numbers_on_each_process_and_after_a_resume() -> None:
    def drawn(loader: Any) -> float:
        return next(iter(loader))[0].item()

    loader = DataLoader(Drawing(8), batch_size=2, num_workers=1)
    first, second = worlds(loader, 2, data_seed=5)
    (again, _), (elsewhere, _) = worlds(loader, 2, data_seed=5), worlds(loader, 2, data_seed=6)
    resumed = first.starting_at(1)
    numbers = [drawn(rank_loader) for rank_loader in (first, second, elsewhere, resumed)]
    assert len(set(numbers)) == 4
    assert drawn(again) == numbers[0]


def test_a_generator_that_is_not_there_is_not_synchronized() -> None:
    assert len(read(_prepared(rng_types=["generator"]))) == 4


def test_the_epoch_reaches_those_who_want_to_know() -> None:
    epochs: list[tuple[str, int]] = []

    class Listening(Numbers):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(("dataset", epoch))

    class Batches(list[list[int]]):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(("batch sampler", epoch))

    loader = DataLoader(Listening(4), batch_sampler=Batches([[0, 1], [2, 3]]))
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0)
    prepared.set_epoch(3)
    assert set(epochs) == {("dataset", 3), ("batch sampler", 3)}
    epochs.clear()
    read(prepared)
    read(prepared)
    assert [epoch for who, epoch in epochs if who == "dataset"] == [3, 4]


def test_even_batches_can_be_switched_for_a_while() -> None:
    (_, second) = worlds(DataLoader(Numbers(9), batch_size=4), 2)
    assert len(read(second)) == len(second) == 2
    second.even_batches = False
    assert len(read(second)) == len(second) == 1
    second.batch_sampler.even_batches = True  # as scripts for Accelerate do it
    assert second.even_batches
    assert len(read(second)) == 2
    (_, stream) = worlds(DataLoader(Stream(9), batch_size=4), 2)
    stream.even_batches = False
    assert [len(read(stream)), stream.even_batches] == [1, False]


def test_a_pass_costs_few_calls_beside_torchs_own() -> None:
    import sys

    def calls(loader: Any) -> int:
        counted = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for _ in loader:
                pass
        finally:
            sys.setprofile(None)
        return counted

    data = torch.utils.data.TensorDataset(torch.randn(3200, 4), torch.randn(3200))
    plain = DataLoader(data, batch_size=32, shuffle=True)
    ours = prepare_data_loader(
        DataLoader(data, batch_size=32, shuffle=True),
        num_processes=1, process_index=0, device="cpu", put_on_device=True,
    )  # fmt: skip
    # Fourteen a batch: the loop, the count of its samples, and the way of two tensors to the device. (Torch's sampler
    # has the same calls in both.)
    assert calls(ours) - calls(plain) < 14 * 100 + 600
