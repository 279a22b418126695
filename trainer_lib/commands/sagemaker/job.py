"""The description of a training job, as SageMaker's `create_training_job` reads it."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.launchers.settings.config_file import SageMakerConfig

CODE = "/opt/ml/input/data/code"  # where SageMaker puts the files of the channel `code`

# What `additional_args` may say: names of SageMaker's Python package, and where the description holds them.
_PLACES = {
    "checkpoint_local_path": ("CheckpointConfig", "LocalPath"),
    "checkpoint_s3_uri": ("CheckpointConfig", "S3Uri"),
    "enable_network_isolation": ("EnableNetworkIsolation",),
    "encrypt_inter_container_traffic": ("EnableInterContainerTrafficEncryption",),
    "environment": ("Environment",),
    "keep_alive_period_in_seconds": ("ResourceConfig", "KeepAlivePeriodInSeconds"),
    "max_retry_attempts": ("RetryStrategy", "MaximumRetryAttempts"),
    "max_run": ("StoppingCondition", "MaxRuntimeInSeconds"),
    "max_wait": ("StoppingCondition", "MaxWaitTimeInSeconds"),
    "output_kms_key": ("OutputDataConfig", "KmsKeyId"),
    "output_path": ("OutputDataConfig", "S3OutputPath"),
    "security_group_ids": ("VpcConfig", "SecurityGroupIds"),
    "subnets": ("VpcConfig", "Subnets"),
    "tags": ("Tags",),
    "use_spot_instances": ("EnableManagedSpotTraining",),
    "volume_kms_key": ("ResourceConfig", "VolumeKmsKeyId"),
    "volume_size": ("ResourceConfig", "VolumeSizeInGB"),
}


def training_job(config: SageMakerConfig, name: str, role: str, where: str) -> dict[str, Any]:
    """Return the description.

    Args:
        config: The configuration file.
        name: The name of the job.
        role: The ARN of the role that runs it.
        where: The URL of the job's files: its source is in `source/`, its output goes to `output/`.

    Raises:
        ConfigurationError: If a TSV file or a name of `additional_args` is not right.
    """
    algorithm: dict[str, Any] = {
        "TrainingImage": config.image_uri,
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["bash", f"{CODE}/launch.sh"],
    }
    if config.sagemaker_metrics_file:
        rows = _rows(config.sagemaker_metrics_file, "metric_name", "metric_regex")
        algorithm["MetricDefinitions"] = [{"Name": metric, "Regex": regex} for metric, regex in rows]
    channels = [("code", f"{where}/source")]
    if config.sagemaker_inputs_file:
        channels += _rows(config.sagemaker_inputs_file, "channel_name", "data_location")
    job: dict[str, Any] = {
        "TrainingJobName": name,
        "AlgorithmSpecification": algorithm,
        "RoleArn": role,
        "InputDataConfig": [_channel(channel, location) for channel, location in channels],
        "OutputDataConfig": {"S3OutputPath": f"{where}/output"},
        "ResourceConfig": {
            "InstanceType": config.ec2_instance_type,
            "InstanceCount": config.num_machines,
            "VolumeSizeInGB": 30,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 24 * 60 * 60},
    }
    _add(job, config.additional_args or {})
    return job


def _channel(name: str, location: str) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": location, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def _rows(file: str, *columns: str) -> Iterator[tuple[str, str]]:
    try:
        with Path(file).expanduser().open(encoding="utf-8", newline="") as lines:
            table = csv.DictReader(lines, delimiter="\t")
            rows, found = list(table), list(table.fieldnames or ())
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}. It is a file with tabs.") from error
    missing = [column for column in columns if column not in found]
    if missing:
        raise ConfigurationError(
            f"{file} must have the columns {' and '.join(columns)}, separated by tabs (got {', '.join(found)})."
        )
    return ((row[columns[0]], row[columns[1]]) for row in rows)


def _add(job: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if name not in _PLACES:
            raise ConfigurationError(unknown("name in `additional_args`", name, _PLACES))
        *groups, last = _PLACES[name]
        part = job
        for group in groups:
            part = part.setdefault(group, {})
        is_mapping_of_tags = name == "tags" and isinstance(value, dict)
        part[last] = [{"Key": key, "Value": str(tag)} for key, tag in value.items()] if is_mapping_of_tags else value
