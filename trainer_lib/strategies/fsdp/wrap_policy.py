"""Choose the modules that FSDP shards separately, so that only one of them is gathered at a time."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.modules.blocks import repeated_blocks
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin

# FSDP gathers weights in a module's forward, and these modules have none.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# The forward of these reads the weights of inner modules instead of calling those modules.
_LEAVES = (nn.MultiheadAttention,)


def modules_to_wrap(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: set[nn.Module]
) -> dict[str, nn.Module]:
    """Return the modules inside `model` to shard separately, by name, in the order of the model.

    Raises:
        ConfigurationError: If the model has no module of a named class.
    """
    chosen = _chosen(model, plugin, ignored)
    return {
        name: module
        for name, module in model.named_modules()
        if module in chosen
        and module is not model
        and module not in ignored
        and not isinstance(module, _CONTAINERS)
        and any(True for _ in module.parameters())
        and not _shares_weights_outside(model, module)
    }


def ignored_modules(model: nn.Module, option: Iterable[nn.Module] | str | None) -> set[nn.Module]:
    """Return the modules to leave whole, including their inner modules.

    Args:
        model: The model.
        option: The plugin's `ignored_modules`: modules, or a pattern for their names.

    Raises:
        ConfigurationError: If a module is not in the model, or the pattern matches no name.
    """
    if option is None:
        return set()
    named = _matching(model, option) if isinstance(option, str) else list(option)
    known = set(model.modules())
    for module in named:
        if not isinstance(module, nn.Module) or module not in known:
            raise ConfigurationError(
                f"ignored_modules holds a {type(module).__name__} that is not in this {type(model).__name__}."
            )
    return {inner for module in named for inner in module.modules()}


def _matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the modules whose whole name matches a pattern."""
    matches = [module for name, module in model.named_modules() if re.fullmatch(pattern, name)]
    if not matches:
        names = [name for name, _ in model.named_modules() if name]
        raise ConfigurationError(
            f"ignored_modules={shown(pattern)} matches no module's name.{did_you_mean(pattern, names)} Known: "
            f"{', '.join(names[:20])}{', …' if len(names) > 20 else ''}."
        )
    return matches


def _chosen(model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: set[nn.Module]) -> set[nn.Module]:
    policy: Any = plugin.auto_wrap_policy
    if policy == "no_wrap":
        return set()
    if policy == "size_based_wrap":
        return _by_function(model, _at_least(plugin.min_num_params or 1), ignored)
    if isinstance(policy, list):
        return _of_classes(model, policy)
    if callable(policy):
        return _by_function(model, policy, ignored)
    if plugin.transformer_cls_names_to_wrap:
        return _of_classes(model, plugin.transformer_cls_names_to_wrap)
    return _inferred_blocks(model, required=policy == "transformer_based_wrap")


def _inferred_blocks(model: nn.Module, required: bool) -> set[nn.Module]:
    declared: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    chosen = {module for module in model.modules() if type(module).__name__ in declared}
    chosen = chosen or set(repeated_blocks(model).values())
    if required and not chosen:
        raise ConfigurationError(
            f"auto_wrap_policy='transformer_based_wrap' finds no repeated blocks in this {type(model).__name__}. "
            f"Name classes in transformer_cls_names_to_wrap. Known: {', '.join(_class_names(model))}."
        )
    return chosen


def _of_classes(model: nn.Module, classes: Sequence[str | type]) -> set[nn.Module]:
    chosen: set[nn.Module] = set()
    for kind in classes:
        matching = {
            module
            for module in model.modules()
            if (isinstance(module, kind) if isinstance(kind, type) else type(module).__name__ == kind)
        }
        if not matching:
            name = kind.__name__ if isinstance(kind, type) else kind
            known = _class_names(model)
            raise ConfigurationError(
                f"This {type(model).__name__} has no module of the class {name!r} to shard separately."
                f"{did_you_mean(name, known)} Known: {', '.join(known)}."
            )
        chosen |= matching
    return chosen


def _class_names(model: nn.Module) -> list[str]:
    return sorted({type(module).__name__ for module in model.modules() if any(True for _ in module.parameters())})


def _at_least(size: int) -> Callable[..., Any]:
    def is_large(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return nonwrapped_numel >= size and not (recurse and isinstance(module, _LEAVES))

    return is_large


def _by_function(model: nn.Module, policy: Callable[..., Any], ignored: set[nn.Module]) -> set[nn.Module]:
    """Ask a policy function as FSDP1 does: whether to descend into a module, and whether to shard what remains."""
    chosen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        size = sum(parameter.numel() for parameter in module.parameters())
        if module in ignored or not _ask(policy, module, True, size):
            return 0
        wrapped = sum(visit(child) for child in module.children())
        if isinstance(module, _CONTAINERS) or not _ask(policy, module, False, size - wrapped):
            return wrapped
        chosen.add(module)
        return size

    visit(model)
    return chosen


def _ask(policy: Callable[..., Any], module: nn.Module, recurse: bool, size: int) -> bool:
    answer: Any = policy(module=module, recurse=recurse, nonwrapped_numel=size)
    if not isinstance(answer, bool):
        raise ConfigurationError(
            f"auto_wrap_policy must return True or False for (module, recurse, nonwrapped_numel), got {answer!r}."
        )
    return answer


def _shares_weights_outside(model: nn.Module, module: nn.Module) -> bool:
    """Whether the module shares a weight with a module outside of it; the two must be gathered together."""
    inside = set(module.modules())
    weights = {id(parameter) for inner in inside for parameter in inner.parameters(recurse=False)}
    return any(
        id(parameter) in weights
        for outside in model.modules()
        if outside not in inside
        for parameter in outside.parameters(recurse=False)
    )
