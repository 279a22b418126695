"""Names that scripts import from `accelerate.utils.transformer_engine`."""

from trainer_lib.modules.module_kinds import has_transformer_engine_layers as has_transformer_engine_layers
from trainer_lib.precision.transformer_engine_fp8 import apply_fp8_autowrap as apply_fp8_autowrap
from trainer_lib.precision.transformer_engine_fp8 import contextual_fp8_autocast as contextual_fp8_autocast
from trainer_lib.precision.transformer_engine_fp8 import convert_model as convert_model
