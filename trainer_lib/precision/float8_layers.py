"""Linear layers that multiply in fp8, by torchao."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from trainer_lib.foundation.imports import torchao_required
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)
_MULTIPLE = 16  # fp8 kernels take matrices whose sizes are multiples of it


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of a model.

    Example:
        >>> find_first_last_linear_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
        ('0', '2')
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(
    module: nn.Module, fqn: str, first_layer_name: str | None = None, last_layer_name: str | None = None
) -> bool:
    """Whether to convert a layer: its sizes are multiples of 16, and it is not the first or the last one.

    Args:
        module: The layer.
        fqn: Its name.
        first_layer_name: The name of the model's first linear layer.
        last_layer_name: The name of its last one.
    """
    has_sizes = not isinstance(module, nn.Linear) or not (
        module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
    )
    return has_sizes and fqn not in (first_layer_name, last_layer_name)


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether to convert a layer; `convert_model_to_fp8_ao` keeps the model's first and last linear layers with it."""
    first, last = find_first_last_linear_layers(module)
    return filter_linear_layers(module, fqn, first, last)


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Any = None,
    module_filter_func: Callable[[nn.Module, str], bool] | None = filter_first_and_last_linear_layers,
) -> None:
    """Let linear layers of a model multiply in fp8, in place; weights keep their names, types and objects.

    Args:
        model: The model.
        config: A `torchao.float8.Float8LinearConfig`.
        module_filter_func: A function of a linear layer and its name that says whether to convert it; by default all
            but the first and the last one, and those whose sizes are no multiples of 16.
    """
    from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]

    if module_filter_func in (None, filter_first_and_last_linear_layers):
        first, last = find_first_last_linear_layers(model)
        module_filter_func = partial(filter_linear_layers, first_layer_name=first, last_layer_name=last)
    names = [
        name for name, module in model.named_modules() if type(module) is nn.Linear and module_filter_func(module, name)
    ]
    if not names:
        _logger.warning(
            "fp8 converts no layer of %s: the first and the last linear layer stay as they are, and so do layers whose "
            "sizes are no multiples of %d. Give module_filter_func to choose others.", type(model).__name__, _MULTIPLE,
        )  # fmt: skip
    # By name: other linear layers, such as quantized ones, are subclasses, which torchao would replace.
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name in names, config=config)
