"""The place of a process and its device."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.worlds import run_world
from trainer_lib import ConfigurationError, DistributedType
from trainer_lib.foundation.environment import patch_environment
from trainer_lib.process_group import LoneProcess
from trainer_lib.state import PartialState, is_initialized


def test_alone() -> None:
    assert not is_initialized()
    state = PartialState(cpu=True)
    assert is_initialized()
    assert state.initialized
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert (state.distributed_type, state.backend, state.device) == (DistributedType.NO, None, torch.device("cpu"))
    assert not state.debug
    assert not state.fork_launched
    assert not dist.is_initialized()
    assert "Num processes: 1\nProcess index: 0\n" in repr(state)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_in_a_world(size: int) -> None:
    def body() -> list[object]:
        state = PartialState()
        assert repr(state).startswith("Distributed environment: MULTI_CPU  Backend: gloo\n")
        return [state.num_processes, state.process_index, state.distributed_type, state.backend, state.fork_launched]

    assert run_world(body, num_processes=size, timeout=60) == [
        [size, rank, DistributedType.MULTI_CPU, "gloo", True] for rank in range(size)
    ]


def test_all_instances_are_one() -> None:
    state = PartialState(cpu=True)
    assert PartialState().__dict__ is state.__dict__
    PartialState._reset_state()
    assert not is_initialized()


def test_the_launcher_may_name_a_device() -> None:
    with patch_environment(accelerate_torch_device="meta"):
        assert PartialState().device == torch.device("meta")
    PartialState._reset_state()
    with (
        patch_environment(accelerate_torch_device="toaster"),
        pytest.raises(ConfigurationError, match="ACCELERATE_TORCH_DEVICE='toaster' is not a device"),
    ):
        PartialState()
    assert not is_initialized(), "a state that failed leaves nothing behind"
    with patch_environment(accelerate_torch_device="meta", accelerate_use_cpu="1"):
        assert PartialState().device == torch.device("cpu")


def test_debug_mode_is_read_once() -> None:
    with patch_environment(accelerate_debug_mode="1"):
        assert PartialState(cpu=True).debug
    assert PartialState().debug


def test_cpu_too_late_is_an_error() -> None:
    PartialState._shared_state.update(PartialState(cpu=True).__dict__, device=torch.device("cuda", 0))
    with pytest.raises(ConfigurationError, match="cpu=True came too late: this rank already uses cuda:0"):
        PartialState(cpu=True)


def test_options_too_late_are_an_error_where_they_matter() -> None:
    PartialState(cpu=True)
    PartialState(timeout=timedelta(seconds=9))  # alone there is nobody to wait for

    def body() -> None:
        PartialState(timeout=timedelta(seconds=30))
        PartialState()
        PartialState(timeout=timedelta(seconds=30))
        with pytest.raises(ConfigurationError, match=r"timeout=datetime.timedelta\(seconds=9\) came too late"):
            PartialState(timeout=timedelta(seconds=9))

    run_world(body, timeout=60)


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"Unknown argument 'time_out'. Known: .* Did you mean 'timeout'?"):
        PartialState(time_out=3)


def test_leaving_the_world() -> None:
    def body() -> None:
        state = PartialState()
        subgroup = dist.new_group([0, 1])
        state.destroy_process_group(subgroup)
        assert dist.is_initialized()
        state.destroy_process_group()
        assert not dist.is_initialized()
        assert isinstance(PartialState().group, LoneProcess)
        state.destroy_process_group()  # twice does no harm

    run_world(body, timeout=60)


def test_the_device_is_the_current_one() -> None:
    state = PartialState(cpu=True)
    state.set_device()
    assert state.default_device.type in ("cpu", str(torch.accelerator.current_accelerator()))
