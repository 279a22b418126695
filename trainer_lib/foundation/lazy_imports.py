"""Lazy public names of a package, declared once, in the stub beside its `__init__.py`."""

import gc
import importlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MANY = 50  # modules
_ROOT = Path(__file__).parents[1]  # of the library
# The function of importlib that asks for the names of an import statement, which drops the text of an AttributeError.
_IMPORT_STATEMENT = "_handle_fromlist"


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are imported when they are first used.

    The names and their modules are the lines `from module import Name as Name` of `__init__.pyi`, which type checkers
    read as well. `from package.part import *` stands for the public names of a module of the package: those it imports
    come from where it imports them, without the module itself.

    A module of the package is imported when it is used as an attribute: `trainer_lib.utils.set_seed(1)` after
    `import trainer_lib`.

    Args:
        package: The package's `__name__`.
        file: The package's `__file__`; the stub lies beside it.
    """
    modules = dict(_imports_of_stub(package, Path(file)))

    def get(name: str) -> Any:
        if name not in modules:
            is_public = not name.startswith("_")
            if is_public and _is_module(Path(file).parent, name):
                with without_collections():
                    return importlib.import_module(f"{package}.{name}")
            hint = (_elsewhere(name, package) or _of_others(name) or _nearest(name, modules)) if is_public else ""
            if is_public and _caller() == _IMPORT_STATEMENT:
                raise ImportError(f"cannot import name {name!r} from {package!r}.{hint}", name=name, path=file)
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")
        with without_collections():
            value = getattr(importlib.import_module(modules[name]), name)
        importlib.import_module(package).__dict__[name] = value
        return value

    return get, lambda: sorted(modules), sorted(modules)


def _caller() -> str:
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    return frame.f_code.co_name


def _elsewhere(name: str, package: str) -> str:
    """Say which other package of the library has a name."""
    for stub in [_ROOT / "__init__.pyi", *sorted(_ROOT.glob("*/__init__.pyi"))]:
        other = ".".join([_ROOT.name, *stub.parent.relative_to(_ROOT).parts])
        if other != package and f" {name} as {name}\n" in stub.read_text(encoding="utf-8"):
            return f" It is in {other}."
    return ""


def _of_others(name: str) -> str:
    """Say what to use instead of a class of another library."""
    from trainer_lib.foundation.public_names.foreign_classes import INSTEAD

    return f" Use {INSTEAD[name]}." if name in INSTEAD else ""


def _nearest(name: str, names: Iterable[str]) -> str:
    from trainer_lib.foundation.errors import did_you_mean

    return did_you_mean(name, names)


def _is_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


@contextmanager
def without_collections() -> Generator[None]:
    """Import without garbage collections: hundreds of new modules would set off one over all that torch has made.

    What was imported stays, so it moves to the oldest generation. In the youngest, the next allocation would set off a
    collection that takes 10 ms and finds nothing. Frozen objects are counted one by one, so only after large imports.
    """
    was_enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # `unfreeze` would return what the program froze as well.
            if len(sys.modules) - modules > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _imports_of_stub(package: str, file: Path) -> Iterator[tuple[str, str]]:
    source = file.with_suffix(".pyi").read_text(encoding="utf-8")
    if "*" not in source and "(" not in source:  # a name a line: ten times as fast as with a parser
        lines = (line.split() for line in source.splitlines() if line.startswith("from "))
        yield from ((words[-1], words[1]) for words in lines)
        return
    from trainer_lib.foundation.public_names.stub_names import imports_of

    yield from imports_of(source, package, file)
