"""Find modules of a model: its repeated blocks, such as the layers of a transformer, and all, the innermost first."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

_STACKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks of a model, by name.

    A block contains modules, and its stack has another block of the same class.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
        >>> list(repeated_blocks(encoder))
        ['layers.0', 'layers.1', 'layers.2']
    """
    blocks: dict[str, nn.Module] = {}
    _collect(model, "", blocks)
    return blocks


def _collect(module: nn.Module, prefix: str, blocks: dict[str, nn.Module]) -> None:
    children = dict(module.named_children())
    counts = Counter(type(child) for child in children.values()) if isinstance(module, _STACKS) else Counter[type]()
    for name, child in children.items():
        inside: dict[str, nn.Module] = {}
        _collect(child, f"{prefix}{name}.", inside)
        is_block = counts[type(child)] > 1 and any(child.children())
        # In a stack of stacks (the stages of a ResNet) the inner blocks count, if there are any.
        if is_block and not (inside and isinstance(child, _STACKS)):
            blocks[prefix + name] = child
        else:
            blocks.update(inside)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name of a module or a module inside it, or `None`."""
    return next((type(inside) for inside in module.modules() if type(inside).__name__ == name), None)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return the modules of a model, each after those inside it; the model is the last.

    Args:
        model: The model.
        return_fqns: Whether to return pairs of a name and a module.
    """
    modules = list(_bottom_up(model, ""))
    return modules if return_fqns else [module for _, module in modules]


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether a module is a `ModuleList` of modules of one class."""
    return isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether a module or one inside it is a `ModuleList` of modules of one class."""
    return any(is_repeated_blocks(inside) for inside in module.modules())


def _bottom_up(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name)
    yield name, module
