"""A launch on Amazon SageMaker: the script's folder goes to S3, and a training job runs it."""

import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.commands.launch.option_words import words_of
from trainer_lib.commands.sagemaker.account import Account
from trainer_lib.commands.sagemaker.job import CODE, training_job
from trainer_lib.commands.sagemaker.job_progress import follow
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers.settings.config_file import SageMakerConfig
from trainer_lib.options.enums import SageMakerDistributedType

_LONGEST_NAME = 63

# What an instance runs.
_START = """\
#!/bin/bash
set -e
mkdir -p /opt/ml/code
tar -xzf {code}/source.tar.gz -C /opt/ml/code
cd /opt/ml/code
if [ -f requirements.txt ]; then python -m pip install --quiet -r requirements.txt; fi
exec python -m trainer_lib.commands.sagemaker.node /opt/ml {words}
"""


def launch_on_sagemaker(values: LaunchValues, script: Sequence[str]) -> int:
    """Submit the job and follow it to its end.

    Args:
        values: The launch, whose configuration file is for SageMaker.
        script: The script and its arguments.

    Returns:
        The exit code: 0 if the job was completed.

    Raises:
        ConfigurationError: If the file or the script is not right, or AWS refuses what they ask for.
        MissingPackageError: If the extra `sagemaker` is not installed.
    """
    config = _configuration(values)
    name = _job_name(config.base_job_name)
    folder, start = _source(values, config, script)
    if values["dry_run"]:
        where = f"s3://sagemaker-{config.region}-ACCOUNT/{name}"
        job = training_job(config, name, config.iam_role_name, where)
        print(f"{yaml.safe_dump(job, sort_keys=False, width=10_000)}\n# {folder} is packed, and launch.sh is:\n{start}")
        return 0
    keys = (values["aws_access_key_id"], values["aws_secret_access_key"])
    account = Account(config.region, config.profile, keys)
    where = f"s3://{account.bucket()}/{name}"
    job = training_job(config, name, account.role(config.iam_role_name), where)
    account.upload(where, folder, start)
    account.submit(job)
    print(f"trainer-lib launch: {name} is submitted to SageMaker in {config.region}; its files are in {where}.")
    return follow(account.client("sagemaker"), account.client("logs"), name)


def _configuration(values: LaunchValues) -> SageMakerConfig:
    known = {**(values.sagemaker or {}), "num_machines": values["num_machines"]}
    missing = [key for key in ("ec2_instance_type", "iam_role_name", "image_uri") if not known.get(key)]
    if missing:
        hint = " image_uri is an image with Python, torch and trainer_lib." if "image_uri" in missing else ""
        raise ConfigurationError(f"{_source_of(values)} must say {', '.join(missing)} for a job on SageMaker.{hint}")
    defaults: dict[str, Any] = {"distributed_type": "NO", "mixed_precision": "no", "use_cpu": False, "debug": False}
    config = SageMakerConfig(**(defaults | known))
    if config.distributed_type == SageMakerDistributedType.MODEL_PARALLEL:
        raise ConfigurationError(
            f"`distributed_type: MODEL_PARALLEL` in {_source_of(values)} is a library of SageMaker's that is not "
            "used here. Write DATA_PARALLEL, and split the model in the script or by options such as --use_fsdp."
        )
    return config


def _source_of(values: LaunchValues) -> str:
    return "The configuration" if values.file is None else str(values.file)


def _job_name(base: str) -> str:
    stamp = time.strftime("-%Y-%m-%d-%H-%M-%S", time.gmtime())
    name = re.sub(r"[^a-zA-Z0-9]+", "-", base).strip("-")[: _LONGEST_NAME - len(stamp)]
    if not name:
        raise ConfigurationError(f"`base_job_name` needs a letter or a digit (got {base!r}).")
    return name + stamp


def _source(values: LaunchValues, config: SageMakerConfig, script: Sequence[str]) -> tuple[Path, str]:
    """Return the folder to pack, and what an instance runs in it."""
    if not script:
        raise ConfigurationError("No script was given. Name it after the options: trainer-lib launch [options] SCRIPT.")
    folder, program = Path.cwd(), script[0]
    if not values["module"] and not values["no_python"]:
        if not Path(program).is_file():
            raise ConfigurationError(f"The script {program!r} is not there (in {folder}). Name a file.")
        folder, program = Path(program).absolute().parent, Path(program).name
    is_alone = config.distributed_type == SageMakerDistributedType.NO and not values.is_asked("num_processes")
    words = [*words_of(values), *(["--num_processes=1"] if is_alone else []), program, *script[1:]]
    return folder, _START.format(code=CODE, words=shlex.join(words))
