"""The face that people who know Accelerate import from."""

import ast
from pathlib import Path

import pytest

import trainer_lib.utils
from trainer_lib import collectives, seeding
from trainer_lib.state import PartialState

SOURCE = Path(trainer_lib.utils.__file__)


def imported_for_type_checkers() -> dict[str, str]:
    """Return the names in the block that only type checkers read, and their modules."""
    tree = ast.parse(SOURCE.read_text())
    return {
        alias.asname or alias.name: str(statement.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def test_every_name_resolves() -> None:
    for name in trainer_lib.utils.__all__:
        assert getattr(trainer_lib.utils, name) is not None


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    assert imported_for_type_checkers() == trainer_lib.utils._HOMES
    assert sorted(trainer_lib.utils._HOMES) == dir(trainer_lib.utils)


def test_the_names_are_the_librarys_own_objects() -> None:
    from trainer_lib.utils import DistributedType, gather, set_seed, tqdm

    assert gather is collectives.gather
    assert set_seed is seeding.set_seed
    assert DistributedType is type(PartialState(cpu=True).distributed_type)
    assert callable(tqdm)


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'gahter'. Did you mean 'gather'?"):
        trainer_lib.utils.gahter  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(trainer_lib.utils, "DeepSpeedPlugin")
