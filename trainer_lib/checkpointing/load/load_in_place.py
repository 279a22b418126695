"""Loads weights into the tensors that a model has: one file at a time, or one tensor at a time from rank 0."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.checkpointing.load.weight_files import WeightFiles
from trainer_lib.collectives.agreement import raise_on_all_ranks, run_on_main_process
from trainer_lib.foundation.errors import CheckpointError, PreparationError
from trainer_lib.modules.weights.names import canonical_name, names_in_model
from trainer_lib.modules.weights.state_dicts import check_fits
from trainer_lib.modules.weights.tied_parameters import find_tied_parameters, retie_parameters
from trainer_lib.process_group import ProcessGroup
from trainer_lib.tensor_files.weights_index import has_rank_shards, read_weights

_DOING = "load_checkpoint_in_model(broadcast_from_rank0=True)"

Differences = tuple[list[str], list[str]]


def load_in_place(model: nn.Module, files: Path, dtype: torch.dtype | None, strict: bool) -> Differences:
    """Load weights, one file at a time: beside the model, at most one file is in memory.

    Args:
        model: The model; of a sharded one each rank keeps its parts.
        files: The file, index or folder of the weights.
        dtype: The type of the weights in the model; by default its own.
        strict: Whether differing names raise.

    Returns:
        The names that the weights do not have, and those that the model does not have.

    Raises:
        StateError: If the weights do not fit; nothing is loaded then.
    """
    found = _Weights(files, model)
    check_fits(model, found.shapes, strict, resizes=True)
    return _load(model, found.shapes, found.by_file(), dtype)


def load_from_rank0(
    model: nn.Module, files: Path, dtype: torch.dtype | None, strict: bool, group: ProcessGroup
) -> Differences:
    """Load weights that rank 0 reads and sends to the other ranks, one tensor at a time; see `load_in_place`.

    Args:
        model: The model.
        files: The weights, which only rank 0 needs to have.
        dtype: The type of the weights in the model; by default its own.
        strict: Whether differing names raise.
        group: The ranks.
    """
    found: list[_Weights] = []

    def kinds() -> dict[str, tuple[torch.dtype, torch.Size]]:
        found.append(_Weights(files, model))
        return found[0].kinds

    described = run_on_main_process(group, _DOING, kinds, CheckpointError)
    shapes = {name: shape for name, (_, shape) in described.items()}
    with raise_on_all_ranks(group, _DOING, CheckpointError):
        check_fits(model, shapes, strict, resizes=True)

    files_of_rank0 = found[0].by_file() if found else iter(())
    return _load(model, shapes, _received(described, files_of_rank0, group), dtype)


def _received(
    kinds: Mapping[str, tuple[torch.dtype, torch.Size]], files: Iterator[dict[str, Tensor]], group: ProcessGroup
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of rank 0, one after the other."""
    weights: dict[str, Tensor] = {}

    def read() -> list[str]:
        weights.update(next(files, {}))
        return list(weights)

    while names := run_on_main_process(group, _DOING, read, CheckpointError):
        for name in names:
            kind, shape = kinds[name]
            value = weights.pop(name).contiguous() if weights else torch.empty(shape, dtype=kind)
            yield {name: group.broadcast(value, 0)}


class _Weights:
    """The weights of a path, which may be the shards that the ranks of a sharded model wrote.

    Their names are those of the model, without what DDP's or torch.compile's wrapper added when they were saved.
    """

    def __init__(self, files: Path, model: nn.Module) -> None:
        known = {canonical_name(name) for name in model.state_dict(keep_vars=True)}
        self._whole: dict[str, Tensor] | None = None
        if has_rank_shards(files):
            weights = read_weights(files)
            names = names_in_model(weights, known)
            self._whole = {names[name]: value for name, value in weights.items()}
            self.kinds = {name: (value.dtype, value.shape) for name, value in self._whole.items()}
        else:
            self._files = WeightFiles(files, known)
            self.kinds = self._files.kinds
        self.shapes = {name: shape for name, (_, shape) in self.kinds.items()}

    def by_file(self) -> Iterator[dict[str, Tensor]]:
        """Yield the weights of one file after the other."""
        if self._whole is not None:
            yield dict(self._whole)
            return
        for path, names in self._files.by_file():
            yield self._files.read(path, names)


def _load(
    model: nn.Module,
    shapes: Mapping[str, torch.Size],
    several: Iterable[dict[str, Tensor]],
    dtype: torch.dtype | None,
) -> Differences:
    """Load several groups of weights, and return what only the model or only the weights have."""
    _gather_nothing(model)
    ties, state = find_tied_parameters(model), model.state_dict(keep_vars=True)
    _check_dtype(state, dtype)
    names = {canonical_name(name): name for name, current in state.items() if isinstance(current, Tensor)}
    loaded: set[int] = set()
    taken: set[int] = set()  # the memory of weights that are in the model now
    for weights in several:
        while weights:  # one after the other, so that a converted one does not stay in memory twice
            name, value = weights.popitem()
            if name in names:
                current = state[names[name]]
                loaded |= {id(current), _load_one(model, names[name], current, value, dtype, taken)}
            del value
    retie_parameters(model, ties)
    missing = [name for name, full in names.items() if id(state[full]) not in loaded]
    return sorted(missing), [name for name in shapes if name not in names]


def _load_one(
    model: nn.Module, name: str, current: Tensor, value: Tensor, dtype: torch.dtype | None, taken: set[int]
) -> int:
    kind = current.dtype if dtype is None or not current.is_floating_point() else dtype
    if hasattr(current, "_local_tensor"):
        _load_part(current, value.to(kind))
    elif current.device.type == "meta":
        owner, _, attribute = name.rpartition(".")
        new = _owned(value.to(kind), taken)
        new = nn.Parameter(new, current.requires_grad) if isinstance(current, nn.Parameter) else new
        setattr(model.get_submodule(owner), attribute, new)
        return id(new)
    elif current.dtype == kind:
        with torch.no_grad():
            if current.shape != value.shape:  # a buffer that its module resizes
                current.resize_(value.shape)
            current.copy_(value)
    else:
        current.data = _owned(value.to(current.device, kind), taken)
    return id(current)


def _gather_nothing(model: nn.Module) -> None:
    """Have each rank of a sharded model hold only its parts, as before a forward."""
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


def _check_dtype(state: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    for name, current in state.items():
        if dtype is not None and hasattr(current, "_local_tensor") and current.dtype != dtype:
            raise PreparationError(
                f"{name} is sharded, and its type {current.dtype} cannot be changed to {dtype}. Leave out dtype, or "
                "load the weights before prepare(model)."
            )


def _load_part(current: Any, value: Tensor) -> None:
    """Load the part of a weight that this rank has of a sharded one."""
    from torch.distributed.tensor import distribute_tensor

    # Each rank has the whole value, so that none is sent.
    part = distribute_tensor(value.to(current.device), current.device_mesh, current.placements, src_data_rank=None)
    with torch.no_grad():
        current.to_local().copy_(part.to_local())


def _owned(value: Tensor, taken: set[int]) -> Tensor:
    """Return a value that shares its memory neither with another weight of the model nor with a larger tensor."""
    storage = value.untyped_storage()
    if storage.data_ptr() in taken or storage.nbytes() != value.nbytes:
        value = value.clone()
    taken.add(value.untyped_storage().data_ptr())
    return value
