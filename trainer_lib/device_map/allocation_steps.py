"""Accelerate's single steps of inferring a device map: the size of a module with its ties, a module that still fits."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from trainer_lib.device_map.units import Classes, class_names
from trainer_lib.foundation.byte_sizes import convert_file_size_to_int
from trainer_lib.foundation.errors import ConfigurationError

Modules = list[tuple[str, Any]]


def get_module_size_with_ties(
    tied_params: Iterable[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, Any]],
) -> tuple[int, list[str], list[Any]]:
    """Return the size of a module together with the modules that share parameters with it, their names and themselves.

    A shared parameter counts once, and so does a module that shares several.

    Args:
        tied_params: The names that the module's parameters have in other modules.
        module_size: The size of the module.
        module_sizes: What `compute_module_sizes` returned for the model.
        modules_to_treat: The other modules by name.
    """
    owners: dict[str, Any] = {}
    shared: dict[str, int] = {}
    for parameter in tied_params:
        found = next(((name, module) for name, module in modules_to_treat if _is_inside(parameter, name)), None)
        if found is None:
            raise ConfigurationError(f"No module in modules_to_treat has {parameter}, which tied_params names.")
        owners[found[0]] = found[1]
        shared[found[0]] = shared.get(found[0], 0) + module_sizes[parameter]
    total = module_size + sum(module_sizes[name] - size for name, size in shared.items())
    return total, list(owners), list(owners.values())


def fallback_allocate(
    modules: Modules,
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Classes = None,
    tied_parameters: Iterable[Sequence[str]] | None = None,
) -> tuple[str | None, Any, Modules]:
    """Return the first module that fits into a size, its name, and the other modules; `None` twice if no module does.

    Modules that are too large are split, unless they are of a class that stays whole.

    Args:
        modules: The modules by name.
        module_sizes: What `compute_module_sizes` returned for the model.
        size_limit: The size, such as 1000 or "10GB".
        no_split_module_classes: Classes, or their names, whose modules are not split.
        tied_parameters: Groups of names of one parameter.

    Example:
        >>> sizes = {"0": 200, "1": 80, "1.weight": 60, "1.bias": 20}
        >>> fallback_allocate([("0", nn.ReLU()), ("1", nn.ReLU())], sizes, 100)[0]
        '1'
    """
    limit, whole = convert_file_size_to_int(size_limit), class_names(no_split_module_classes)
    groups = [list(names) for names in tied_parameters or ()]
    waiting = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        if name not in module_sizes:  # it has no tensors
            continue
        if _size_with_ties(name, module_sizes, groups, waiting) <= limit:
            return name, module, _without(modules, name)
        if isinstance(module, nn.Module) and type(module).__name__ not in whole and any(module.children()):
            waiting = [*_parts(name, module), *waiting]
    return None, None, modules


def _size_with_ties(
    name: str, sizes: Mapping[str, int], groups: Iterable[Sequence[str]], others: Sequence[tuple[str, Any]]
) -> int:
    tied = [
        parameter
        for names in groups
        if any(_is_inside(parameter, name) for parameter in names)
        for parameter in names
        if not _is_inside(parameter, name)
    ]
    known = [parameter for parameter in tied if any(_is_inside(parameter, other) for other, _ in others)]
    return get_module_size_with_ties(known, sizes[name], sizes, others)[0]


def _without(modules: Modules, name: str) -> Modules:
    """Return modules without one that may be inside another, of which the other parts stay."""
    left: Modules = []
    for other, module in modules:
        if other == name:
            continue
        left += _without(_parts(other, module), name) if _is_inside(name, other) else [(other, module)]
    return left


def _parts(name: str, module: nn.Module) -> Modules:
    inside = [*module.named_parameters(recurse=False), *module.named_children()]
    return [(f"{name}.{part}", value) for part, value in inside]


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
