"""What NVIDIA's driver says of the GPUs, without initializing CUDA."""

import subprocess

from packaging.version import parse

from trainer_lib.foundation.errors import UnsupportedError

# GPUs without peer-to-peer copies and InfiniBand below this version of the driver.
_WITHOUT_PEERS = "RTX 40"
_DRIVER_WITH_PEERS = "550.40.07"


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the GPUs of this machine, and how many there are.

    Raises:
        UnsupportedError: If NVIDIA's driver is not installed.
    """
    names = _query("count,name")
    return [line.partition(",")[2].strip() for line in names], len(names)


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver.

    Raises:
        UnsupportedError: If it is not installed.
    """
    return _query("driver_version")[0].strip()


def check_cuda_p2p_ib_support() -> bool:
    """Whether the GPUs of this machine can send to each other directly; True where there is no way to tell."""
    try:
        names, count = get_gpu_info()
        if count < 2 or not any(_WITHOUT_PEERS in name for name in names):
            return True
        return parse(get_driver_version()) >= parse(_DRIVER_WITH_PEERS)
    except UnsupportedError:
        return True


def check_cuda_fp8_capability() -> bool:
    """Whether this GPU computes in fp8 (Ada, Hopper and later)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def _query(fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnsupportedError(f"nvidia-smi cannot be asked for the GPUs of this machine: {error}") from error
    return done.stdout.strip().splitlines()
