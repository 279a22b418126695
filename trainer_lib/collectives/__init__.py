"""Collectives over nested structures of tensors, and over any objects.

A world of one takes the same path as a larger world.
"""

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
