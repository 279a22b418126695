"""Inference on several processes: a model whose layers are spread over them, and inputs that are."""

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
