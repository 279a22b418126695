"""The callbacks that ship with the library, one a file, imported as `trainer_lib.callbacks`."""

# A second import under another name would make every class here twice.
if __name__ != "trainer_lib.callbacks":
    raise ImportError("this folder ships as trainer_lib.callbacks: import that name")

from typing import TYPE_CHECKING

from trainer_lib.foundation.lazy_imports import lazy_names

if TYPE_CHECKING:
    from trainer_lib.callbacks.accumulation import AccumulationSchedule as AccumulationSchedule
    from trainer_lib.callbacks.checkpoint import Checkpoint as Checkpoint
    from trainer_lib.callbacks.clipping import AdaptiveClipping as AdaptiveClipping
    from trainer_lib.callbacks.clipping import ClipValue as ClipValue
    from trainer_lib.callbacks.console import Printer as Printer
    from trainer_lib.callbacks.csv_log import CsvLog as CsvLog
    from trainer_lib.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from trainer_lib.callbacks.ema import EMA as EMA
    from trainer_lib.callbacks.filters import LambdaCallback as LambdaCallback
    from trainer_lib.callbacks.filters import after as after
    from trainer_lib.callbacks.filters import before as before
    from trainer_lib.callbacks.filters import every as every
    from trainer_lib.callbacks.filters import once as once
    from trainer_lib.callbacks.flops import Flops as Flops
    from trainer_lib.callbacks.freezing import Freeze as Freeze
    from trainer_lib.callbacks.freezing import GradualUnfreezing as GradualUnfreezing
    from trainer_lib.callbacks.gc_interval import GarbageSchedule as GarbageSchedule
    from trainer_lib.callbacks.gradient_norms import GradientNorms as GradientNorms
    from trainer_lib.callbacks.histograms import Histograms as Histograms
    from trainer_lib.callbacks.jsonl import JsonlLog as JsonlLog
    from trainer_lib.callbacks.label_smoothing import LabelSmoothing as LabelSmoothing
    from trainer_lib.callbacks.learning_rate import LearningRateMonitor as LearningRateMonitor
    from trainer_lib.callbacks.live_control import LiveControl as LiveControl
    from trainer_lib.callbacks.live_control import ask_run as ask_run
    from trainer_lib.callbacks.memory_snapshot import MemorySnapshot as MemorySnapshot
    from trainer_lib.callbacks.mixup import CutMix as CutMix
    from trainer_lib.callbacks.mixup import Mixup as Mixup
    from trainer_lib.callbacks.mixup import MixupOrCutMix as MixupOrCutMix
    from trainer_lib.callbacks.model_summary import ModelSummary as ModelSummary
    from trainer_lib.callbacks.neftune import NEFTune as NEFTune
    from trainer_lib.callbacks.notebook import NotebookChart as NotebookChart
    from trainer_lib.callbacks.notifications import Slack as Slack
    from trainer_lib.callbacks.notifications import Webhook as Webhook
    from trainer_lib.callbacks.predictions import Predictions as Predictions
    from trainer_lib.callbacks.profile import Profile as Profile
    from trainer_lib.callbacks.progress import ProgressBar as ProgressBar
    from trainer_lib.callbacks.sam import SAM as SAM
    from trainer_lib.callbacks.sample_losses import SampleLosses as SampleLosses
    from trainer_lib.callbacks.sample_losses import top_losses as top_losses
    from trainer_lib.callbacks.sample_provenance import Provenance as Provenance
    from trainer_lib.callbacks.sample_provenance import replay_batch as replay_batch
    from trainer_lib.callbacks.sample_provenance import samples_of_step as samples_of_step
    from trainer_lib.callbacks.sequence_length import SequenceLengthWarmup as SequenceLengthWarmup
    from trainer_lib.callbacks.swa import SWA as SWA
    from trainer_lib.callbacks.system import SystemMonitor as SystemMonitor
    from trainer_lib.callbacks.throughput import Throughput as Throughput
    from trainer_lib.callbacks.timer import Timer as Timer
    from trainer_lib.callbacks.trackers import ClearMLCallback as ClearMLCallback
    from trainer_lib.callbacks.trackers import CometCallback as CometCallback
    from trainer_lib.callbacks.trackers import DVCLiveCallback as DVCLiveCallback
    from trainer_lib.callbacks.trackers import MLflowCallback as MLflowCallback
    from trainer_lib.callbacks.trackers import SwanLabCallback as SwanLabCallback
    from trainer_lib.callbacks.trackers import TensorBoardCallback as TensorBoardCallback
    from trainer_lib.callbacks.trackers import TrackerCallback as TrackerCallback
    from trainer_lib.callbacks.trackers import TrackioCallback as TrackioCallback
    from trainer_lib.callbacks.trackers import WandbCallback as WandbCallback

