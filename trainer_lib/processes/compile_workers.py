"""The worker processes of torch's compiler leave the process group of training, as data workers do.

`timeout`, a launcher and `kill -- -GROUP` send SIGTERM to all processes of a group. Training ends after its step, for
which it may have to compile. Torch would wait for compile workers that are gone without an end: it holds the other end
of their pipe open itself.
"""

import subprocess
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace


@cache
def keep_compile_workers() -> None:
    """Let a signal for the process group leave compile workers alone; they end with the process that needs them."""
    pool = import_module("torch._inductor.compile_worker.subproc_pool")
    in_own_group = partial(subprocess.Popen, process_group=0)
    vars(pool)["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": in_own_group})
