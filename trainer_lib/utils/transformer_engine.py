"""Names that scripts import from `accelerate.utils.transformer_engine`."""

from trainer_lib.foundation.missing_features import FP8, missing_function
from trainer_lib.modules.module_kinds import has_transformer_engine_layers as has_transformer_engine_layers

apply_fp8_autowrap = missing_function("apply_fp8_autowrap", FP8)
contextual_fp8_autocast = missing_function("contextual_fp8_autocast", FP8)
convert_model = missing_function("convert_model", FP8)
