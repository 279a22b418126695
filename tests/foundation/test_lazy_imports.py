"""Names that are imported when they are first used."""

import gc
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trainer_lib.foundation.lazy_imports import lazy_names

PACKAGE = """
from trainer_lib.foundation.lazy_imports import lazy_names
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
"""
STUB = """
from json import dumps as dumps
from json import (
    loads as loads,
)
from no_such_module import gone as gone

__version__: str
"""
LAZY_PACKAGES = ["", ".accelerator", ".callbacks", ".checkpointing", ".launchers", ".tracking", ".utils"]


def forget(package: str) -> None:
    """Have the next import of a package run it again."""
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        del sys.modules[module]


@pytest.fixture
def package(tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "__init__.pyi").write_text(STUB)
    module = ModuleType("lazy_package")
    names = lazy_names("lazy_package", str(tmp_path / "__init__.py"))
    module.__getattr__, module.__dir__, module.__all__ = names  # type: ignore[method-assign]
    sys.modules["lazy_package"] = module
    yield module
    del sys.modules["lazy_package"]


def test_a_name_is_resolved_once(package: ModuleType) -> None:
    assert "dumps" not in vars(package)
    assert package.dumps([1]) == "[1]"
    assert package.loads("[1]") == [1]
    assert "dumps" in vars(package)


def test_the_stub_lists_the_names(package: ModuleType) -> None:
    assert dir(package) == package.__all__ == ["dumps", "gone", "loads"]


def test_a_star_stands_for_the_public_names_of_a_module_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "__init__.pyi").write_text("from starred.part import *\n")
    (tmp_path / "part.py").write_text(
        "from json import dumps as dumps\nfrom json import loads\n\nLIMIT: int = 3\n_PRIVATE = 4\n"
        "Alias = loads\n\ndef function(): ...\n\nclass Kind: ...\n"
    )
    get, names, _ = lazy_names("starred", str(tmp_path / "__init__.py"))
    assert names() == ["Alias", "Kind", "LIMIT", "dumps", "function"]
    sys.modules["starred"] = ModuleType("starred")
    assert get("dumps") is importlib.import_module("json").dumps
    assert "starred.part" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="starred"):  # a definition needs its module
        get("Kind")
    del sys.modules["starred"]


def test_an_unknown_name_is_an_attribute_error_with_the_nearest(package: ModuleType) -> None:
    assert not hasattr(package, "other")
    with pytest.raises(AttributeError, match=r"module 'lazy_package' has no attribute 'dump'. Did you mean 'dumps'?"):
        package.dump  # noqa: B018


def test_modules_of_a_package_can_be_used_as_its_attributes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_modules" / "inner").mkdir(parents=True)
    (tmp_path / "with_modules" / "data").mkdir()  # not a package
    (tmp_path / "with_modules" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "with_modules" / "__init__.pyi").write_text(STUB)
    (tmp_path / "with_modules" / "part.py").write_text("x = 1\n")
    (tmp_path / "with_modules" / "inner" / "__init__.py").write_text("y = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        package = importlib.import_module("with_modules")
        assert "with_modules.part" not in sys.modules
        assert (package.part.x, package.inner.y) == (1, 2)
        assert dir(package) == ["dumps", "gone", "loads"]
        with pytest.raises(AttributeError, match="has no attribute 'data'"):
            _ = package.data
    finally:
        forget("with_modules")


@pytest.mark.parametrize("name", LAZY_PACKAGES)
def test_every_public_name_of_a_lazy_package_resolves(name: str) -> None:
    package = importlib.import_module(f"trainer_lib{name}")
    assert package.__file__ is not None
    assert Path(package.__file__).with_suffix(".pyi").exists()
    assert set(package.__all__) <= set(dir(package))
    for public in dir(package):
        assert getattr(package, public) is not None


def test_a_star_import_leaves_out_the_estimators_of_scikit_learn() -> None:
    import trainer_lib

    assert set(dir(trainer_lib)) - set(trainer_lib.__all__) == {"TrainerClassifier", "TrainerRegressor"}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_collection_runs_within_an_import(is_enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"package_{is_enabled}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(PACKAGE)
    (tmp_path / name / "__init__.pyi").write_text(
        f"from {name}.part import seen as seen\nfrom {name}.bad import x as x\n"
    )
    (tmp_path / name / "part.py").write_text("import gc\nseen = gc.isenabled()\n")
    (tmp_path / name / "bad.py").write_text("raise ValueError('bad')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (gc.enable if is_enabled else gc.disable)()
    try:
        package = importlib.import_module(name)
        assert package.seen is False
        assert gc.isenabled() == is_enabled
        with pytest.raises(ValueError, match="bad"):
            _ = package.x
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
        forget(name)


@pytest.mark.parametrize(("modules", "is_old"), [(60, True), (9, False)])
def test_what_a_large_import_made_counts_as_old_at_once(
    modules: int, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"package_of_{modules}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(PACKAGE)
    (tmp_path / name / "__init__.pyi").write_text(f"from {name}.part import seen as seen\n")
    (tmp_path / name / "part.py").write_text(
        "\n".join(f"from {name} import m{n}" for n in range(modules)) + "\nseen = []"
    )
    for number in range(modules):
        (tmp_path / name / f"m{number}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        gc.unfreeze()  # what the session froze
        seen = importlib.import_module(name).seen
        gc.disable()
        assert any(value is seen for value in gc.get_objects(2)) == is_old
    finally:
        gc.enable()
        gc.freeze()
        forget(name)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "trainer_lib.EarlyStopping",
            "'EarlyStopping' from 'trainer_lib'. It is in trainer_lib.callbacks.",
        ),
        ("trainer_lib.callbacks.Trainer", "'Trainer' from 'trainer_lib.callbacks'. It is in trainer_lib."),
        ("trainer_lib.TrainerCallback", "from 'trainer_lib'. Did you mean 'Callback'?"),
        ("trainer_lib.callbacks.EarlyStoppingCallback", "Use trainer_lib.callbacks.EarlyStopping."),
    ],
)
def test_an_import_of_a_name_that_is_not_there_says_where_it_is(path: str, message: str) -> None:
    package, _, name = path.rpartition(".")
    with pytest.raises(ImportError, match=re.escape(message)) as raised:
        __import__(package, fromlist=[name])  # what `from package import name` does first
    assert raised.value.name == name


def test_a_name_that_is_asked_for_may_be_missing() -> None:
    assert not hasattr(importlib.import_module("trainer_lib"), "EarlyStopping")
    assert not hasattr(importlib.import_module("trainer_lib.callbacks"), "_hidden")
    with pytest.raises(AttributeError, match=r"no attribute 'EarlyStopping'. It is in trainer_lib.callbacks"):
        _ = importlib.import_module("trainer_lib").EarlyStopping
    __import__("trainer_lib", fromlist=["runs", "trainer"])  # folders without a name in the stub
