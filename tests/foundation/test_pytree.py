"""Functions on nested tensors."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.utils import ModelOutput

from trainer_lib.foundation.tensors import pytree
from trainer_lib.foundation.tensors.pytree import TensorInformation


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    value: Any
    derived: int = field(init=False, default=3)


@dataclass
class Output(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None


class Names(list):  # type: ignore[type-arg]
    """A list of a kind of its own."""


def vector() -> Tensor:
    return torch.tensor([1.0, 2.0])


CONTAINERS = [
    [vector(), 3],
    (vector(), "text"),
    Names([vector()]),
    Point(vector(), None),
    {"a": {"b": vector()}},
    OrderedDict(a=vector()),
    MappingProxyType({"a": vector()}),
    Frozen([vector()]),
    Output(logits=vector()),
    BatchEncoding({"input_ids": vector()}),
]


def numbers(tree: Any) -> list[list[float]]:
    return [tensor.tolist() for tensor in pytree.tensors(tree)]


@pytest.mark.parametrize("tree", CONTAINERS, ids=lambda tree: type(tree).__name__)
def test_containers_keep_their_types_and_the_original_its_values(tree: Any) -> None:
    doubled = pytree.map_tensors(lambda tensor: tensor * 2, tree)
    assert type(doubled) is type(tree) or isinstance(doubled, dict)
    assert numbers(doubled) == [[2.0, 4.0]]
    assert numbers(tree) == [[1.0, 2.0]]
    assert numbers(pytree.slice_tensors(tree, slice(1))) == [[1.0]]
    assert numbers(pytree.send_to_device(tree, "cpu")) == [[1.0, 2.0]]
    assert pytree.find_batch_size(tree) == 2
    assert pytree.find_device(tree) == torch.device("cpu")


@pytest.mark.parametrize("tree", [vector(), *CONTAINERS], ids=lambda tree: type(tree).__name__)
def test_tensors_in_all_containers_are_sent_and_stay_where_they_should_be(tree: Any) -> None:
    (before,), (after,) = pytree.tensors(tree), pytree.tensors(pytree.send_to_device(tree, torch.device("cpu")))
    assert after is before
    moved = pytree.send_to_device(tree.copy() if isinstance(tree, BatchEncoding) else tree, "meta")  # it moves itself
    assert [tensor.device.type for tensor in pytree.tensors(moved)] == ["meta"]


def test_frozen_dataclasses_keep_what_they_derived() -> None:
    doubled = pytree.map_tensors(lambda tensor: tensor * 2, Frozen(vector()))
    assert (doubled.value.tolist(), doubled.derived) == ([2.0, 4.0], 3)


def test_mappings_keep_what_their_constructor_does_not_know() -> None:
    lists: defaultdict[str, Any] = defaultdict(list, a=vector())
    doubled = pytree.map_tensors(lambda tensor: tensor * 2, lists)
    assert doubled["new"] == []
    assert "new" not in lists


def test_leaves_come_with_their_names_in_order() -> None:
    tree = {"a": [1, Point("x", None)], "b": Frozen((2,))}
    assert list(pytree.named_leaves(tree)) == [
        ("['a'][0]", 1),
        ("['a'][1][0]", "x"),
        ("['a'][1][1]", None),
        ("['b'].value[0]", 2),
        ("['b'].derived", 3),
    ]
    assert list(pytree.leaves(tree)) == [1, "x", None, 2, 3]
    assert list(pytree.leaves(tree, is_leaf=lambda part: isinstance(part, list))) == [[1, Point("x", None)], 2, 3]


def test_containers_may_be_taken_for_leaves() -> None:
    tree = {"rows": ["a", "b"], "more": (["c"],)}
    assert pytree.map_leaves(len, tree, is_leaf=lambda part: isinstance(part, list)) == {"rows": 2, "more": (1,)}


def test_recursively_apply() -> None:
    tree = {"a": vector(), "b": "text"}
    assert pytree.recursively_apply(torch.add, tree, 1)["a"].tolist() == [2.0, 3.0]
    assert pytree.recursively_apply(len, tree, test_type=lambda leaf: isinstance(leaf, str))["b"] == 4
    with pytest.raises(TypeError, match=r"add got a str inside a dict. Give only tensors"):
        pytree.recursively_apply(torch.add, tree, 1, error_on_other_type=True)


@pytest.mark.parametrize(
    "tree",
    [
        [vector()],
        (vector(),),
        Point(vector(), vector()),
        {"a": vector()},
        Output(logits=vector()),
        BatchEncoding({"a": vector()}),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_concatenate_goes_tensor_by_tensor(tree: Any) -> None:
    joined = pytree.concatenate([tree, tree])
    assert type(joined) is type(tree)
    assert all(values == [1.0, 2.0, 1.0, 2.0] for values in numbers(joined))


class OfRows(dict[str, Tensor]):
    """A mapping whose iterator yields rows instead of keys, as that of a TensorDict."""

    def __iter__(self) -> Any:
        return iter(zip(*self.values(), strict=True))


def test_concatenate_asks_a_mapping_for_its_items() -> None:
    joined = pytree.concatenate([OfRows(a=vector()), OfRows(a=vector())])
    assert dict(joined.items())["a"].tolist() == [1.0, 2.0, 1.0, 2.0]
    assert type(joined) is OfRows


def test_concatenate_along_another_dimension_and_what_it_refuses() -> None:
    assert pytree.concatenate([torch.ones(1, 2), torch.ones(1, 1)], dim=1).tolist() == [[1, 1, 1]]

    @dataclass
    class Batch:
        ids: Tensor

    assert pytree.concatenate([Batch(vector()), Batch(vector())]).ids.shape == (4,)
    with pytest.raises(TypeError, match="A str cannot be concatenated; only tensors"):
        pytree.concatenate([{"a": "x"}, {"a": "y"}])
    assert pytree.concatenate([{"a": "x"}]) == {"a": "x"}
    assert pytree.concatenate([(None, [None]), (None, [None])]) == (None, [None])
    with pytest.raises(TypeError, match="A NoneType cannot be concatenated"):
        pytree.concatenate([None, torch.ones(1)])


def test_send_to_device_skips_keys_and_uses_the_to_of_others() -> None:
    class Movable:
        device = "somewhere"

        def to(self, device: str) -> "Movable":
            self.device = device
            return self

    class Graph(dict):  # type: ignore[type-arg]
        pass

    sent = pytree.send_to_device({"a": vector(), "b": vector()}, "meta", skip_keys="b")
    assert (sent["a"].device.type, sent["b"].device.type) == ("meta", "cpu")
    sent = pytree.send_to_device(Graph(a=[{"b": vector()}]), "meta", skip_keys=["b"])
    assert isinstance(sent, Graph)
    assert sent["a"][0]["b"].device.type == "cpu"
    assert pytree.send_to_device([Movable()], "meta", non_blocking=True)[0].device == "meta"
    assert pytree.send_to_device(Frozen(vector()), "meta").value.device.type == "meta"
    assert pytree.send_to_device("text", "meta") == "text"


class Plain(Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize(
    "tensor", [vector(), torch.nn.Parameter(vector()), vector().as_subclass(Plain)], ids=["plain", "parameter", "own"]
)
def test_send_to_device_sends_tensors_of_any_class_while_it_skips_keys(tensor: Tensor) -> None:
    sent = pytree.send_to_device([tensor, {"a": tensor, "b": tensor}], "meta", skip_keys="b")
    assert [part.device.type for part in pytree.tensors(sent)] == ["meta", "meta", "cpu"]


@pytest.mark.parametrize("skip_keys", [None, "b"])
def test_send_to_device_leaves_the_batch_sizes_of_a_packed_sequence_on_the_cpu(skip_keys: str | None) -> None:
    packed = pack_sequence([torch.ones(1), torch.ones(2)], enforce_sorted=False)
    sent = pytree.send_to_device((packed, 3), "meta", skip_keys=skip_keys)[0]
    assert type(sent) is type(packed)
    assert [getattr(part, "device", None) for part in sent] == [
        torch.device(kind) for kind in ("meta", "cpu", "meta", "meta")
    ]


def test_batch_sizes() -> None:
    assert pytree.find_batch_size({"text": ["x"], "ids": torch.ones(3, 2)}) == 3
    assert pytree.find_batch_size(torch.tensor(1.0)) is None
    assert pytree.ignorant_find_batch_size(["x"]) is None
    with pytest.raises(TypeError, match="no tensor in this list to take a batch size from"):
        pytree.find_batch_size(["x"])
    assert pytree.find_device(["x"]) is None


def test_other_forms_of_tensors() -> None:
    assert pytree.listify({"a": vector().requires_grad_()}) == {"a": [1.0, 2.0]}
    converted = pytree.convert_to_fp32([vector().half(), vector().bfloat16(), vector().double(), torch.tensor([1])])
    assert [tensor.dtype for tensor in converted] == [torch.float32, torch.float32, torch.float64, torch.int64]


def test_structures_without_values() -> None:
    structure = pytree.get_data_structure({"a": vector(), "b": "text", "c": torch.tensor(3)})
    assert structure == {
        "a": TensorInformation(shape=torch.Size([2]), dtype=torch.float32),
        "b": "text",
        "c": TensorInformation(shape=torch.Size([]), dtype=torch.int64),
    }
    assert pytree.is_tensor_information(structure["a"])
    made = pytree.initialize_tensors(structure)
    assert (made["a"].shape, made["a"].dtype, made["b"]) == ((2,), torch.float32, "text")
    assert (made["c"].shape, made["c"].dtype) == ((), torch.int64)


def test_kinds() -> None:
    assert pytree.is_torch_tensor(vector())
    assert not pytree.is_torch_tensor([1.0])
    assert pytree.is_namedtuple(Point(1, 2))
    assert not pytree.is_namedtuple((1, 2))
    assert pytree.honor_type(Point(1, 2), [3, 4]) == Point(3, 4)
    assert pytree.honor_type((), iter([3])) == (3,)
