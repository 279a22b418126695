"""What the machine is: its GPUs, its cores, its kernel."""

import os
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_lib import UnsupportedError
from trainer_lib.foundation.environment import patch_environment
from trainer_lib.launchers.device_count import get_current_device_type
from trainer_lib.memory import get_max_memory
from trainer_lib.processes import gpu_info, numa_affinity
from trainer_lib.processes.gpu_info import check_cuda_p2p_ib_support, get_driver_version, get_gpu_info
from trainer_lib.processes.kernel import check_os_kernel
from trainer_lib.processes.numa_affinity import (
    CPUInformation,
    get_cpu_distributed_information,
    override_numa_affinity,
)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Answer questions to nvidia-smi."""
    answers = {"count,name": "2, NVIDIA GeForce RTX 4090\n2, NVIDIA A100, 80GB\n", "driver_version": "535.1\n535.1\n"}

    def run(command: list[str], **options: Any) -> Any:
        return SimpleNamespace(stdout=answers[command[1].removeprefix("--query-gpu=")])

    monkeypatch.setattr(gpu_info.subprocess, "run", run)
    return answers


def test_gpus_and_the_driver_are_named(driver: dict[str, str]) -> None:
    assert get_gpu_info() == (["NVIDIA GeForce RTX 4090", "NVIDIA A100, 80GB"], 2)
    assert get_driver_version() == "535.1"


@pytest.mark.parametrize(
    ("gpus", "version", "supported"),
    [
        ("2, NVIDIA GeForce RTX 4090\n2, NVIDIA GeForce RTX 4090", "535.1", False),
        ("2, NVIDIA GeForce RTX 4090\n2, NVIDIA GeForce RTX 4090", "550.40.07", True),
        ("1, NVIDIA GeForce RTX 4090", "535.1", True),
        ("2, NVIDIA A100\n2, NVIDIA A100", "535.1", True),
    ],
)
def test_gpus_that_cannot_send_to_each_other(driver: dict[str, str], gpus: str, version: str, supported: bool) -> None:
    driver.update({"count,name": gpus, "driver_version": version})
    assert check_cuda_p2p_ib_support() is supported


def test_without_a_driver_there_is_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **options: Any) -> Any:
        raise FileNotFoundError(2, "No such file", "nvidia-smi")

    monkeypatch.setattr(subprocess, "run", run)
    assert check_cuda_p2p_ib_support()
    with pytest.raises(UnsupportedError, match="nvidia-smi cannot be asked"):
        get_gpu_info()


def test_the_type_of_the_devices() -> None:
    expected = ("cuda", "MULTI_GPU") if torch.cuda.is_available() else ("cpu", "MULTI_CPU")
    assert get_current_device_type() == expected


def test_ranks_are_those_of_the_launcher() -> None:
    assert get_cpu_distributed_information() == CPUInformation()
    with patch_environment(rank=5, world_size=8, local_rank=1, local_world_size=4):
        assert get_cpu_distributed_information() == CPUInformation(5, 8, 1, 4)


def test_a_process_is_bound_to_the_cores_of_its_gpus_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bound: list[set[int]] = []
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    node = tmp_path / "0000:1b:00.0" / "numa_node"
    node.parent.mkdir()
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("0-2,8\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(numa_affinity, "_DEVICES", tmp_path)
    monkeypatch.setattr(numa_affinity, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound.append(cores))
    node.write_text("-1\n")  # one node for all
    override_numa_affinity(0)
    assert bound == []
    node.write_text("1\n")
    override_numa_affinity(0)
    assert bound == [{1, 2, 8}]


def test_an_old_kernel_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-13-amd64")
    check_os_kernel()
    monkeypatch.setattr(platform, "release", lambda: "5.4.0-1-generic")
    with pytest.warns(UserWarning, match=r"Linux 5.4.0-1-generic is older than 5.5.0"):
        check_os_kernel()


def test_memory_of_the_devices() -> None:
    assert get_max_memory({0: "10GB", "cpu": 5}) == {0: 10_000_000_000, "cpu": 5}
    assert get_max_memory({0: 0.9 * 11, "cpu": 5.0}) == {0: 9, "cpu": 5}  # transformers hands shares of the free memory
    memory = get_max_memory()
    assert list(memory) == [*range(torch.accelerator.device_count()), "cpu"]
    assert memory["cpu"] > 1 << 20
