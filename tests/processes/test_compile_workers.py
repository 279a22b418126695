"""A signal for the process group leaves torch's compile workers alone, and they end with their process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import PYTHON_PATH

SCRIPT = """
import os
import signal

from torch import nn

from trainer_lib.modules.compilation import compile_regions

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)  # as training does, which ends after its step
    compile_regions(nn.Linear(2, 2), backend="inductor")
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    pool = SubprocPool(1)
    worker = pool.submit(os.getpid).result()
    os.killpg(0, signal.SIGTERM)
    print(worker, pool.submit(os.getpid).result(60), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.launch
def test_compile_workers_outlive_a_signal_for_the_group_and_end_with_their_process(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(file)],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        timeout=200,
        check=False,
    )  # returns once the workers, which have the same output, have ended too
    assert done.returncode == -signal.SIGKILL
    worker, answer = done.stdout.split()
    assert answer == worker
