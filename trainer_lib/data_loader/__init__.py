"""Data loading across ranks: each rank reads its share of one global order, from any position on."""

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
