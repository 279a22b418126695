"""This file is every error the library raises in its own words.

Each is also the built-in error a caller would expect, so `except ValueError` keeps working.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from trainer_lib.foundation.error_values import shown


class TrainerLibError(Exception):
    """The base of all errors of this library."""


class ConfigurationError(TrainerLibError, ValueError):
    """An argument, option or environment variable that is unknown, contradictory or out of range."""


class UnsupportedError(TrainerLibError, NotImplementedError):
    """Something asked for that this version or this machine cannot do."""


class PreparationError(TrainerLibError, ValueError):
    """An object that cannot be prepared: prepared already, or unrelated to what it is prepared with."""


class WorldError(TrainerLibError, RuntimeError):
    """A world of processes that does not form, or is not the one asked for."""


class DistributedOperationException(TrainerLibError, RuntimeError):  # noqa: N818
    """A collective whose inputs disagree between processes (the name Accelerate's users know)."""


class StateError(TrainerLibError, RuntimeError):
    """A state that does not fit the object it is loaded into."""


class CheckpointError(StateError):
    """A state on disk that is not there, not whole, of something else, or that could not be written."""


class DamagedError(CheckpointError):
    """A state on disk that is not as it was written: a file of it is missing, has other bytes, or cannot be read."""


class UnwritableError(CheckpointError):
    """A state that the disk does not take: it is full, read-only, failing or not there."""


class OccupiedError(UnwritableError, ConfigurationError):
    """A state that cannot be written to its folder because a plain file has that name."""


class UnsavedError(UnwritableError):
    """A run that trained to its end and whose last checkpoint could not be written, so that it is not finished.

    Attributes:
        result: The result of the run.
    """

    result: Any = None


class UnreachableError(CheckpointError):
    """A file on another machine that could not be read, listed or written, in several attempts."""


class RunInUseError(TrainerLibError, RuntimeError):
    """A run that another program trains, and writes into the folder of."""


class HubError(TrainerLibError, OSError):
    """The Hugging Face Hub, which could not be reached, or refused what it was asked for."""


class NonFiniteError(TrainerLibError, ArithmeticError):
    """A loss or gradients that are not finite, or a loss far beyond the usual, before they change a weight."""


class BadSampleError(TrainerLibError, RuntimeError):
    """More samples that cannot be read than a run may leave out."""


class SignatureError(TrainerLibError, TypeError):
    """A function that cannot be called with what it would be given."""


class UnknownMemberError(TrainerLibError, AttributeError):
    """A method or attribute that an object does not have."""


class NoExecutableBatchSizeError(TrainerLibError, RuntimeError):
    """No batch size fits into memory, not even 1."""


class MissingPackageError(TrainerLibError, ImportError):
    """An optional package that is needed here and not installed."""


def did_you_mean(given: object, known: Iterable[object]) -> str:
    """Return ` Did you mean 'x'?` for the known name nearest to `given`, or an empty string."""
    given = str(given) if len(str(given)) <= 100 else ""  # what is longer is no name
    names = [str(name) for name in known]
    in_small = {name.lower(): name for name in names}
    nearest = get_close_matches(given, names, n=1) or [
        in_small[name] for name in get_close_matches(given.lower(), list(in_small), n=1)
    ]
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def unknown(kind: str, given: object, known: Iterable[object]) -> str:
    """Say that `given` is not a known `kind`, what is, and what it may have been.

    Example:
        >>> unknown("precision", "bf61", ["no", "fp16", "bf16"])
        "Unknown precision 'bf61'. Known: bf16, fp16, no. Did you mean 'bf16'?"
    """
    names = sorted(str(name) for name in known)
    return f"Unknown {kind} {shown(given)}. Known: {', '.join(names)}.{did_you_mean(given, names)}"


def nearest(given: object, known: Iterable[object], count: int = 3) -> list[str]:
    """Return the known names that are most like `given`, the nearest first, however far they are.

    Example:
        >>> nearest("gradient_norm", ["seed", "max_grad_norm", "gradient_checkpointing"], 2)
        ['max_grad_norm', 'gradient_checkpointing']
    """
    return get_close_matches(str(given), [str(name) for name in known], n=count, cutoff=0.0)
