"""The GPUs of a launch that needs fewer than there are, and NCCL's settings for GPUs without peer-to-peer copies."""

from trainer_lib.foundation import environment
from trainer_lib.processes.gpu_info import check_cuda_p2p_ib_support
from trainer_lib.processes.nvidia_driver import read_gpus

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PEERS = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
_STEP = 0.1  # of a GPU's memory: GPUs within the same tenth are equally free


def free_gpus(num_processes: int, accelerators: int) -> dict[str, str]:
    """Return the variable that restricts processes to the GPUs with the most free memory.

    It is empty if all GPUs are needed, if the first ones are as free as the others, or if the user has chosen GPUs.

    Args:
        num_processes: How many processes this machine starts.
        accelerators: How many accelerators they may use.
    """
    if num_processes >= accelerators or environment.variable(_VISIBLE) is not None:
        return {}
    _, gpus = read_gpus()
    if len(gpus) != accelerators:  # other accelerators, or parts of GPUs
        return {}
    used = [int((1 - gpu.free / gpu.memory) / _STEP) for gpu in gpus]
    chosen = sorted(sorted(range(accelerators), key=lambda index: (used[index], index))[:num_processes])
    # By their ids, since the driver and CUDA may number them in different orders.
    return {} if chosen == list(range(num_processes)) else {_VISIBLE: ",".join(gpus[index].uuid for index in chosen)}


def peer_settings(num_processes: int, accelerators: int) -> dict[str, str]:
    """Return the variables that keep NCCL from direct copies between GPUs whose driver does not support them."""
    if min(num_processes, accelerators) < 2 or check_cuda_p2p_ib_support():
        return {}
    return {name: "1" for name in _PEERS if environment.variable(name) is None}
