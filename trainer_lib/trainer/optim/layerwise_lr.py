"""This file is learning rates that are lower the deeper a layer lies, as groups of parameters."""

import glob
import math

from torch import nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.names import canonical_name
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup


def layerwise_learning_rates(
    model: nn.Module, learning_rate: float, decay: float = 0.9, layers: str | None = None
) -> list[ParameterGroup]:
    """Return groups of parameters whose learning rates fall from the last layer to the first.

    The last of n layers has `learning_rate * decay`, the one before `learning_rate * decay**2`, and what comes before
    the first, such as embeddings, `learning_rate * decay**(n + 1)`. What comes after the layers, such as a head, is in
    none of the groups and has the learning rate of the arguments.

    Args:
        model: The model.
        learning_rate: The learning rate above the layers, that of the arguments.
        decay: What each layer's is multiplied by, more than 0 and less than 1.
        layers: The name of the list of layers; by default the `ModuleList` or `Sequential` of most layers of one kind.

    Raises:
        ConfigurationError: If there is no such list.

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
        raise ConfigurationError(f"layerwise_learning_rates(decay={decay!r}): give a number between 0 and 1.")
    if not 0 < learning_rate < math.inf:
        raise ConfigurationError(f"layerwise_learning_rates(learning_rate={learning_rate!r}): give a number above 0.")
    name, count = _layers(model, layers)
    # Layers without weights, such as activations in a Sequential, have no rate.
    numbers = [number for number in range(count) if any(True for _ in model.get_submodule(name)[number].parameters())]  # type: ignore[index]
    prefix = f"{canonical_name(name)}." if name else ""
    groups = [
        ParameterGroup(f"{glob.escape(f'{prefix}{number}')}.*", learning_rate=learning_rate * decay**depth)
        for depth, number in enumerate(reversed(numbers), start=1)
    ]
    lowest = learning_rate * decay ** (len(numbers) + 1)
    return groups + [ParameterGroup(pattern, learning_rate=lowest) for pattern in _before(model, prefix)]


def _layers(model: nn.Module, given: str | None) -> tuple[str, int]:
    """Return the name of the list of layers, and how many they are."""
    lists = {
        canonical_name(name): (name, len(module))
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(module) > 1
        and any(True for _ in module.parameters())
    }
    if given is not None:
        if given not in lists:
            raise ConfigurationError(
                f"layerwise_learning_rates(layers={shown(given)}) is no list of layers of {type(model).__name__}. "
                f"There are: {', '.join(lists) or 'none'}."
            )
        return lists[given]

    def alike(name: str) -> int:
        kinds = [type(layer) for layer in model.get_submodule(lists[name][0]).children()]
        return max(kinds.count(kind) for kind in kinds)

    if not lists:
        raise ConfigurationError(
            f"layerwise_learning_rates: {type(model).__name__} has no ModuleList or Sequential of layers. Give groups "
            "of your own: ParameterGroup(pattern, learning_rate=…)."
        )
    return lists[max(lists, key=alike)]


def _before(model: nn.Module, prefix: str) -> list[str]:
    """Return patterns of the parameters that come before the layers, and of these alone."""
    names = [canonical_name(name) for name, one in model.named_parameters() if one.requires_grad]
    first = next(place for place, name in enumerate(names) if name.startswith(prefix))
    early, others = names[:first], names[first:]
    patterns: list[str] = []
    for name in early:
        parts = name.split(".")
        starts = [".".join(parts[:length]) for length in range(1, len(parts))]
        whole = next((start for start in starts if not any(one.startswith(f"{start}.") for one in others)), None)
        pattern = glob.escape(name) if whole is None else f"{glob.escape(whole)}.*"
        if pattern not in patterns:
            patterns.append(pattern)
    return patterns
