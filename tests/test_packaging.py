"""What ships: the package list, the callbacks folder, the wheel and the sdist."""

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHIPPED = [
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "trainer_lib",
    "callbacks",
]


def packages_on_disk() -> list[str]:
    """List every folder below trainer_lib that holds Python files, the linked callbacks included."""
    return sorted(
        ".".join(Path(folder).relative_to(ROOT).parts)
        for folder, _, files in os.walk(ROOT / "trainer_lib", followlinks=True)
        if any(name.endswith(".py") for name in files)
    )


def run_python(code: str, cwd: Path) -> str:
    """Run Python code in a fresh process and return what it printed last."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources: a build leaves files behind, which would end up in the next wheel."""
    copy = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """Build the wheel, without a network."""
    return source / run_python("import setuptools.build_meta as build; print(build.build_wheel('.'))", source)


@pytest.fixture(scope="module")
def sdist(source: Path) -> Path:
    """Build the source archive, without a network."""
    return source / run_python("import setuptools.build_meta as build; print(build.build_sdist('.'))", source)


def test_package_list_equals_the_folders_on_disk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert sorted(project["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_every_package_has_an_init_file() -> None:
    missing = [name for name in packages_on_disk() if not (ROOT / name.replace(".", "/") / "__init__.py").exists()]
    assert missing == []


def test_callbacks_link_is_relative() -> None:
    assert (ROOT / "trainer_lib" / "callbacks").readlink() == Path("../callbacks")


def test_callbacks_refuse_to_be_imported_under_another_name() -> None:
    with pytest.raises(ImportError, match=r"ships as trainer_lib\.callbacks: import that name"):
        importlib.import_module("callbacks")


@pytest.mark.launch
def test_wheel_holds_the_callbacks_and_the_type_marker_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert names.count("trainer_lib/callbacks/__init__.py") == 1
    assert "trainer_lib/py.typed" in names
    assert {name.split("/")[0] for name in names if name.endswith(".py")} == {"trainer_lib"}


@pytest.mark.launch
def test_wheel_and_sdist_hold_the_stubs_with_the_public_names(wheel: Path, sdist: Path) -> None:
    stubs = {f"trainer_lib/{path.relative_to(ROOT / 'trainer_lib')}" for path in ROOT.glob("trainer_lib/**/*.pyi")}
    stubs.add("trainer_lib/callbacks/__init__.pyi")
    assert "trainer_lib/__init__.pyi" in stubs
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.endswith(".pyi")} == stubs
    with tarfile.open(sdist) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in shipped if name.endswith(".pyi")} == {
        name.replace("trainer_lib/callbacks", "callbacks") for name in stubs
    }


@pytest.mark.launch
def test_wheel_holds_the_files_of_reports(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("trainer_lib/runs/report/page/")}
    assert names == {
        f"trainer_lib/runs/report/page/{path.name}" for path in (ROOT / "trainer_lib/runs/report/page").iterdir()
    }
    assert "trainer_lib/runs/report/page/page.html" in names


@pytest.mark.slow
@pytest.mark.launch
def test_unpacked_wheel_imports_the_callbacks(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import trainer_lib.callbacks as callbacks; callbacks.EarlyStopping; print(callbacks.__file__)"
    assert Path(run_python(code, tmp_path)) == tmp_path / "trainer_lib" / "callbacks" / "__init__.py"


@pytest.mark.slow
@pytest.mark.launch
def test_sdist_holds_the_callbacks_once(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert [name for name in names if name.endswith("callbacks/__init__.py")] == ["callbacks/__init__.py"]
    assert "trainer_lib/callbacks" not in names
