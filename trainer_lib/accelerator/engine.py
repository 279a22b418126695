"""The parts of an `Accelerator` that train: rank, prepared objects, strategy, precision and accumulation window."""

import torch
from torch import nn

from trainer_lib.accelerator.prepared import Prepared
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.precision import FullPrecision
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.accelerator_state import AcceleratorState
from trainer_lib.state.accumulation_window import GradientWindow
from trainer_lib.strategies import Strategy


@frozen_dataclass(eq=False)
class Engine:
    """The parts of an `Accelerator` that checkpoints and uneven inputs read and restore."""

    state: AcceleratorState
    prepared: Prepared
    strategy: Strategy
    precision: FullPrecision
    window: GradientWindow

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.state.device

    @property
    def group(self) -> ProcessGroup:
        """The process group of all ranks."""
        return self.state.group

    @property
    def rank(self) -> int:
        """This rank."""
        return self.state.process_index

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.state.num_processes

    @property
    def first_of_replica(self) -> int:
        """The first of the ranks that read the same batches as this one, as parts of one replica of a model."""
        return self.state.first_readers[self.state.data_group.rank]

    @property
    def trains_locally(self) -> bool:
        """Whether ranks train copies of a model that differ (`LocalSGD`, `DiLoCo`)."""
        return self.window.is_local and self.state.use_distributed

    @property
    def has_whole_tensors(self) -> bool:
        """Whether this rank gets whole tensors from the strategy."""
        return self.rank == 0 or not self.strategy.gathers_to_rank_zero

    def bare_models(self) -> list[nn.Module]:
        """Return the users' models inside the prepared ones."""
        return [self.strategy.bare(model) for model in self.prepared.models]
