"""Runs a script written for Accelerate in this process, as it is or with `trainer_lib` in its imports."""

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Generator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.worlds import forget_world

ACCELERATE = Path(str(find_spec("accelerate").origin)).parent  # type: ignore[union-attr]
_IMPORT = re.compile(r"^(\s*(?:from|import)\s+)accelerate(\.test_utils(?:\.testing|\.training)?)?\b", re.MULTILINE)


def swap_imports(source: str) -> str:
    """Replace `accelerate` in the imports of a script, and nothing else."""
    return _IMPORT.sub(
        lambda found: found[1] + ("tests.accelerate_scripts.accelerate_test_utils" if found[2] else "trainer_lib"),
        source,
    )


def run_script(
    path: Path, package: str, arguments: Sequence[str] = (), replaced: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a script as `__main__`, with `names` beside its own, and return its names."""
    source = path.read_text()
    for old, new in (replaced or {}).items():
        assert old in source, old
        source = source.replace(old, new)
    code = compile(source if package == "accelerate" else swap_imports(source), str(path), "exec")
    module = ModuleType("__main__")
    module.__dict__.update(__file__=str(path))
    _forget_accelerate()  # this process may be the fork of one that used it
    with _as_main(module, arguments):
        try:
            exec(code, module.__dict__)  # noqa: S102 - it is the script that is tested
        finally:
            _forget_states()
    return module.__dict__


def leave_world() -> None:
    """Make this process one that no launcher started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@contextlib.contextmanager
def _as_main(module: ModuleType, arguments: Sequence[str]) -> Generator[None]:
    main, argv = sys.modules["__main__"], sys.argv
    sys.modules["__main__"], sys.argv = module, [str(module.__file__), *arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            yield
    finally:
        sys.modules["__main__"], sys.argv = main, argv


def _forget_states() -> None:
    _forget_accelerate()
    forget_world()


def _forget_accelerate() -> None:
    if "accelerate" in sys.modules:
        state = import_module("accelerate.state")
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
