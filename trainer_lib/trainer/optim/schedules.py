"""Learning-rate schedules by name or dotted path."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.options.base import check_choice, check_count, check_positive
from trainer_lib.scheduler import AcceleratedScheduler
from trainer_lib.trainer.arguments.import_path import check_options, load, parameters_of, takes_any_keyword
from trainer_lib.trainer.optim import schedule_shapes
from trainer_lib.trainer.optim.plateau import PlateauSchedule

Shape = Callable[..., float]

SHAPES: dict[str, Shape] = {
    "constant": schedule_shapes.constant,
    "constant_with_warmup": schedule_shapes.constant,
    "cosine": schedule_shapes.cosine,
    "cosine_with_restarts": schedule_shapes.cosine_with_restarts,
    "inverse_sqrt": schedule_shapes.inverse_sqrt,
    "linear": schedule_shapes.linear,
    "one_cycle": schedule_shapes.one_cycle,
    "polynomial": schedule_shapes.polynomial,
    "wsd": schedule_shapes.wsd,
}
NAMES = (*SHAPES, "plateau")

# Schedules that transformers or torch has under another name or in another form.
_RENAMED = {
    "cosine_with_min_lr": '"cosine" with min_ratio, the fraction of the rate at the end',
    "cosine_warmup_with_min_lr": '"transformers.get_cosine_with_min_lr_schedule_with_warmup_lr_rate"',
    "reduce_lr_on_plateau": '"plateau"',
    "ReduceLROnPlateau": '"plateau"',
    "warmup_stable_decay": '"wsd" with decay_steps or decay_ratio, decay and min_ratio',
}
# Options of schedules that arguments of the trainer set.
_SET_BY_ARGUMENTS = {
    "warmup": "warmup",
    "warmup_steps": "warmup",
    "num_warmup_steps": "warmup",
    "total": "max_steps or schedule_steps",
    "total_steps": "max_steps or schedule_steps",
    "num_training_steps": "max_steps or schedule_steps",
    "base": "learning_rate",
    "step": "the trainer",
    "optimizer": "the trainer",
}
_UNKNOWN = (
    ", which is unknown: the data has no length, or max_time or max_tokens alone ends the run. Give max_steps or "
    "schedule_steps"
)
_ONE_CYCLE_WARMUP = 0.3  # as in torch's OneCycleLR
_DECAY = 0.1
_SAMPLED = 10_000


class Rates(NamedTuple):
    """The learning rates of a run; `None` if unknown before it starts."""

    first: float
    peak: float | None
    last: float | None


def build_schedule(
    name: str,
    optimizer: Optimizer,
    /,
    *,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    **options: Any,
) -> LRScheduler:
    """Return a schedule: a function of the number of updates, which rises in the first `warmup_steps`.

    A schedule with the name of one in transformers gives the same rates, "wsd" those of its "warmup_stable_decay", and
    "one_cycle" those of torch's `OneCycleLR`. Checkpoints hold its position only; its settings come from the arguments.

    Args:
        name: One of `NAMES`, or a dotted path. A function or class at that path gets those of `num_warmup_steps`,
            `num_training_steps`, `warmup_steps` and `total_steps` that it takes.
        optimizer: The optimizer, before it is prepared.
        warmup_steps: Updates of the warm-up.
        total_steps: Updates of the run; `None` if unknown.
        options: Further options of the schedule.

    Raises:
        ConfigurationError: If the schedule or an option is unknown, or the steps contradict each other.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> peak_first_last(build_schedule("linear", optimizer, warmup_steps=2, total_steps=10))
        Rates(first=0.0, peak=1.0, last=0.125)
    """
    owner = f"lr_scheduler {name!r}"
    check_count("warmup_steps", warmup_steps, at_least=0)
    if total_steps is not None:
        check_count("total_steps", total_steps)
        if warmup_steps > total_steps:
            raise ConfigurationError(
                f"The warm-up must not be longer than the run (got {warmup_steps} of {total_steps} steps)."
            )
    if not isinstance(name, str) or ("." not in name and name not in NAMES):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(unknown_schedule(name))
    if "." in name:
        return _from_path(name, optimizer, warmup_steps, total_steps, options)
    if name in SHAPES:
        return _from_shape(name, optimizer, warmup_steps, total_steps, options)
    check_options(owner, options, parameters_of(PlateauSchedule), _SET_BY_ARGUMENTS)
    return PlateauSchedule(optimizer, warmup_steps, **options)


def is_metric_driven(schedule: Any) -> bool:
    """Whether to call `step(value)` with the metric of each evaluation."""
    return isinstance(_inner(schedule), (PlateauSchedule, ReduceLROnPlateau))


def moves_each_update(schedule: Any) -> bool:
    """Whether to call `step()` after each update. A plateau with a warm-up needs both calls."""
    return not isinstance(_inner(schedule), ReduceLROnPlateau)


def peak_first_last(schedule: Any, total_steps: int | None = None) -> Rates:
    """Return the first, highest and last learning rate of the first parameter group.

    A rate is `None` if unknown: the last one of a run without an end, or those of a custom schedule.

    Args:
        schedule: A schedule, prepared or not; it does not change.
        total_steps: Updates of the run; by default those that the schedule was created for.
    """
    schedule = _inner(schedule)
    base = float(schedule.base_lrs[0]) if getattr(schedule, "base_lrs", None) else 0.0
    if isinstance(schedule, PlateauSchedule):
        return Rates(schedule.rate_at(0), base, None)
    if not isinstance(schedule, LambdaLR):
        return Rates(float(schedule.get_last_lr()[0]), None, None)
    factor = schedule.lr_lambdas[0]
    known: dict[str, Any] = getattr(factor, "keywords", {})
    total = total_steps or known.get("total") or known.get("num_training_steps")
    warmup = int(known.get("warmup") or known.get("num_warmup_steps") or 0)
    stride = max(1, (total or 1) // _SAMPLED)
    steps = {0, max(0, warmup - 1), warmup, *range(0, total or 1, stride)}
    last = None if total is None else base * factor(total - 1)
    return Rates(base * factor(0), max(base * factor(step) for step in steps), last)


def unknown_schedule(name: Any) -> str:
    """Return the message that no schedule has this name, with what to give instead.

    Example:
        >>> print(unknown_schedule("reduce_lr_on_plateau"))
        Unknown lr_scheduler 'reduce_lr_on_plateau'. Its name here is "plateau".
    """
    if str(name) in _RENAMED:
        return f"Unknown lr_scheduler {name!r}. Its name here is {_RENAMED[name]}."
    kind = getattr(torch_schedules, str(name), None)
    if isinstance(kind, type) and issubclass(kind, LRScheduler):
        return (
            f"Unknown lr_scheduler {name!r}. Give the path of torch's: "
            f'lr_scheduler="torch.optim.lr_scheduler.{name}", '
            "with its arguments as lr_scheduler_kwargs={…}. Schedules by name: " + ", ".join(sorted(NAMES)) + "."
        )
    return unknown("lr_scheduler", name, NAMES) + " Or give a dotted path."


def _inner(schedule: Any) -> Any:
    return schedule.scheduler if isinstance(schedule, AcceleratedScheduler) else schedule


def _from_shape(
    name: str, optimizer: Optimizer, warmup_steps: int, total_steps: int | None, options: dict[str, Any]
) -> LambdaLR:
    shape, owner = SHAPES[name], f"lr_scheduler {name!r}"
    taken = parameters_of(shape)
    settings = {"wsd": {"decay_ratio", "decay_steps"}, "one_cycle": {"pct_start"}}.get(name, set())
    check_options(owner, options, [*taken, *(settings - set(taken))], _SET_BY_ARGUMENTS)
    fixed: dict[str, Any] = {"warmup": warmup_steps}
    if "total" in taken:
        if total_steps is None:
            raise ConfigurationError(
                f'{owner} needs the number of steps{_UNKNOWN}, or use "constant" or "inverse_sqrt".'
            )
        fixed["total"], options = total_steps, dict(options)
        if name == "wsd":
            ratio, steps = options.pop("decay_ratio", None), options.get("decay_steps")
            options["decay_steps"] = _decay_steps(owner, warmup_steps, total_steps, ratio, steps)
        elif name == "one_cycle":
            fraction = options.pop("pct_start", None)
            fixed["warmup"] = _one_cycle_warmup(owner, warmup_steps, total_steps, fraction)
    _check_values(owner, options)
    bases = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if "base" not in taken:
        return LambdaLR(optimizer, [partial(shape, **fixed, **options) for _ in bases])
    _check_end(owner, bases, options.get("lr_end", cast("float", taken["lr_end"].default)))
    return LambdaLR(optimizer, [partial(shape, **fixed, **options, base=base) for base in bases])


def _decay_steps(owner: str, warmup: int, total: int, ratio: Any, steps: Any) -> int:
    """Return the steps of the decay of "wsd", given as a share of all steps (`ratio`) or as a number."""
    if ratio is not None and steps is not None:
        raise ConfigurationError(
            f"{owner} has decay_ratio={ratio!r} and decay_steps={steps!r}, which set the same thing. Give one of them."
        )
    if steps is None:
        steps = round(_fraction(owner, "decay_ratio", _DECAY if ratio is None else ratio) * total)
    check_count("decay_steps", steps, at_least=0)
    if warmup + steps > total:
        raise ConfigurationError(
            f"{owner}: {warmup} steps of warm-up and {steps} of decay must not be more than all {total} steps."
        )
    return steps


def _one_cycle_warmup(owner: str, warmup: int, total: int, fraction: Any) -> float:
    """Return the steps of the warm-up of "one_cycle", given as a share of all steps (`fraction`) or as a number."""
    if fraction is not None and warmup:
        raise ConfigurationError(f"{owner} has pct_start={fraction!r} and a warm-up. Give one of them.")
    fraction = _fraction(owner, "pct_start", _ONE_CYCLE_WARMUP if fraction is None else fraction)
    return warmup or fraction * total


def _fraction(owner: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigurationError(f"{owner}: {name} must be between 0 and 1 (got {shown(value)}).")
    return float(value)


def _check_values(owner: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name == "min_ratio":
            _fraction(owner, name, value)
        elif name == "decay":
            check_choice("decay", value, ("linear", "cosine", "1-sqrt"))
        elif name == "timescale":
            check_count(name, value)
        elif name != "decay_steps" and not (name == "lr_end" and value == 0):
            check_positive(f"{owner}: {name}", value)


def _check_end(owner: str, bases: list[float], end: float) -> None:
    low = min(bases)
    if low <= end:
        raise ConfigurationError(
            f"{owner}: lr_end must be below the learning rate of all groups (got {end}, and a group has {low})."
        )


def _from_path(
    path: str, optimizer: Optimizer, warmup_steps: int, total_steps: int | None, options: dict[str, Any]
) -> LRScheduler:
    make = load(path, "lr_scheduler")
    known, owner = parameters_of(make), f"lr_scheduler {path!r}"
    if not takes_any_keyword(make):
        check_options(owner, options, [name for name in known if name != "optimizer"], {"optimizer": "the trainer"})
    if warmup_steps and not {"warmup_steps", "num_warmup_steps"} & {*known, *options}:
        raise ConfigurationError(
            f"{owner} takes no warm-up (warmup_steps or num_warmup_steps), so {warmup_steps} steps of warm-up would "
            "have no effect. Leave warmup out, or give the path of a function with such an argument."
        )
    steps = {"warmup_steps": warmup_steps, "num_warmup_steps": warmup_steps}
    steps |= {"total_steps": total_steps, "num_training_steps": total_steps}
    settings = {name: value for name, value in steps.items() if name in known and name not in options}
    for name, value in settings.items():
        if value is None and known[name].default is known[name].empty:
            raise ConfigurationError(f"{owner} needs {name}{_UNKNOWN}.")
    try:
        schedule = make(optimizer, **{name: value for name, value in settings.items() if value is not None}, **options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{owner} cannot be created: {error}") from error
    if not isinstance(schedule, LRScheduler):
        raise ConfigurationError(f"{owner} must return a torch LRScheduler (got {type(schedule).__name__}).")
    return schedule
