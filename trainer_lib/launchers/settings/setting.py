"""One setting of a launch: its option, its key in a configuration file, its variable, and the values it takes."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from trainer_lib.foundation.environment import str_to_bool
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.public_names.missing_features import MissingFeature
from trainer_lib.options.precision_options import PRECISIONS, check_precision


@frozen_dataclass
class Kind:
    """The values that a setting takes.

    Args:
        allowed: What is allowed, in words.
        parse: Turns a text into a value, or raises a ValueError.
        metavar: How help names the value; empty for a switch.
        choices: The names, if only some are allowed.
    """

    allowed: str
    parse: Callable[[str], Any]
    metavar: str = "TEXT"
    choices: Sequence[str] = ()

    def check(self, name: str, text: str) -> Any:
        """Return the value of a text.

        Args:
            name: The setting, as the user knows it.
            text: What the user wrote.

        Raises:
            ConfigurationError: If the text is not allowed.
        """
        try:
            return self.parse(text)
        except ConfigurationError:
            raise  # it says what is known
        except (ValueError, OverflowError):
            near = did_you_mean(text, self.choices)
            raise ConfigurationError(f"{name} must be {self.allowed} (got {text!r}).{near}") from None


@frozen_dataclass(kw_only=True)
class Setting:
    """A setting of a launch.

    Args:
        name: The name of the option, without dashes.
        group: The topic of `--help` that shows it.
        kind: The values that it takes.
        help: What it does, in a line.
        default: Its value if nobody sets it; `None` if it is detected or left out.
        section: The part of a configuration file that holds it; empty for the top level.
        key: Its key there, if that is not `name`; `None` if files do not hold it.
        variable: The environment variable in which the script gets it.
        short: Its short form.
        aliases: Other names of the option, such as torchrun's.
        old_keys: Keys of older configuration files.
        missing: The feature of Accelerate's that it needs, if this version does not have it.
    """

    name: str
    group: str
    kind: Kind
    help: str
    default: Any = None
    section: str = ""
    key: str | None = ""
    variable: str = ""
    short: str = ""
    aliases: tuple[str, ...] = ()
    old_keys: tuple[str, ...] = ()
    missing: MissingFeature | None = None

    @property
    def file_key(self) -> str | None:
        """Its key in a configuration file."""
        return self.name if self.key == "" else self.key

    @property
    def is_switch(self) -> bool:
        """Whether the option takes no value."""
        return not self.kind.metavar


def choice(*names: str) -> Kind:
    """Return the kind of a setting that takes one of some names, in upper or lower case."""
    by_lower_case = {name.lower(): name for name in names}

    def parse(text: str) -> str:
        if text.lower() not in by_lower_case:
            raise ValueError
        return by_lower_case[text.lower()]

    return Kind(f"one of {', '.join(names)}", parse, "NAME", names)


def whole_choice(*numbers: int) -> Kind:
    """Return the kind of a setting that takes one of some whole numbers."""

    def parse(text: str) -> int:
        if int(text) not in numbers:
            raise ValueError
        return int(text)

    names = [str(number) for number in numbers]
    return Kind(f"one of {', '.join(names)}", parse, "N", names)


def _first(*parsers: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the first of some parsers that takes a text."""

    def parse(text: str) -> Any:
        for parser in parsers[:-1]:
            with contextlib.suppress(ValueError):
                return parser(text)
        return parsers[-1](text)

    return parse


def _auto(text: str) -> str:
    if text != "auto":
        raise ValueError
    return text


def _machine_word(text: str) -> str:
    if text not in ("auto", "gpu", "cpu"):
        raise ValueError
    return text


def _yes_or_no(text: str) -> bool:
    try:
        return bool(str_to_bool(text))
    except ConfigurationError:
        raise ValueError from None


def _whole(at_least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = float(text)
        if not text.isascii() or not number.is_integer() or number < at_least:
            raise ValueError
        return int(number)

    return parse


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


def _three(text: str) -> list[bool]:
    values = [_yes_or_no(part.strip()) for part in text.split(",")]
    if len(values) != 3:
        raise ValueError
    return values


def _filled(text: str) -> str:
    if not text:
        raise ValueError
    return text


_YES_OR_NO = "yes or no"
SWITCH = Kind(_YES_OR_NO, _yes_or_no, "")
YES_OR_NO = Kind(_YES_OR_NO, _yes_or_no, "yes|no")
THREE_YES_OR_NO = Kind("three of yes or no, as no,no,yes", _three, "yes|no,…")
COUNT = Kind("a whole number of at least 1", _whole(at_least=1), "N")
COUNT_OR_ZERO = Kind("a whole number of at least 0", _whole(at_least=0), "N")
SECONDS = Kind("a number of at least 0", _number, "SECONDS")
NUMBER = Kind("a number of at least 0", _number, "X")
TEXT = Kind("a text", str)
FILLED = Kind("a text that is not empty", _filled)
PER_MACHINE = Kind("a whole number of at least 1, auto, gpu or cpu", _first(_whole(at_least=1), _machine_word), "N")
YES_NO_OR_NAME = Kind("yes, no or a name that is not empty", _first(_yes_or_no, _filled), "yes|no")
NUMBER_OR_AUTO = Kind("a number of at least 0, or auto", _first(_number, _auto), "X")
PRECISION = Kind("a precision", check_precision, "NAME", PRECISIONS)
