"""A lease on a run's folder, with a heartbeat, so that only one program writes to the run.

A lease is a file such as `lease-00000007.json`. Its number is one above that of the previous lease. The file is created
only if it does not exist (on object stores by a conditional write), so only one of two programs gets the lease. A
program takes over the lease of a dead one.
"""

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer_lib.filesystem.atomic_files import make_folder, sync
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.filesystem.strict_json import read_json
from trainer_lib.foundation.errors import RunInUseError, UnreachableError
from trainer_lib.logging import get_logger
from trainer_lib.runs.run_environment import describe_process, is_alive
from trainer_lib.runs.run_folder import RUN_FILE

_logger = get_logger(__name__)

HEARTBEAT = 20.0  # seconds between two heartbeats
STALE_AFTER = 120.0  # seconds without a heartbeat, for processes on other machines

_LEASES = "lease-*.json"
_held: set[str] = set()  # tokens of this process's leases


class Lease:
    """The right of one program to write into the folder of a run.

    Args:
        folder: The folder; `None` for a run that writes nothing and needs no lease.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Lease(Path(folder)) as lease:
        ...     lease.acquire()
        ...     lease.loss() is None
        True
    """

    def __init__(self, folder: AnyPath | None) -> None:
        self.folder = folder
        self._file: AnyPath | None = None
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_warned = False

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def is_held(self) -> bool:
        """Whether the lease is acquired and not released."""
        return self._file is not None

    def acquire(self) -> None:
        """Acquire the lease, taking over that of a dead program, and renew it until `release`.

        If the storage takes no file, such as a full disk, it only warns: training matters more.

        Raises:
            RunInUseError: If another program writes into the folder.
        """
        if self.folder is None or self.is_held:
            return
        try:
            self._file = self._create_lease(self.folder)
        except (OSError, UnreachableError) as error:
            if not self._is_warned:
                _logger.warning(
                    "The run %s could not be leased, so a second program can write to it at the same time: %s",
                    self.folder,
                    error,
                )
            self._is_warned = True
            return
        _held.add(self._token)
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name=f"lease of {self.folder.name}", daemon=True)
        self._thread.start()

    def loss(self) -> str | None:
        """Return why the lease is lost, such as to a program that took over while this one was paused; or `None`.

        A folder that was deleted with all that was in it has no other program: it is created again, with a warning.
        """
        if self.folder is None or self._file is None or self._is_ours(self._file):
            return None
        try:
            if not (self.folder / RUN_FILE).exists():
                self._file = self._create_lease(self.folder)
                _logger.warning("The folder %s was deleted while the run trains. It is created again.", self.folder)
                return None
        except (OSError, UnreachableError):  # unknown: assume that it is held
            return None
        except RunInUseError as error:
            return str(error)
        return (
            f"The lease of the run {self.folder} was taken over by another program, because this one sent no heartbeat "
            f"for {STALE_AFTER:g} seconds or the lease file was deleted."
        )

    def release(self) -> None:
        """Release the lease, if it is held."""
        if self._file is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join(HEARTBEAT)
        is_lost = not self._is_ours(self._file)
        file, self._file, self._thread = self._file, None, None
        _held.discard(self._token)
        try:
            if not is_lost:
                file.unlink(missing_ok=True)
        except (OSError, UnreachableError) as error:
            _logger.warning("The lease %s could not be deleted: %s", file, error)

    def _is_ours(self, file: AnyPath) -> bool:
        """Whether a lease is this one's, as far as is known."""
        try:
            holder = _read(file)
        except UnreachableError:
            return True
        return holder is not None and holder.get("token") == self._token

    def _create_lease(self, folder: AnyPath) -> AnyPath:
        if isinstance(folder, Path):
            make_folder(folder)
        content = json.dumps({**_this_process(), "token": self._token}, indent=1).encode()
        while True:
            stale = list(_leases(folder))
            for file in stale:
                _wait_until_free(file)
            file = folder / f"lease-{1 + max((_number(path) for path in stale), default=0):08d}.json"
            if not _create(file, content, self._token):
                continue  # another program was faster: check its lease
            rivals = [path for path in _leases(folder) if path not in (*stale, file)]
            if rivals:
                file.unlink(missing_ok=True)
                raise _in_use(rivals[0], _read(rivals[0]) or {})
            killed = (path for path in folder.glob(f".{_LEASES}.*") if _is_free(path))  # while they created a lease
            for path in (*stale, *killed):
                path.unlink(missing_ok=True)
            return file

    def _beat(self) -> None:
        """Renew the lease until it is released, unless it is lost."""
        while not self._stop.wait(HEARTBEAT):
            file = self._file
            try:
                if file is None or not self._is_ours(file):
                    continue
                if isinstance(file, Path):
                    os.utime(file)
                else:
                    file.write_bytes(file.read_bytes())
            except (OSError, UnreachableError) as error:
                _logger.info("The heartbeat of the lease %s failed: %s", file, error)


