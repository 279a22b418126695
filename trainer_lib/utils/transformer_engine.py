"""Names that scripts import from `accelerate.utils.transformer_engine`."""

from trainer_lib.modules.module_kinds import has_transformer_engine_layers as has_transformer_engine_layers
from trainer_lib.precision.transformer_engine import apply_fp8_autowrap as apply_fp8_autowrap
from trainer_lib.precision.transformer_engine import contextual_fp8_autocast as contextual_fp8_autocast
from trainer_lib.precision.transformer_engine import convert_model as convert_model
