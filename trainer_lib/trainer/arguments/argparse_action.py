"""How argparse reads an argument, for parsers of dataclasses such as transformers' `HfArgumentParser`."""

import typing
from argparse import Action, ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.arguments.type_hints import has_fields, members


class ReadByCheck(Action):
    """Reads a text as the check of its argument allows: as a YAML value if that fits, else as it stands.

    `HfArgumentParser` picks one type of a union by itself; a declared argument knows better.
    """

    def __init__(self, check: Any, **options: Any) -> None:
        super().__init__(**options)
        self._check = check
        kind = options.get("type")
        origin = typing.get_origin(kind)
        if isinstance(origin, type) and issubclass(origin, Sequence):
            self.nargs: int | str | None = "+"
            self._kinds, self._check = [typing.get_args(kind)[0]], None
        else:
            self._kinds = members(kind)
        if self.choices is None:
            self.type: Any = self._reader()

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store the value."""
        setattr(namespace, self.dest, values)

    def _reader(self) -> Callable[[str], Any]:
        def value(text: str) -> Any:  # no method: argparse shows a method with its object, which shows its type, ...
            return self._read(text)

        return value

    def _read(self, text: str) -> Any:
        if self._check is None:
            return text if self._kinds == [str] else self._from_yaml(text)
        if (value := self._from_yaml(text)) is None:
            return None  # checked with the object: whether it is allowed is up to the type
        try:
            self._check(self.dest, value)
        except ConfigurationError:
            value = text
        try:
            self._check(self.dest, value)
        except ConfigurationError as error:
            raise ArgumentTypeError(str(error)) from None
        return value

    def _from_yaml(self, text: str) -> Any:
        from trainer_lib.trainer.arguments import yaml_text  # not before it is needed: it takes 15 ms to import

        try:
            value, _ = yaml_text.read(text, self.dest)
        except ConfigurationError:
            return text
        made = next((kind for kind in self._kinds if has_fields(kind)), None)
        return made(**value) if made is not None and isinstance(value, Mapping) else value
