"""This file is the names of a model's tensors and classes as its author knows them, whatever wraps its modules."""

# What torch's wrappers put between a module and what they wrap.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_name(name: str) -> str:
    """Return the name of a parameter, buffer or module without the wrappers around its owners.

    Example:
        >>> canonical_name("layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def class_name(value: object) -> str:
    """Return the name of an object's class, for messages; of a sharded module, the name it had before.

    Example:
        >>> class_name([])
        'list'
    """
    # Not by isinstance: nobody has to import torch.distributed.fsdp to be told something.
    kinds = (kind for kind in type(value).__mro__ if all(base.__name__ != "FSDPModule" for base in kind.__mro__))
    return next(kinds).__name__
