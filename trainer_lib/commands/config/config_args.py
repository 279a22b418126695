"""Configurations of launchers, as scripts import them from `accelerate.commands.config.config_args`."""

from trainer_lib.launchers.settings.config_file import BaseConfig as BaseConfig
from trainer_lib.launchers.settings.config_file import ClusterConfig as ClusterConfig
from trainer_lib.launchers.settings.config_file import SageMakerConfig as SageMakerConfig
from trainer_lib.launchers.settings.config_file import load_config_from_file as load_config_from_file
from trainer_lib.options.accelerate_constants import SAGEMAKER_PYTHON_VERSION as SAGEMAKER_PYTHON_VERSION
from trainer_lib.options.accelerate_constants import SAGEMAKER_PYTORCH_VERSION as SAGEMAKER_PYTORCH_VERSION
from trainer_lib.options.accelerate_constants import SAGEMAKER_TRANSFORMERS_VERSION as SAGEMAKER_TRANSFORMERS_VERSION
