"""This package is the contestants: one file each, all doing the same task."""

from benchmarks.contestants.accelerate import Accelerate
from benchmarks.contestants.bare import Bare, BareAgain
from benchmarks.contestants.base import Contestant, NotOfferedError
from benchmarks.contestants.fabric import Fabric
from benchmarks.contestants.trainer_lib import TrainerLib

# The first is the one that the others are compared with. A new contestant is a file in this package and a line here.
CONTESTANTS: list[type[Contestant]] = [Bare, BareAgain, TrainerLib, Accelerate, Fabric]

__all__ = ["CONTESTANTS", "Contestant", "NotOfferedError"]
