"""Experiment trackers, isolated from the training run."""

from typing import TYPE_CHECKING

from trainer_lib.foundation.lazy_imports import lazy_names

if TYPE_CHECKING:
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
    from trainer_lib.tracking.registry import filter_trackers as filter_trackers
    from trainer_lib.tracking.registry import get_available_trackers as get_available_trackers
    from trainer_lib.tracking.registry import register_tracker_class as register_tracker_class
    from trainer_lib.tracking.tracker_group import TrackerGroup as TrackerGroup

_HOMES = {
    "ClearMLTracker": "trainer_lib.tracking.adapters.clearml",
    "CometMLTracker": "trainer_lib.tracking.adapters.comet",
    "DVCLiveTracker": "trainer_lib.tracking.adapters.dvclive",
    "GeneralTracker": "trainer_lib.tracking.base",
    "JsonlTracker": "trainer_lib.tracking.adapters.jsonl_file",
    "MLflowTracker": "trainer_lib.tracking.adapters.mlflow",
    "Patience": "trainer_lib.tracking.delivery.queue_worker",
    "SwanLabTracker": "trainer_lib.tracking.adapters.swanlab",
    "TensorBoardTracker": "trainer_lib.tracking.adapters.tensorboard",
    "TrackerGroup": "trainer_lib.tracking.tracker_group",
    "TrackioTracker": "trainer_lib.tracking.adapters.trackio",
    "WandBTracker": "trainer_lib.tracking.adapters.wandb",
    "filter_trackers": "trainer_lib.tracking.registry",
    "get_available_trackers": "trainer_lib.tracking.registry",
    "on_main_process": "trainer_lib.tracking.base",
    "register_tracker_class": "trainer_lib.tracking.registry",
}
__all__ = [
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JsonlTracker",
    "MLflowTracker",
    "Patience",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackerGroup",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
