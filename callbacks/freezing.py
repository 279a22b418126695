"""This file is weights that are left as they are for a part of a run."""

from typing import Any, ClassVar, NamedTuple

from torch import nn

from trainer_lib.callbacks.weight_averaging import interval
from trainer_lib.events import Modifier, Run
from trainer_lib.events.gates import Gate
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.patterns import matching


class _Part(NamedTuple):
    """Weights, and when they are frozen."""

    patterns: tuple[str, ...]
    begins: Gate | None  # None: from the start
    ends: Gate | None  # None: not before the end


class Freeze(Modifier):
    """Leaves weights as they are until an amount of training is reached, after one, or between two.

    What is frozen gets no gradients, which saves their computation, and what an optimizer kept of it is forgotten: it
    begins anew when the weights are trained again. What is to be frozen in the whole run is a
    `ParameterGroup(frozen=True)`. Several processes with replicas have to look for what is unused:
    `TrainingArguments(ddp=DistributedDataParallelKwargs(find_unused_parameters=True))`.

    Args:
        *patterns: Which weights: shell patterns (`fnmatch`) over their whole names, such as "encoder.*".
        until: When they are trained (again), such as "2 epochs"; `None`: not in this run.
        after: When they are frozen; `None`: from the start.

    Example:
        >>> head_first = Freeze("encoder.*", "embeddings.*", until="1 epoch")
    """

    saves_memory: ClassVar[bool] = True  # frozen weights have no gradients

    def __init__(self, *patterns: str, until: Any = None, after: Any = None) -> None:
        if until is None and after is None:
            raise ConfigurationError(
                'Freeze has to know until when, or after what: until="1 epoch". What is frozen in the whole run is '
                "TrainingArguments(parameter_groups=[ParameterGroup(pattern, frozen=True)])."
            )
        ends = None if until is None else interval(until, "Freeze(until)")
        begins = None if after is None else interval(after, "Freeze(after)")
        self._parts = [_Part(_checked(patterns, "Freeze"), begins, ends)]
        self._weights: list[list[nn.Parameter]] = []

    def on_fit_begin(self, run: Run) -> None:
        _check_replicas(run, type(self).__name__)
        names = run.parameters
        self._weights = [
            list(dict.fromkeys(names[name] for name in matching(names, part.patterns, type(self).__name__)))
            for part in self._parts
        ]
        self._check(run)
        for part in self._parts:
            for gate in (part.begins, part.ends):
                if gate is not None:
                    gate.begin(run.state)
        self._apply(run)
        if not any(one.requires_grad for one in _trained(run)):
            raise ConfigurationError(
                f"{type(self).__name__} freezes all that is trained, so there is nothing to train. Leave something, "
                "such as the head."
            )

    def on_step_end(self, run: Run) -> None:
        self._apply(run)

    on_epoch_end = on_step_end  # for a pass whose length nobody knew

    def on_fit_end(self, run: Run) -> None:
        del run
        for weight in (weight for weights in self._weights for weight in weights):
            weight.requires_grad_(True)
        self._weights = []

    def _apply(self, run: Run) -> None:
        for part, weights in zip(self._parts, self._weights, strict=True):
            begun = part.begins is None or part.begins.is_reached(run.state)
            trains = not begun or (part.ends is not None and part.ends.is_reached(run.state))
            if weights[0].requires_grad is trains:
                continue
            for weight in weights:
                weight.requires_grad_(trains)
                if not trains:
                    weight.grad = None
                    for optimizer in run.optimizers.values():
                        optimizer.state.pop(weight, None)

    def _check(self, run: Run) -> None:
        trained = {id(one) for one in _trained(run)}
        own: set[int] = set()
        for part, weights in zip(self._parts, self._weights, strict=True):
            told = f"{type(self).__name__}({', '.join(map(repr, part.patterns))})"
            if any(id(one) not in trained for one in weights):
                raise ConfigurationError(
                    f"{told}: some of these {len(weights)} weights are not trained at all (requires_grad=False, or in "
                    "no optimizer). Leave requires_grad as it is: this callback sees to it."
                )
            if own & {id(one) for one in weights}:
                raise ConfigurationError(f"{told}: some of these weights are in an earlier stage too. Name them once.")
            own |= {id(one) for one in weights}
        others = [one for one in run.trainer.events if isinstance(one, Freeze) and one is not self]
        if any(id(weight) in own for other in others for weights in other._weights for weight in weights):
            raise ConfigurationError("Two callbacks freeze the same weights, each at its own time. Name them in one.")


class GradualUnfreezing(Freeze):
    """Trains a first part of the weights, and one more each time an amount of training is reached.

    Args:
        *stages: The parts in the order in which they are trained, each a pattern or several in a list; the first one
            from the start. Weights that are in none are trained from the start.
        every: How much training comes between two stages.

    Example:
        >>> from_the_top = GradualUnfreezing("head.*", "layers.2.*", ["layers.1.*", "layers.0.*"], every="1 epoch")
    """

    def __init__(self, *stages: Any, every: Any = "1 epoch") -> None:
        interval(every, "GradualUnfreezing(every)")
        each = Every.parse(every)
        if len(stages) < 2:
            raise ConfigurationError(
                "GradualUnfreezing needs two stages at least, the one that is trained first first."
            )
        self._parts = [
            _Part(
                _checked((stage,) if isinstance(stage, str) else tuple(stage), "GradualUnfreezing"),
                None,
                interval(Every(each.amount * number, each.unit), "GradualUnfreezing(every)"),
            )
            for number, stage in enumerate(stages[1:], start=1)
        ]
        self._first = _checked((stages[0],) if isinstance(stages[0], str) else tuple(stages[0]), "GradualUnfreezing")
        self._weights = []

    def on_fit_begin(self, run: Run) -> None:
        matching(run.parameters, self._first, "GradualUnfreezing")
        super().on_fit_begin(run)


def _checked(patterns: tuple[Any, ...], told_as: str) -> tuple[str, ...]:
    if not patterns or not all(isinstance(one, str) and one for one in patterns):
        raise ConfigurationError(f'{told_as}{patterns!r}: give names of weights, or patterns such as "encoder.*".')
    return patterns


def _trained(run: Run) -> list[Any]:
    return [p for one in run.optimizers.values() for group in one.param_groups for p in group["params"]]


def _check_replicas(run: Run, told_as: str) -> None:
    models = [run.model] if isinstance(run.model, nn.Module) else list(run.model.values())
    if not all(getattr(model, "find_unused_parameters", True) for model in models):  # only DDP has it
        raise ConfigurationError(
            f"{told_as}: several processes wait for the gradients of all weights, frozen ones too, unless they look "
            "for those that are missing. Give TrainingArguments(ddp=DistributedDataParallelKwargs("
            "find_unused_parameters=True))."
        )
