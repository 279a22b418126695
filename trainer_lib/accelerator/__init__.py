"""This package is the engine: `Accelerator`, and what it is put together from."""

from trainer_lib.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
