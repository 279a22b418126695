"""The choice of a device; the accelerators are pretended ones."""

import pytest
import torch

from trainer_lib import WorldError
from trainer_lib.foundation.launcher_variables import World
from trainer_lib.processes import numa_affinity
from trainer_lib.state.devices import choose_device, use_device


def _world(launcher: str) -> World:
    return World(rank=3, size=4, local_rank=1, local_size=2, launcher=launcher)


def _devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_each_process_takes_the_device_of_its_place(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    _devices(monkeypatch, 2)
    assert choose_device(False, _world(launcher)) == torch.device("cuda", 1)


def test_a_task_of_srun_takes_the_one_device_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    _devices(monkeypatch, 1)
    assert choose_device(False, _world("srun")) == torch.device("cuda", 0)


def test_a_rank_of_mpirun_takes_the_one_device_that_a_variable_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _devices(monkeypatch, 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(WorldError, match="Rank 3 needs cuda device 1, and this machine has 1"):
        choose_device(False, _world("mpirun"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert choose_device(False, _world("mpirun")) == torch.device("cuda", 0)
    with pytest.raises(WorldError, match="Rank 3 needs cuda device 1, and this machine has 1"):
        choose_device(False, _world("torchrun"))


def test_too_few_devices_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _devices(monkeypatch, 1)
    with pytest.raises(WorldError, match="Rank 3 needs cuda device 1, and this machine has 1"):
        choose_device(False, _world("torchrun"))


def test_the_cores_near_the_device_are_used_if_the_launcher_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(numa_affinity, "set_numa_affinity", bound.append)
    use_device(torch.device("cuda", 1))
    assert bound == []
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    use_device(torch.device("cuda", 1))
    use_device(torch.device("cpu"))
    assert bound == [1]


def test_a_device_that_is_requested_without_an_index_is_that_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _devices(monkeypatch, 2)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")
    assert choose_device(False, _world("torchrun")) == torch.device("cuda", 1)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:0")
    assert choose_device(False, _world("torchrun")) == torch.device("cuda", 0)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    assert choose_device(False, _world("torchrun")) == torch.device("meta")
