"""This file is the options of mixed precision."""

from dataclasses import dataclass

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import KwargsHandler, check_choice, check_count, check_flag, check_positive


@dataclass
class AutocastKwargs(KwargsHandler):
    """The options of `torch.autocast`.

    Args:
        enabled: Whether autocast is on.
        cache_enabled: Whether casts of weights are kept for the length of the region; torch's own default if `None`.
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_flag("enabled", self.enabled)
        check_choice("cache_enabled", self.cache_enabled, [None, True, False])


@dataclass
class GradScalerKwargs(KwargsHandler):
    """The options of `torch.amp.GradScaler`, which fp16 trains with.

    Args:
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by after `growth_interval` good updates.
        backoff_factor: What it is multiplied by after an overflow.
        growth_interval: Good updates in a row until the scale grows.
        enabled: Whether the loss is scaled at all.
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
