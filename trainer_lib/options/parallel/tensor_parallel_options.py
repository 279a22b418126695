"""`TorchTensorParallelConfig` and `TorchTensorParallelPlugin`: options of tensor parallelism."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import Options, check_count, check_flag


@dataclass(repr=False, eq=False)
class TorchTensorParallelConfig(Options):
    """How tensor parallelism splits a model: `ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(…))`.

    Args:
        enable_async_tp: Overlap gathers and scatters of parts of the sequence with matrix products. It needs GPUs, and
            `dynamo_backend="inductor"`.
        plan: The style of each module, by patterns of names: `{"*.q_proj": "colwise", "*.o_proj": "rowwise"}`.
            `None`: the plan that the model has (transformers' `tp_plan`).
        loss_parallel: Compute the loss from logits that stay split over the vocabulary.
        sequence_parallel: Let norms of Llama's kind of models compute parts of the sequence, instead of all of it on
            each rank; other models have their usual plan. Lengths must be multiples of the number of ranks.

    Example:
        >>> TorchTensorParallelConfig(plan={"*.up": "colwise", "*.down": "rowwise"}).plan["*.up"]
        'colwise'
    """

    enable_async_tp: bool = False
    plan: Mapping[str, str] | None = None
    loss_parallel: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        """Check the types; names and styles are checked with the model."""
        check_flag("enable_async_tp", self.enable_async_tp)
        check_flag("loss_parallel", self.loss_parallel)
        check_flag("sequence_parallel", self.sequence_parallel)
        plan: Any = self.plan
        if plan is not None and not (isinstance(plan, Mapping) and all(isinstance(k, str) for k in plan)):
            raise ConfigurationError(
                f"plan must map patterns of module names to styles (got {plan!r}). Example: plan={{'*.q_proj': "
                "'colwise', '*.o_proj': 'rowwise'}."
            )


@dataclass(repr=False, eq=False)
class TorchTensorParallelPlugin(Options):
    """The older option of tensor parallelism; `ParallelismConfig(tp_size=…)` says the same.

    Args:
        tp_size: How many ranks split each matrix. The other ranks replicate the model.
        torch_device_mesh: A mesh with a dimension "tp", whose size is `tp_size`; by default one is built.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        """Take the size from the mesh, if there is one."""
        check_count("tp_size", self.tp_size)
        mesh = self.torch_device_mesh
        if mesh is None:
            return
        names: Any = getattr(mesh, "mesh_dim_names", None) or ()
        if "tp" not in names:
            raise ConfigurationError(f"torch_device_mesh must have a dimension 'tp' (it has {names}).")
        size = mesh["tp"].size()
        if self.tp_size not in (1, size):
            raise ConfigurationError(f"tp_size={self.tp_size}, and torch_device_mesh has {size} ranks in 'tp'.")
        self.tp_size = size
