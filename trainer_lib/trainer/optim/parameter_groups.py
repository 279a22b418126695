"""This file is groups of parameters that are trained each in its own way."""

import math
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.names import canonical_name
from trainer_lib.modules.patterns import no_match

# torch's own, and what models call theirs: LlamaRMSNorm, T5LayerNorm, BatchNormAct2d …
_NORM_NAMES = re.compile(r"(layer|rms|batch|group|instance)_?norm|norm$", re.IGNORECASE)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are trained otherwise than the rest; what is left at `None` is as for the rest.

    Args:
        pattern: Which parameters: a shell pattern (`fnmatch`) over their names, such as "encoder.*" or "*.bias".
        learning_rate: Their learning rate.
        weight_decay: Their weight decay. Norms, biases and vectors stay spared, unless the pattern matches nothing
            else.
        frozen: Leave them as they are.

    Example:
        >>> ParameterGroup("encoder.*", learning_rate=1e-5)
        ParameterGroup(pattern='encoder.*', learning_rate=1e-05, weight_decay=None, frozen=False)
    """

    pattern: str
    _: KW_ONLY
    learning_rate: float | None = None
    weight_decay: float | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        """Check what can be known without a model."""
        if not isinstance(self.pattern, str) or not self.pattern:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f'ParameterGroup(pattern={self.pattern!r}): give a text such as "encoder.*".')
        settings = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        for name, value in settings.items():
            if value is not None and not _is_amount(value):
                raise ConfigurationError(
                    f"ParameterGroup({self.pattern!r}, {name}={shown(value)}): give a finite number of at least 0."
                )
        given = [name for name, value in settings.items() if value is not None]
        if self.frozen and given:
            raise ConfigurationError(
                f"ParameterGroup({self.pattern!r}, frozen=True, {given[0]}=…): what is frozen is not trained. Leave "
                f"out frozen or {' and '.join(given)}."
            )
        if not self.frozen and not given:
            raise ConfigurationError(
                f"ParameterGroup({self.pattern!r}) says nothing. Give learning_rate, weight_decay or frozen=True."
            )


def group_parameters(
    model: nn.Module, weight_decay: float, groups: Sequence[ParameterGroup] = ()
) -> list[dict[str, Any]]:
    """Return the parameters of a model as an optimizer takes them, and freeze those that are to be.

    A parameter belongs to the first of `groups` that matches one of its names. Weight decay spares norms, biases and
    whatever has fewer than two dimensions. Tied weights are there once. What is trained as the rest comes first, then
    the groups as given; each has a `name`.

    Args:
        model: The model.
        weight_decay: The weight decay of what `groups` do not say otherwise.
        groups: What is trained otherwise.

    Raises:
        ConfigurationError: If a pattern matches nothing that it could apply to, or nothing is left to train.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> [(group["name"], group["weight_decay"], len(group["params"])) for group in group_parameters(model, 0.1)]
        [('rest', 0.1, 1), ('rest, no decay', 0.0, 3)]
    """
    parameters = _parameters(model)
    if not parameters:
        raise ConfigurationError(f"{type(model).__name__} has no parameters, so there is nothing to train.")
    owners = _owners(parameters, groups)
    left = [one for one, owner in zip(parameters, owners, strict=True) if one.trains and not (owner and owner.frozen)]
    if not left:
        raise ConfigurationError(
            f"All {len(parameters)} parameters of {type(model).__name__} are frozen, so there is nothing to train. Set "
            "requires_grad=True on some, or take frozen=True from a group."
        )
    # Only now, when nothing can be wrong any more.
    for one, owner in zip(parameters, owners, strict=True):
        if owner is not None and owner.frozen:
            one.value.requires_grad_(False)
    members = {
        group: [one for one, owner in zip(parameters, owners, strict=True) if owner is group and one.trains]
        for group in (None, *groups)
    }
    return [part for group, own in members.items() for part in _parts(group, own, weight_decay)]


def freeze(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Freeze what is to be frozen, before a model is prepared: who averages gradients has to know which there are."""
    for one in _parameters(model) if any(group.frozen for group in groups) else ():
        owner = next((group for group in groups if _matches(group, one)), None)
        if owner is not None and owner.frozen:
            one.value.requires_grad_(False)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parameter:
    """A parameter, with all the names it goes by."""

    value: nn.Parameter
    names: list[str]
    spared: bool

    @property
    def trains(self) -> bool:
        return self.value.requires_grad


def _parameters(model: nn.Module) -> list[_Parameter]:
    """Return the parameters in the order of the model, tied ones once."""
    names: dict[nn.Parameter, list[str]] = {}
    in_norms: set[nn.Parameter] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        own = list(module.named_parameters(path, recurse=False, remove_duplicate=False))
        in_norms.update(value for _, value in own if _NORM_NAMES.search(type(module).__name__))
        for name, value in own:
            names.setdefault(value, []).append(canonical_name(name))
    return [
        _Parameter(value=value, names=own, spared=value in in_norms or value.ndim < 2 or any(map(_is_bias, own)))
        for value, own in names.items()
    ]


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition(".")[2]


def _owners(parameters: list[_Parameter], groups: Sequence[ParameterGroup]) -> list[ParameterGroup | None]:
    """Return the group of each parameter, and check that each group has some."""
    matching = {group: {one for one in parameters if _matches(group, one)} for group in groups}
    owners = [next((group for group in groups if one in matching[group]), None) for one in parameters]
    for index, group in enumerate(groups):
        own = [one for one, owner in zip(parameters, owners, strict=True) if owner is group]
        if not matching[group]:
            names = [name for one in parameters for name in one.names]
            raise no_match("ParameterGroup", group.pattern, names)
        if not own:
            earlier = [other.pattern for other in groups[:index] if matching[other] & matching[group]]
            raise ConfigurationError(
                f"ParameterGroup({group.pattern!r}): all that it matches belongs to "
                f"{' and '.join(map(repr, earlier))}, which come before it. Put it first."
            )
        if not group.frozen and not any(one.trains for one in own):
            raise ConfigurationError(
                f"ParameterGroup({group.pattern!r}): all that it matches is frozen (requires_grad=False), such as "
                f"{own[0].names[0]}. Leave the group out, or set requires_grad=True."
            )
    return owners


def _matches(group: ParameterGroup, parameter: _Parameter) -> bool:
    return any(fnmatchcase(name, group.pattern) for name in parameter.names)


def _parts(group: ParameterGroup | None, members: list[_Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return what a group is for an optimizer: one part that decays and one that does not, as far as there are any."""
    name, rate = ("rest", None) if group is None else (group.pattern, group.learning_rate)
    own_decay = None if group is None else group.weight_decay
    decay = weight_decay if own_decay is None else own_decay
    decayed = [one for one in members if not one.spared]
    spared = [one for one in members if one.spared]
    if decay == 0 or (own_decay is not None and not decayed):
        decayed, spared = members, []
    parts = [(name, decay, decayed), (f"{name}, no decay", 0.0, spared)]
    return [
        {
            "params": [one.value for one in own],
            "name": name,
            "weight_decay": decay,
            **({} if rate is None else {"lr": rate}),
        }
        for name, decay, own in parts
        if own
    ]


def _is_amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
