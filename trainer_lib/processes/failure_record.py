"""The record of a process's failure, for the launcher that started it."""

import contextlib
import json
import time

from trainer_lib.foundation.environment import error_file


def record_failure(kind: str, message: str) -> None:
    """Write why this process fails, unless a reason is already written: the first one counts.

    The layout is that of torch's `record`. The launcher reads it, and so does torchrun if it started the launcher.

    Args:
        kind: The name of the error.
        message: Its message.
    """
    path = error_file()
    if path is None or path.exists():
        return
    details = {"py_callstack": f"{kind}: {message}", "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"message": {"message": f"{kind}: {message}", "extraInfo": details}}))
