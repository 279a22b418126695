"""Parameter groups: learning rate, weight decay and freezing by patterns of parameter names."""

import math
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self

from torch import nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, SignatureError, unknown
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.public_names.signatures import ConstructorSignature, unknown_keywords
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.modules.weights.patterns import no_match

# Class names of norms in torch and in models: LlamaRMSNorm, T5LayerNorm, BatchNormAct2d …
_NORM_NAMES = r"(?i)(layer|rms|batch|group|instance)_?norm|norm$"


@dataclass(frozen=True)
class ParameterGroup:
    """Settings for some of the parameters; `None` takes the value of the arguments.

    Args:
        pattern: A shell pattern (`fnmatch`) that matches the names of the parameters, such as "encoder.*" or "*.bias".
        learning_rate: Their learning rate.
        weight_decay: Their weight decay. Norms, biases and vectors still have none, unless the pattern matches nothing
            else.
        frozen: Whether to freeze the parameters.

    Example:
        >>> ParameterGroup("encoder.*", learning_rate=1e-5)
        ParameterGroup(pattern='encoder.*', learning_rate=1e-05, weight_decay=None, frozen=False)
    """

    __signature__: ClassVar[ConstructorSignature] = ConstructorSignature()

    pattern: str
    _: KW_ONLY
    learning_rate: float | None = None
    weight_decay: float | None = None
    frozen: bool = False

    # Runs before __init__, which would raise a TypeError for an unknown name and could not suggest a known one.
    def __new__(cls, *positional: Any, **named: Any) -> Self:
        """Check the names of the settings."""
        del positional
        for name in unknown_keywords(cls.__init__, named):
            hint = " Give learning_rate." if name == "lr" else ""
            raise SignatureError(unknown("setting of ParameterGroup", name, [each.name for each in fields(cls)]) + hint)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check the settings that need no model."""
        if not isinstance(self.pattern, str) or not self.pattern:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f'ParameterGroup: pattern must be a text such as "encoder.*" (got {self.pattern!r}).'
            )
        settings = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        for name, value in settings.items():
            if value is not None and not _is_amount(value):
                raise ConfigurationError(
                    f"ParameterGroup({self.pattern!r}): {name} must be a finite number of at least 0 (got "
                    f"{shown(value)})."
                )
        set_names = [name for name, value in settings.items() if value is not None]
        if self.frozen and set_names:
            raise ConfigurationError(
                f"ParameterGroup({self.pattern!r}): {' and '.join(set_names)} has no effect with frozen=True. Leave "
                f"out frozen or {' and '.join(set_names)}."
            )
        if not self.frozen and not set_names:
            raise ConfigurationError(
                f"ParameterGroup({self.pattern!r}) has no effect. Give learning_rate, weight_decay or frozen=True."
            )


def group_parameters(
    model: nn.Module, weight_decay: float, groups: Sequence[ParameterGroup] = ()
) -> list[dict[str, Any]]:
    """Return the parameters of a model in groups for an optimizer, and freeze those of frozen groups.

    A parameter belongs to the first of `groups` that matches one of its names. Norms, biases and parameters with fewer
    than two dimensions have no weight decay. Tied weights appear once. Parameters outside of all groups come first (as
    "rest"), then `groups` in their order; each group has a `name`.

    Args:
        model: The model.
        weight_decay: The weight decay of parameters for which no group sets another one.
        groups: The groups with other settings.

    Raises:
        ConfigurationError: If a pattern matches no parameter that it can apply to, or nothing is left to train.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> [(group["name"], group["weight_decay"], len(group["params"])) for group in group_parameters(model, 0.1)]
        [('rest', 0.1, 1), ('rest, no decay', 0.0, 3)]
    """
    parameters = _parameters(model)
    if not parameters:
        raise ConfigurationError(f"{type(model).__name__} has no parameters, so there is nothing to train.")
    owners = _owners(parameters, groups)
    if not any(
        parameter.trains and not (owner and owner.frozen) for parameter, owner in zip(parameters, owners, strict=True)
    ):
        raise ConfigurationError(
            f"All {len(parameters)} parameters of {type(model).__name__} are frozen, so there is nothing to train. Set "
            "requires_grad=True on some, or remove frozen=True from a group."
        )
    # After all checks, so that an error leaves the model unchanged.
    for parameter, owner in zip(parameters, owners, strict=True):
        if owner is not None and owner.frozen:
            parameter.value.requires_grad_(False)
    members = {
        group: [
            parameter
            for parameter, owner in zip(parameters, owners, strict=True)
            if owner is group and parameter.trains
        ]
        for group in (None, *groups)
    }
    return [part for group, parameters in members.items() for part in _parts(group, parameters, weight_decay)]


def named_alike(model: nn.Module, other: nn.Module) -> bool:
    """Return whether two models are the same object, or have parameters of the same names."""
    return model is other or _names(model).keys() == _names(other).keys()


def groups_of_part(groups: Sequence[dict[str, Any]], whole: nn.Module, part: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of a whole model with the parameters that a part of it holds; some may have none.

    Args:
        groups: The groups of the whole model.
        whole: The whole model.
        part: The part, with the whole model's names.
    """
    names = _names(whole)
    held = {names[name]: parameter for name, parameter in _names(part).items()}
    return [{**group, "params": [held[each] for each in group["params"] if each in held]} for group in groups]


