"""The configuration files of a launch, under Accelerate's keys: find, read and write them."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trainer_lib.filesystem.atomic_files import replace_file
from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers.settings.config_reader import is_sagemaker, read_values
from trainer_lib.options.accelerate_constants import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
)
from trainer_lib.options.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from trainer_lib.options.precision_options import check_precision

_Config = TypeVar("_Config", bound="BaseConfig")
_DEFAULTS = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no", "use_cpu": False, "debug": False}


@dataclass
class BaseConfig:
    """What all configurations of Accelerate's launcher say; see its documentation."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        """Turn texts into members of their enums."""
        if isinstance(self.compute_environment, str):
            self.compute_environment = ComputeEnvironment(self.compute_environment)
        kinds = SageMakerDistributedType if isinstance(self, SageMakerConfig) else DistributedType
        self.distributed_type = kinds(str(self.distributed_type))

    def to_dict(self) -> dict[str, Any]:
        """Return the values that are set, with texts in place of enums."""
        values = {name: value.value if isinstance(value, Enum) else value for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value not in (None, {})}

    @classmethod
    def from_json_file(cls: type[_Config], json_file: str | Path) -> _Config:
        """Return the configuration in a JSON file."""
        return _from_values(cls, read_file(json_file), json_file)

    @classmethod
    def from_yaml_file(cls: type[_Config], yaml_file: str | Path) -> _Config:
        """Return the configuration in a YAML file."""
        return _from_values(cls, read_file(yaml_file), yaml_file)

    def to_json_file(self, json_file: str | Path) -> None:
        """Write the configuration as JSON."""
        write_text(Path(json_file), json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write the configuration as YAML."""
        write_text(Path(yaml_file), yaml.safe_dump(self.to_dict()))

    def write(self, file: Path) -> None:
        """Write the configuration: as JSON if the file's name ends so, else as YAML."""
        file.parent.mkdir(parents=True, exist_ok=True)
        (self.to_json_file if file.suffix == ".json" else self.to_yaml_file)(file)


@dataclass
class ClusterConfig(BaseConfig):
    """How Accelerate's launcher starts processes on machines of your own; see its documentation."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = field(default=None)


@dataclass
class SageMakerConfig(BaseConfig):
    """How Accelerate's launcher starts jobs on SageMaker; see its documentation."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = f"accelerate-sagemaker-{num_machines}"
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | Path | None) -> ClusterConfig | SageMakerConfig:
    """Return the configuration in a JSON or YAML file; by default that of this library, else that of Accelerate.

    Raises:
        ConfigurationError: If there is no such file, or something in it is wrong: all that is, each with its line.
    """
    file = default_config_file() if config_file is None else Path(config_file).expanduser()
    values = read_file(file)
    return _from_values(SageMakerConfig if is_sagemaker(values) else ClusterConfig, values, file)


def read_file(file: str | Path) -> dict[str, Any]:
    """Return the values that a configuration file sets, checked and under today's keys."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is neither JSON nor YAML: {error}. Save it as UTF-8.") from error
    except OSError as error:
        raise ConfigurationError(
            f"There is no configuration file {file} ({error.strerror}). `trainer-lib config` writes one."
        ) from error
    return read_values(text, file)


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | bool:
    """Write a configuration file for this machine, with all its devices.

    `trainer-lib launch` and `accelerate launch` read it.

    Args:
        mixed_precision: The precision: "no", "fp16" or "bf16".
        save_location: The file, in JSON if its name ends so, else in YAML; by default that of `default_config_file`.

    Returns:
        The file, or False if there is one already: it stays as it is.
    """
    file = default_config_file() if save_location is None else Path(save_location).expanduser()
    precision = check_precision(mixed_precision)
    if file.exists():
        from trainer_lib.logging import get_logger

        get_logger(__name__).warning(
            "There is a configuration in %s, which stays as it is. Delete it to write a new one.", file
        )
        return False
    _for_this_machine(precision).write(file)
    return file


def default_config_file() -> Path:
    """Return the configuration file that counts: one of this library or of Accelerate, else where this library writes.

    Example:
        >>> with environment.patch_environment(trainer_lib_home="/tmp/settings", hf_home="/tmp/nothing"):
        ...     str(default_config_file())
        '/tmp/settings/default_config.yaml'
    """
    return find_config_file() or home_config_file()


def home_config_file() -> Path:
    """Return the file that `trainer-lib config` writes."""
    config_home = environment.variable("XDG_CONFIG_HOME") or "~/.config"
    home = environment.variable("TRAINER_LIB_HOME") or f"{config_home}/trainer_lib"
    return Path(home).expanduser() / "default_config.yaml"


def find_config_file() -> Path | None:
    """Return the configuration file of this library, else that of Accelerate, if there is one."""
    cache = environment.variable("XDG_CACHE_HOME") or "~/.cache"
    accelerate = environment.variable("HF_HOME") or f"{cache}/huggingface"
    files = (home_config_file(), Path(accelerate).expanduser() / "accelerate" / "default_config.yaml")
    forms = [form for file in files for form in (file, file.with_suffix(".json"))]
    return next((form for form in forms if form.is_file()), None)


def write_text(file: Path, text: str) -> None:
    """Write a file at once: nobody reads half of it."""
    replace_file(file, lambda path: path.write_text(text, encoding="utf-8"))


def _for_this_machine(precision: str) -> ClusterConfig:
    # Here, so that reading a file does not import torch.
    from trainer_lib.launchers.device_count import count_accelerators, get_current_device_type

    accelerators = count_accelerators()
    return ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType(get_current_device_type()[1]) if accelerators > 1 else DistributedType.NO,
        mixed_precision=precision,
        use_cpu=accelerators == 0,
        debug=False,
        num_processes=max(1, accelerators),
    )


def _from_values(kind: type[_Config], values: Mapping[str, Any], file: str | Path) -> _Config:
    options: dict[str, Any] = {"distributed_type": "NO", **_DEFAULTS, **values}
    required = [each.name for each in fields(kind) if each.default is MISSING and each.name not in options]
    if required:
        raise ConfigurationError(f"{file} lacks {', '.join(required)}. Add `{required[0]}: …`.")
    return kind(**options)
