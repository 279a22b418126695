"""The state of a rank: its world, its device, its precision, and its gradient accumulation."""

from trainer_lib.foundation.compat import ThreadLocalSharedDict
from trainer_lib.state.accelerator_state import AcceleratorState
from trainer_lib.state.gradient_state import GradientState
from trainer_lib.state.partial_state import PartialState, is_initialized
from trainer_lib.state.rank_control import do_nothing

__all__ = ["AcceleratorState", "GradientState", "PartialState", "ThreadLocalSharedDict", "do_nothing", "is_initialized"]
