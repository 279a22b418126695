"""`ParallelismConfig`: how many ranks replicate a model, and how many shard one copy."""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.base import check_count

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NOT_YET = {"tp_size": "tensor parallelism", "cp_size": "context parallelism", "sp_size": "sequence parallelism"}


@dataclass
class ParallelismConfig:
    """How the processes are arranged; what is left at `None` is what the launcher says, or else 1.

    Args:
        dp_replicate_size: How many copies of the model there are. Alone it means DDP.
        dp_shard_size: How many processes share each copy (FSDP2).
        tp_size: 1.
        cp_size: 1.
        cp_backend: `None`, or "torch".
        sp_size: 1.
        sp_backend: `None`, or "deepspeed".
        tp_handler: `None`.
        cp_handler: `None`.
        sp_handler: `None`.

    Example:
        >>> config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
        >>> config.total_size, config.active_mesh_dims
        (8, ['dp_replicate', 'dp_shard'])
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    def __post_init__(self) -> None:
        """Take up what the launcher says, and check the sizes."""
        launcher = environment.parallelism_requested()
        for name in ("dp_replicate_size", "dp_shard_size", *_NOT_YET):
            if getattr(self, name) is None:
                setattr(self, name, launcher.get(name, 1))
            check_count(name, getattr(self, name))
        for name, capability in _NOT_YET.items():
            if getattr(self, name) > 1 or getattr(self, f"{name[:2]}_handler") is not None:
                raise UnsupportedError(
                    f"ParallelismConfig({name}={getattr(self, name)}) asks for {capability}, which this version does "
                    "not have. Use dp_replicate_size and dp_shard_size."
                )
        for name, known in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if getattr(self, name) not in (None, known):
                raise ConfigurationError(f"Unknown {name} {getattr(self, name)!r}. Known: {known}.")
        self._mesh: DeviceMesh | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension, by its name in the mesh."""
        return {
            "dp_replicate": self.dp_replicate_size or 1,
            "dp_shard": self.dp_shard_size or 1,
            "cp": self.cp_size or 1,
            "sp": self.sp_size or 1,
            "tp": self.tp_size or 1,
        }

    @property
    def total_size(self) -> int:
        """How many processes it takes."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """How many processes have data of their own."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def non_data_parallel_size(self) -> int:
        """How many processes share their data."""
        return self.total_size // self.data_parallel_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether several processes share a copy of the model."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether matrices are split."""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split for attention."""
        return self.sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split between attentions."""
        return self.sizes["sp"] > 1

    @property
    def active_mesh_dims(self) -> list[str]:
        """The names of the dimensions larger than 1."""
        return [name for name, size in self.sizes.items() if size > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The names of the dimensions along which the data differ."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The names of the dimensions along which the data are the same."""
        return self._active("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The names of the dimensions that share the weights."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The names of the dimensions over which a loss is averaged."""
        return self._active("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The names of the dimensions over which FSDP2 works."""
        return [*self._active("dp_replicate"), "dp_shard"]

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def check_world(self, size: int) -> None:
        """Raise unless it takes exactly `size` processes."""
        if self.total_size != size:
            raise ConfigurationError(
                f"ParallelismConfig(dp_replicate_size={self.dp_replicate_size}, dp_shard_size={self.dp_shard_size}) "
                f"takes {self.total_size} processes, and there are {size}."
            )

    def build_device_mesh(self, device_type: str) -> "DeviceMesh | None":
        """Return the mesh of the dimensions larger than 1; none, if there are none. All processes have to call."""
        from torch.distributed.device_mesh import init_device_mesh

        names = self.active_mesh_dims
        if not names:
            return None
        return init_device_mesh(device_type, tuple(self.sizes[name] for name in names), mesh_dim_names=tuple(names))

    def get_device_mesh(self, device_type: str | None = None) -> "DeviceMesh | None":
        """Return the mesh, which is built on the first call."""
        if self._mesh is None:
            if device_type is None:
                raise ConfigurationError("The mesh is not built. Say for which devices: get_device_mesh('cuda').")
            self._mesh = self.build_device_mesh(device_type)
        if self._mesh is not None and device_type not in (None, self._mesh.device_type):
            raise ConfigurationError(
                f"The mesh is built for {self._mesh.device_type!r}, and {device_type!r} is asked for."
            )
        return self._mesh

    def _active(self, *names: str) -> list[str]:
        return [name for name in names if self.sizes[name] > 1]
