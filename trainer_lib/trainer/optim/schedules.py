"""This file is making a learning-rate schedule from its name."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from torch.optim import Optimizer
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

# What transformers has by another name, or in another form.
_OTHERWISE = {
    "cosine_with_min_lr": '"cosine" with min_ratio, the part of the rate it ends at',
    "cosine_warmup_with_min_lr": '"cosine" with min_ratio, the part of the rate it ends at',
    "reduce_lr_on_plateau": '"plateau"',
    "warmup_stable_decay": '"wsd" with decay_steps or decay_ratio, decay and min_ratio',
}
# What a schedule is told by the trainer, by the names that schedules call it.
_TOLD = {
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
    ", and that is not known: the data has no length, or max_time or max_tokens alone ends the run. Give max_steps or "
    "schedule_steps"
)
_ONE_CYCLE_WARMUP = 0.3  # as torch's OneCycleLR
_DECAY = 0.1
_SAMPLED = 10_000


class Rates(NamedTuple):
    """The learning rates of a run, as far as they can be known before it."""

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
    """Return a schedule: a function of the updates made, which goes up from 0 in the first `warmup_steps`.

    Where transformers has one of the same name it gives the same rates. What survives a restart is where it stands; how
    it goes is for the arguments to say.

    Args:
        name: One of `NAMES`, or a dotted path. A function or class there is told what it takes by the names
            `num_warmup_steps`, `num_training_steps`, `warmup_steps` and `total_steps`.
        optimizer: The optimizer, not prepared.
        warmup_steps: The updates of the warm-up.
        total_steps: The updates there will be, if that is known.
        options: Further options of the schedule.

    Raises:
        ConfigurationError: If there is no such schedule or option, or the steps do not fit.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> peak_first_last(build_schedule("linear", optimizer, warmup_steps=2, total_steps=10))
        Rates(first=0.0, peak=1.0, last=0.125)
    """
    told_as = f"lr_scheduler {name!r}"
    check_count("warmup_steps", warmup_steps, at_least=0)
    if total_steps is not None:
        check_count("total_steps", total_steps)
        if warmup_steps > total_steps:
            raise ConfigurationError(f"A warm-up of {warmup_steps} steps is longer than all {total_steps} steps.")
    if not isinstance(name, str) or ("." not in name and name not in NAMES):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(_no_such(name))
    if "." in name:
        return _from_path(name, optimizer, warmup_steps, total_steps, options)
    if name in SHAPES:
        return _from_shape(name, optimizer, warmup_steps, total_steps, options)
    check_options(told_as, options, parameters_of(PlateauSchedule), _TOLD)
    return PlateauSchedule(optimizer, warmup_steps, **options)


def is_metric_driven(schedule: Any) -> bool:
    """Whether `step(value)` is to be called with the metric of each evaluation."""
    return isinstance(_inner(schedule), (PlateauSchedule, ReduceLROnPlateau))


def moves_each_update(schedule: Any) -> bool:
    """Whether `step()` is to be called after each update. Both may be true: of a plateau with a warm-up."""
    return not isinstance(_inner(schedule), ReduceLROnPlateau)


def peak_first_last(schedule: Any, total_steps: int | None = None) -> Rates:
    """Return the rates of the first update, the highest, and that of the last, of the first parameter group.

    `None` where it cannot be known: the last of a run without an end, or what a foreign schedule will do.

    Args:
        schedule: A schedule, prepared or not; it is not moved.
        total_steps: The updates there will be, if not as many as the schedule was made for.
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
    warmup = known.get("warmup") or known.get("num_warmup_steps") or 0
    stride = max(1, (total or 1) // _SAMPLED)
    steps = {0, warmup, *range(0, total or 1, stride)}
    last = None if total is None else base * factor(total - 1)
    return Rates(base * factor(0), max(base * factor(step) for step in steps), last)


def _no_such(name: Any) -> str:
    if str(name) in _OTHERWISE:
        return f"lr_scheduler {name!r} is {_OTHERWISE[name]} here."
    return unknown("lr_scheduler", name, NAMES) + " Or give a dotted path."


def _inner(schedule: Any) -> Any:
    return schedule.scheduler if isinstance(schedule, AcceleratedScheduler) else schedule


def _from_shape(
    name: str, optimizer: Optimizer, warmup_steps: int, total_steps: int | None, options: dict[str, Any]
) -> LambdaLR:
    shape, told_as = SHAPES[name], f"lr_scheduler {name!r}"
    taken = parameters_of(shape)
    settings = {"wsd": {"decay_ratio", "decay_steps"}, "one_cycle": {"pct_start"}}.get(name, set())
    check_options(told_as, options, [*taken, *(settings - set(taken))], _TOLD)
    fixed: dict[str, Any] = {"warmup": warmup_steps}
    if "total" in taken:
        if total_steps is None:
            raise ConfigurationError(
                f'{told_as} has to know how many steps there will be{_UNKNOWN}, or take "constant" or "inverse_sqrt".'
            )
        fixed["total"] = total_steps
        options = _phases(name, told_as, fixed, options)
    _check_values(told_as, options)
    bases = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if "base" not in taken:
        return LambdaLR(optimizer, [partial(shape, **fixed, **options) for _ in bases])
    _check_end(told_as, bases, options.get("lr_end", cast("float", taken["lr_end"].default)))
    return LambdaLR(optimizer, [partial(shape, **fixed, **options, base=base) for base in bases])


def _phases(name: str, told_as: str, fixed: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return options with lengths that were given as parts of the whole turned into steps."""
    total, options = fixed["total"], dict(options)
    if name == "wsd":
        part, steps = options.pop("decay_ratio", None), options.get("decay_steps")
        if part is not None and steps is not None:
            raise ConfigurationError(f"{told_as} has decay_ratio={part!r} and decay_steps={steps!r}. Give one of them.")
        if steps is None:
            options["decay_steps"] = round(_part(told_as, "decay_ratio", _DECAY if part is None else part) * total)
        check_count("decay_steps", options["decay_steps"], at_least=0)
        if fixed["warmup"] + options["decay_steps"] > total:
            raise ConfigurationError(
                f"{told_as}: {fixed['warmup']} steps of warm-up and {options['decay_steps']} of decay are more than "
                f"all {total} steps."
            )
    if name == "one_cycle":
        part = options.pop("pct_start", None)
        if part is not None and fixed["warmup"]:
            raise ConfigurationError(f"{told_as} has pct_start={part!r} and a warm-up. Give one of them.")
        part = _part(told_as, "pct_start", _ONE_CYCLE_WARMUP if part is None else part)
        fixed["warmup"] = fixed["warmup"] or round(part * total)
    return options


def _part(told_as: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigurationError(f"{told_as}: {name}={shown(value)} must lie between 0 and 1.")
    return float(value)


def _check_values(told_as: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name == "min_ratio":
            _part(told_as, name, value)
        elif name == "decay":
            check_choice("decay", value, ("linear", "cosine", "1-sqrt"))
        elif name == "timescale":
            check_count(name, value)
        elif name != "decay_steps" and not (name == "lr_end" and value == 0):
            check_positive(f"{told_as}: {name}", value)


def _check_end(told_as: str, bases: list[float], end: float) -> None:
    low = min(bases)
    if low <= end:
        raise ConfigurationError(
            f"{told_as} goes down to lr_end={end}, and a group begins at {low}. Give a lower lr_end."
        )


def _from_path(
    path: str, optimizer: Optimizer, warmup_steps: int, total_steps: int | None, options: dict[str, Any]
) -> LRScheduler:
    make = load(path, "lr_scheduler")
    known, told_as = parameters_of(make), f"lr_scheduler {path!r}"
    if not takes_any_keyword(make):
        check_options(told_as, options, [one for one in known if one != "optimizer"], {"optimizer": "the trainer"})
    if warmup_steps and not {"warmup_steps", "num_warmup_steps"} & {*known, *options}:
        raise ConfigurationError(
            f"{told_as} takes no warm-up (warmup_steps or num_warmup_steps), and one of {warmup_steps} steps is asked "
            "for. Leave it out, or write a function with such an argument and give its path."
        )
    steps = {"warmup_steps": warmup_steps, "num_warmup_steps": warmup_steps}
    steps |= {"total_steps": total_steps, "num_training_steps": total_steps}
    told = {one: value for one, value in steps.items() if one in known and one not in options}
    for one, value in told.items():
        if value is None and known[one].default is known[one].empty:
            raise ConfigurationError(f"{told_as} has to know {one}{_UNKNOWN}.")
    try:
        made = make(optimizer, **{name: value for name, value in told.items() if value is not None}, **options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{told_as} cannot be made: {error}") from error
    if not isinstance(made, LRScheduler):
        raise ConfigurationError(f"{told_as} makes a {type(made).__name__}, and that is no LRScheduler of torch's.")
    return made
