"""Names of a model's tensors and classes without the prefixes that wrappers add."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

# The attributes in which torch's wrappers hold the wrapped module.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_name(name: str) -> str:
    """Return the name of a parameter, buffer or module without the parts that wrappers add.

    Example:
        >>> canonical_name("layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_in_model(names: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Return the name in a model of each weight of a file; one that the model does not have keeps its own.

    Args:
        names: The names in the file, which may have the parts that DDP and torch.compile add.
        known: The names of the model's tensors.

    Example:
        >>> names_in_model(["module.weight", "other"], ["weight"])
        {'module.weight': 'weight', 'other': 'other'}
    """
    found = dict(zip(names, names, strict=True))
    for name in [name for name in names if name not in known]:
        inner = canonical_name(name).removeprefix("module.")
        if inner in known and inner not in found:
            found[name] = inner
    return found


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with canonical names as its keys."""
    return {canonical_name(name): value for name, value in named_params.items()}


def is_listed(name: str, modules: Iterable[str]) -> bool:
    """Whether a list of names of modules, whole or parts such as "lm_head", has one that this name is of or inside of.

    Example:
        >>> is_listed("layers.0.lm_head.weight", ["lm_head"]), is_listed("lm_heads.weight", ["lm_head"])
        (True, False)
    """
    return any(f".{module}." in f".{name}." for module in modules)


def class_name(value: object) -> str:
    """Return the name of an object's class for messages; for a sharded module, its name before sharding.

    Example:
        >>> class_name([])
        'list'
    """
    # Not by isinstance, which would import torch.distributed.fsdp for a message.
    kinds = (kind for kind in type(value).__mro__ if all(base.__name__ != "FSDPModule" for base in kind.__mro__))
    return next(kinds).__name__
