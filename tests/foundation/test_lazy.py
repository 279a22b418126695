"""Names that are imported when they are first used."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from trainer_lib.foundation.lazy_imports import lazy_names


@pytest.fixture
def package() -> Iterator[ModuleType]:
    made = ModuleType("lazy_package")
    made.__getattr__, made.__dir__ = lazy_names("lazy_package", {"dumps": "json", "gone": "no_such_module"})  # type: ignore[method-assign]
    sys.modules["lazy_package"] = made
    yield made
    del sys.modules["lazy_package"]


def test_a_name_is_resolved_once(package: ModuleType) -> None:
    assert "dumps" not in vars(package)
    assert package.dumps([1]) == "[1]"
    assert "dumps" in vars(package)


def test_the_names_are_listed(package: ModuleType) -> None:
    assert dir(package) == ["dumps", "gone"]


def test_an_unknown_name_is_an_attribute_error_with_the_nearest(package: ModuleType) -> None:
    assert not hasattr(package, "other")
    with pytest.raises(AttributeError, match=r"module 'lazy_package' has no attribute 'dump'. Did you mean 'dumps'?"):
        package.dump  # noqa: B018
