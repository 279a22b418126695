"""Names that scripts import from `accelerate.utils.ao`."""

from trainer_lib.foundation.missing_features import FP8, missing_function
from trainer_lib.modules.module_kinds import has_ao_layers as has_ao_layers

convert_model_to_fp8_ao = missing_function("convert_model_to_fp8_ao", FP8)
filter_first_and_last_linear_layers = missing_function("filter_first_and_last_linear_layers", FP8)
filter_linear_layers = missing_function("filter_linear_layers", FP8)
find_first_last_linear_layers = missing_function("find_first_last_linear_layers", FP8)
