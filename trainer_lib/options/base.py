"""The base of options: comparison with the defaults, and checks of values."""

import copy
import inspect
import math
from collections.abc import Iterable
from enum import EnumMeta, StrEnum
from typing import Any, ClassVar, Self

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, SignatureError, unknown
from trainer_lib.foundation.light_dataclasses import LightDataclass
from trainer_lib.foundation.public_names.signatures import ConstructorSignature, unknown_keywords


class EnumWithContains(EnumMeta):
    """The class of enums for which `text in Enum` asks for the text of a member."""

    def __contains__(cls, item: object) -> bool:
        return item in cls.list()  # type: ignore[attr-defined]


class BaseEnum(StrEnum, metaclass=EnumWithContains):
    """An enum whose members equal their text: `DistributedType.NO == "NO"`, and `"NO" in DistributedType`."""

    @classmethod
    def list(cls) -> list[str]:
        """Return all texts."""
        return [str(member.value) for member in cls]

    @classmethod
    def read(cls, kind: str, value: Any) -> "BaseEnum":
        """Return the member for a text (case does not matter), or raise an error that lists the members."""
        for member in cls:
            if str(value).lower() == str(member.value).lower():
                return member
        raise ConfigurationError(unknown(kind, value, cls.list()))


class Options(LightDataclass):
    """A dataclass of options, which answers a name that it does not have with the nearest one."""

    __signature__: ClassVar[ConstructorSignature] = ConstructorSignature()

    # Runs before __init__, which would raise a TypeError for an unknown name and could not suggest a known one.
    def __new__(cls, *positional: Any, **named: Any) -> Self:
        """Check the names of the options."""
        del positional
        for name in unknown_keywords(cls.__init__, named):
            known = inspect.signature(cls).parameters
            raise SignatureError(unknown(f"option of {cls.__name__}", name, known))
        return super().__new__(cls)


class KwargsHandler(Options):
    """A dataclass of options that can list those that differ from the defaults."""

    def to_dict(self) -> dict[str, Any]:
        """Return all options by name."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, by name."""
        default = type(self)().to_dict()
        return {key: value for key, value in self.to_dict().items() if default[key] != value}


def check_choice(option: str, value: object, known: Iterable[object]) -> None:
    """Raise unless `value` is one of `known`."""
    known = list(known)
    if value not in known:
        raise ConfigurationError(unknown(option, value, known))


def check_count(option: str, value: object, at_least: int = 1) -> None:
    """Raise unless `value` is a whole number of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigurationError(f"{option} must be a whole number of at least {at_least}, got {shown(value)}.")


def check_positive(option: str, value: object) -> None:
    """Raise unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigurationError(f"{option} must be a finite number above 0, got {shown(value)}.")


def is_at_least_zero(value: object) -> bool:
    """Whether a value is a finite number of at least 0."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value < math.inf


def check_at_least_zero(option: str, value: object) -> None:
    """Raise unless `value` is a finite number of at least 0."""
    if not is_at_least_zero(value):
        raise ConfigurationError(f"{option} must be a finite number of at least 0, got {shown(value)}.")


def check_flag(option: str, value: object) -> None:
    """Raise unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{option} must be True or False, got {shown(value)}.")


def check_flags(**flags: object) -> None:
    """Raise unless all of these options are true or false."""
    for option, value in flags.items():
        check_flag(option, value)
