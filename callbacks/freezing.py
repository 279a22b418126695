"""Freezing weights for part of a run, and gradual unfreezing."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import nn

from trainer_lib.events import Modifier, Run
from trainer_lib.events.trigger import Trigger, callback_trigger
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.weights.patterns import matching


class _Part(NamedTuple):
    """Patterns of weights, and when they are frozen."""

    patterns: tuple[str, ...]
    begins: Trigger | None  # None: frozen from the start
    ends: Trigger | None  # None: frozen until the end


class Freeze(Modifier):
    """Freezes weights until an amount of training, from an amount on, or between the two.

    Frozen weights get no gradients, which saves their computation. Their optimizer state is dropped, and starts from
    zero when the weights are trained again. To freeze weights for the whole run, use `ParameterGroup(frozen=True)`.
    With `TrainingArguments(ddp=DistributedDataParallelKwargs(…))`, set `find_unused_parameters=True` in it.

    Args:
        *patterns: Shell patterns (`fnmatch`) of the full names of the weights, such as "encoder.*".
        until: When the weights are unfrozen, such as "2 epochs"; `None`: never in this run.
        after: When the weights are frozen; `None`: from the start.

    Example:
        >>> head_first = Freeze("encoder.*", "embeddings.*", until="1 epoch")
    """

    freezes_weights: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = True  # frozen weights have no gradients

    def __init__(self, *patterns: str, until: Any = None, after: Any = None) -> None:
        if until is None and after is None:
            raise ConfigurationError(
                'Freeze needs until=… or after=…, such as until="1 epoch". To freeze weights for the whole run, use '
                "TrainingArguments(parameter_groups=[ParameterGroup(pattern, frozen=True)])."
            )
        ends = None if until is None else callback_trigger(until, "Freeze(until)", may_be_time=False)
        begins = None if after is None else callback_trigger(after, "Freeze(after)", may_be_time=False)
        self._parts = [_Part(_checked(patterns, "Freeze"), begins, ends)]
        self._weights: list[list[nn.Parameter]] = []

    def on_fit_begin(self, run: Run) -> None:
        _check_replicas(run, type(self).__name__)
        named = run.parameters
        all_names = _of_all_parts(run, named)
        matches = [matching(all_names, part.patterns, type(self).__name__) for part in self._parts]
        self._weights = [list(dict.fromkeys(named[name] for name in names if name in named)) for names in matches]
        self._check(run)
        for part in self._parts:
            for trigger in (part.begins, part.ends):
                if trigger is not None:
                    trigger.begin(run.state)
        self._apply(run)
        trained = {id(weight) for weight in run.trained_parameters if weight.requires_grad}
        if not _of_all_parts(run, [name for name, weight in named.items() if id(weight) in trained]):
            raise ConfigurationError(
                f"{type(self).__name__} freezes all trained weights, so nothing is left to train. Leave some weights "
                "unfrozen, such as the head."
            )

    def on_load_end(self, run: Run, folder: Path) -> None:
        del folder
        if self._weights:  # a rewind; at the start of a resumed run they are not known yet
            self._apply(run)

    def on_step_end(self, run: Run) -> None:
        self._apply(run)

    on_epoch_end = on_step_end  # for an epoch of unknown length

    def on_fit_end(self, run: Run) -> None:
        del run
        for weight in (weight for weights in self._weights for weight in weights):
            weight.requires_grad_(True)
        self._weights = []

    def _apply(self, run: Run) -> None:
        for part, weights in zip(self._parts, self._weights, strict=True):
            has_begun = part.begins is None or part.begins.is_reached(run.state)
            trains = not has_begun or (part.ends is not None and part.ends.is_reached(run.state))
            if not weights or weights[0].requires_grad is trains:  # none: of another stage of a pipeline
                continue
            for weight in weights:
                weight.requires_grad_(trains)
                if not trains:
                    weight.grad = None
                    for optimizer in run.optimizers.values():
                        optimizer.state.pop(weight, None)

    def _check(self, run: Run) -> None:
        trained = {id(weight) for weight in run.trained_parameters}
        frozen: set[int] = set()
        for part, weights in zip(self._parts, self._weights, strict=True):
            source = f"{type(self).__name__}({', '.join(map(repr, part.patterns))})"
            ids = {id(weight) for weight in weights}
            if ids - trained:
                raise ConfigurationError(
                    f"{source}: some of these {len(weights)} weights are never trained (requires_grad=False, or in no "
                    "optimizer). Leave requires_grad=True: this callback sets it."
                )
            if frozen & ids:
                raise ConfigurationError(
                    f"{source}: some of these weights are in an earlier stage too. Name each weight in one stage."
                )
            frozen |= ids
        unfiltered = [callback.unfiltered for callback in run.trainer.events]
        freezers = [callback for callback in unfiltered if isinstance(callback, Freeze) and callback is not self]
        if any(id(weight) in frozen for freezer in freezers for weights in freezer._weights for weight in weights):
            raise ConfigurationError("Two callbacks freeze the same weights. Name each weight in one of them.")


class GradualUnfreezing(Freeze):
    """Unfreezes the weights in stages, one after each amount of training.

    Args:
        *stages: The stages in the order in which they are unfrozen, each a pattern or a list of patterns. The first
            stage, and weights in no stage, are trained from the start.
        every: The amount of training between two stages.

    Example:
        >>> from_the_top = GradualUnfreezing("head.*", "layers.2.*", ["layers.1.*", "layers.0.*"], every="1 epoch")
    """

    def __init__(self, *stages: Any, every: Any = "1 epoch") -> None:
        gap = callback_trigger(every, "GradualUnfreezing(every)", may_be_time=False).amount
        if len(stages) < 2:
            raise ConfigurationError(
                f"GradualUnfreezing needs at least two stages (got {len(stages)}). Give first the one to train first."
            )
        self._parts = [
            _Part(
                _checked((stage,) if isinstance(stage, str) else tuple(stage), "GradualUnfreezing"),
                None,
                Trigger(Every(gap.amount * number, gap.unit)),
            )
            for number, stage in enumerate(stages[1:], start=1)
        ]
        self._first = _checked((stages[0],) if isinstance(stages[0], str) else tuple(stages[0]), "GradualUnfreezing")
        self._weights = []

    def on_fit_begin(self, run: Run) -> None:
        matching(_of_all_parts(run, run.parameters), self._first, "GradualUnfreezing")
        super().on_fit_begin(run)


def _of_all_parts(run: Run, names: Iterable[str]) -> list[str]:
    """Return the names of all stages of a pipeline, or those given. All ranks call it."""
    return sorted(run.accelerator.strategy.names_of_all_parts(names))


def _checked(patterns: tuple[Any, ...], callback: str) -> tuple[str, ...]:
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ConfigurationError(
            f'{callback} needs names of weights or patterns such as "encoder.*" (got {patterns!r}).'
        )
    return patterns


def _check_replicas(run: Run, callback: str) -> None:
    models = [run.model] if isinstance(run.model, nn.Module) else list(run.model.values())
    if not all(getattr(model, "find_unused_parameters", True) for model in models):  # only DDP has it
        raise ConfigurationError(
            f"{callback} needs DDP with find_unused_parameters=True: otherwise the ranks wait for the gradients of "
            "frozen weights. Set it in TrainingArguments(ddp=DistributedDataParallelKwargs(…)), or leave ddp out and "
            "pass the callback to the Trainer when you make it."
        )
