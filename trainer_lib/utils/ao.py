"""Names that scripts import from `accelerate.utils.ao`."""

from trainer_lib.modules.module_kinds import has_ao_layers as has_ao_layers
from trainer_lib.precision.float8_layers import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from trainer_lib.precision.float8_layers import (
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
)
from trainer_lib.precision.float8_layers import filter_linear_layers as filter_linear_layers
from trainer_lib.precision.float8_layers import find_first_last_linear_layers as find_first_last_linear_layers