def is_leased(folder: AnyPath) -> bool:
    """Whether a program that may be alive holds the lease of a run's folder."""
    return any(_is_free(file) is not True for file in _leases(folder))


def _leases(folder: AnyPath) -> Iterator[AnyPath]:
    return iter(sorted((path for path in folder.glob(_LEASES) if _number(path) >= 0), key=_number))


def _number(file: AnyPath) -> int:
    digits = file.name.removeprefix("lease-").removesuffix(".json")
    return int(digits) if digits.isdigit() else -1


def _read(file: AnyPath) -> dict[str, Any] | None:
    """Return the contents of a lease; `None` if there is no file, an empty dict if it cannot be read."""
    try:
        holder = read_json(file.read_bytes()) if file.is_file() else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return holder if holder is None or isinstance(holder, dict) else {}


def _is_free(file: AnyPath) -> bool | None:
    """Whether the holder of a lease is dead; `None` if unknown, such as on another machine."""
    holder = _read(file)
    if holder is None:
        return True
    here = _this_process()
    if any(holder.get(name) != here[name] for name in ("host", "boot", "namespace")):
        return None
    if (holder.get("pid"), holder.get("began")) == (here["pid"], here["began"]):
        return holder.get("token") not in _held
    alive = is_alive(holder)
    return None if alive is None else not alive


def _wait_until_free(file: AnyPath) -> None:
    """Return when a lease is free: immediately if its process is dead, otherwise after a time without heartbeat.

    Raises:
        RunInUseError: If its holder is alive.
    """
    is_free = _is_free(file)
    if is_free is False:
        raise _in_use(file, _read(file) or {})
    if is_free:
        return
    beat, age = _age(file)
    if age < STALE_AFTER:
        _logger.warning("Waiting up to %.0f s for a heartbeat of the program that holds %s.", STALE_AFTER - age, file)
    ends = time.monotonic() + STALE_AFTER - age
    while time.monotonic() < ends:
        time.sleep(min(1.0, max(ends - time.monotonic(), 0.0)))
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_mtime != beat:
                raise _in_use(file, _read(file) or {})
            continue
        return  # released


def _age(file: AnyPath) -> tuple[float, float]:
    """Return when a lease was last renewed, and its age by the storage's own clock."""
    probe = file.with_name(f".clock-{secrets.token_hex(4)}")
    try:
        beat = file.stat().st_mtime
        probe.write_bytes(b"")
        now = probe.stat().st_mtime
    except FileNotFoundError:
        return 0.0, STALE_AFTER
    finally:
        probe.unlink(missing_ok=True)
    return beat, max(now - beat, 0.0) if beat and now else 0.0


def _create(file: AnyPath, content: bytes, token: str) -> bool:
    """Create a file with its content atomically, unless it exists; return whether this call created it."""
    if not isinstance(file, Path):
        if file.create(content):
            return True
        holder = _read(file)  # a retry after a lost answer finds our own file
        return holder is not None and holder.get("token") == token
    partial = file.with_name(f".{file.name}.{token}")
    try:
        partial.write_bytes(content)
        sync(partial)
        os.link(partial, file)
    except FileExistsError:
        return False
    finally:
        partial.unlink(missing_ok=True)
    return True


def _in_use(file: AnyPath, holder: dict[str, Any]) -> RunInUseError:
    holder_name = f"process {holder['pid']} on {holder.get('host')}" if "pid" in holder else "an unknown process"
    return RunInUseError(
        f"The run {file.parent} is in use: another program, {holder_name}, trains it. Wait for its "
        f'end or stop it, or give resume="never" to start a new run. If no such program runs, delete {file}.'
    )


def _this_process() -> dict[str, Any]:
    return {**describe_process(), "namespace": _namespace()}


def _namespace() -> str | None:
    """Return the process id namespace (the container)."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None
