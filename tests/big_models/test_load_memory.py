"""Loading takes at most the largest file of memory beside the model, mapped weights none; in fresh processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from trainer_lib import Accelerator

MB = 1 << 20
SCRIPT = """
import sys
import torch
from torch import nn
from trainer_lib import init_empty_weights, load_checkpoint_in_model, load_checkpoint_and_dispatch
import torch.distributed.tensor

how, folder = sys.argv[1:]
with init_empty_weights():
    model = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(24)))  # 192 MB

def memory(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

# VmHWM is the peak of this process; ru_maxrss would begin with that of the process that started it.
before = memory("VmRSS")
if how == "in_model":
    load_checkpoint_in_model(model, folder)
elif how == "mapped":
    load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
else:
    load_checkpoint_in_model(model, folder, dtype=torch.bfloat16)
assert not any(parameter.is_meta for parameter in model.parameters())
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(("how", "size"), [("in_model", 192), ("mapped", 0), ("in_bfloat16", 96)])
def test_the_peak_is_the_model_and_one_file(how: str, size: int, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(24)))
    Accelerator(cpu=True).save_model(model, str(tmp_path), max_shard_size="32MB")
    shards = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(shards) > 5
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", how, str(tmp_path)],
        cwd=tmp_path,
        # What is freed goes back at once, so that the peak is what is in use.
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout) / 1024
    print(f"{how}: weights {size} MB, largest file {max(shards) / MB:.0f} MB, peak {peak:.0f} MB")
    assert size * 0.9 <= peak < size + max(shards) / MB + 16
