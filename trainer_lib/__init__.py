"""trainer_lib: train PyTorch models on one process or many, exactly.

The names below are imported when they are first used, so `import trainer_lib` costs next to nothing.
"""

from typing import TYPE_CHECKING

from trainer_lib.foundation.lazy_imports import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator as Accelerator
    from trainer_lib.checkpointing.model_weights import load_checkpoint_in_model as load_checkpoint_in_model
    from trainer_lib.data_loader import skip_first_batches as skip_first_batches
    from trainer_lib.events import Callback as Callback
    from trainer_lib.events import Modifier as Modifier
    from trainer_lib.events import Run as Run
    from trainer_lib.events import RunState as RunState
    from trainer_lib.foundation.errors import CheckpointError as CheckpointError
    from trainer_lib.foundation.errors import ConfigurationError as ConfigurationError
    from trainer_lib.foundation.errors import DistributedOperationException as DistributedOperationException
    from trainer_lib.foundation.errors import HubError as HubError
    from trainer_lib.foundation.errors import MissingPackageError as MissingPackageError
    from trainer_lib.foundation.errors import NonFiniteError as NonFiniteError
    from trainer_lib.foundation.errors import PreparationError as PreparationError
    from trainer_lib.foundation.errors import RunInUseError as RunInUseError
    from trainer_lib.foundation.errors import StateError as StateError
    from trainer_lib.foundation.errors import TrainerLibError as TrainerLibError
    from trainer_lib.foundation.errors import UnsavedError as UnsavedError
    from trainer_lib.foundation.errors import UnsupportedError as UnsupportedError
    from trainer_lib.foundation.errors import WorldError as WorldError
    from trainer_lib.launchers import debug_launcher as debug_launcher
    from trainer_lib.launchers import notebook_launcher as notebook_launcher
    from trainer_lib.local_sgd import LocalSGD as LocalSGD
    from trainer_lib.logging import get_logger as get_logger
    from trainer_lib.memory import find_executable_batch_size as find_executable_batch_size
    from trainer_lib.options.accumulation_options import GradientAccumulationPlugin as GradientAccumulationPlugin
    from trainer_lib.options.compile_options import TorchDynamoPlugin as TorchDynamoPlugin
    from trainer_lib.options.data_options import DataLoaderConfiguration as DataLoaderConfiguration
    from trainer_lib.options.ddp_options import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from trainer_lib.options.ddp_options import InitProcessGroupKwargs as InitProcessGroupKwargs
    from trainer_lib.options.enums import DistributedType as DistributedType
    from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from trainer_lib.options.precision_options import AutocastKwargs as AutocastKwargs
    from trainer_lib.options.precision_options import GradScalerKwargs as GradScalerKwargs
    from trainer_lib.options.profiler_options import ProfileKwargs as ProfileKwargs
    from trainer_lib.options.project_options import ProjectConfiguration as ProjectConfiguration
    from trainer_lib.parallelism_config import ParallelismConfig as ParallelismConfig
    from trainer_lib.processes.exit_codes import Interrupted as Interrupted
    from trainer_lib.seeding import set_seed as set_seed
    from trainer_lib.sklearn import TrainerClassifier as TrainerClassifier
    from trainer_lib.sklearn import TrainerRegressor as TrainerRegressor
    from trainer_lib.state import AcceleratorState as AcceleratorState
    from trainer_lib.state import GradientState as GradientState
    from trainer_lib.state import PartialState as PartialState
    from trainer_lib.tracking.base import GeneralTracker as GeneralTracker
    from trainer_lib.trainer.arguments.training_arguments import TrainingArguments as TrainingArguments
    from trainer_lib.trainer.data.mixing import MixedDataset as MixedDataset
    from trainer_lib.trainer.data.packing import PackedDataset as PackedDataset
    from trainer_lib.trainer.evaluation.outputs import EvaluationOutput as EvaluationOutput
    from trainer_lib.trainer.losses.loss_result import LossResult as LossResult
    from trainer_lib.trainer.optim.layerwise_lr import layerwise_learning_rates as layerwise_learning_rates
    from trainer_lib.trainer.optim.parameter_groups import ParameterGroup as ParameterGroup
    from trainer_lib.trainer.result import FitResult as FitResult
    from trainer_lib.trainer.trainer import Trainer as Trainer

