"""The command `trainer-lib launch`, and the names that scripts import from `accelerate.commands.launch`."""

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
