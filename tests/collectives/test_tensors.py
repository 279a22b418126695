"""Gather, reduce, broadcast and pad, against numbers written by hand."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from transformers import BatchEncoding

from tests.collectives.trees import Batch, Output, Point, nested
from tests.worlds import run_world
from trainer_lib import ConfigurationError, DistributedOperationException
from trainer_lib.collectives import (
    CannotPadNestedTensorWarning,
    broadcast,
    copy_tensor_to_devices,
    gather,
    gather_rows,
    pad_across_processes,
    pad_input_tensors,
    reduce,
)
from trainer_lib.collectives.gather_for_metrics import gather_real_rows
from trainer_lib.collectives.tensor_collectives import gather_tensor_shape
from trainer_lib.foundation.errors import WorldError
from trainer_lib.foundation.tensors.pytree import get_shape, is_torch_xpu_tensor, tensors
from trainer_lib.state import PartialState
from trainer_lib.state.gradient_state import Rows

Everywhere = Callable[[Callable[[int, int], Any]], list[Any]]

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def same(tensor: Tensor, values: Any, dtype: torch.dtype | None = None) -> None:
    assert tensor.tolist() == values
    if dtype is not None:
        assert tensor.dtype is dtype


# -- gather --------------------------------------------------------------------------------------------------------


def test_gather_concatenates_in_order_of_rank(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        gathered = gather(torch.tensor([[rank, 10 * rank]]))
        same(gathered, [[other, 10 * other] for other in range(size)], torch.int64)

    everywhere(body)


def test_gather_makes_one_dimension_of_none(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        same(gather(torch.tensor(rank + 0.5)), [other + 0.5 for other in range(size)])

    everywhere(body)


def test_gather_takes_every_type(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        for dtype in DTYPES:
            expected = torch.cat([torch.tensor([other % 2, 1]).to(dtype) for other in range(size)])
            gathered = gather(torch.tensor([rank % 2, 1]).to(dtype))
            assert gathered.dtype is dtype
            assert gathered.tolist() == expected.tolist()

    everywhere(body)


def test_gather_goes_by_values_where_strides_differ(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        tensor = torch.tensor([[1, 2, 3], [4, 5, 6]])
        values = tensor if rank % 2 else tensor.T.contiguous().T
        same(gather(values), tensor.tolist() * size)

    everywhere(body)


def test_a_column_of_one_row_travels(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        column = torch.tensor([[0.0, rank + 1.0]])[:, 1]  # contiguous, with a stride of 2
        same(gather(column), [other + 1.0 for other in range(size)])
        assert gather(column[:0]).numel() == 0
        same(broadcast(column, from_process=size - 1), [float(size)])

    everywhere(body)


def test_views_that_conjugate_or_negate_travel_as_their_values(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        views = {"conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(), "negative": torch.tensor([1 + 2j]).conj().imag}
        for tensor in views.values():
            same(gather(tensor), tensor.tolist() * size)
            same(broadcast(tensor * (1 if rank else 2), from_process=0), (2 * tensor).tolist())
        target = torch.tensor([1.0 + 1j * rank])
        broadcast(target.conj(), from_process=size - 1)  # a view of `target`
        same(target, [1 + 1j * (size - 1)])

    everywhere(body)


def test_gather_keeps_containers(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        gathered = gather(nested(float(rank)))
        expected = [float(other) for other in range(size) for _ in range(2)]
        assert [tensor.reshape(2 * size, -1)[:, 0].tolist() for tensor in tensors(gathered)] == [expected] * 9
        assert isinstance(gathered["point"], Point)
        assert isinstance(gathered["batch"], Batch)
        assert isinstance(gathered["output"], Output)
        assert gathered["output"].loss is None
        assert isinstance(gathered["encoding"], BatchEncoding)

    everywhere(body)


def test_gather_is_cut_off_from_the_graph(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        tensor = torch.ones(2, requires_grad=True) * 2
        gathered = gather(tensor)
        assert not gathered.requires_grad
        gathered.zero_()
        assert tensor.tolist() == [2, 2], "it shares no memory with the input"

    everywhere(body)


def test_what_is_no_tensor_is_refused_with_the_way_out(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        for operation in (gather, reduce, broadcast, pad_across_processes):
            with pytest.raises(TypeError, match=r"got a str inside a dict.*gather_object"):
                operation({"texts": ["a cat"]})

    everywhere(body)


NOT_DENSE: dict[str, tuple[Callable[[], Any], str]] = {
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "a nested tensor, and needs dense ones. Pad it: torch.nested.to_padded_tensor(tensor, 0.0), then "
        "pad_across_processes(…, dim=1).",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "a nested tensor, and needs dense ones. Pad it: torch.nested.to_padded_tensor(tensor, 0.0), then "
        "pad_across_processes(…, dim=1).",
    ),
    "coo": (
        lambda: torch.eye(2).to_sparse(),
        "a sparse tensor (torch.sparse_coo), and needs dense ones. Convert it: tensor.to_dense().",
    ),
    "csr": (
        lambda: torch.eye(2).to_sparse_csr(),
        "a sparse tensor (torch.sparse_csr), and needs dense ones. Convert it: tensor.to_dense().",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8),
        "a quantized tensor (torch.qint8), and needs plain ones. Convert it: tensor.dequantize().",
    ),
    "packed": (
        lambda: pack_sequence([torch.ones(1), torch.ones(2)], enforce_sorted=False),
        "a PackedSequence, whose tensors cannot be combined between ranks. Pad it: "
        "pad_packed_sequence(sequence, batch_first=True), then pad_across_processes(…, dim=1).",
    ),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.filterwarnings("ignore:.*CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning", "ignore:.*quantiz.*:DeprecationWarning")
def test_tensors_that_are_not_dense_are_refused_on_all_ranks(kind: str, everywhere: Everywhere) -> None:
    make, problem = NOT_DENSE[kind]

    def body(rank: int, size: int) -> None:
        value = {"ids": torch.ones(2), "x": make()}
        operations = [gather, reduce, broadcast, gather_rows, lambda tree: gather_real_rows(tree, Rows(2, 1))]
        names = ["gather", "reduce", "broadcast", "gather_for_metrics", "gather_for_metrics"]
        if kind not in ("nested", "jagged"):
            operations, names = [*operations, pad_across_processes], [*names, "pad_across_processes"]
        for operation, name in zip(operations, names, strict=True):
            with pytest.raises(TypeError) as caught:
                operation(value)
            assert str(caught.value) == f"{name} got {problem}"
        assert gather(torch.tensor([rank])).tolist() == list(range(size)), "no rank waits in one of them"

    everywhere(body)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_nested_and_packed_values_are_gathered_padded(layout: torch.layout, everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        parts = [torch.full((1,), rank), torch.full((rank + 1,), rank)]
        expected = [
            [float(other)] * count + [0.0] * (size - count) for other in range(size) for count in (1, other + 1)
        ]
        nested_parts = torch.nested.nested_tensor([part.float() for part in parts], layout=layout)
        padded = pad_across_processes(torch.nested.to_padded_tensor(nested_parts, 0.0), dim=1)
        assert gather(padded).tolist() == expected
        packed = pack_sequence([part.float() for part in parts], enforce_sorted=False)
        values, lengths = pad_packed_sequence(packed, batch_first=True)
        assert gather(pad_across_processes(values, dim=1)).tolist() == expected
        assert gather(lengths).tolist() == [count for other in range(size) for count in (1, other + 1)]

    everywhere(body)


def test_one_rank_with_a_sparse_tensor_is_an_error_of_all_in_gather_for_metrics() -> None:
    def body() -> str:
        rank = PartialState().process_index
        with pytest.raises((TypeError, WorldError)) as caught:
            gather_real_rows(torch.eye(2).to_sparse() if rank else torch.eye(2), None)
        return f"{type(caught.value).__name__}: {caught.value}"

    problem = "gather_for_metrics got a sparse tensor (torch.sparse_coo), and needs dense ones. Convert it: "
    assert run_world(body, num_processes=2) == [
        f"WorldError: gather_for_metrics failed on rank 1: TypeError: {problem}tensor.to_dense().",
        f"TypeError: {problem}tensor.to_dense().",
    ]


# -- reduce --------------------------------------------------------------------------------------------------------


def test_reduce_by_hand(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        ranks = list(range(size))
        tensor = torch.tensor([rank + 1.0, 2.0])
        same(reduce(tensor), [sum(ranks) / size + 1, 2.0], torch.float32)
        same(reduce(tensor, "sum"), [sum(ranks) + size, 2.0 * size])
        same(reduce(tensor, "sum", scale=0.5), [(sum(ranks) + size) / 2, float(size)])
        same(reduce(tensor, "mean", scale=4), [4 * (sum(ranks) / size + 1), 8.0])
        same(reduce(tensor, "none", scale=4), tensor.tolist())
        same(tensor, [rank + 1.0, 2.0])

    everywhere(body)


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_reduce_keeps_the_nan_of_any_rank(everywhere: Everywhere, reduction: str) -> None:
    def body(rank: int, size: int) -> None:
        for bad in range(size):
            tensor = torch.full((65,), float(rank))  # as many as gloo divides between ranks
            tensor[[0, -1]] = float("nan") if rank == bad else 0.0
            reduced = reduce(tensor, reduction)
            assert reduced.isnan().tolist() == [True, *[False] * 63, True]
            assert reduced[1:-1].unique().tolist() == [size - 1 if reduction == "max" else 0]

    everywhere(body)


def test_reduce_returns_memory_of_its_own(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        tensor = torch.tensor([1.0])
        for reduction in ("mean", "sum", "max", "min", "none"):
            reduce(tensor, reduction).add_(7)
        same(tensor, [1.0])

    everywhere(body)


def test_reduce_of_whole_numbers_and_booleans(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        large = 2**53 + 1
        same(reduce(torch.tensor([large]), "sum"), [large * size], torch.int64)
        same(reduce(torch.tensor([100, 120], dtype=torch.uint8), "sum"), [100 * size, 120 * size], torch.int64)
        same(reduce(torch.tensor([True, rank == 0]), "sum"), [size, 1], torch.int64)
        same(reduce(torch.tensor([True, rank == 0])), [1.0, 1 / size], torch.float32)
        same(reduce(torch.tensor(rank)), (size - 1) / 2, torch.float32)

    everywhere(body)


def test_reduce_of_short_floats_rounds_once(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        # 256 + 1 has no bf16: summed in it, the ones would all be lost.
        tensor = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
        exact = torch.tensor([256.0 + size - 1]).to(torch.bfloat16)
        same(reduce(tensor, "sum"), exact.tolist(), torch.bfloat16)
        # Nor does a mean overflow on the way.
        same(reduce(torch.tensor([60000.0], dtype=torch.float16)), [60000.0], torch.float16)

    everywhere(body)


def test_reduce_goes_by_values_where_strides_differ(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        tensor = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        same(reduce(tensor if rank % 2 else tensor.T.contiguous().T), tensor.tolist())

    everywhere(body)


def test_reduce_keeps_containers(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        reduced = reduce(nested(float(rank)), "sum")
        assert all(bool((tensor == sum(range(size))).all()) for tensor in tensors(reduced))
        assert isinstance(reduced["batch"], Batch)

    everywhere(body)


def test_an_unknown_reduction_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"Unknown reduction 'avg'. Known: max, mean, min, none, sum."):
        reduce(torch.ones(1), "avg")


# -- broadcast -----------------------------------------------------------------------------------------------------


def test_broadcast_overwrites_and_returns(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        for dtype in DTYPES:
            tensor = torch.tensor([rank % 2, 1]).to(dtype)
            assert broadcast(tensor) is tensor
            assert tensor.tolist() == torch.tensor([0, 1]).to(dtype).tolist()

    everywhere(body)


def test_broadcast_of_trees_from_any_process(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        received = broadcast(nested(float(rank)), from_process=size - 1)
        assert all(bool((tensor == size - 1).all()) for tensor in tensors(received))

    everywhere(body)


def test_broadcast_fills_parameters_and_strided_tensors(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
        same(broadcast(parameter), [0.0, 0.0])
        assert parameter.requires_grad
        strided = (torch.arange(6).view(2, 3) + 10 * rank).T
        broadcast(strided)
        same(strided, [[0, 3], [1, 4], [2, 5]])

    everywhere(body)


def test_broadcast_from_nowhere_is_refused(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        with pytest.raises(ConfigurationError, match=f"Rank {size} does not exist in a world of {size}"):
            broadcast(torch.ones(1), from_process=size)

    everywhere(body)


def test_copy_needs_a_tensor_on_one_process_only(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        tensor = torch.tensor([[1, 2]], dtype=torch.int16) if rank == size - 1 else None
        copied = copy_tensor_to_devices(tensor)
        same(copied, [[1, 2]], torch.int16)
        copied.zero_()
        assert tensor is None or tensor.tolist() == [[1, 2]]
        with pytest.raises(DistributedOperationException, match="no tensor on any rank"):
            copy_tensor_to_devices(None)

    everywhere(body)


# -- pad -----------------------------------------------------------------------------------------------------------


def test_pad_fills_up_to_the_longest(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        tensor = torch.full((rank + 1,), 7)
        missing = size - rank - 1
        same(pad_across_processes(tensor), [7] * (rank + 1) + [0] * missing, torch.int64)
        same(pad_across_processes(tensor, pad_index=-100, pad_first=True), [-100] * missing + [7] * (rank + 1))

    everywhere(body)


def test_pad_along_another_dimension(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        settings = {"ids": torch.full((1, rank + 1), 7), "mask": torch.ones(1, rank + 1, dtype=torch.bool)}
        expected = [[7] * (rank + 1) + [0] * (size - rank - 1)]
        for dim in (1, -1):
            padded = pad_across_processes(settings, dim=dim)
            same(padded["ids"], expected)
            same(padded["mask"], [[number == 7 for number in expected[0]]], torch.bool)

    everywhere(body)


def test_pad_leaves_tensors_without_that_dimension(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        scalar, row = torch.tensor(1.0), torch.ones(rank + 1)
        assert pad_across_processes(scalar) is scalar
        assert pad_across_processes(row, dim=1) is row
        assert pad_across_processes(row, dim=-2) is row

    everywhere(body)


def test_pad_keeps_the_graph() -> None:
    def body() -> None:
        tensor = torch.ones(PartialState().process_index + 1, requires_grad=True)
        pad_across_processes(tensor).sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.tolist() == [1.0] * len(tensor)

    run_world(body, num_processes=2)


def test_pad_tells_of_different_dimensions_on_all_processes() -> None:
    def body() -> str:
        with pytest.raises(DistributedOperationException) as caught:
            pad_across_processes(torch.ones([2] * (1 + PartialState().process_index)))
        return str(caught.value)

    first, second = run_world(body, num_processes=2)
    assert first == second
    assert "rank 0: the value: float32 [2]\n  rank 1: the value: float32 [2, 2]\n" in first


def test_nested_tensors_stay_with_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        tensor = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(CannotPadNestedTensorWarning, match="to_padded_tensor"):
        assert pad_across_processes(tensor) is tensor


@pytest.mark.parametrize(
    ("rows", "processes", "padded"), [(16, 4, 16), (4, 2, 4), (3, 2, 4), (2, 4, 4), (5, 3, 6), (61, 8, 64)]
)
def test_pad_input_makes_equal_parts(rows: int, processes: int, padded: int) -> None:
    result = pad_input_tensors({"a": torch.ones(rows, 2), "b": torch.tensor(1)}, rows, processes)
    assert result["a"].shape == (padded, 2)
    assert result["a"][:rows].eq(1).all()
    assert result["a"][rows:].eq(0).all()
    assert result["b"].tolist() == 1


def test_pad_input_along_another_dimension() -> None:
    assert pad_input_tensors(torch.ones(2, 3), 3, 2, dim=1).tolist() == [[1, 1, 1, 0]] * 2


def test_every_rank_learns_the_shape_of_a_tensor_that_one_has() -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        shape, kind = gather_tensor_shape(torch.ones(2, 0, 3, dtype=torch.float16) if state.process_index else None)
        return shape.tolist(), kind

    assert run_world(body, num_processes=2) == [([[2], [0], [3]], 3)] * 2


def test_a_shape_needs_a_tensor_somewhere() -> None:
    with pytest.raises(DistributedOperationException, match="gather_tensor_shape got no tensor on any rank"):
        gather_tensor_shape(None)


def test_shapes_of_a_tree() -> None:
    assert get_shape({"a": [torch.ones(2, 3)], "b": 4}) == {"a": [[2, 3]], "b": 4}
    assert not is_torch_xpu_tensor(torch.ones(1))


def test_the_largest_and_the_smallest_of_all_ranks() -> None:
    def body() -> list[Any]:
        rank = PartialState(cpu=True).process_index
        tensors = {"loss": torch.tensor([rank, -rank], dtype=torch.bfloat16), "any": torch.tensor([rank == 1, False])}
        return [reduce(tensors, kind, scale) for kind, scale in (("max", 1.0), ("min", 1.0), ("max", 2.0))]

    for largest, smallest, doubled in run_world(body, num_processes=2):
        assert largest["loss"].tolist() == [1, 0]
        assert largest["loss"].dtype is torch.bfloat16
        assert smallest["loss"].tolist() == [0, -1]
        assert (largest["any"].tolist(), smallest["any"].tolist()) == ([1, 0], [0, 0])
        assert doubled["loss"].tolist() == [2, 0]
