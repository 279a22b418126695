"""The parser of a command, alone or among the commands of another program."""

import argparse
import errno
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers.settings.setting import COUNT


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of the library."""

    def error(self, message: str) -> NoReturn:
        """Raise an error of the library instead of ending the process."""
        raise ConfigurationError(f"{message.removesuffix('.')}. `{self.prog} -h` lists the options.")


def make_parser(name: str, description: str, subparsers: Any = None, **more: Any) -> argparse.ArgumentParser:
    """Return the parser of `trainer-lib NAME`, which is added to `subparsers` if you give them.

    Args:
        name: The name of the command.
        description: What it does.
        subparsers: What `add_subparsers` returned.
        **more: Other arguments of the parser.
    """
    if subparsers is None:
        return argparse.ArgumentParser(f"trainer-lib {name}", description=description, **more)
    return subparsers.add_parser(name, description=description, **more)


def add_option(parser: Any, name: str, **options: Any) -> None:
    """Add an option that may be written with hyphens in place of underscores."""
    parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), **options)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Return the block that writes a file or a folder of a command's output, which may not be possible.

    Raises:
        ConfigurationError: If it cannot be written, or a file cannot be read that it is made from, with the reason.
    """
    try:
        yield
    except OSError as error:
        file = path if error.filename is None else Path(error.filename)
        # The temporary file and the copy of the former one have its name in theirs.
        if not (path.name in file.name or path.is_relative_to(file) or file.is_relative_to(path)):
            raise ConfigurationError(f"{file} cannot be read: {error.strerror}.") from error
        reason = f"{file} is a file" if isinstance(error, FileExistsError) else error.strerror or error
        raise ConfigurationError(f"{path} cannot be written: {reason}. Name another place.") from error


def check_can_write(file: Path) -> None:
    """Raise the error of `writing` at once if a file cannot be written; nothing is created.

    Raises:
        ConfigurationError: With the reason.
    """
    with writing(file):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        folder = next(parent for parent in file.absolute().parents if parent.exists())
        if not folder.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))


def option_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type of options whose errors are those of `read`; argparse hides the text of a `ValueError`.

    Args:
        read: Turns a text into a value, or raises a `ConfigurationError`.
    """

    def value_of(text: str) -> Any:
        try:
            return read(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value_of


count: Callable[[str], int] = option_type(partial(COUNT.check, "The value"))
"""The type of options that take a whole number of at least 1."""
