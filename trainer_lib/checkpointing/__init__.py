"""Checkpoints on a disk or behind a URL: their format, saving, loading, retention and conversion."""

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
