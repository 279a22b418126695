"""Worlds of processes: how they form, what they say to one another, and when they give up."""

import multiprocessing
import pickle
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.worlds import run_world
from trainer_lib import ConfigurationError, WorldError
from trainer_lib.foundation import environment
from trainer_lib.foundation.environment import patch_environment
from trainer_lib.launchers import run_forked
from trainer_lib.process_group import LoneProcess, TorchProcesses
from trainer_lib.processes.ports import free_port
from trainer_lib.state import PartialState

ONE_SECOND = timedelta(seconds=1)


def conversation() -> list[Any]:
    """Say everything that a group can say."""
    group = PartialState(cpu=True).group
    rank = group.rank
    group.barrier()
    return [
        group.all_reduce(torch.tensor(rank + 1)).item(),
        group.all_reduce(torch.tensor(rank + 1), "max").item(),
        group.all_reduce(torch.tensor(rank + 1), "min").item(),
        [tensor.item() for tensor in group.all_gather(torch.tensor(rank + 1))],
        group.broadcast(torch.tensor(rank + 1), source=group.size - 1).item(),
        group.all_gather_objects({"rank": rank}),
        group.broadcast_objects([rank, "text"]),
        group.scatter_objects([10, 11, 12, 13][: group.size] if rank == 0 else None),
    ]


def test_a_lone_process_is_a_world_of_one() -> None:
    assert conversation() == [1, 1, 1, [1], 1, [{"rank": 0}], [0, "text"], 10]
    assert isinstance(PartialState().group, LoneProcess)
    for say in ("broadcast", "broadcast_objects", "scatter_objects"):
        with pytest.raises(ConfigurationError, match="Rank 1 does not exist in a world of 1"):
            getattr(LoneProcess(), say)([], source=1)


LONGEST = 1016  # bytes of a pickled object that fits into one message


def test_objects_of_any_length_arrive_and_short_ones_take_one_message() -> None:
    def body() -> list[tuple[bool, int]]:
        group = PartialState(cpu=True).group
        messages: list[int] = []
        for name in ("all_gather", "broadcast"):
            send = getattr(dist, name)
            setattr(dist, name, lambda *args, _send=send, **kwargs: messages.append(1) or _send(*args, **kwargs))
        overhead = len(pickle.dumps("x" * LONGEST)) - LONGEST

        def texts(length: int) -> list[str]:
            return [str(rank) * (length - overhead) for rank in range(group.size)]

        found: list[tuple[bool, int]] = []
        for longest in (overhead + 1, LONGEST, LONGEST + 1, 100_000):
            messages.clear()
            expected = [text if rank == 1 else "short" for rank, text in enumerate(texts(longest))]
            found.append((group.all_gather_objects(expected[group.rank]) == expected, len(messages)))
        with torch.device("meta"):  # as where a model is made without memory
            assert group.all_gather_objects(group.rank) == list(range(group.size))
        for longest in (10, 100_000):
            messages.clear()
            sent = [["a" * longest], {"b": torch.arange(3)}]
            values = sent if group.rank == 1 else [None, None]
            received = group.broadcast_objects(values, source=1)
            same = received is values and received[0] == sent[0] and torch.equal(received[1]["b"], torch.arange(3))
            found.append((same, len(messages)))
        return found

    expected = [(True, 1), (True, 1), (True, 2), (True, 2), (True, 1), (True, 2)]
    assert run_forked(body, num_processes=3) == [expected] * 3


@pytest.mark.parametrize(("backend", "device"), [("cuda:gloo", "cuda"), ("cpu:gloo,cuda:gloo", "cpu"), ("gloo", "cpu")])
def test_objects_are_sent_from_host_memory_where_the_group_can(backend: str, device: str) -> None:
    def body() -> str:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return str(TorchProcesses()._message_device)

    assert run_forked(body, num_processes=1) == [device]


