"""The launch that a job runs: its options and script, checked where the job is submitted."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_lib.commands.launch.launch_environment import script_variables
from trainer_lib.commands.launch.launch_parser import option_line, parse
from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.commands.launch.option_words import NOT_OF_THE_JOB, PLACES, word_of, words_of
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.launchers.settings.launch_options import SETTINGS
from trainer_lib.launchers.settings.setting import Setting


@frozen_dataclass
class JobLaunch:
    """A launch as the words of its command line.

    Attributes:
        settings: The options of the submission, by name.
        machines: The number of machines.
        options: The options of `trainer-lib launch` in the job, without those about machines.
        script: The script and its arguments.
        is_dry: Whether the job is printed instead of submitted.
    """

    settings: Mapping[str, Any]
    machines: int
    options: list[str]
    script: list[str]
    is_dry: bool

    @property
    def name(self) -> str:
        """The name of the job: that of the script by default."""
        return self.settings["job_name"] or Path(self.script[0]).stem


def read_launch(arguments: Sequence[str], own: Mapping[str, Setting], runs_here: bool = True) -> JobLaunch:
    """Return what a command line submits.

    Args:
        arguments: The words after the scheduler's name.
        own: The options of the submission, which stand among those of the launch.
        runs_here: Whether the job sees the files of this machine.

    Raises:
        ConfigurationError: If an option is wrong, or there is no such script.
    """
    options, script = parse(arguments, own)
    values = LaunchValues(options)
    if not script:
        raise ConfigurationError("No script was given. Name it after the options: trainer-lib submit SCHEDULER SCRIPT.")
    if runs_here and not values["module"] and not values["no_python"] and not Path(script[0]).is_file():
        raise ConfigurationError(f"The script {script[0]!r} is not there (in {Path.cwd()}). Name a file.")
    if values.sagemaker is not None:
        raise ConfigurationError(
            f"{values.file} is for SageMaker: `trainer-lib launch` submits there. Give another file by --config_file."
        )
    _refuse_places(values)
    script_variables(values)  # wrong values are errors now, not when the job starts
    defaults = {name: setting.default for name, setting in own.items()}
    given = {name: value for name, value in vars(options).items() if name in own and value is not None}
    words = _words(options, values) if runs_here else words_of(values)
    return JobLaunch(defaults | given, values["num_machines"], words, script, bool(values["dry_run"]))


def describe(own: Mapping[str, Setting]) -> str:
    """Return the help on the options of a submission."""
    return "\n".join(option_line(setting) for setting in own.values())


def _refuse_places(values: LaunchValues) -> None:
    for name in PLACES[1:]:
        if values.source(name) == f"--{name}":
            raise ConfigurationError(
                f"--{name} has no effect in a job: the scheduler says where it runs. Leave it out."
            )


def _words(options: argparse.Namespace, values: LaunchValues) -> list[str]:
    """Return the options of the launch as they were given, and the configuration file that counts here."""
    file = [] if values.file is None else [f"--config_file={values.file.resolve()}"]
    given = {name: value for name, value in vars(options).items() if name in SETTINGS and name not in NOT_OF_THE_JOB}
    return file + [word_of(name, value) for name, value in given.items() if value is not None]
