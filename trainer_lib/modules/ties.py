"""Find and restore tied parameters: one tensor under several names."""

from collections.abc import Iterable, Sequence

from torch import nn


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share one parameter.

    Example:
        >>> model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        >>> model["head"].weight = model["embedding"].weight
        >>> find_tied_parameters(model)
        [['embedding.weight', 'head.weight']]
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a model of transformers says in its configuration that some of its weights are tied."""
    config = getattr(model, "config", None)
    ties_embeddings = getattr(config, "tie_word_embeddings", False) and hasattr(model, "get_output_embeddings")
    ties_halves = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool(ties_embeddings or ties_halves or any(hasattr(module, "_tie_weights") for module in model.modules()))


def retie_by_device(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie the names of each group that are on one device to one parameter again; those on the meta device stay."""
    for names in tied_params:
        by_device: dict[str, list[str]] = {}
        for name in names:
            by_device.setdefault(str(model.get_parameter(name).device), []).append(name)
        retie_parameters(model, [group for device, group in by_device.items() if device != "meta"])


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie each group of names to one parameter again: the first that is not on the meta device."""
    for names in tied_params:
        parameters = [model.get_parameter(name) for name in names]
        kept = next((parameter for parameter in parameters if parameter.device.type != "meta"), parameters[0])
        for name in names:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, kept)


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter and buffer, by each of its names.

    Example:
        >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        >>> model["head"].weight = model["embed"].weight
        >>> first_names(model)
        {'embed.weight': 'embed.weight', 'head.weight': 'embed.weight'}
    """
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}
