"""Hooks around a module's forward: your own, device placement and offloading, smaller types of weights."""

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
