from trainer_lib.commands.launch.launch import deepspeed_launcher as deepspeed_launcher
from trainer_lib.commands.launch.launch import launch_command as launch_command
from trainer_lib.commands.launch.launch import launch_command_parser as launch_command_parser
from trainer_lib.commands.launch.launch import main as main
from trainer_lib.commands.launch.launch import multi_gpu_launcher as multi_gpu_launcher
from trainer_lib.commands.launch.launch import sagemaker_launcher as sagemaker_launcher
from trainer_lib.commands.launch.launch import simple_launcher as simple_launcher
from trainer_lib.commands.launch.launch import tpu_launcher as tpu_launcher
from trainer_lib.commands.launch.launch import tpu_pod_launcher as tpu_pod_launcher
from trainer_lib.options.accelerate_constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from trainer_lib.options.accelerate_constants import DYNAMO_BACKENDS as DYNAMO_BACKENDS
from trainer_lib.options.accelerate_constants import TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES

__all__: list[str]
