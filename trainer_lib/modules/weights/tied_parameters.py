"""Find and restore tied parameters: one tensor under several names."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from trainer_lib.foundation.tensors.tensor_operations import has_same_bits
from trainer_lib.modules.weights.tensor_slots import buffer_slots, parameter_slots


class TiedTensors:
    """The names of parameters and buffers of a model that are one tensor, to tie them again after hooks are removed.

    Args:
        model: The model.
        prefix: The name of the model, which names of its tensors begin with.

    Attributes:
        groups: The names of each such tensor.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self._model, self._prefix = model, prefix
        self.groups: list[list[str]] = _groups(_all_tensors(model, prefix))
        self._group_of = {name: names for names in self.groups for name in names}

    def find(self, name: str) -> Tensor | None:
        """Return the tensor of another name of the same group that has the value of this one, on the same device."""
        current = self._tensor(name)
        for other in self._group_of.get(name, ()):
            tensor = self._tensor(other)
            # A module with several names has one tensor under them.
            if current is None or tensor is None or tensor is current:
                continue
            if _is_same(tensor, current):
                return tensor
        return None

    def _tensor(self, name: str) -> Tensor | None:
        try:
            return _tensor(self._model, name.removeprefix(self._prefix).removeprefix("."))
        except (AttributeError, KeyError):  # the model has changed
            return None


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share one parameter.

    Example:
        >>> model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        >>> model["head"].weight = model["embedding"].weight
        >>> find_tied_parameters(model)
        [['embedding.weight', 'head.weight']]
    """
    return _groups(model.named_parameters(remove_duplicate=False))


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
            tensor = _tensor(model, name)
            if tensor is not None:
                by_device.setdefault(str(tensor.device), []).append(name)
        retie_parameters(model, [group for device, group in by_device.items() if device != "meta"])


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie each group of names to one parameter again: the first that is not on the meta device."""
    for names in tied_params:
        tensors = [_tensor(model, name) for name in names]
        kept = next((tensor for tensor in tensors if tensor is not None and tensor.device.type != "meta"), tensors[0])
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
    return {name: first.setdefault(id(tensor), name) for name, tensor in _all_tensors(model)}


def _tensor(model: nn.Module, name: str) -> Tensor | None:
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return (parameter_slots(owner) | buffer_slots(owner))[last]


def _all_tensors(model: nn.Module, prefix: str = "") -> list[tuple[str, Tensor]]:
    parameters = model.named_parameters(prefix, remove_duplicate=False)
    return [*parameters, *model.named_buffers(prefix, remove_duplicate=False)]


def _groups(tensors: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors:
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _is_same(first: Tensor, second: Tensor) -> bool:
    return not first.is_meta and first.device == second.device and has_same_bits(first, second)
