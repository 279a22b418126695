"""States are decoded to exactly the same values, or refused with the path of the value."""

import enum
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer_lib.checkpointing.format.state_codec import Encoded, decode, encode
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.safetensors import read_tensors, write_tensors


class Pair(NamedTuple):
    first: int
    second: int


class Color(enum.IntEnum):
    RED = 1


class Own:
    """Something that only pickle can take apart."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


shared = torch.arange(3.0)
STATES: dict[str, Any] = {
    "numbers": [0, -7, 10**40, True, None, 0.1, -0.0, 1e-320, math.inf, -math.inf, 2 - 3j, complex("nan+infj")],
    "texts": ["", "ü\ud800", "line\nbreak", b"\0\xff", bytearray(b"ab")],
    "keys": {"a.b": 1, 7: 2, (1, "x"): 3, None: 4, 2.5: 5, "7": torch.ones(1)},
    "keys that look alike": {1: torch.zeros(1), "1": torch.ones(1), "a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)},
    "keys like tags": {"$tensor": 1, "$float": {"$dict": []}},
    "containers": [(), (1,), {1, 2}, frozenset("a"), deque([1, 2], 5), deque(), range(1, 9, 3), [], {}, [[[]]]],
    "dicts": [
        OrderedDict([("b", 1), ("a", 2)]),
        Counter("abca"),
        defaultdict(list, a=[1]),
        defaultdict(None, {1: 2}),
    ],
    "tensors": {
        "scalar": torch.tensor(3, dtype=torch.int16),
        "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
        "turned": torch.arange(6.0).view(2, 3).T,
        "empty": torch.empty(0, 2, dtype=torch.bfloat16),
        "weight": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False),
    },
    "arrays": {
        "grid": np.arange(6, dtype=">i4").reshape(2, 3).T,
        "texts": np.array(["a", "bcd"]),
        "times": np.array(["2020-01-01"], "datetime64[D]"),
        "long": np.array([1.5], np.longdouble),
        "none": np.empty((0, 4), np.float16),
        "scalar array": np.array(7),
    },
    "array scalars": [np.float64(0.1), np.int8(-3), np.bool_(True), np.complex64(1j), np.str_("abc")],
    "of torch": [torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])],
    "generators": [
        random.getstate(),
        np.random.get_state(),
        np.random.get_state(legacy=False),
        np.random.default_rng(7).bit_generator.state,
        torch.get_rng_state(),
    ],
}


def round_trip(state: Any, folder: Path, **words: Any) -> Any:
    encoded = encode(state, **words)
    write_tensors(encoded.tensors, folder / "tensors")
    text = json.dumps(encoded.tree, allow_nan=False)
    return decode(Encoded(json.loads(text), read_tensors(folder / "tensors")), **words)


def same(first: Any, second: Any) -> bool:
    """Whether two states are the same down to types and bits; for nan, == would not do."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        equal = torch.equal(first.detach(), second.detach()) and first.dtype == second.dtype
        return equal and first.requires_grad == second.requires_grad
    if isinstance(first, (np.ndarray, np.generic)):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, (list, tuple, deque)):
        return len(first) == len(second) and all(map(same, first, second))
    return repr(first) == repr(second)


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    loaded = round_trip(STATES[name], tmp_path)
    assert same(loaded, STATES[name]), loaded


def test_what_containers_know_beside_their_items_comes_back(tmp_path: Path) -> None:
    queue, counts, lists = round_trip([deque([1], 3), Counter(), defaultdict(list)], tmp_path)
    assert queue.maxlen == 3
    assert counts["never seen"] == 0
    assert lists["new"] == []


def test_one_tensor_in_two_places_stays_one(tmp_path: Path) -> None:
    loaded = round_trip({"a": shared, "b": [shared], "c": shared.clone()}, tmp_path)
    assert loaded["a"] is loaded["b"][0]
    assert loaded["a"] is not loaded["c"]


def test_arrays_that_come_back_can_be_written_to(tmp_path: Path) -> None:
    loaded = round_trip(np.zeros(2), tmp_path)
    loaded[0] = 1


@pytest.mark.parametrize(
    "build",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=9),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
            milestones=[2],
        ),
        lambda o: torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.LinearLR(o)], o),
    ],
)
def test_torchs_schedules_have_states_that_need_no_pickle(build: Any, tmp_path: Path) -> None:
    schedule = build(torch.optim.SGD([torch.ones(1)], lr=0.1))
    state = schedule.state_dict()
    assert same(round_trip(state, tmp_path), state)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Own(1), "is a tests.checkpointing.test_codec.Own"),
        (Pair(1, 2), "is a tests.checkpointing.test_codec.Pair"),
        (Color.RED, "is a tests.checkpointing.test_codec.Color"),
        (np.array([Own(1)]), "is an array of object"),
        (np.zeros(1, [("a", "i4")]), "is an array of"),
        (torch.eye(2).to_sparse(), "is not a dense tensor"),
        (len, "is a builtins.builtin_function_or_method"),
        (defaultdict(Counter), "is a defaultdict of <class"),
    ],
)
def test_anything_else_is_refused_by_its_path_and_pickled_on_request(value: Any, kind: str, tmp_path: Path) -> None:
    state = {"stack": [0, {"deep": value}]}
    with pytest.raises(CheckpointError) as error:
        encode(state, label="the state of custom_checkpoint_0")
    assert str(error.value).startswith(f"the state of custom_checkpoint_0['stack.1.deep'] {kind}")
    assert "allow_pickle=True" in str(error.value)
    loaded = round_trip(state, tmp_path, allow_pickle=True)
    assert type(loaded["stack"][1]["deep"]) is type(value)
    with pytest.raises(CheckpointError, match=r"the state\['stack.1.deep'\] was pickled when it was saved"):
        decode(encode(state, allow_pickle=True))


def test_a_value_that_cannot_be_pickled_raises() -> None:
    with pytest.raises(CheckpointError, match=r"\['a'\] is a builtins.function, which cannot be pickled either"):
        encode({"a": lambda: 0}, allow_pickle=True)


def test_a_state_that_contains_itself_raises() -> None:
    state: dict[str, Any] = {"a": []}
    state["a"].append(state)
    with pytest.raises(CheckpointError, match=r"\['a.0'\] contains itself"):
        encode(state)
    twice = [1]
    assert decode(encode([twice, twice])) == [[1], [1]]


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"a": {"$tensor": "gone"}}, r"\['a'\] is a tensor that is not in the file: 'gone'"),
        ({"a": {"$new": 1}}, r"\['a'\] has the type '\$new', which this version does not know"),
        ({"a": {"$dtype": "load"}}, r"\['a'\] is damaged"),
        ({"a": {"$counter": 3}}, r"\['a'\] is damaged"),
        ({"a": {"$array": "x"}}, r"\['a'\] is a tensor that is not in the file"),
        ({"a": {"$device": "nowhere"}}, r"\['a'\] is damaged"),
    ],
)
def test_damage_is_reported_with_its_path(tree: Any, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        decode(Encoded(tree, {}))
