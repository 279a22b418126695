"""This file is the engine's side of process control and collectives: who am I, who may, and what have the others."""

from typing import Any

import torch

from trainer_lib import collectives
from trainer_lib.collectives.gather_for_metrics import gather_real_objects, gather_real_rows
from trainer_lib.options.enums import DistributedType
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.accelerator_state import AcceleratorState
from trainer_lib.state.gradient_state import GradientState
from trainer_lib.state.rank_control import ProcessControl


class Processes(ProcessControl):
    """What an `Accelerator` knows and does as one of several processes."""

    state: AcceleratorState
    gradient_state: GradientState
    _trigger: bool = False

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return self.state.distributed_type

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded."""
        return self.state.is_fsdp2

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many processes replicate a model and how many share a copy, if that was said or models are sharded."""
        return self.state.parallelism_config

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parallelism of several kinds is composed by `parallelism_config`."""
        return self.is_fsdp2

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of processes that `parallelism_config` describes, or `None`."""
        config = self.parallelism_config
        return None if config is None else config.get_device_mesh(self.device.type)

    @property
    def data_parallel_rank(self) -> int:
        """Which copy of the model this process has a part in; 0 if there is one."""
        return self._place_along("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which part of a copy of the model this process has; 0 if it has it whole."""
        return self._place_along("dp_shard")

    @property
    def num_processes(self) -> int:  # type: ignore[override]
        """How many processes there are."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """The place of this process among all."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:  # type: ignore[override]
        """The place of this process on its machine."""
        return self.state.local_process_index

    @property
    def group(self) -> ProcessGroup:  # type: ignore[override]
        """The processes."""
        return self.state.group

    @property
    def multi_device(self) -> bool:
        """Whether several accelerator devices work together."""
        return self.use_distributed and self.device.type != "cpu"

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all processes, concatenated along the first dimension."""
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather predictions and labels of a batch, without the samples that the loader repeated to fill it.

        Tensors of any type, lists of texts or other objects, and structures of them; the processes may hold different
        numbers of rows.

        Args:
            input_data: One row (or as many) for each sample of the batch.
            use_gather_object: Send objects whole, instead of looking for tensors inside.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.gather_for_metrics(torch.tensor([1, 0, 1]))
            tensor([1, 0, 1])
        """
        loader = self.gradient_state.active_dataloader
        rows = None if loader is None else loader.rows
        return gather_real_objects(input_data, rows) if use_gather_object else gather_real_rows(input_data, rows)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean of the tensors of all processes."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Return the tensor padded to the largest size along `dim` that any process has."""
        return collectives.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Raise a flag for all processes to see by `check_trigger`.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        self._trigger = True

    def _place_along(self, dimension: str) -> int:
        mesh = self.torch_device_mesh
        return mesh.get_local_rank(dimension) if mesh is not None and dimension in mesh.mesh_dim_names else 0

    def check_trigger(self) -> bool:
        """Whether any process raised its flag since the last check. All processes have to ask."""
        flag = torch.tensor(int(self._trigger), dtype=torch.int32, device=self.device)
        self._trigger = False
        return bool(self.group.all_reduce(flag, "max").item())
