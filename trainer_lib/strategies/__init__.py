"""This package is the ways to spread a model over processes. There is always one: a single process is one too."""

from trainer_lib.strategies.base import SingleProcess
from trainer_lib.strategies.registry import choose_strategy

__all__ = ["SingleProcess", "choose_strategy"]
