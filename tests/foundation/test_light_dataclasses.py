"""Dataclasses whose methods are not compiled for each class."""

import pickle
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest

from trainer_lib.foundation.light_dataclasses import LightDataclass, frozen_dataclass
from trainer_lib.options.base import KwargsHandler


@frozen_dataclass(kw_only=True)
class Point:
    x: int
    y: int = 0
    name: str = field(default="", compare=False)
    secret: str = field(default="", repr=False)


@frozen_dataclass
class Other:
    x: int


@frozen_dataclass(eq=False)
class ByIdentity:
    x: Any


@frozen_dataclass
class WithOwnText:
    x: int

    def __repr__(self) -> str:
        return "its own"


def test_values_are_equal_if_their_compared_fields_are():
    assert Point(x=1, name="a") == Point(x=1, name="b")
    assert Point(x=1) != Point(x=1, y=2)
    assert Other(1) != Point(x=1)
    assert Other(1) != 1
    assert {Point(x=1): "kept"}[Point(x=1, name="c")] == "kept"


def test_without_eq_identity_decides():
    one = ByIdentity([])
    assert one == one
    assert one != ByIdentity([])
    assert hash(one) != hash(ByIdentity([]))


def test_a_value_shows_its_fields():
    assert repr(Point(x=1, secret="s")) == "Point(x=1, y=0, name='')"
    assert repr(WithOwnText(1)) == "its own"
    loop: list[Any] = []
    loop.append(ByIdentity(loop))
    assert repr(loop[0]) == "ByIdentity(x=[...])"


def test_what_is_written_for_dataclasses_works():
    point = Point(x=1, name="a")
    assert asdict(replace(point, y=3)) == {"x": 1, "y": 3, "name": "a", "secret": ""}
    assert pickle.loads(pickle.dumps(point)) == point
    match Other(4):
        case Other(x):
            assert x == 4


@dataclass(repr=False, eq=False)
class Options(LightDataclass):
    x: Any = 0
    name: str = field(default="", compare=False)
    secret: str = field(default="", repr=False)


@dataclass
class OwnOptions(Options):
    y: int = 0


def test_light_dataclasses_are_shown_and_compared_as_others_are():
    assert Options(1, name="a") == Options(1, name="b")
    assert Options(1) != Options(2)
    assert Options(1) != OwnOptions(1)
    assert Options(1) != 1
    assert repr(Options(1, secret="s")) == "Options(x=1, name='')"
    loop: list[Any] = []
    loop.append(Options(loop))
    assert repr(loop[0]) == "Options(x=[...], name='')"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Options())


def test_a_dataclass_derived_from_a_light_one_has_its_own_fields():
    assert OwnOptions(1, y=2) != OwnOptions(1, y=3)
    assert repr(OwnOptions(1, y=2)) == "OwnOptions(x=1, name='', y=2)"
    assert replace(Options(1), x=3) == Options(3)


def test_a_class_without_fields_is_shown_and_compared_as_any_object():
    class Plain(KwargsHandler):
        pass

    plain = Plain()
    assert plain == plain
    assert plain != Plain()
    assert "Plain object at" in repr(plain)