_HOMES = {
    "AccumulationSchedule": "trainer_lib.callbacks.accumulation",
    "AdaptiveClipping": "trainer_lib.callbacks.clipping",
    "Checkpoint": "trainer_lib.callbacks.checkpoint",
    "ClearMLCallback": "trainer_lib.callbacks.trackers",
    "ClipValue": "trainer_lib.callbacks.clipping",
    "CometCallback": "trainer_lib.callbacks.trackers",
    "CsvLog": "trainer_lib.callbacks.csv_log",
    "CutMix": "trainer_lib.callbacks.mixup",
    "DVCLiveCallback": "trainer_lib.callbacks.trackers",
    "EMA": "trainer_lib.callbacks.ema",
    "EarlyStopping": "trainer_lib.callbacks.early_stopping",
    "Flops": "trainer_lib.callbacks.flops",
    "Freeze": "trainer_lib.callbacks.freezing",
    "GarbageSchedule": "trainer_lib.callbacks.gc_interval",
    "GradientNorms": "trainer_lib.callbacks.gradient_norms",
    "GradualUnfreezing": "trainer_lib.callbacks.freezing",
    "Histograms": "trainer_lib.callbacks.histograms",
    "JsonlLog": "trainer_lib.callbacks.jsonl",
    "LabelSmoothing": "trainer_lib.callbacks.label_smoothing",
    "LambdaCallback": "trainer_lib.callbacks.filters",
    "LearningRateMonitor": "trainer_lib.callbacks.learning_rate",
    "LiveControl": "trainer_lib.callbacks.live_control",
    "MLflowCallback": "trainer_lib.callbacks.trackers",
    "MemorySnapshot": "trainer_lib.callbacks.memory_snapshot",
    "Mixup": "trainer_lib.callbacks.mixup",
    "MixupOrCutMix": "trainer_lib.callbacks.mixup",
    "ModelSummary": "trainer_lib.callbacks.model_summary",
    "NEFTune": "trainer_lib.callbacks.neftune",
    "NotebookChart": "trainer_lib.callbacks.notebook",
    "Predictions": "trainer_lib.callbacks.predictions",
    "Printer": "trainer_lib.callbacks.console",
    "Profile": "trainer_lib.callbacks.profile",
    "ProgressBar": "trainer_lib.callbacks.progress",
    "Provenance": "trainer_lib.callbacks.sample_provenance",
    "SAM": "trainer_lib.callbacks.sam",
    "SWA": "trainer_lib.callbacks.swa",
    "SampleLosses": "trainer_lib.callbacks.sample_losses",
    "SequenceLengthWarmup": "trainer_lib.callbacks.sequence_length",
    "SwanLabCallback": "trainer_lib.callbacks.trackers",
    "SystemMonitor": "trainer_lib.callbacks.system",
    "TensorBoardCallback": "trainer_lib.callbacks.trackers",
    "Throughput": "trainer_lib.callbacks.throughput",
    "Slack": "trainer_lib.callbacks.notifications",
    "Timer": "trainer_lib.callbacks.timer",
    "Webhook": "trainer_lib.callbacks.notifications",
    "TrackerCallback": "trainer_lib.callbacks.trackers",
    "TrackioCallback": "trainer_lib.callbacks.trackers",
    "WandbCallback": "trainer_lib.callbacks.trackers",
    "after": "trainer_lib.callbacks.filters",
    "ask_run": "trainer_lib.callbacks.live_control",
    "before": "trainer_lib.callbacks.filters",
    "every": "trainer_lib.callbacks.filters",
    "once": "trainer_lib.callbacks.filters",
    "replay_batch": "trainer_lib.callbacks.sample_provenance",
    "samples_of_step": "trainer_lib.callbacks.sample_provenance",
    "top_losses": "trainer_lib.callbacks.sample_losses",
}
__all__ = [
    "EMA",
    "SAM",
    "SWA",
    "AccumulationSchedule",
    "AdaptiveClipping",
    "Checkpoint",
    "ClearMLCallback",
    "ClipValue",
    "CometCallback",
    "CsvLog",
    "CutMix",
    "DVCLiveCallback",
    "EarlyStopping",
    "Flops",
    "Freeze",
    "GarbageSchedule",
    "GradientNorms",
    "GradualUnfreezing",
    "Histograms",
    "JsonlLog",
    "LabelSmoothing",
    "LambdaCallback",
    "LearningRateMonitor",
    "LiveControl",
    "MLflowCallback",
    "MemorySnapshot",
    "Mixup",
    "MixupOrCutMix",
    "ModelSummary",
    "NEFTune",
    "NotebookChart",
    "Predictions",
    "Printer",
    "Profile",
    "ProgressBar",
    "Provenance",
    "SampleLosses",
    "SequenceLengthWarmup",
    "Slack",
    "SwanLabCallback",
    "SystemMonitor",
    "TensorBoardCallback",
    "Throughput",
    "Timer",
    "TrackerCallback",
    "TrackioCallback",
    "WandbCallback",
    "Webhook",
    "after",
    "ask_run",
    "before",
    "every",
    "once",
    "replay_batch",
    "samples_of_step",
    "top_losses",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
