"""Comparisons of versions: names that scripts import from `accelerate.utils.versions`."""

from trainer_lib.foundation.imports import compare_versions as compare_versions
from trainer_lib.foundation.imports import is_torch_version as is_torch_version
from trainer_lib.options.accelerate_constants import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
