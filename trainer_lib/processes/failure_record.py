"""This file is the record that a process leaves of how it failed, for the launcher that started it."""

import contextlib
import json
import time

from trainer_lib.foundation.environment import error_file


def record_failure(kind: str, message: str, stack: str | None = None) -> None:
    """Write down why this process ends, unless that is done: the first reason is the one that counts.

    The layout is that of torch's `record`; it is read by the launcher, and by torchrun above it if there is one.

    Args:
        kind: The name of the error.
        message: What it says.
        stack: Its traceback; by default the message.
    """
    path = error_file()
    if path is None or path.exists():
        return
    details = {"py_callstack": stack or f"{kind}: {message}", "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"message": {"message": f"{kind}: {message}", "extraInfo": details}}))
