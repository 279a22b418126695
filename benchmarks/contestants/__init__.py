"""The contestants: one file each, all training the same task."""

from benchmarks.contestants.accelerate import Accelerate
from benchmarks.contestants.bare import Bare, BareAgain
from benchmarks.contestants.base import Contestant, NotOfferedError
from benchmarks.contestants.fabric import Fabric
from benchmarks.contestants.fastai import Fastai
from benchmarks.contestants.hugging_face import HuggingFace
from benchmarks.contestants.ignite import Ignite
from benchmarks.contestants.lightning_trainer import LightningTrainer
from benchmarks.contestants.pytorch_accelerated import PytorchAccelerated
from benchmarks.contestants.skorch import Skorch
from benchmarks.contestants.trainer import Trainer
from benchmarks.contestants.trainer_lib import TrainerLib

# The first is the one that the others are compared with. A new contestant is a file in this package and a line here.
CONTESTANTS: list[type[Contestant]] = [
    Bare,
    BareAgain,
    TrainerLib,
    Trainer,
    Accelerate,
    Fabric,
    HuggingFace,
    LightningTrainer,
    PytorchAccelerated,
    Ignite,
    Skorch,
    Fastai,
]

__all__ = ["CONTESTANTS", "Contestant", "NotOfferedError"]
