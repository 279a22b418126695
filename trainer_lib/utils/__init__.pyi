from trainer_lib.launchers.settings.config_file import write_basic_config as write_basic_config
from trainer_lib.memory import MemoryUse as MemoryUse
from trainer_lib.memory import PeakMemory as PeakMemory
from trainer_lib.parallelism_config import ParallelismConfig as ParallelismConfig
from trainer_lib.utils.ao import *
from trainer_lib.utils.bnb import *
from trainer_lib.utils.constants import *
from trainer_lib.utils.dataclasses import *
from trainer_lib.utils.deepspeed import *
from trainer_lib.utils.environment import *
from trainer_lib.utils.fsdp_utils import *
from trainer_lib.utils.imports import *
from trainer_lib.utils.launch import *
from trainer_lib.utils.megatron_lm import AbstractTrainStep as AbstractTrainStep
from trainer_lib.utils.megatron_lm import BertTrainStep as BertTrainStep
from trainer_lib.utils.megatron_lm import GPTTrainStep as GPTTrainStep
from trainer_lib.utils.megatron_lm import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from trainer_lib.utils.megatron_lm import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from trainer_lib.utils.megatron_lm import T5TrainStep as T5TrainStep
from trainer_lib.utils.megatron_lm import avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group
from trainer_lib.utils.memory import *
from trainer_lib.utils.modeling import *
from trainer_lib.utils.offload import *
from trainer_lib.utils.operations import *
from trainer_lib.utils.other import *
from trainer_lib.utils.random import *
from trainer_lib.utils.torch_xla import *
from trainer_lib.utils.tqdm import *
from trainer_lib.utils.transformer_engine import *
from trainer_lib.utils.versions import *

__all__: list[str]
