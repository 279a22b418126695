"""Names that scripts import from `accelerate.utils.bnb`."""

from trainer_lib.foundation.missing_features import BITSANDBYTES, missing_function
from trainer_lib.modules.module_kinds import has_4bit_bnb_layers as has_4bit_bnb_layers

get_keys_to_not_convert = missing_function("get_keys_to_not_convert", BITSANDBYTES)
get_parameter_device = missing_function("get_parameter_device", BITSANDBYTES)
get_quantized_model_device_map = missing_function("get_quantized_model_device_map", BITSANDBYTES)
load_and_quantize_model = missing_function("load_and_quantize_model", BITSANDBYTES)
quantize_and_offload_8bit = missing_function("quantize_and_offload_8bit", BITSANDBYTES)
replace_with_bnb_layers = missing_function("replace_with_bnb_layers", BITSANDBYTES)
