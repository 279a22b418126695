"""This file is the random generators of a process as a state: Python's, numpy's, torch's, and its accelerator's."""

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainer_lib.logging import get_logger

_logger = get_logger(__name__)


class Generators:
    """The generators that a training draws from.

    Args:
        device: The device of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type

    def state_dict(self) -> dict[str, Any]:
        """Return where the generators stand."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        if self._device_type != "cpu":
            state["device"] = {self._device_type: torch.get_device_module(self._device_type).get_rng_state()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the generators go on where they stood."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        devices = state.get("device", {})
        if not devices and self._device_type != "cpu":
            _logger.warning(
                "The state was saved on a CPU and has no generator of %s, which draws from where it stands.",
                self._device_type,
            )
        for kind, of_device in devices.items():
            if kind == self._device_type:
                torch.get_device_module(kind).set_rng_state(of_device.cpu())
            else:
                _logger.warning(
                    "The state was saved on %s, and training goes on on %s: what is drawn there will differ.",
                    kind,
                    self._device_type,
                )


@contextmanager
def preserved_generators(device: torch.device) -> Generator[None]:
    """Return the context after which the generators of this process and its device stand where they stood before it."""
    generators = Generators(device)
    drawn = generators.state_dict()
    try:
        yield
    finally:
        generators.load_state_dict(drawn)
