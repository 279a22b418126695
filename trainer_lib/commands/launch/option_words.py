"""Options of a launch as the words of a command line that another machine runs."""

from typing import Any

from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.launchers.settings.launch_options import SETTINGS

# Where a process runs is the scheduler's to say; the rest is about the submission.
PLACES = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_endpoint")
_OF_THE_SUBMISSION = ("config_file", "dry_run", "print_config", "aws_access_key_id", "aws_secret_access_key")
NOT_OF_THE_JOB = frozenset({*PLACES, *_OF_THE_SUBMISSION})


def word_of(name: str, value: Any) -> str:
    """Return the word that gives an option a value."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--{name}=no"
    return f"--{name}={value}"


def words_of(values: LaunchValues) -> list[str]:
    """Return all values that are no defaults, for a machine that does not see the configuration file."""
    asked = {name: values[name] for name in SETTINGS if name not in NOT_OF_THE_JOB and values.is_asked(name)}
    return [word_of(name, value) for name, value in asked.items() if value is not None]
