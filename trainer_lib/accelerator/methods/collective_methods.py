"""The `Accelerator`'s methods for ranks and collectives: `device`, `process_index`, `gather`, `reduce`, triggers."""

from typing import Any

import torch
from torch import Tensor

from trainer_lib import collectives
from trainer_lib.options.enums import DistributedType
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.accelerator_state import AcceleratorState
from trainer_lib.state.gradient_state import GradientState
from trainer_lib.state.rank_control import ProcessControl


class CollectiveMethods(ProcessControl):
    """Methods and properties of an `Accelerator` as one rank of a world."""

    state: AcceleratorState
    gradient_state: GradientState
    flag_tensor: Tensor | None = None  # set: the trigger of this rank

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distributed training."""
        return self.state.distributed_type

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded."""
        return self.state.is_fsdp2

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many ranks replicate a model and how many share a copy; `None` if not given and nothing is sharded."""
        return self.state.parallelism_config

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parallelism of several kinds is composed by `parallelism_config`."""
        return self.is_fsdp2

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of ranks that `parallelism_config` describes, or `None`."""
        config = self.parallelism_config
        return None if config is None else config.get_device_mesh(self.device.type)

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's copy of the model; 0 if there is one copy."""
        return self._mesh_index("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The index of this rank's shard of its model copy; 0 if nothing is sharded."""
        return self._mesh_index("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """The index of this rank's part of each matrix, with `tp_size`; 0 if they are whole."""
        return self._mesh_index("tp")

    @property
    def context_parallel_rank(self) -> int:
        """The index of this rank's part of its sequences, with `cp_size`; 0 if they are whole."""
        return self._mesh_index("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The index of this rank in its pipeline, with `pp_size`; 0 if it has all layers."""
        return self._mesh_index("pp")

    @property
    def num_processes(self) -> int:  # type: ignore[override]
        """The world size."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """This rank."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:  # type: ignore[override]
        """The local rank: the index of this process on its machine."""
        return self.state.local_process_index

    @property
    def group(self) -> ProcessGroup:  # type: ignore[override]
        """The process group of all ranks."""
        return self.state.group

    @property
    def data_group(self) -> ProcessGroup:  # type: ignore[override]
        """The process group of the ranks that read different batches: all, unless ranks hold parts of one replica."""
        return self.state.data_group

    @property
    def ranks_per_batch(self) -> int:
        """How many ranks read the same batches, as parts of one replica of a model."""
        return self.group.size // self.data_group.size

    @property
    def reads_first(self) -> bool:
        """Whether this is the first of the ranks that read the same batches: the one that writes what it read."""
        return self.process_index in self.state.first_readers

    @property
    def multi_device(self) -> bool:
        """Whether the world has several accelerator devices."""
        return self.use_distributed and self.device.type != "cpu"

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all ranks along the first dimension, without gradients. All ranks call it.

        Every rank gets the result. For metrics of an evaluation use `gather_for_metrics`, which leaves out samples that
        fill the last round.

        Args:
            tensor: A tensor, or a structure of tensors, of the same shapes on all ranks; `pad_across_processes` makes
                them equal.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.gather(torch.tensor([accelerator.process_index]))  # on two ranks: tensor([0, 1])
            tensor([0])
        """
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather predictions and labels of a batch, without samples that the loader repeated to fill it up.

        Takes tensors of any type, lists of texts or other objects, and structures of them; ranks may hold different
        numbers of rows. Ranks that read the same batch, as parts of one replica of the model, count as one.

        Args:
            input_data: One row (or as many) for each sample of the batch; a tensor without dimensions, such as the mean
                loss of the batch, is one value of this rank.
            use_gather_object: Send objects as they are, without looking for tensors inside.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.gather_for_metrics(torch.tensor([1, 0, 1]))
            tensor([1, 0, 1])
        """
        from trainer_lib.collectives.gather_for_metrics import gather_real_objects, gather_real_rows

        loader = self.gradient_state.active_dataloader
        rows = None if loader is None else loader.rows
        return gather_real_objects(input_data, rows) if use_gather_object else gather_real_rows(input_data, rows)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum of the tensors of all ranks, or their mean, maximum or minimum. All ranks call it.

        Args:
            tensor: A tensor, or a structure of tensors, of the same shapes on all ranks.
            reduction: "sum", "mean", "max", "min", or "none" for a copy of this rank's tensor.
            scale: A factor for the result.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.reduce(torch.tensor(0.5), reduction="mean")
            tensor(0.5000)
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad the tensor to the largest size along `dim` over all ranks. All ranks call it.

        Args:
            tensor: A tensor, or a structure of tensors.
            dim: The dimension to pad.
            pad_index: The value to pad with.
            pad_first: Pad at the beginning instead of at the end.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> tokens = torch.ones(2, 3 + accelerator.process_index)
            >>> accelerator.gather(accelerator.pad_across_processes(tokens, dim=1)).shape  # on two ranks: 4 by 4
            torch.Size([2, 3])
        """
        return collectives.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Set a flag that `check_trigger` reports on all ranks.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        self.flag_tensor = torch.tensor(1, dtype=torch.int32, device=self.device)

    def _mesh_index(self, dimension: str) -> int:
        mesh = self.torch_device_mesh
        return mesh.get_local_rank(dimension) if mesh is not None and dimension in mesh.mesh_dim_names else 0

    def check_trigger(self) -> bool:
        """Whether any rank called `set_trigger` since the last check. All ranks call it."""
        flag = torch.zeros((), dtype=torch.int32, device=self.device)
        if self.flag_tensor is not None:
            flag += self.flag_tensor
        self.flag_tensor = None
        return bool(self.group.all_reduce(flag, "max").item())
