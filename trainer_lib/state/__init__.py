"""The state of a rank: its world, its device, its precision, and its gradient accumulation."""

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
