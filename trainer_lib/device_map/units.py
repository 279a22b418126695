"""The parts of a model that stay on one device: single tensors, layers, and modules that must not be split."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.logging import get_logger
from trainer_lib.modules.module_kinds import READS_INNER_WEIGHTS
from trainer_lib.modules.weights.tensor_sizes import tensor_bytes
from trainer_lib.modules.weights.tensor_slots import buffer_slots, module_slots, parameter_slots

_logger = get_logger(__name__)

Classes = str | type[nn.Module] | Iterable[str | type[nn.Module]] | None


@frozen_dataclass
class Unit:
    """A part of a model that stays on one device.

    Args:
        name: The name of the module or tensor.
        parameters: The bytes of its parameters by the identity of the tensor; a tied parameter is in several units.
        buffers: The bytes of its buffers, in the same way.
    """

    name: str
    parameters: Mapping[int, int]
    buffers: Mapping[int, int]

    @property
    def size(self) -> int:
        """The bytes of all its tensors."""
        return sum(self.parameters.values()) + sum(self.buffers.values())


def units_of(
    model: nn.Module,
    no_split: Classes = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> list[Unit]:
    """Return the units of a model, in the order of its modules.

    Args:
        model: The model.
        no_split: Names of classes, or classes, whose modules are one unit.
        dtype: The type to count with; see `compute_module_sizes`.
        special_dtypes: The types of single tensors; see `compute_module_sizes`.
    """
    sizes = tensor_bytes(model, dtype, special_dtypes)
    whole = class_names(no_split)
    _warn_of_unknown(model, whole)
    units = (_unit(name, part, sizes) for name, part in _parts(model, "", whole))
    return [unit for unit in units if unit.parameters or unit.buffers]


def class_names(classes: Classes) -> frozenset[str]:
    """Return the names of classes, which may be given as names or classes, one or several.

    Example:
        >>> sorted(class_names([nn.Linear, "Block"]))
        ['Block', 'Linear']
    """
    several = [classes] if isinstance(classes, (str, type)) else list(classes or ())
    for value in several:
        if not isinstance(value, (str, type)):
            raise ConfigurationError(
                f"no_split_module_classes must be names of classes or classes (got {shown(value)}). "
                "Give, for example, ['LlamaDecoderLayer']."
            )
    return frozenset(value if isinstance(value, str) else value.__name__ for value in several)


def _warn_of_unknown(model: nn.Module, whole: frozenset[str]) -> None:
    """Warn if no module of the model is of one of these classes; a list for several kinds of models is fine."""
    known = {type(module).__name__ for module in model.modules()}
    if whole and whole.isdisjoint(known):
        _logger.warning_once(
            "no_split_module_classes has no effect: the %s has no module of the class %s.%s",
            type(model).__name__,
            " or ".join(sorted(whole)),
            did_you_mean(min(whole), sorted(known)),
        )


def _parts(module: nn.Module, name: str, whole: frozenset[str]) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield the units of a module: itself, or its own tensors and the units of the modules inside it."""
    children = {key: child for key, child in module_slots(module).items() if child is not None}
    if name and (not children or isinstance(module, READS_INNER_WEIGHTS) or type(module).__name__ in whole):
        yield name, module
        return
    prefix = f"{name}." if name else ""
    for key, tensor in (parameter_slots(module) | buffer_slots(module)).items():
        if tensor is not None:
            yield f"{prefix}{key}", tensor
    for key, child in children.items():
        yield from _parts(child, f"{prefix}{key}", whole)


def _unit(name: str, part: nn.Module | Tensor, sizes: Mapping[int, int]) -> Unit:
    if isinstance(part, nn.Module):
        parameters, buffers = list(part.parameters()), list(part.buffers())
    else:
        parameters, buffers = ([part], []) if isinstance(part, nn.Parameter) else ([], [part])
    return Unit(name, {id(t): sizes[id(t)] for t in parameters}, {id(t): sizes[id(t)] for t in buffers})