_HOMES = {
    "Accelerator": "trainer_lib.accelerator",
    "AcceleratorState": "trainer_lib.state",
    "AutocastKwargs": "trainer_lib.options.precision_options",
    "Callback": "trainer_lib.events",
    "CheckpointError": "trainer_lib.foundation.errors",
    "ConfigurationError": "trainer_lib.foundation.errors",
    "DataLoaderConfiguration": "trainer_lib.options.data_options",
    "DistributedDataParallelKwargs": "trainer_lib.options.ddp_options",
    "DistributedOperationException": "trainer_lib.foundation.errors",
    "DistributedType": "trainer_lib.options.enums",
    "EvaluationOutput": "trainer_lib.trainer.evaluation.outputs",
    "FitResult": "trainer_lib.trainer.result",
    "FullyShardedDataParallelPlugin": "trainer_lib.options.fsdp_options",
    "GeneralTracker": "trainer_lib.tracking.base",
    "GradScalerKwargs": "trainer_lib.options.precision_options",
    "GradientAccumulationPlugin": "trainer_lib.options.accumulation_options",
    "GradientState": "trainer_lib.state",
    "HubError": "trainer_lib.foundation.errors",
    "InitProcessGroupKwargs": "trainer_lib.options.ddp_options",
    "Interrupted": "trainer_lib.processes.exit_codes",
    "LocalSGD": "trainer_lib.local_sgd",
    "LossResult": "trainer_lib.trainer.losses.loss_result",
    "MissingPackageError": "trainer_lib.foundation.errors",
    "MixedDataset": "trainer_lib.trainer.data.mixing",
    "NonFiniteError": "trainer_lib.foundation.errors",
    "PackedDataset": "trainer_lib.trainer.data.packing",
    "ParallelismConfig": "trainer_lib.parallelism_config",
    "ParameterGroup": "trainer_lib.trainer.optim.parameter_groups",
    "PartialState": "trainer_lib.state",
    "PreparationError": "trainer_lib.foundation.errors",
    "ProfileKwargs": "trainer_lib.options.profiler_options",
    "ProjectConfiguration": "trainer_lib.options.project_options",
    "Run": "trainer_lib.events",
    "RunState": "trainer_lib.events",
    "RunInUseError": "trainer_lib.foundation.errors",
    "StateError": "trainer_lib.foundation.errors",
    "TorchDynamoPlugin": "trainer_lib.options.compile_options",
    "Trainer": "trainer_lib.trainer.trainer",
    "TrainerClassifier": "trainer_lib.sklearn",
    "TrainerLibError": "trainer_lib.foundation.errors",
    "TrainerRegressor": "trainer_lib.sklearn",
    "TrainingArguments": "trainer_lib.trainer.arguments.training_arguments",
    "Modifier": "trainer_lib.events",
    "UnsavedError": "trainer_lib.foundation.errors",
    "UnsupportedError": "trainer_lib.foundation.errors",
    "WorldError": "trainer_lib.foundation.errors",
    "debug_launcher": "trainer_lib.launchers",
    "find_executable_batch_size": "trainer_lib.memory",
    "get_logger": "trainer_lib.logging",
    "layerwise_learning_rates": "trainer_lib.trainer.optim.layerwise_lr",
    "load_checkpoint_in_model": "trainer_lib.checkpointing.model_weights",
    "notebook_launcher": "trainer_lib.launchers",
    "set_seed": "trainer_lib.seeding",
    "skip_first_batches": "trainer_lib.data_loader",
}
# All but the estimators of scikit-learn, so that `from trainer_lib import *` works without it.
__all__ = [
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "Callback",
    "CheckpointError",
    "ConfigurationError",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "EvaluationOutput",
    "FitResult",
    "FullyShardedDataParallelPlugin",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "HubError",
    "InitProcessGroupKwargs",
    "Interrupted",
    "LocalSGD",
    "LossResult",
    "MissingPackageError",
    "MixedDataset",
    "Modifier",
    "NonFiniteError",
    "PackedDataset",
    "ParallelismConfig",
    "ParameterGroup",
    "PartialState",
    "PreparationError",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Run",
    "RunInUseError",
    "RunState",
    "StateError",
    "TorchDynamoPlugin",
    "Trainer",
    "TrainerLibError",
    "TrainingArguments",
    "UnsavedError",
    "UnsupportedError",
    "WorldError",
    "debug_launcher",
    "find_executable_batch_size",
    "get_logger",
    "layerwise_learning_rates",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "set_seed",
    "skip_first_batches",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
