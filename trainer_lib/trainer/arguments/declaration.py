"""`setting`: declares an argument on its field, with default, sentence, check, section and policy for resume."""

import dataclasses
import functools
import inspect
import textwrap
from argparse import Action
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, cast

from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.trainer.arguments.type_hints import field_types, members
from trainer_lib.trainer.arguments.value_checks import Check, check_for

T = TypeVar("T")


class OnResume(Enum):
    """What happens to an argument whose value changed when a run is resumed."""

    NEW = "the new value counts"
    KEPT = "the checkpoint's value counts"
    REFUSED = "a changed value is an error"
    SILENT = "the new value counts, without a warning"


@frozen_dataclass
class Setting:
    """The declaration of an argument.

    Args:
        section: The heading under which help and documentation list it.
        text: What it does, in a sentence.
        check: Returns a value in the form that is stored, or raises; `None` accepts any value.
        on_resume: What a changed value means for a resumed run.
        may_differ: Whether ranks may have different values.
    """

    section: str
    text: str
    check: Check | None = None
    on_resume: OnResume = OnResume.NEW
    may_differ: bool = False


class _Help(str):
    """The sentence of an argument as parsers of dataclasses hand it to argparse; it carries the declaration."""

    __slots__ = ("setting",)
    setting: Setting

    def __new__(cls, declared: Setting) -> "_Help":
        text = super().__new__(cls, declared.text.replace("%", "%%"))
        text.setting = declared
        return text


def _action(check: Check | None, **options: Any) -> Action:
    from trainer_lib.trainer.arguments.argparse_action import ReadByCheck  # for parsers of dataclasses alone

    return ReadByCheck(check, **options)


def setting(
    section: str,
    default: Any,
    text: str,
    *,
    check: Check | None = None,
    on_resume: OnResume = OnResume.NEW,
    may_differ: bool = False,
) -> Any:
    """Declare an argument on the field of a dataclass that derives from `TrainingArguments`.

    Args:
        section: The heading under which `--help` and the documentation list it.
        default: The default; a list or dict is copied for each object.
        text: What it does, in a sentence.
        check: Takes the name and the value, and returns the value in the form that is stored, or raises a
            `ConfigurationError`; `value_checks` has many. By default it follows from the field's type, where that is
            a bool, a str, a list of texts, a dict, a `Literal` or a dataclass. `None` is allowed if the type has it.
        on_resume: What happens if a run is resumed with another value.
        may_differ: Whether ranks may have different values.

    Example:
        >>> from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
        >>> @dataclasses.dataclass(kw_only=True)
        ... class DistillationArguments(TrainingArguments):
        ...     teacher: str | None = setting("distillation", None, "The folder of the teacher.")
        >>> DistillationArguments(teacher=7)
        Traceback (most recent call last):
        ...
        trainer_lib.foundation.errors.ConfigurationError: teacher must be a text that is not blank, got 7.
    """
    metadata: dict[str, Any] = {"help": _Help(Setting(section, text, check, on_resume, may_differ))}
    if default is not True:  # HfArgumentParser gives such a flag a second option, with an action of its own
        metadata["action"] = functools.partial(_action, check)
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.lru_cache(maxsize=64)
def settings(cls: type) -> Mapping[str, Setting]:
    """Return the declaration of each argument of a class, by name.

    A subclass that declares only another default keeps the declaration of its base class.
    """
    return MappingProxyType({name: _declared(field) for name, (field, _) in _fields(cls).items()})


def check_values(arguments: Any) -> None:
    """Raise for a value that is not allowed, and store each value in its plain form."""
    cls = type(arguments)
    for name in settings(cls):
        setattr(arguments, name, checked_value(cls, name, getattr(arguments, name)))


def checked_value(cls: type, name: str, value: Any) -> Any:
    """Return a value of an argument in its plain form, or raise if it is not allowed."""
    check = _check(cls, name, value is None)
    return value if check is None else check(name, value)


def documented(cls: type[T]) -> type[T]:
    """Describe each argument in the docstring of its class, before the example, once somebody reads it."""
    cls.__doc__ = cast("str", _Documentation(cls, cls.__doc__ or ""))
    return cls


class _Documentation:
    """The docstring of a class of arguments, made when it is first read."""

    def __init__(self, cls: type, written: str) -> None:
        self._cls = cls
        self._written = written

    def __get__(self, instance: object, owner: type) -> str:
        return _with_arguments(self._cls, self._written)


def _with_arguments(cls: type, written: str) -> str:
    before, example, after = inspect.cleandoc(written).partition("\nExample:\n")
    wrapper = textwrap.TextWrapper(116, "    ", " " * 8, break_on_hyphens=False)
    lines, last = [before, "Args:"], None
    for name, declared in settings(cls).items():
        lines += [""] if last not in (None, declared.section) else []
        lines += wrapper.wrap(f"{name}: {declared.text}")
        last = declared.section
    return "\n".join(lines) + f"\n{example}{after}"


@functools.lru_cache(maxsize=64)
def _fields(cls: type) -> dict[str, tuple[dataclasses.Field[Any], type]]:
    """Return the field of each argument, and the class in whose module its type means something."""
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    return {
        field.name: (field, base)
        for base in bases
        for field in dataclasses.fields(base)
        if isinstance(field.metadata.get("help"), _Help)
    }


def _declared(field: dataclasses.Field[Any]) -> Setting:
    return field.metadata["help"].setting


@functools.lru_cache(maxsize=1024)
def _check(cls: type, name: str, is_none: bool) -> Check | None:
    """Return the check of a value; a type given as a text is resolved, which imports it, only if the check needs it."""
    field, base = _fields(cls)[name]
    check: Check | None = _declared(field).check
    # The field's own type is what a parser of dataclasses left there: transformers' keeps one type of a union.
    annotations = (inspect.get_annotations(each) for each in base.__mro__)
    hint: Any = next(known[name] for known in annotations if name in known)
    if is_none and isinstance(hint, str) and hint.endswith("| None"):
        return None
    if check is not None and not is_none:
        return check
    if isinstance(hint, str):
        hint = field_types(base)[name]
    allows_none = hint is Any or NoneType in members(hint)
    return None if is_none and allows_none else check or check_for(hint)
