"""trainer_lib: train PyTorch models on one process or many, exactly.

The public names are listed in `__init__.pyi`. They are imported when they are first used, so `import trainer_lib` costs
next to nothing.
"""

from trainer_lib.foundation.lazy_imports import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
# Without the estimators, so that `from trainer_lib import *` works without scikit-learn.
_ESTIMATORS = ("TrainerClassifier", "TrainerRegressor")
__all__ = [name for name in __all__ if name not in _ESTIMATORS]  # pyright: ignore[reportUnsupportedDunderAll]
