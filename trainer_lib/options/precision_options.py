"""The names of the precisions, and the options of autocast and of the loss scaler."""

from dataclasses import dataclass
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.options.base import KwargsHandler, check_choice, check_count, check_flag, check_positive

PRECISIONS = ("no", "fp16", "bf16", "bf16-true", "fp8")
_UNSUPPORTED = {
    "fp16-true": ": gradients below 6e-8 become 0 in fp16 and values above 65504 infinite, and a loss scaler needs "
    "fp32 weights to unscale into. Use 'bf16-true', or 'fp16', which keeps the weights in fp32",
    "64-true": ": the model's own precision counts. Convert the model and the data, model.double(), and use 'no'",
}
_LIGHTNING_NAMES = {
    "bf16-mixed": "bf16", "16-mixed": "fp16", "fp16-mixed": "fp16", "16": "fp16", "16-true": "fp16-true", "32": "no",
    "32-true": "no", "fp32": "no",
    "64": "64-true",
}  # fmt: skip


def check_precision(name: Any, option: str = "mixed_precision") -> str:
    """Return the name of a precision in lower case.

    Args:
        name: The name, or a `PrecisionType`.
        option: The name of the option in errors.

    Raises:
        UnsupportedError: If this version does not support the precision.
        ConfigurationError: If the name is unknown.
    """
    text = str(name).lower()
    if text in PRECISIONS:
        return text
    translated = _LIGHTNING_NAMES.get(text, text)
    if translated in _UNSUPPORTED:
        raise UnsupportedError(
            f"mixed_precision={str(name)!r} is not supported by this version{_UNSUPPORTED[translated]}. "
            f"Known: {', '.join(PRECISIONS)}."
        )
    if translated != text:
        raise ConfigurationError(f"mixed_precision={str(name)!r} is called {translated!r} in this library.")
    raise ConfigurationError(unknown(option, name, PRECISIONS))


@dataclass(repr=False, eq=False)
class AutocastKwargs(KwargsHandler):
    """The options of `torch.autocast`.

    Args:
        enabled: Whether autocast is on.
        cache_enabled: Whether casts of weights are cached within an autocast region; `None`: torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_flag("enabled", self.enabled)
        check_choice("cache_enabled", self.cache_enabled, [None, True, False])


@dataclass(repr=False, eq=False)
class GradScalerKwargs(KwargsHandler):
    """The options of `torch.amp.GradScaler`, which scales the loss in fp16.

    Args:
        init_scale: The first scale.
        growth_factor: The factor for the scale after `growth_interval` updates without overflow.
        backoff_factor: The factor for the scale after an overflow.
        growth_interval: The number of updates in a row without overflow after which the scale grows.
        enabled: Whether the loss is scaled.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        """Check the values."""
        check_positive("init_scale", self.init_scale)
        check_positive("growth_factor", self.growth_factor)
        check_positive("backoff_factor", self.backoff_factor)
        check_count("growth_interval", self.growth_interval)
        check_flag("enabled", self.enabled)
        if self.growth_factor <= 1:
            raise ConfigurationError(f"growth_factor must be above 1, got {self.growth_factor!r}.")
        if self.backoff_factor >= 1:
            raise ConfigurationError(f"backoff_factor must be below 1, got {self.backoff_factor!r}.")
