"""Layer-wise learning rate decay: parameter groups with lower rates for earlier layers."""

import glob
import math

from torch import nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup


def layerwise_learning_rates(
    model: nn.Module, learning_rate: float, decay: float = 0.9, layers: str | None = None
) -> list[ParameterGroup]:
    """Return parameter groups whose learning rates fall from the last layer to the first.

    The last of n layers has `learning_rate * decay`, the one before `learning_rate * decay**2`, and parameters before
    the first layer, such as embeddings, `learning_rate * decay**(n + 1)`. Parameters after the layers, such as a head,
    are in none of the groups and have the learning rate of the arguments.

    Args:
        model: The model.
        learning_rate: The learning rate of the arguments, which the parameters after the layers have.
        decay: The factor from each layer to the one before, between 0 and 1.
        layers: The name of the list of layers; by default the `ModuleList` or `Sequential` with the most layers of one
            class.

    Raises:
        ConfigurationError: If the model has no such list.

    Example:
        >>> model = nn.ModuleDict({
        ...     "embedding": nn.Embedding(5, 2),
        ...     "blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
        ...     "head": nn.Linear(2, 5),
        ... })
        >>> for group in layerwise_learning_rates(model, 0.8, decay=0.5):
        ...     print(group.pattern, group.learning_rate)
        blocks.1.* 0.4
        blocks.0.* 0.2
        embedding.* 0.1
    """
    if not 0 < decay < 1:
        raise ConfigurationError(f"layerwise_learning_rates: decay must be between 0 and 1 (got {decay!r}).")
    if not 0 < learning_rate < math.inf:
        raise ConfigurationError(f"layerwise_learning_rates: learning_rate must be above 0 (got {learning_rate!r}).")
    name, count = _layers(model, layers)
    # Skips layers without weights, such as activations in a Sequential.
    numbers = [number for number in range(count) if any(True for _ in model.get_submodule(name)[number].parameters())]  # type: ignore[index]
    prefix = f"{canonical_name(name)}." if name else ""
    groups = [
        ParameterGroup(f"{glob.escape(f'{prefix}{number}')}.*", learning_rate=learning_rate * decay**depth)
        for depth, number in enumerate(reversed(numbers), start=1)
    ]
    lowest = learning_rate * decay ** (len(numbers) + 1)
    return groups + [ParameterGroup(pattern, learning_rate=lowest) for pattern in _before(model, prefix)]


def _layers(model: nn.Module, chosen: str | None) -> tuple[str, int]:
    """Return the name of the list of layers, and the number of layers."""
    lists = {
        canonical_name(name): (name, len(module))
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(module) > 1
        and any(True for _ in module.parameters())
    }
    if chosen is not None:
        if chosen not in lists:
            raise ConfigurationError(
                f"layerwise_learning_rates: layers={shown(chosen)} is not a ModuleList or Sequential of "
                f"{type(model).__name__}. Known: {', '.join(lists) or 'none'}."
            )
        return lists[chosen]

    def layers_of_one_class(name: str) -> int:
        kinds = [type(layer) for layer in model.get_submodule(lists[name][0]).children()]
        return max(kinds.count(kind) for kind in kinds)

    if not lists:
        raise ConfigurationError(
            f"layerwise_learning_rates: {type(model).__name__} has no ModuleList or Sequential of layers. Write the "
            "groups yourself: ParameterGroup(pattern, learning_rate=…)."
        )
    return lists[max(lists, key=layers_of_one_class)]


def _before(model: nn.Module, prefix: str) -> list[str]:
    """Return patterns that match the parameters before the layers and no others."""
    names = [canonical_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    first = next(index for index, name in enumerate(names) if name.startswith(prefix))
    early, later = names[:first], names[first:]
    patterns: list[str] = []
    for name in early:
        parts = name.split(".")
        modules = [".".join(parts[:length]) for length in range(1, len(parts))]
        early_module = next(
            (module for module in modules if not any(other.startswith(f"{module}.") for other in later)), None
        )
        pattern = glob.escape(name) if early_module is None else f"{glob.escape(early_module)}.*"
        if pattern not in patterns:
            patterns.append(pattern)
    return patterns
