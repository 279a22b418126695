"""The choice of a strategy, and the interface that all strategies share."""

import pytest
import torch

from tests.worlds import run_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin
from trainer_lib.strategies import SingleDevice, Strategy
from trainer_lib.strategies.ddp.ddp import DDP


def _chosen() -> tuple[str, str]:
    return type(Accelerator(cpu=True).strategy).__name__, type(Accelerator(cpu=True).strategy).__mro__[1].__name__


def test_one_process_gets_a_single_device() -> None:
    assert _chosen() == ("SingleDevice", "Strategy")


def test_launched_ranks_get_ddp() -> None:
    assert run_world(_chosen, (), 2, timeout=60) == [("DDP", "Strategy")] * 2


def _sharded() -> tuple[str, str]:
    strategy = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()).strategy
    return type(strategy).__name__, type(strategy).__mro__[1].__name__


def test_a_sharding_plugin_gets_fsdp() -> None:
    assert run_world(_sharded, (), 2, timeout=60) == [("FSDP", "Strategy")] * 2


def test_no_strategy_is_a_single_device_with_changes() -> None:
    assert not issubclass(DDP, SingleDevice)


def test_the_interface_cannot_be_instantiated() -> None:
    with pytest.raises(TypeError, match=r"abstract methods? .*distribute.*send_with_gradients"):
        Strategy(Accelerator(cpu=True).group, torch.device("cpu"))  # type: ignore[abstract]
