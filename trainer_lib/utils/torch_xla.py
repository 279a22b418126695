"""Names that scripts import from `accelerate.utils.torch_xla`."""

from trainer_lib.foundation.missing_features import TPU, missing_function

install_xla = missing_function("install_xla", TPU)
