"""This file is the repeated blocks of a model: the layers that it is a stack of."""

from collections import Counter

from torch import nn

_STACKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that stacks of layers repeat, by name, the outermost ones only.

    A block has modules of its own and shares its class with another one of its stack.

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
        # A stack of stacks (the stages of a ResNet) is made of the blocks inside, if there are any.
        if is_block and not (inside and isinstance(child, _STACKS)):
            blocks[prefix + name] = child
        else:
            blocks.update(inside)
