from trainer_lib.launchers.debug import debug_launcher as debug_launcher
from trainer_lib.launchers.debug import test_launch as test_launch
from trainer_lib.launchers.fork import run_forked as run_forked
from trainer_lib.launchers.notebook_processes import notebook_launcher as notebook_launcher
from trainer_lib.launchers.process_failures import ProcessFailedError as ProcessFailedError
from trainer_lib.options.accelerate_constants import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
)

__all__: list[str]
