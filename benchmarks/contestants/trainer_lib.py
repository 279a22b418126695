"""This library's `Accelerator`."""

from typing import Any

from torch import Tensor

from benchmarks.contestants.accelerator_loop import AcceleratorLoop
from benchmarks.task import Task


class TrainerLib(AcceleratorLoop):
    """`trainer_lib.Accelerator`."""

    name = "trainer_lib"
    statement = "from trainer_lib import Accelerator"

    def accelerator(self, task: Task) -> Any:
        """Return a new `Accelerator`."""
        from trainer_lib import Accelerator, FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin() if task.blocks else None
        return Accelerator(cpu=task.device == "cpu", gradient_accumulation_steps=task.accumulation, fsdp_plugin=plugin)

    def backward(self, accelerator: Any, loss: Tensor, weight: Tensor) -> None:
        """Name the weight; it travels with the gradients."""
        accelerator.backward(loss, weight=weight)

    def reset(self) -> None:
        """Forget the state that all its objects share."""
        forget_state()


def forget_state() -> None:
    """Forget the state that all objects of the library share."""
    from trainer_lib.state import AcceleratorState, GradientState

    AcceleratorState.reset(True)
    GradientState.reset()
