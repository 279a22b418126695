"""Strategies distribute a model over ranks: one device, DDP or FSDP2."""

from trainer_lib.strategies.base import Strategy
from trainer_lib.strategies.registry import choose_strategy, register_strategy
from trainer_lib.strategies.single_device import SingleDevice

__all__ = ["SingleDevice", "Strategy", "choose_strategy", "register_strategy"]
