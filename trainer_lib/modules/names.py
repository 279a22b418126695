"""This file is the names of a model's tensors as its author knows them, whatever wraps its modules."""

# What torch's wrappers put between a module and what they wrap.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_name(name: str) -> str:
    """Return the name of a parameter, buffer or module without the wrappers around its owners.

    Example:
        >>> canonical_name("layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
