"""Optional packages: whether they are installed."""

import importlib.metadata
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trainer_lib import ConfigurationError, MissingPackageError
from trainer_lib.foundation import imports
from trainer_lib.foundation.imports import compare_versions, is_package_available, is_torch_version, require


def test_a_package_is_found_without_being_imported() -> None:
    assert is_package_available("torch")
    assert is_package_available("torch", "torch")
    assert not is_package_available("no_such_package")
    assert not is_package_available("no_such_package.inside")
    assert not is_package_available("json", "no-such-distribution"), "a folder of that name is not enough"


def test_require_returns_the_module_or_says_how_to_get_it() -> None:
    assert isinstance(require("json", "test"), ModuleType)
    with pytest.raises(
        MissingPackageError, match=r'pip install no_such_package` or `pip install "trainer_lib\[test\]"`'
    ):
        require("no_such_package", "test")
    with pytest.raises(MissingPackageError, match=r'Install it with `pip install "no_such_package\[all\]"`\.$'):
        require("no_such_package", distribution="no_such_package[all]")


def test_no_command_of_pip_has_brackets_that_a_shell_reads() -> None:
    root = Path(imports.__file__).parents[1]
    files = [*root.rglob("*.py"), *root.rglob("*.pyi"), *root.parent.glob("docs/**/*.md"), root.parent / "README.md"]
    unquoted = re.compile(r"pip install\s+(?:\"\s+\")?[\w-]+\[")
    assert not [file for file in files if unquoted.search(file.read_text())]


def test_versions_are_compared_as_versions() -> None:
    installed = importlib.metadata.version("packaging")
    assert compare_versions("packaging", "==", installed)
    assert compare_versions("packaging", ">=", "9") == (int(installed.split(".")[0]) >= 9)
    assert is_torch_version(">=", "2.13")
    assert not is_torch_version("<", "2.13")
    with pytest.raises(ConfigurationError, match=r"Unknown comparison '=>'. Known: <, <=, =="):
        compare_versions("torch", "=>", "2.0")


def test_predicates_answer_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    predicates = {name: value for name, value in vars(imports).items() if name.endswith("_available")}
    predicates.pop("is_package_available")
    assert len(predicates) > 45
    for name, predicate in predicates.items():
        assert predicate() in (True, False), name
        assert predicate.__doc__, name
    assert "pandas" not in sys.modules


def test_predicates_take_accelerates_arguments() -> None:
    assert not imports.is_mps_available(min_version="99")
    assert not imports.is_torch_xla_available(check_is_tpu=True)
    assert not imports.is_bnb_available(min_version="99")
    assert not imports.is_hpu_available(init_hccl=True)
    assert not imports.is_npu_available(check_device=True)
    assert imports.is_rocm_available() == (torch.version.hip is not None)


def test_libraries_that_are_imported() -> None:
    assert imports.are_libraries_initialized("torch", "no_such_library", "packaging") == ["torch", "packaging"]


def test_a_function_that_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(number: int) -> int:
        """Return it."""
        return number

    monkeypatch.setattr(imports, "is_deepspeed_available", lambda: False)
    needy = imports.deepspeed_required(answer)
    assert needy.__doc__ == "Return it."
    with pytest.raises(MissingPackageError, match="answer needs deepspeed, which is not installed"):
        needy(3)
    assert imports.torchao_required(answer)(3) == 3


def test_versions_of_packages_decide() -> None:
    assert imports.is_numpy_available()
    assert not imports.is_numpy_available("1000.0")
    assert imports.is_torch_distributed_available()
    assert imports.is_pippy_available()
    assert imports.is_tqdm_available()
    assert imports.is_fp8_available(), "torchao is installed for the tests"
    for question in ("8bit_bnb", "4bit_bnb", "bitsandbytes_multi_backend"):
        assert getattr(imports, f"is_{question}_available")() is imports.is_bnb_available("0.46.0")
    assert not imports.is_habana_gaudi1()
    assert not imports.is_transformer_engine_mxfp8_available()
    assert not imports.is_xccl_available()
