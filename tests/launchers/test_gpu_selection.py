"""The GPUs that a launch takes, and NCCL's settings for GPUs without peer-to-peer copies."""

import pytest

from trainer_lib.launchers import gpu_selection
from trainer_lib.launchers.gpu_selection import free_gpus, peer_settings
from trainer_lib.processes.nvidia_driver import Gpu


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the free memory of four GPUs of 100 bytes, which tests change."""
    free = [97, 5, 96, 98]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        gpu_selection, "read_gpus", lambda: ("1", [Gpu("GPU", 100, each, f"GPU-{at}") for at, each in enumerate(free)])
    )
    return free


@pytest.mark.parametrize(
    ("free", "num_processes", "chosen"),
    [
        ([97, 5, 96, 98], 1, None),  # the first one is as free as any
        ([97, 5, 96, 98], 2, "GPU-0,GPU-2"),
        ([97, 5, 96, 98], 3, "GPU-0,GPU-2,GPU-3"),
        ([97, 5, 96, 98], 4, None),
        ([5, 50, 20, 80], 1, "GPU-3"),
        ([5, 50, 20, 80], 3, "GPU-1,GPU-2,GPU-3"),
        ([5, 50, 20], 2, None),  # torch sees others than the driver
    ],
)
def test_the_freest_gpus_are_chosen(gpus: list[int], free: list[int], num_processes: int, chosen: str | None) -> None:
    gpus[:] = free
    assert free_gpus(num_processes, 4) == ({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen})


def test_a_choice_of_the_user_stays(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_gpus(2, 4) != {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert free_gpus(2, 4) == {}


def test_nccl_does_not_copy_directly_where_the_driver_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_selection, "check_cuda_p2p_ib_support", lambda: False)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    assert peer_settings(2, 2) == {"NCCL_P2P_DISABLE": "1"}
    assert peer_settings(1, 2) == peer_settings(2, 0) == {}
    monkeypatch.setattr(gpu_selection, "check_cuda_p2p_ib_support", lambda: True)
    assert peer_settings(2, 2) == {}
