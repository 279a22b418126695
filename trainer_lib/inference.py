"""Names that scripts import from `accelerate.inference`."""

from trainer_lib.foundation.missing_features import PIPELINES, missing_function

build_pipeline = missing_function("build_pipeline", PIPELINES)
find_pippy_batch_size = missing_function("find_pippy_batch_size", PIPELINES)
generate_device_map = missing_function("generate_device_map", PIPELINES)
pippy_forward = missing_function("pippy_forward", PIPELINES)
prepare_pippy = missing_function("prepare_pippy", PIPELINES)
