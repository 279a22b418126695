"""`Accelerator` and its parts."""

from trainer_lib.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
