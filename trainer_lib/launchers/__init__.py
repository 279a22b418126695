"""Start a function or script on several processes: from a notebook, a test or the command line."""

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
