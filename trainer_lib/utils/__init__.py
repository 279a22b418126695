"""The names that Accelerate's users import from `accelerate.utils`.

Nothing is defined here, and nothing inside the library imports from here. A name is imported when it is first used.
"""

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
