"""What scripts ask an `Accelerator` about engines that this version does not have."""

from typing import Any

from trainer_lib.foundation.missing_features import DEEPSPEED_SEQUENCES, missing_function


class AbsentEngines:
    """Answers of an `Accelerator` without DeepSpeed."""

    deepspeed_plugin: Any = None

    deepspeed_ulysses_dl_adapter = staticmethod(missing_function("deepspeed_ulysses_dl_adapter", DEEPSPEED_SEQUENCES))
