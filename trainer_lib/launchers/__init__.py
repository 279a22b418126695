"""This package is starting one function or script on several processes: from a notebook, a test, the command line."""

from typing import TYPE_CHECKING

from trainer_lib.foundation.lazy_imports import lazy_names

if TYPE_CHECKING:
    from trainer_lib.launchers.debug import debug_launcher as debug_launcher
    from trainer_lib.launchers.fork import run_forked as run_forked
    from trainer_lib.launchers.notebook_launcher import notebook_launcher as notebook_launcher
    from trainer_lib.launchers.process_failures import ProcessFailedError as ProcessFailedError

# Lazily, so that a command can tell of a wrong option before torch is imported.
_HOMES = {
    "ProcessFailedError": "trainer_lib.launchers.process_failures",
    "debug_launcher": "trainer_lib.launchers.debug",
    "notebook_launcher": "trainer_lib.launchers.notebook_launcher",
    "run_forked": "trainer_lib.launchers.fork",
}
__all__ = ["ProcessFailedError", "debug_launcher", "notebook_launcher", "run_forked"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
