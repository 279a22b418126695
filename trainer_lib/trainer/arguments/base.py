"""The base of `TrainingArguments`: checked when you create it, read from and written to dicts, files, command lines."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from trainer_lib.filesystem.remote_paths import RemotePath
from trainer_lib.foundation.errors import ConfigurationError, UnknownMemberError
from trainer_lib.foundation.light_dataclasses import LightDataclass
from trainer_lib.foundation.public_names.signatures import ConstructorSignature
from trainer_lib.logging import get_logger
from trainer_lib.options.base import check_choice
from trainer_lib.trainer.arguments.declaration import check_values
from trainer_lib.trainer.arguments.unknown_names import check_names, missing_attribute

_logger = get_logger(__name__)

Unwritable = Literal["refuse", "leave out"]


@dataclass(kw_only=True, repr=False, eq=False)
class ArgumentsBase(LightDataclass):
    """A dataclass of arguments that are declared by `setting`."""

    __signature__: ClassVar[ConstructorSignature] = ConstructorSignature()

    # Runs before __init__, which would raise a TypeError for an unknown name and could not suggest a known one.
    def __new__(cls, *positional: Any, **named: Any) -> Self:
        """Check the names of the arguments."""
        check_names(cls, positional, named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check each value."""
        check_values(self)

    if not TYPE_CHECKING:  # type checkers would accept every misspelled name

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the equivalent of another library's attribute."""
            if hasattr(type(self), name):  # a property raised AttributeError: raise that error again
                return object.__getattribute__(self, name)
            raise UnknownMemberError(missing_attribute(type(self), name))

    def to_dict(self, *, unwritable: Unwritable = "refuse") -> dict[str, Any]:
        """Return all arguments as plain values, which `from_dict` reads back.

        Args:
            unwritable: What to do with an argument that has no plain form, such as a plugin that holds a function:
                "refuse" raises an error, "leave out" omits it with a warning.

        Raises:
            ConfigurationError: If an argument has no plain form and `unwritable` is "refuse".

        Example:
            >>> from trainer_lib import TrainingArguments
            >>> TrainingArguments.from_dict(TrainingArguments(max_steps=10).to_dict()).max_steps
            10
        """
        check_choice("unwritable", unwritable, ("refuse", "leave out"))
        from trainer_lib.trainer.arguments import yaml_json

        plain, left_out = yaml_json.to_plain(self)
        for name, reason in left_out.items():
            if unwritable == "refuse":
                raise ConfigurationError(f"{reason} Leave it out here, and set it in the program.")
            _logger.warning_once("%s %s is not saved: give it again when you resume the run.", reason, name)
        return plain

    @classmethod
    def from_dict(cls, arguments: Mapping[str, Any]) -> Self:
        """Return arguments made from the plain values of `to_dict`, or from some of them by name."""
        from trainer_lib.trainer.arguments import yaml_json

        return cls(**yaml_json.from_plain(cls, arguments))

    def to_file(self, path: str | os.PathLike[str], *, unwritable: Unwritable = "refuse") -> None:
        """Write all arguments to a .json, .yaml or .yml file.

        Args:
            path: The file.
            unwritable: As in `to_dict`.
        """
        from trainer_lib.trainer.arguments import yaml_json

        yaml_json.write(path, self.to_dict(unwritable=unwritable))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str] | RemotePath) -> Self:
        """Return the arguments in a .json, .yaml or .yml file."""
        from trainer_lib.trainer.arguments import yaml_json

        return yaml_json.read(path, cls.from_dict)

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, **defaults: Any) -> Self:
        """Return the arguments given on the command line: `--max_steps 1000 --config run.yaml …`.

        Options override the files of `--config`, later files override earlier ones, and files override `defaults`. An
        invalid option ends the program with exit code 2 and a line that says what to give.

        Args:
            argv: The options; `None` takes those of the program.
            **defaults: Values that replace the defaults of this class.

        Raises:
            MissingPackageError: If the extra `cli` is not installed.
        """
        from trainer_lib.trainer.arguments.command_line import parse

        return parse(cls, argv, defaults)
