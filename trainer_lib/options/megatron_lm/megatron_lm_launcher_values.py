"""The values of `MegatronLMPlugin` that the launcher sets."""

import dataclasses
from collections.abc import Callable
from typing import Any

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError


def _flag(text: str) -> bool:
    return bool(environment.str_to_bool(text))


_READERS: dict[Any, Callable[[str], Any]] = {int | None: int, float | None: float, bool | None: _flag, str | None: str}


def fill_from_launcher(plugin: Any) -> None:
    """Give the fields of a plugin that were left out the launcher's values.

    Raises:
        ConfigurationError: If one of them cannot be read.
    """
    for field in dataclasses.fields(plugin):
        text = environment.megatron_lm_setting(field.name)
        if text is None or field.type not in _READERS or getattr(plugin, field.name) is not None:
            continue
        try:
            setattr(plugin, field.name, _READERS[field.type](text))
        except ValueError as error:
            raise ConfigurationError(f"MEGATRON_LM_{field.name.upper()}={text} cannot be read: {error}.") from error
