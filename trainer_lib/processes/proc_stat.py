"""What Linux says of a process in `/proc/PID/stat`: when it began, and whether it is ending."""

from pathlib import Path

_PF_EXITING = 4  # from Linux's linux/sched.h
# Places of fields, counted after the name.
_FLAGS, _BEGAN = 6, 19


def began_at(pid: int | str) -> str:
    """Return the clock ticks from the start of the machine to that of a process.

    Raises:
        OSError: If there is no such process, or the system is not Linux.
    """
    return _fields(pid)[_BEGAN]


def is_exiting(pid: int | None) -> bool:
    """Return whether the kernel is ending a process, whose parent has not been told yet; `False` where it does not say.

    Args:
        pid: The process.
    """
    try:
        return bool(int(_fields(pid)[_FLAGS]) & _PF_EXITING)
    except OSError:
        return False


def _fields(pid: int | str | None) -> list[str]:
    # A name may hold spaces, brackets, and the first bytes of a character.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
