from trainer_lib.inference.map_inputs import map_between_processes as map_between_processes
from trainer_lib.inference.pippy import prepare_pippy as prepare_pippy
from trainer_lib.inference.pippy_names import build_pipeline as build_pipeline
from trainer_lib.inference.pippy_names import find_pippy_batch_size as find_pippy_batch_size
from trainer_lib.inference.pippy_names import generate_device_map as generate_device_map
from trainer_lib.inference.pippy_names import pippy_forward as pippy_forward

__all__: list[str]
