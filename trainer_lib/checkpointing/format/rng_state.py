"""The random number generators of a rank as a state: Python's, NumPy's, torch's, and its accelerator's."""

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainer_lib.foundation.device_types import generator_state, set_generator_state
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)


class Generators:
    """The generators that training draws from.

    Args:
        device: The device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        if self._device_type != "cpu":
            state["device"] = {self._device_type: generator_state(self._device_type)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of the generators."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        devices = state.get("device", {})
        if not devices and self._device_type != "cpu":
            _logger.warning(
                "The checkpoint was saved on a CPU and has no generator state for %s: that generator is not restored.",
                self._device_type,
            )
        for kind, saved in devices.items():
            if kind == self._device_type:
                set_generator_state(kind, saved.cpu())
            else:
                _logger.warning(
                    "The checkpoint was saved on %s and is loaded on %s: random numbers drawn there will differ.",
                    kind,
                    self._device_type,
                )


@contextmanager
def preserved_generators(device: torch.device) -> Generator[None]:
    """Run a block, and restore the generators of this rank and its device afterwards."""
    generators = Generators(device)
    state = generators.state_dict()
    try:
        yield
    finally:
        generators.load_state_dict(state)
