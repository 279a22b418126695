"""The updates of the schedule that a `MegatronLMPlugin` describes: of the warm-up, of the decay, of the training."""

from typing import Any, NamedTuple

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import check_at_least_zero, check_choice, check_count, is_at_least_zero
from trainer_lib.options.megatron_lm.dummy_data_loader import DECAYS, INCREASES

_PAIRS = (
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_iters", "lr_warmup_samples"),
)


class ScheduleSteps(NamedTuple):
    """Updates of a schedule.

    Args:
        warmup: Those in which the learning rate rises.
        decay: The update at which it is at its end; `None`: it has none.
        train: Those of the training; `None`: unknown.
    """

    warmup: int
    decay: int | None
    train: int | None


def check_schedule(plugin: Any) -> None:
    """Raise for values of a plugin's schedule that are wrong, or contradict each other."""
    check_choice("lr_decay_style", plugin.lr_decay_style, DECAYS)
    check_choice("weight_decay_incr_style", plugin.weight_decay_incr_style, INCREASES)
    for names in _PAIRS:
        for name in names:
            if getattr(plugin, name) is not None:
                check_count(name, getattr(plugin, name), at_least=0 if "warmup" in name else 1)
        _check_one(plugin, names)
    _check_one(plugin, (*_PAIRS[2], "lr_warmup_fraction"))
    fraction = plugin.lr_warmup_fraction
    if fraction is not None and not (is_at_least_zero(fraction) and fraction < 1):
        raise ConfigurationError(f"lr_warmup_fraction must be at least 0 and below 1 (got {shown(fraction)}).")
    for name in ("min_lr", "start_weight_decay", "end_weight_decay"):
        value = getattr(plugin, name)
        if value is not None:
            check_at_least_zero(name, value)
    start, end, is_constant = (
        plugin.start_weight_decay,
        plugin.end_weight_decay,
        plugin.weight_decay_incr_style == "constant",
    )
    if (start is None) != is_constant or (end is None) != is_constant:
        raise ConfigurationError(
            "start_weight_decay and end_weight_decay belong to weight_decay_incr_style='linear' or 'cosine' (got "
            f"{start}, {end} and {plugin.weight_decay_incr_style!r}). Give all three, or none."
        )


def schedule_steps(plugin: Any, total: int | None, warmup: int) -> ScheduleSteps:
    """Return the updates of a schedule.

    Args:
        plugin: The plugin, whose values come first.
        total: The updates that a stand-in for a schedule says.
        warmup: The updates of the warm-up that it says.
    """
    train = _updates(plugin, "train") or total
    decay = _updates(plugin, "lr_decay") or train
    rising = _updates(plugin, "lr_warmup")
    if rising is None and plugin.lr_warmup_fraction is not None and decay is not None:
        rising = int(plugin.lr_warmup_fraction * decay)
    rising = warmup if rising is None else rising
    if decay is None and plugin.lr_decay_style != "constant":
        raise ConfigurationError(
            f"MegatronLMDummyScheduler needs total_num_steps, the updates until lr_decay_style="
            f"{plugin.lr_decay_style!r} ends; or MegatronLMPlugin(lr_decay_iters=…)."
        )
    if train is None and plugin.weight_decay_incr_style != "constant":
        raise ConfigurationError(
            f"weight_decay_incr_style={plugin.weight_decay_incr_style!r} needs train_iters=…, after which it ends."
        )
    if decay is not None and rising >= decay:
        raise ConfigurationError(f"The warm-up ({rising} updates) must end before the decay ({decay} updates).")
    return ScheduleSteps(rising, decay, train)


def _updates(plugin: Any, name: str) -> int | None:
    """Return a number of updates, from samples if it is given in samples."""
    samples = getattr(plugin, f"{name}_samples")
    if samples is None:
        return getattr(plugin, f"{name}_iters")
    if plugin.global_batch_size is None:
        raise ConfigurationError(
            f"{name}_samples={samples} is divided by the samples of an update, which are not known yet. Give prepare() "
            f"the loader with the schedule, or before it; or give {name}_iters=…."
        )
    return samples // plugin.global_batch_size


def _check_one(plugin: Any, names: tuple[str, ...]) -> None:
    given = [name for name in names if getattr(plugin, name) is not None]
    if len(given) > 1:
        raise ConfigurationError(f"{' and '.join(given)} say the same: give one of them.")
