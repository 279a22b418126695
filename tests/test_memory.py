"""Memory: what is let go of, what a block needed at its peak, and which batch size fits."""

import gc
import logging
import mmap
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError
from trainer_lib.foundation.errors import NoExecutableBatchSizeError, SignatureError
from trainer_lib.memory import MemoryUse, PeakMemory, find_executable_batch_size, release_memory
from trainer_lib.memory.executable_batch_size import is_out_of_memory
from trainer_lib.state import PartialState

MEGABYTE = 2**20
TOO_MUCH = 2**55


def filled(megabytes: int) -> Tensor:
    """Return a tensor in pages new from the kernel: the heap of a worker may have free room for it, and not grow."""
    return torch.frombuffer(mmap.mmap(-1, megabytes * MEGABYTE), dtype=torch.float32).fill_(1.0)


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Let each collection of garbage look at what the test made, not at all that the process has imported."""
    gc.freeze()
    yield
    gc.unfreeze()


class Cycle:
    def __init__(self) -> None:
        self.self = self


# -- letting go ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [release_memory, lambda *objects: Accelerator(cpu=True).free_memory(*objects)])
def test_overwritten_objects_and_reference_cycles_are_freed(release: Any) -> None:
    tensor, cycle = torch.ones(2), Cycle()
    kept = [weakref.ref(tensor), weakref.ref(cycle)]
    del cycle
    tensor, nothing = release(tensor, None)
    assert tensor is nothing is None
    assert [reference() for reference in kept] == [None, None]
    assert release() == []


# -- measuring -------------------------------------------------------------------------------------------------------


def test_the_peak_of_a_block_is_measured_though_it_has_passed() -> None:
    with PeakMemory() as peak:
        filled(64)
        assert peak.use.host_growth > 60 * MEGABYTE
    assert 60 * MEGABYTE < peak.use.host_growth < 80 * MEGABYTE
    with PeakMemory() as small:
        filled(1)
    assert small.use.host_growth < 32 * MEGABYTE
    assert peak.use.host == peak._before.host + peak.use.host_growth


def test_blocks_may_be_nested() -> None:
    with PeakMemory() as outer:
        filled(96)
        with PeakMemory() as inner:
            filled(32)
    assert 28 * MEGABYTE < inner.use.host_growth < 60 * MEGABYTE
    assert outer.use.host_growth > 90 * MEGABYTE


def test_a_counter_that_cannot_be_set_back_tells_only_of_new_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    with PeakMemory():  # sets back what other tests have left
        monkeypatch.setattr("trainer_lib.memory.peak_memory._reset_host_peak", lambda: False)
    filled(64)
    with PeakMemory() as unseen:
        filled(16)
    assert unseen.use.host_growth < 32 * MEGABYTE
    with PeakMemory() as seen:
        filled(160)
    assert seen.use.host_growth > 150 * MEGABYTE


def test_the_largest_peak_of_all_processes() -> None:
    def body() -> MemoryUse:
        rank = PartialState(cpu=True).process_index
        with PeakMemory() as peak:
            filled(16 + 48 * rank)
        return peak.over_processes()

    first, second = run_world(body, timeout=60)
    assert first == second
    assert 60 * MEGABYTE < first.host_growth < 100 * MEGABYTE
    assert first.device == 0


def test_a_measurement_reads_well() -> None:
    use = MemoryUse(host=3 * MEGABYTE, host_growth=MEGABYTE, device=0, device_growth=0)
    assert str(use) == "host 3.0 MB (+1.0 MB)"
    assert str(MemoryUse(1024, 0, 2048, 512)) == "host 1.0 KB (+0 bytes), device 2.0 KB (+512 bytes)"


# -- the batch size that fits ----------------------------------------------------------------------------------------


def out_of_memory(how: str) -> None:
    if how == "torch":
        torch.empty(TOO_MUCH)
    elif how == "numpy":
        np.empty(TOO_MUCH)
    elif how == "device":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    else:
        raise RuntimeError(how)


@pytest.mark.parametrize(
    "how",
    [
        "torch",
        "numpy",
        "device",
        "MPS backend out of memory (MPS allocated: 1 GB)",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_sizes_are_tried_until_one_fits(how: str, caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int, name: str, *, twice: bool) -> str:
        """Train."""
        tried.append(batch_size)
        if batch_size > 12:
            out_of_memory(how)
        return f"{name} {batch_size} {twice}"

    with caplog.at_level(logging.WARNING):
        assert train("run", twice=True) == "run 12 True"
    assert tried == [16, 14, 12]
    assert [record.getMessage() for record in caplog.records][-1] == (
        "`train` ran out of memory at batch size 14. Next: 12."
    )
    assert train("run", twice=False) == "run 12 False"
    assert tried[3:] == [12]
    assert (train.__name__, train.__doc__) == ("train", "Train.")


def test_the_next_size_may_be_chosen() -> None:
    sizes = iter([50, 7])
    tried: list[int] = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 7:
            torch.empty(TOO_MUCH)
        return batch_size

    assert find_executable_batch_size(train, 100, lambda: next(sizes))() == 7
    assert tried == [100, 50, 7]


@pytest.mark.parametrize("answer", [8, 9, -1, 4.0, True, None])
def test_a_next_size_that_is_none_is_refused(answer: Any) -> None:
    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: answer)
    def train(batch_size: int) -> None:
        torch.empty(TOO_MUCH)

    with pytest.raises(ConfigurationError, match="whole number below the last one"):
        train()


def test_where_nothing_fits_the_last_error_is_the_cause() -> None:
    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size: int) -> None:
        raise RuntimeError(f"out of memory at {batch_size}")

    with pytest.raises(NoExecutableBatchSizeError, match="No executable batch size found, reached zero") as error:
        train()
    assert str(error.value.__cause__) == "out of memory at 1"
    with pytest.raises(RuntimeError, match="reached zero"):
        find_executable_batch_size(train, starting_batch_size=0)()


def test_other_errors_pass_through() -> None:
    tried: list[int] = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        train()
    assert tried == [128]
    assert not is_out_of_memory(ValueError("out of memory"))


def test_what_a_failed_attempt_held_is_gone_before_the_next() -> None:
    seen: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []

    def forward(network: nn.Module) -> None:
        cycle = Cycle()
        cycle.network = network  # type: ignore[attr-defined]
        try:
            raise KeyError("first")
        except KeyError:
            torch.empty(TOO_MUCH)

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        alive.append(sum(reference() is not None for reference in seen))
        network = nn.Linear(4, 4)
        seen.append(weakref.ref(network))
        if batch_size > 1:
            forward(network)

    train()
    assert alive == [0, 0, 0, 0]


def test_whoever_calls_leaves_the_batch_size_out() -> None:
    @find_executable_batch_size
    def train(batch_size: int, name: str, steps: int = 1) -> None:
        raise AssertionError("never called")

    words = r"Batch size was passed into `train` as the first argument.*`train\(name='x', steps=3\)`"
    for call in (
        lambda: train(64, "x", 3),
        lambda: train(batch_size=64, name="x", steps=3),
        lambda: train("x", 3, batch_size=64),
    ):
        with pytest.raises(SignatureError, match=words):
            call()
    with pytest.raises(TypeError, match="does not take these arguments: missing a required argument: 'name'"):
        train()


def test_a_function_without_a_place_for_the_batch_size_is_refused() -> None:
    with pytest.raises(SignatureError, match="`train` must take the batch size as its first argument"):

        @find_executable_batch_size
        def train(*, batch_size: int) -> None: ...

    assert find_executable_batch_size(lambda *sizes: sizes, starting_batch_size=2)() == (2,)
    with pytest.raises(ConfigurationError, match="starting_batch_size"):
        find_executable_batch_size(starting_batch_size=-1)


def test_an_engine_starts_over_with_each_size() -> None:
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> float:
        accelerator.free_memory()
        torch.manual_seed(0)
        network = nn.Linear(2, 2)
        network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
        loss = network(torch.ones(batch_size, 2)).square().mean()
        accelerator.backward(loss)
        if batch_size > 5:
            torch.empty(TOO_MUCH)
        optimizer.step()
        return float(batch_size)

    assert train() == 5.0
    assert len(accelerator._models) == 1
