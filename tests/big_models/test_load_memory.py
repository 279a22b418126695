"""Loading takes at most the largest file of memory beside the model, mapped weights none; in processes of their own."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer_lib import Accelerator, init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from trainer_lib.launchers import run_forked

MB = 1 << 20
_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 192 MB of weights in several files."""
    folder = tmp_path_factory.mktemp("saved")
    Accelerator(cpu=True).save_model(layers(), str(folder), max_shard_size="32MB")
    return folder


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(24)))


def memory(name: str) -> int:
    """Return a line of the memory of this process, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def peak_of_loading(how: str, folder: Path) -> int:
    """Return the peak in kB beyond what this process had, which was just forked: its peak begins with what it has."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 65536)  # what is freed goes back at once: the peak is what is in use
    with init_empty_weights():
        model = layers()
    before = memory("VmRSS")
    if how == "in_model":
        load_checkpoint_in_model(model, folder)
    elif how == "mapped":
        load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
    else:
        load_checkpoint_in_model(model, folder, dtype=torch.bfloat16)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return memory("VmHWM") - before


ROOT = Path(__file__).parents[2]
WAYS = {"in_model": 192, "mapped": 0, "in_bfloat16": 96}  # how the weights are loaded, and the MB they then take


@pytest.fixture(scope="module")
def peaks(saved: Path) -> dict[str, int]:
    """Return the peak of each way, forked from a new interpreter: the heap of a worker may have free room for all."""
    command = [sys.executable, "-m", "tests.big_models.test_load_memory", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "size"), WAYS.items())
def test_the_peak_is_the_model_and_one_file(how: str, size: int, saved: Path, peaks: dict[str, int]) -> None:
    files = [path.stat().st_size for path in saved.glob("*.safetensors")]
    assert len(files) > 5
    peak = peaks[how] / 1024
    print(f"{how}: weights {size} MB, largest file {max(files) / MB:.0f} MB, peak {peak:.0f} MB")
    assert size * 0.9 <= peak < size + max(files) / MB + 16


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(json.dumps({how: run_forked(peak_of_loading, (how, folder), num_processes=1, timeout=60)[0] for how in WAYS}))
