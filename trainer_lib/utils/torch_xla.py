"""Names that scripts import from `accelerate.utils.torch_xla`."""

from collections.abc import Callable
from typing import Any

from trainer_lib.foundation.public_names.missing_features import TPU_INSTALLER, missing_function

install_xla: Callable[..., Any] = missing_function("install_xla", TPU_INSTALLER)
