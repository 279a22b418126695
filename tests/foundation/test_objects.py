"""Names of objects, nested attributes and merged dictionaries."""

import functools
import socket
from typing import Any

import pytest

from trainer_lib.foundation.compat import get_pretty_name, merge_dicts, recursive_getattr


def test_names() -> None:
    assert get_pretty_name(socket.socket) == "socket"
    assert get_pretty_name(merge_dicts) == "merge_dicts"
    assert get_pretty_name(functools.partial(print)) == "partial"
    assert get_pretty_name(3) == "int"


def test_attributes_deep_inside() -> None:
    assert recursive_getattr(socket, "socket.accept.__name__") == "accept"
    with pytest.raises(AttributeError):
        recursive_getattr(socket, "socket.nothing.here")


def test_dictionaries_merge_into_the_second() -> None:
    destination: dict[str, Any] = {"a": {"b": 1, "c": 1}, "d": 1}
    assert merge_dicts({"a": {"c": 2}, "d": {"e": 3}}, destination) is destination
    assert destination == {"a": {"b": 1, "c": 2}, "d": {"e": 3}}
