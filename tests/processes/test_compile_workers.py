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
import sys
import time

from torch import nn

from trainer_lib.modules.compilation import compile_regions

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)  # as training does, which ends after its step
    compile_regions(nn.Linear(2, 2), backend=sys.argv[1])
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    pool = SubprocPool(1)
    worker = pool.submit(os.getpid).result()
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + 60
    answer = pool.submit(os.getpid)
    while not answer.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    print(worker, answer.done() and answer.result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups")
def test_compile_workers_outlive_a_signal_for_the_group_and_end_with_their_process(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(file), "inductor"],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        timeout=200,
        check=False,
    )  # returns once the workers, which have the same output, have ended too
    worker, answer = done.stdout.split()
    assert answer == worker
    assert done.returncode == -signal.SIGKILL
