from trainer_lib.tracking.adapters.aim import AimTracker as AimTracker
from trainer_lib.tracking.adapters.clearml import ClearMLTracker as ClearMLTracker
from trainer_lib.tracking.adapters.comet import CometMLTracker as CometMLTracker
from trainer_lib.tracking.adapters.dvclive import DVCLiveTracker as DVCLiveTracker
from trainer_lib.tracking.adapters.jsonl_file import JsonlTracker as JsonlTracker
from trainer_lib.tracking.adapters.mlflow import MLflowTracker as MLflowTracker
from trainer_lib.tracking.adapters.swanlab import SwanLabTracker as SwanLabTracker
from trainer_lib.tracking.adapters.tensorboard import TensorBoardTracker as TensorBoardTracker
from trainer_lib.tracking.adapters.trackio import TrackioTracker as TrackioTracker
from trainer_lib.tracking.adapters.wandb import WandBTracker as WandBTracker
from trainer_lib.tracking.base import GeneralTracker as GeneralTracker
from trainer_lib.tracking.base import on_main_process as on_main_process
from trainer_lib.tracking.delivery.queue_worker import Patience as Patience
from trainer_lib.tracking.registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from trainer_lib.tracking.registry import filter_trackers as filter_trackers
from trainer_lib.tracking.registry import get_available_trackers as get_available_trackers
from trainer_lib.tracking.registry import register_tracker_class as register_tracker_class
from trainer_lib.tracking.tracker_group import TrackerGroup as TrackerGroup

__all__: list[str]
