"""Workers send small tensors as bytes, and the batches are the same."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.data_loader.reference import assert_batches_equal
from trainer_lib.data_loader import prepare_data_loader

SMALL, LARGE = 32 << 10, (32 << 10) + 1  # numbers of 4 bytes


def twice(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor, tensor


VALUES: list[Any] = [
    torch.arange(SMALL, dtype=torch.int32),
    torch.tensor(2.5),
    torch.randn(3, 1, 2).to(torch.bfloat16),
    torch.randn(4).to(torch.float8_e4m3fn),
    torch.tensor([True, False]),
    torch.randn(2, 2, dtype=torch.complex64),
    torch.tensor([1j]).conj(),
    torch.tensor([1j]).conj().imag,
    {"deep": [(torch.ones(2), "text")], "number": 1},
    twice(torch.ones(3)),
]
SHARED: list[Any] = [
    torch.arange(LARGE, dtype=torch.int32),
    torch.arange(6.0).view(2, 3).t(),
    torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last),
    torch.nn.Parameter(torch.ones(2)),
    torch.ones(2, requires_grad=True),
    torch.zeros(0, 2),
]


class KilledWhileItSends(Dataset[Tensor]):
    """Its worker is killed in the middle of its second message, after what a pipe takes at once."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == 1:
            Connection._send = _send_a_part  # type: ignore[method-assign]
        return torch.zeros(SMALL)


def _send_a_part(connection: Any, message: Any, write: Any = None) -> None:
    del write
    os.write(connection.fileno(), memoryview(message)[: select.PIPE_BUF])
    os.kill(os.getpid(), signal.SIGKILL)


def as_it_is(sample: Any) -> Any:
    return sample


def loader_of(dataset: Any, **options: Any) -> Any:
    # Forked workers have the samples as they are here; torch itself would forget signs on the way to another.
    settings: dict[str, Any] = {"batch_size": None, "num_workers": 1, "collate_fn": as_it_is, **options}
    settings.setdefault("multiprocessing_context", "fork")
    return prepare_data_loader(DataLoader(dataset, **settings), num_processes=1)


def test_values_pass_unchanged() -> None:
    for actual, expected in zip(loader_of(VALUES + SHARED, timeout=20), VALUES + SHARED, strict=True):
        assert_batches_equal(actual, expected)
        if isinstance(expected, Tensor):
            assert actual.stride() == expected.stride() or expected.is_neg()
            assert actual.requires_grad == expected.requires_grad


def test_small_tensors_are_in_memory_of_their_own() -> None:
    received = list(loader_of(VALUES[:8] + SHARED[:3], timeout=20))
    assert [tensor.is_shared() for tensor in received] == [False] * 8 + [True] * 3
    received[0].add_(1)
    assert torch.equal(received[0], VALUES[0] + 1)


def test_nested_tensors_pass_unchanged() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        sent = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    (received,) = loader_of([sent], timeout=20)
    assert_batches_equal(received.unbind(), sent.unbind())


def test_kept_batches_hold_no_file_descriptors() -> None:
    loader = loader_of([{"x": torch.ones(4), "y": index} for index in range(40)], batch_size=2, collate_fn=None)
    kept: list[Any] = []
    counts: list[int] = []
    for batch in loader:
        kept.append(batch)
        counts.append(psutil.Process().num_fds())
    assert counts == [counts[0]] * 20


def test_one_tensor_stays_one() -> None:
    ((first, second),) = loader_of([twice(torch.zeros(3))], timeout=20)
    first.add_(1)
    assert second is first


@pytest.mark.parametrize("collate", [None, torch.stack])
def test_batches_are_small_by_their_own_size(collate: Any) -> None:
    rows = torch.arange(8.0 * 3000).view(8, 3000)
    for size, is_shared in ((2, False), (8, False), (16, True)):
        loader = loader_of([*rows.repeat(2, 1)], batch_size=size, collate_fn=collate)
        batches = list(loader)
        assert [batch.is_shared() for batch in batches] == [is_shared] * (16 // size)
        assert torch.equal(torch.cat(batches), rows.repeat(2, 1))


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_worker_that_is_killed_while_it_sends_ends_the_pass(in_thread: bool) -> None:
    errors: list[Exception] = []

    def read() -> None:
        try:
            list(loader_of(KilledWhileItSends(), prefetch_factor=1))
        except (RuntimeError, OSError, EOFError) as error:  # outside of the main thread torch does not decide which
            errors.append(error)

    if in_thread:
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(30)
    else:
        read()
    assert len(errors) == 1
    assert in_thread or "DataLoader worker" in str(errors[0])
    assert any(note.startswith("Worker ") and "SIGKILL" in note for note in errors[0].__notes__), repr(errors[0])


def test_a_killed_worker_of_a_fork_server_ends_the_pass() -> None:
    program = """
        from tests.data_loader.test_worker_tensors import KilledWhileItSends, loader_of
        if __name__ == "__main__":
            list(loader_of(KilledWhileItSends(), prefetch_factor=1, multiprocessing_context="forkserver"))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "was killed by SIGKILL" in ended.stderr
