"""What scripts ask an `Accelerator` about engines that this version does not have."""

from trainer_lib.foundation.missing_features import DEEPSPEED_SEQUENCES, missing_function


class AbsentEngines:
    """Answers of an `Accelerator` without DeepSpeed's sequence parallelism."""

    deepspeed_ulysses_dl_adapter = staticmethod(missing_function("deepspeed_ulysses_dl_adapter", DEEPSPEED_SEQUENCES))
