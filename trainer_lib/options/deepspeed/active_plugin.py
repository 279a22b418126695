"""Several DeepSpeed plugins by name, one of which is active."""

from collections.abc import Mapping
from typing import Any, cast

from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin

_ONLY = ""  # the name of a plugin that was given without one


class DeepSpeedPlugins:
    """Plugins by name; the first one is active until another is selected.

    Args:
        plugins: A plugin, or plugins by name.

    Attributes:
        by_name: All plugins.
        first: The name of the first one.

    Example:
        >>> student, teacher = DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=3)
        >>> plugins = DeepSpeedPlugins({"student": student, "teacher": teacher})
        >>> plugins.select("teacher")
        >>> plugins.active.zero_stage
        3
    """

    first: str

    def __init__(self, plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin]) -> None:
        by_name: Any = {_ONLY: plugins} if isinstance(plugins, DeepSpeedPlugin) else plugins
        if not isinstance(by_name, Mapping) or not by_name:
            raise ConfigurationError(
                f"deepspeed_plugins must be a DeepSpeedPlugin or a dict of them by name (got {type(plugins).__name__})."
            )
        self.by_name: dict[str, Any] = dict(cast(Mapping[str, Any], by_name))
        for name, plugin in self.by_name.items():
            if not isinstance(plugin, DeepSpeedPlugin):
                raise ConfigurationError(
                    f"deepspeed_plugins[{name!r}] must be a DeepSpeedPlugin (got {type(plugin).__name__})."
                )
        self.first = self._selected = next(iter(self.by_name))

    @property
    def shards(self) -> bool:
        """Whether a plugin asks for a ZeRO stage above 0, which shards something."""
        return any(plugin.zero_stage for plugin in self.by_name.values())

    @property
    def active(self) -> DeepSpeedPlugin:
        """The plugin that is used for what is prepared now."""
        return self.by_name[self._selected]

    def get(self, name: str) -> DeepSpeedPlugin:
        """Return a plugin by its name."""
        if name not in self.by_name:
            raise ConfigurationError(unknown("DeepSpeed plugin", name, self.by_name))
        return self.by_name[name]

    def select(self, name: str) -> None:
        """Make a plugin active: models that are prepared from now on follow it."""
        self.get(name)
        self._selected = name

    def __eq__(self, other: object) -> bool:
        """Whether both hold equal plugins."""
        return isinstance(other, DeepSpeedPlugins) and self.by_name == other.by_name

    __hash__: None = None  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
