"""Where a model can be cut: its blocks in a row, the modules around them, and parts of equal size."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from trainer_lib.foundation.errors import ConfigurationError


def find_blocks(model: nn.Module, blocks: str | Sequence[str] | None) -> list[str]:
    """Return the names of the blocks, in order: those of the list or the pattern, or the longest row of equal ones.

    Raises:
        ConfigurationError: If names or the pattern match no module, or the model has no repeated blocks.
    """
    names = [name for name, _ in model.named_modules() if name]
    if blocks is None:
        return _repeated_blocks(model)
    if isinstance(blocks, str):
        chosen = [name for name in names if fnmatchcase(name, blocks) and name.count(".") == blocks.count(".")]
    else:
        chosen = list(blocks)
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        raise ConfigurationError(
            f"blocks={blocks!r} names no modules of {type(model).__name__}{f': {unknown}' if unknown else ''}. "
            f"Modules: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}."
        )
    return chosen


def split_evenly(model: nn.Module, blocks: list[str], num_stages: int) -> list[int]:
    """Return where each stage begins, and the end, so that the largest stage has as few parameters as possible.

    Raises:
        ConfigurationError: If there are fewer blocks than stages.
    """
    costs = [1 + sum(weight.numel() for weight in model.get_submodule(name).parameters()) for name in blocks]
    return even_bounds(costs, num_stages, type(model).__name__)


def even_bounds(costs: Sequence[int], num_stages: int, model: str) -> list[int]:
    """Return where each stage begins, and the end, so that the largest stage costs as little as possible.

    Args:
        costs: What each block costs.
        num_stages: How many stages there are.
        model: The name of the model's class, for errors.

    Raises:
        ConfigurationError: If there are fewer blocks than stages.

    Example:
        >>> even_bounds([3, 1, 1, 1], 2, "Net")
        [0, 1, 4]
    """
    if num_stages > len(costs):
        raise ConfigurationError(
            f"{num_stages} stages need as many blocks, and {model} has {len(costs)}. Set pp_size or stages_per_rank so "
            f"that their product is at most {len(costs)}, or name smaller blocks (blocks=)."
        )
    best: dict[int, tuple[int, list[int]]] = {end: (sum(costs[:end]), [0, end]) for end in range(1, len(costs) + 1)}
    for count in range(2, num_stages + 1):
        best = {
            end: min(
                (max(best[start][0], sum(costs[start:end])), [*best[start][1], end]) for start in range(count - 1, end)
            )
            for end in range(count, len(costs) + 1)
        }
    return best[len(costs)][1]


def outermost_blocks(model: nn.Module) -> list[str]:
    """Return the names of modules with weights: those of outermost lists, and those beside the lists.

    Example:
        >>> outermost_blocks(nn.ModuleDict({"down": nn.ModuleList([nn.Linear(1, 1)]), "up": nn.Linear(1, 1)}))
        ['down.0', 'up']
    """
    return [name for name in _in_lists(model, "") if any(True for _ in model.get_submodule(name).parameters())]


def _in_lists(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        has_list = any(isinstance(inside, nn.ModuleList | nn.Sequential) for inside in child.modules())
        if has_list and not isinstance(module, nn.ModuleList | nn.Sequential):
            yield from _in_lists(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def _repeated_blocks(model: nn.Module) -> list[str]:
    """Return the children of a Sequential model, or of its longest list of modules of one class."""
    if isinstance(model, nn.Sequential):
        return [name for name, _ in model.named_children()]
    rows = [
        [f"{name}.{child}" for child, _ in module.named_children()]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for child in module}) == 1
    ]
    if not rows:
        raise ConfigurationError(
            f"{type(model).__name__} has no list of repeated blocks that can be cut. Keep its layers in an "
            "nn.ModuleList or nn.Sequential, or name them in the order they run: blocks=['layer1', 'layer2']."
        )
    return max(rows, key=len)


def surroundings(model: nn.Module, blocks: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the outermost modules registered before the first block and after the last one."""
    around = list(_outermost(model, blocks))
    positions = [position for position, name in enumerate(around) if name in set(blocks)]
    before = [name for name in around[: positions[0]] if _counts(model.get_submodule(name))]
    after = [name for name in around[positions[-1] + 1 :] if _counts(model.get_submodule(name))]
    return before, after


def _outermost(model: nn.Module, blocks: list[str], prefix: str = "") -> Iterator[str]:
    for child_name, child in model.named_children():
        name = f"{prefix}{child_name}"
        if any(block.startswith(f"{name}.") for block in blocks):
            yield from _outermost(child, blocks, f"{name}.")
        else:
            yield name


def _counts(module: nn.Module) -> bool:
    """Whether a module must run on one stage only; those without parameters, such as rotary angles, run on all."""
    is_dropout = isinstance(module, nn.Dropout)
    return is_dropout or any(True for _ in module.parameters())
