"""The dictionaries in which a module keeps its parameters, buffers and modules by name, to replace them in place."""

from torch import Tensor, nn

# torch has no public names for them. Its iterators leave out duplicates and `None`; assigning attributes runs hooks.


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of the module itself, `None` where one is registered without a value."""
    return module._parameters  # pyright: ignore[reportPrivateUsage]


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of the module itself, `None` where one is registered without a value."""
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of buffers of the module itself that its state dict leaves out."""
    return module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]


def module_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules directly inside the module, also one that has several names."""
    return module._modules  # pyright: ignore[reportPrivateUsage]
