"""Names of objects, nested attributes and merged dictionaries."""

import functools
import socket
import threading
from typing import Any

import pytest
import torch
from torch import nn

from trainer_lib.foundation.compat import (
    GatheredParameters,
    ThreadLocalSharedDict,
    get_pretty_name,
    merge_dicts,
    recursive_getattr,
)


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


def test_parameters_are_not_gathered_without_deepspeed() -> None:
    parameters = [1]
    with GatheredParameters(parameters, modifier_rank=0):
        parameters.append(2)
    assert parameters == [1, 2]
    with GatheredParameters(nn.Parameter(torch.tensor(1.0))):  # which is iterable only in name
        pass


def test_a_dict_for_all_threads_or_for_each() -> None:
    class State:
        shared: Any = ThreadLocalSharedDict()
        own: Any = ThreadLocalSharedDict(thread_local=True)

    seen: list[Any] = []

    def look() -> None:
        seen.append((dict(State().shared), dict(State().own)))

    State().shared["a"] = State().own["a"] = 1
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    look()
    assert seen == [({"a": 1}, {}), ({"a": 1}, {"a": 1})]
    State().shared = {"b": 2}
    assert State().shared == {"b": 2}
