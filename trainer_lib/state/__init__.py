"""This package is what a process knows of itself: its place, its device, its precision, its window of gradients."""

from trainer_lib.state.accelerator import AcceleratorState
from trainer_lib.state.control import do_nothing
from trainer_lib.state.gradients import GradientState
from trainer_lib.state.process import PartialState, is_initialized

__all__ = ["AcceleratorState", "GradientState", "PartialState", "do_nothing", "is_initialized"]
