"""Find the repeated blocks of a model, such as the layers of a transformer."""

from collections import Counter

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
