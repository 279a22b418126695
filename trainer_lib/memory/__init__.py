"""Memory: release it, measure its peak, and find the largest batch size that fits."""

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
