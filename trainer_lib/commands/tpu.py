"""The command `trainer-lib tpu-config`, which this version refuses."""

from collections.abc import Sequence

from trainer_lib.foundation.missing_features import TPU, missing_function, refusal

main = missing_function("main", TPU)
tpu_command_launcher = missing_function("tpu_command_launcher", TPU)
tpu_command_parser = missing_function("tpu_command_parser", TPU)


def run(arguments: Sequence[str]) -> int:
    """Refuse, and say why."""
    del arguments
    raise refusal("tpu-config", TPU)
