"""The callbacks that ship with the library, one a file, imported as `trainer_lib.callbacks`."""

# A second import under another name would make every class here twice.
if __name__ != "trainer_lib.callbacks":
    raise ImportError("this folder ships as trainer_lib.callbacks: import that name")

from trainer_lib.foundation.lazy_imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
