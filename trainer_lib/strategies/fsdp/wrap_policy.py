"""This file is the choice of the modules that are sharded on their own, so that only one is whole at a time."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.modules.blocks import repeated_blocks
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin

# They have no forward, which is where weights are gathered.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# Its forward takes the weights of the modules inside instead of calling them.
_LEAVES = (nn.MultiheadAttention,)


def modules_to_wrap(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: set[nn.Module]
) -> dict[str, nn.Module]:
    """Return the modules inside `model` to shard on their own, by name, in the order of the model.

    Raises:
        ConfigurationError: If a class that is named is not in the model.
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
        and not _is_tied_to_others(model, module)
    }


def ignored_modules(model: nn.Module, given: Iterable[nn.Module] | str | None) -> set[nn.Module]:
    """Return the modules to leave whole, with all that is inside of them.

    Raises:
        ConfigurationError: If one is not in the model, or a pattern matches no name.
    """
    if given is None:
        return set()
    inside = set(model.modules())
    if isinstance(given, str):
        named = [module for name, module in model.named_modules() if re.fullmatch(given, name)]
        if not named:
            names = [name for name, _ in model.named_modules() if name]
            raise ConfigurationError(
                f"ignored_modules={shown(given)} matches no module's name.{did_you_mean(given, names)} Known: "
                f"{', '.join(names[:20])}{', …' if len(names) > 20 else ''}."
            )
    else:
        named = list(given)
        for module in named:
            if not isinstance(module, nn.Module) or module not in inside:
                raise ConfigurationError(
                    f"ignored_modules holds a {type(module).__name__} that is not in this {type(model).__name__}."
                )
    return {inner for module in named for inner in module.modules()}


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
    return _found(model, required=policy == "transformer_based_wrap")


def _found(model: nn.Module, required: bool) -> set[nn.Module]:
    own: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    chosen = {module for module in model.modules() if type(module).__name__ in own}
    chosen = chosen or set(repeated_blocks(model).values())
    if required and not chosen:
        raise ConfigurationError(
            f"auto_wrap_policy='transformer_based_wrap' finds no repeated blocks in this {type(model).__name__}. "
            f"Name classes in transformer_cls_names_to_wrap. Known: {', '.join(_class_names(model))}."
        )
    return chosen


def _of_classes(model: nn.Module, wanted: Sequence[str | type]) -> set[nn.Module]:
    chosen: set[nn.Module] = set()
    for one in wanted:
        matching = {
            module
            for module in model.modules()
            if (isinstance(module, one) if isinstance(one, type) else type(module).__name__ == one)
        }
        if not matching:
            name = one.__name__ if isinstance(one, type) else one
            known = _class_names(model)
            raise ConfigurationError(
                f"No module of this {type(model).__name__} is a {name!r}, which is to be sharded on its own."
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
    """Ask a function as FSDP1 does: may I look inside, and is what is left here to be sharded on its own?"""
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


def _is_tied_to_others(model: nn.Module, module: nn.Module) -> bool:
    """Whether the module shares a weight with one outside of it; the two have to be gathered together."""
    inside = set(module.modules())
    own = {id(parameter) for one in inside for parameter in one.parameters(recurse=False)}
    return any(
        id(parameter) in own
        for other in model.modules()
        if other not in inside
        for parameter in other.parameters(recurse=False)
    )