def _names(model: nn.Module) -> dict[str, nn.Parameter]:
    return {canonical_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}


def freeze(model: nn.Module, groups: Sequence[ParameterGroup]) -> list[nn.Parameter]:
    """Freeze the parameters of frozen groups, and return those that were not frozen before."""
    frozen: list[nn.Parameter] = []
    for parameter in _parameters(model) if any(group.frozen for group in groups) else ():
        owner = next((group for group in groups if _matches(group, parameter)), None)
        if owner is not None and owner.frozen and parameter.trains:
            parameter.value.requires_grad_(False)
            frozen.append(parameter.value)
    return frozen


@frozen_dataclass(kw_only=True, eq=False)
class _Parameter:
    """A parameter with all its names."""

    value: nn.Parameter
    names: list[str]
    without_decay: bool

    @property
    def trains(self) -> bool:
        return self.value.requires_grad


def _parameters(model: nn.Module) -> list[_Parameter]:
    """Return the parameters in the order of the model; tied ones appear once."""
    names: dict[nn.Parameter, list[str]] = {}
    in_norms: set[nn.Parameter] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        direct = list(module.named_parameters(path, recurse=False, remove_duplicate=False))
        in_norms.update(value for _, value in direct if re.search(_NORM_NAMES, type(module).__name__))
        for name, value in direct:
            names.setdefault(value, []).append(canonical_name(name))
    return [
        _Parameter(
            value=value,
            names=aliases,
            without_decay=value in in_norms or value.ndim < 2 or any(map(_is_bias, aliases)),
        )
        for value, aliases in names.items()
    ]


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition(".")[2]


def _owners(parameters: list[_Parameter], groups: Sequence[ParameterGroup]) -> list[ParameterGroup | None]:
    """Return the group of each parameter, and check that each group has parameters."""
    matching = {group: {parameter for parameter in parameters if _matches(group, parameter)} for group in groups}
    owners = [next((group for group in groups if parameter in matching[group]), None) for parameter in parameters]
    for index, group in enumerate(groups):
        members = [parameter for parameter, owner in zip(parameters, owners, strict=True) if owner is group]
        if not matching[group]:
            names = [name for parameter in parameters for name in parameter.names]
            raise no_match("ParameterGroup", group.pattern, names)
        if not members:
            earlier = [other.pattern for other in groups[:index] if matching[other] & matching[group]]
            raise ConfigurationError(
                f"ParameterGroup({group.pattern!r}): all parameters that it matches belong to "
                f"{' and '.join(map(repr, earlier))}, earlier in the list. Put it first."
            )
        if not group.frozen and not any(member.trains for member in members):
            raise ConfigurationError(
                f"ParameterGroup({group.pattern!r}): all parameters that it matches are frozen (requires_grad=False), "
                f"such as {members[0].names[0]}. Leave the group out, or set requires_grad=True."
            )
    return owners


def _matches(group: ParameterGroup, parameter: _Parameter) -> bool:
    return any(fnmatchcase(name, group.pattern) for name in parameter.names)


def _parts(group: ParameterGroup | None, members: list[_Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups for an optimizer: one with weight decay and one without, if they have parameters."""
    name, rate = ("rest", None) if group is None else (group.pattern, group.learning_rate)
    group_decay = None if group is None else group.weight_decay
    decay = weight_decay if group_decay is None else group_decay
    decayed = [member for member in members if not member.without_decay]
    undecayed = [member for member in members if member.without_decay]
    if decay == 0 or (group_decay is not None and not decayed):
        decayed, undecayed = members, []
    parts = [(name, decay, decayed), (f"{name}, no decay", 0.0, undecayed)]
    return [
        {
            "params": [parameter.value for parameter in parameters],
            "name": name,
            "weight_decay": decay,
            **({} if rate is None else {"lr": rate}),
        }
        for name, decay, parameters in parts
        if parameters
    ]


def _is_amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
