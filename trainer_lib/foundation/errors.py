"""The error classes of the library.

Each is also a subclass of the built-in error that you would expect, so `except ValueError` keeps working.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from trainer_lib.foundation.error_values import shown


class TrainerLibError(Exception):
    """The base of all errors of this library."""

    def _render_traceback_(self) -> Any:
        """Return the traceback as IPython shows it: the line that you wrote, without the library's frames."""
        from trainer_lib.foundation.notebook_tracebacks import hide_library_frames, notebook_shell

        hide_library_frames(self)
        shown_by = notebook_shell().InteractiveTB
        return shown_by.structured_traceback(type(self), self, self.__traceback__, tb_offset=1)


class ConfigurationError(TrainerLibError, ValueError):
    """An argument, option or environment variable that is unknown, contradictory or out of range."""


class UnsupportedError(TrainerLibError, NotImplementedError):
    """A request that this version or this machine does not support."""


class PreparationError(TrainerLibError, ValueError):
    """An object that cannot be prepared: it is prepared already, or unrelated to the objects prepared with it."""


class WorldError(TrainerLibError, RuntimeError):
    """A distributed world that cannot be formed, or is not the requested one."""


class DistributedOperationException(TrainerLibError, RuntimeError):  # noqa: N818
    """A collective whose inputs differ between ranks (the class name is Accelerate's)."""


class StateError(TrainerLibError, RuntimeError):
    """A state that does not fit the object it is loaded into."""


class CheckpointError(StateError):
    """A checkpoint that is missing, incomplete, of another format, or that could not be written."""


class OtherClassError(CheckpointError):
    """A checkpoint with the state of an object of another class.

    Args:
        message: The message.
        part: The name of the object in the checkpoint, such as "scheduler".
        saved: The class that was saved.
        present: The class that there is now.
    """

    def __init__(self, message: str, part: str, saved: str, present: str) -> None:
        super().__init__(message)
        self.part: str = part
        self.saved: str = saved
        self.present: str = present


class DamagedError(CheckpointError):
    """A damaged checkpoint: a file is missing, has other bytes, or cannot be read."""


class UnwritableError(CheckpointError):
    """A checkpoint that the disk cannot store: the disk is full, read-only, failing or missing."""


class OccupiedError(UnwritableError, ConfigurationError):
    """A checkpoint that cannot be written because a file has the name of its folder."""


class UnsavedError(UnwritableError):
    """A run that trained to its end, but is not finished because its last checkpoint could not be written.

    Attributes:
        result: The result of the run.
    """

    result: Any = None


class UnreachableError(CheckpointError):
    """A file behind a URL that could not be read, listed or written in several attempts."""


class RunInUseError(TrainerLibError, RuntimeError):
    """A run that another program is training."""


class HubError(TrainerLibError, OSError):
    """A request that the Hugging Face Hub refused, or that could not reach it."""


class NonFiniteError(TrainerLibError, ArithmeticError):
    """A loss or gradients with NaN or Inf, or a loss spike, detected before they change a weight."""


class BadSampleError(TrainerLibError, RuntimeError):
    """More unreadable samples than a run may skip."""


class SignatureError(TrainerLibError, TypeError):
    """A function that cannot be called with the arguments it would get."""


class UnknownMemberError(TrainerLibError, AttributeError):
    """A method or attribute that an object does not have."""


class NoExecutableBatchSizeError(TrainerLibError, RuntimeError):
    """No batch size fits into memory, not even a batch size of 1."""


class MissingPackageError(TrainerLibError, ImportError):
    """An optional package that is needed and not installed."""


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return ` Did you mean 'x'?` for the known name nearest to `name`, or an empty string."""
    name = str(name) if len(str(name)) <= 100 else ""  # a longer value is not a misspelt name
    names = [str(known_name) for known_name in known]
    by_lower_case = {known_name.lower(): known_name for known_name in names}
    nearest = get_close_matches(name, names, n=1) or [
        by_lower_case[match] for match in get_close_matches(name.lower(), list(by_lower_case), n=1)
    ]
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def unknown(kind: str, name: object, known: Iterable[object]) -> str:
    """Return the message that `name` is not a known `kind`, with the known names and the nearest one.

    Example:
        >>> unknown("precision", "bf61", ["no", "fp16", "bf16"])
        "Unknown precision 'bf61'. Known: bf16, fp16, no. Did you mean 'bf16'?"
    """
    names = sorted(str(known_name) for known_name in known)
    return f"Unknown {kind} {shown(name)}. Known: {', '.join(names)}.{did_you_mean(name, names)}"


def nearest(name: object, known: Iterable[object], count: int = 3) -> list[str]:
    """Return the known names that are most similar to `name`, the nearest first, without a lower limit.

    Example:
        >>> nearest("gradient_norm", ["seed", "max_grad_norm", "gradient_checkpointing"], 2)
        ['max_grad_norm', 'gradient_checkpointing']
    """
    return get_close_matches(str(name), [str(known_name) for known_name in known], n=count, cutoff=0.0)