def test_processes_meet_where_all_come_with_the_same_value_in_time() -> None:
    def body() -> list[bool]:
        group = PartialState(cpu=True).group
        meetings = [
            group.meet("here", "same", 30),
            group.meet("here", str(group.rank), 30),
            group.meet("here", "same", 30),
        ]
        if group.rank == 0:
            meetings.append(group.meet("here", "alone", 0.1))
        group.barrier()  # what was said is no answer to who comes later
        if group.rank == 1:
            meetings.append(group.meet("here", "alone", 0.1))
        return meetings

    assert run_world(body, timeout=60) == [[True, False, True, False]] * 2
    assert LoneProcess().meet("here", "alone", 0.1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes_of_a_launcher_form_a_real_world(size: int) -> None:
    def body() -> tuple[list[Any], bool, str | None]:
        answers = conversation()
        return answers, isinstance(PartialState().group, TorchProcesses) and dist.is_initialized(), dist.get_backend()

    ranks = range(size)
    for rank, (message, is_real, backend) in enumerate(run_world(body, num_processes=size, timeout=60)):
        assert (is_real, backend) == (True, "gloo")
        assert message == [
            sum(ranks) + size,
            size,
            1,
            [other + 1 for other in ranks],
            size,
            [{"rank": other} for other in ranks],
            [0, "text"],
            10 + rank,
        ]


def test_torchruns_variables_are_enough() -> None:
    variables = {"rank": "0", "world_size": "1", "master_addr": "127.0.0.1", "master_port": str(free_port())}
    with patch_environment(**variables):
        assert conversation()[0] == 1
        assert dist.is_initialized()


def test_a_group_that_the_script_formed_is_taken_over() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = PartialState(cpu=True)
    assert isinstance(state.group, TorchProcesses)
    assert state.num_processes == 1


def test_a_world_can_form_again() -> None:
    def body() -> list[float]:
        sums: list[float] = []
        for _ in range(2):
            state = PartialState()
            sums.append(state.group.all_reduce(torch.ones(1)).item())
            state.destroy_process_group()
            PartialState._reset_state()
        return sums

    assert run_world(body, timeout=60) == [[2.0, 2.0]] * 2


def test_each_world_has_a_store_of_its_own() -> None:
    """Who leaves a world last removes its file, and would take the addresses of the next one along."""

    def body() -> bool:
        files: list[set[str]] = []
        for _ in range(2):
            state = PartialState()
            state.group.all_reduce(torch.ones(1))
            store = Path(environment.store_file() or "")
            files.append({path.name for path in store.parent.glob(f"{store.name}*")})
            state.destroy_process_group()
            PartialState._reset_state()
        return bool(files[1] - files[0])

    assert run_world(body, timeout=60) == [True, True]


def test_another_world_than_asked_for_is_an_error() -> None:
    def body() -> str:
        with pytest.raises(WorldError) as caught:
            PartialState()
        assert not dist.is_initialized()
        return str(caught.value)

    for message in run_world(body, timeout=60, TRAINER_LIB_WORLD_SIZE="4"):
        assert message.startswith("The world size is 2, and 4 processes were requested.")


def test_a_group_of_the_script_that_is_not_the_launchers_world_is_an_error() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with (
        patch_environment(rank="0", world_size="2"),
        pytest.raises(WorldError, match="The world size is 1, and 2 processes were requested"),
    ):
        PartialState(cpu=True)


@pytest.mark.slow
@pytest.mark.parametrize("through_a_file", [True, False])
def test_who_waits_for_a_missing_process_gives_up_in_time(through_a_file: bool, tmp_path: Any) -> None:
    port = free_port()
    variables = {"rank": "0", "world_size": "2", "master_addr": "127.0.0.1", "master_port": str(port)}
    if through_a_file:
        variables["trainer_lib_store_file"] = str(tmp_path / "store")
    began = monotonic()
    with patch_environment(**variables), pytest.raises(WorldError) as caught:
        PartialState(cpu=True, timeout=ONE_SECOND)
    assert 0.5 < monotonic() - began < 20
    assert str(caught.value).startswith(f"Rank 0 could not join the world of 2 at 127.0.0.1:{port} (torchrun, gloo): ")
    assert "Check that all 2 processes are started" in str(caught.value)
    assert not dist.is_initialized()


def test_a_collective_gives_up_in_time() -> None:
    over = multiprocessing.get_context("fork").Event()

    def body() -> float:
        state = PartialState(timeout=ONE_SECOND)
        began = monotonic()
        if state.is_main_process:
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                state.wait_for_everyone()
            over.set()
        else:
            over.wait(30)
        return monotonic() - began

    first, _ = run_forked(body, timeout=60)
    assert 0.5 < first < 20


def test_several_machines_need_an_address() -> None:
    with (
        patch_environment(rank="0", world_size="4", local_world_size="2"),
        pytest.raises(ConfigurationError, match="MASTER_ADDR and MASTER_PORT are not set, so ranks on several"),
    ):
        PartialState(cpu=True)


def test_nccl_on_the_cpu_is_refused() -> None:
    with (
        patch_environment(rank="0", world_size="2", accelerate_use_cpu="1"),
        pytest.raises(
            ConfigurationError, match=r"backend='nccl' does not work on the CPU. Use 'gloo', or leave it out"
        ),
    ):
        PartialState(backend="nccl")


def test_objects_hold_tensors_of_all_types() -> None:
    types = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool]

    def tensors_of(rank: int) -> list[torch.Tensor]:
        values = [
            torch.tensor(rank),
            torch.zeros(0, 2),
            torch.tensor([[1, 2, rank], [3, 4, 5]]).t(),
            torch.arange(9)[:1],
        ]
        return [value.to(dtype) for value in values for dtype in types]

    def body() -> None:
        group = PartialState(cpu=True).group
        expected = [tensors_of(rank) for rank in range(2)]
        own, other = expected[group.rank], expected[1 - group.rank]
        for found, wanted in (
            (group.all_gather_objects(own)[1 - group.rank], other),
            (group.broadcast_objects([own], source=1)[0], expected[1]),
            (group.scatter_objects(expected if group.rank == 0 else None), own),
        ):
            assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in wanted]
            assert [tensor.double().tolist() for tensor in found] == [tensor.double().tolist() for tensor in wanted]

    run_world(body, num_processes=2)
