"""Parameter groups for Muon, GaLore and APOLLO: the matrices of hidden layers, and all else."""

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

HIDDEN = "hidden_matrices"
OPTIMIZERS = frozenset({"muon", "galore_adamw", "apollo_adamw"})
_BOTH = (True, False)


def split_hidden_matrices(model: nn.Module, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split parameter groups into matrices of hidden layers and other parameters, which AdamW trains.

    Embeddings, the output layer, and what has not two dimensions are other parameters.

    Args:
        model: The model.
        groups: Its parameters, as `group_parameters` returns them.

    Example:
        >>> model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2), nn.Linear(2, 5))
        >>> groups = [{"params": list(model.parameters()), "name": "rest"}]
        >>> [(group["name"], len(group["params"])) for group in split_hidden_matrices(model, groups)]
        [('rest, matrices', 1), ('rest', 4)]
    """
    outer = _outer_weights(model)
    parts: list[dict[str, Any]] = []
    for group in groups:
        matrices = [parameter for parameter in group["params"] if parameter.ndim == 2 and parameter not in outer]
        chosen = set(matrices)
        others = [parameter for parameter in group["params"] if parameter not in chosen]
        if matrices:
            parts.append({**group, "params": matrices, "name": f"{group['name']}, matrices", HIDDEN: True})
        if others:
            parts.append({**group, "params": others, HIDDEN: False})
    return parts


def marked_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameter groups that all say whether they hold hidden matrices; others go by the dimensions."""
    items: list[Any] = list(params)
    groups: list[dict[str, Any]] = items if items and isinstance(items[0], dict) else [{"params": items}]
    marked: list[dict[str, Any]] = []
    for group in groups:
        given: Any = group["params"]
        members = [given] if isinstance(given, Tensor) else [_bare(member) for member in given]
        if HIDDEN in group:
            marked.append({**group, "params": members})
            continue
        parts = {is_matrix: [member for member in members if (member.ndim == 2) == is_matrix] for is_matrix in _BOTH}
        marked += [{**group, "params": part, HIDDEN: is_matrix} for is_matrix, part in parts.items() if part]
    return marked


def _bare(member: Any) -> Tensor:
    return member[1] if isinstance(member, tuple) else member  # torch also takes (name, parameter)


def _outer_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of embeddings and of the output layer."""
    layers = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    get_output: Any = getattr(model, "get_output_embeddings", None)
    output = get_output() if callable(get_output) else None
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if isinstance(output, nn.Module):
        layers.append(cast("Any", output))
    elif len(linear) > 1:
        layers.append(cast("Any", linear[-1]))
    return {parameter for layer in layers for parameter in layer.parameters(recurse=False)}
