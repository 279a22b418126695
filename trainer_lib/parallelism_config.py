"""`ParallelismConfig`: the mesh of ranks: how many replicate a model, shard a copy, split matrices or sequences."""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer_lib.foundation import environment
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import Options, check_count
from trainer_lib.options.parallel.pipeline_options import TorchPipelineParallelConfig
from trainer_lib.options.parallel.sequence_options import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "pp_size")
_SHOWN = ("dp_replicate", "dp_shard")  # in errors, even where they are 1
_HANDLERS = {
    "tp_handler": TorchTensorParallelConfig,
    "cp_handler": TorchContextParallelConfig,
    "sp_handler": DeepSpeedSequenceParallelConfig,
    "pp_handler": TorchPipelineParallelConfig,
}
_BACKENDS = {"cp_backend": "torch", "sp_backend": "deepspeed"}


@dataclass(repr=False, eq=False)
class ParallelismConfig(Options):
    """How the processes are arranged; what is left at `None` is what the launcher says, or else 1.

    Args:
        dp_replicate_size: How many copies of the model there are. Alone it means DDP.
        dp_shard_size: How many processes share each copy (FSDP2).
        tp_size: How many processes split each matrix (tensor parallelism). They read the same batches.
        cp_size: How many processes hold parts of the same sequences and exchange keys and values (context parallelism).
            They read the same batches.
        cp_backend: "torch".
        sp_size: How many processes hold parts of the same sequences and share out the attention heads (sequence
            parallelism, Ulysses). They read the same batches.
        sp_backend: "deepspeed", Accelerate's name for it; it runs without DeepSpeed.
        tp_handler: The plan and the options of tensor parallelism; each handler is set where its size is larger than 1.
        cp_handler: The options of context parallelism.
        sp_handler: The options of sequence parallelism.
        pp_size: How many processes hold consecutive layers each (pipeline parallelism). They read the same batches.
        pp_handler: The options of pipeline parallelism.

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
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = None
    pp_handler: TorchPipelineParallelConfig | None = None

    def __post_init__(self) -> None:
        """Take up what the launcher says, and check the sizes."""
        launcher = environment.parallelism_requested()
        for name in _SIZES:
            if getattr(self, name) is None:
                setattr(self, name, launcher.get(name, 1))
            check_count(name, getattr(self, name))
        for name, kind in _HANDLERS.items():
            if not isinstance(getattr(self, name), kind | None):
                raise ConfigurationError(f"{name} must be a {kind.__name__} (got {shown(getattr(self, name))}).")
            if getattr(self, name) is None and getattr(self, name.replace("handler", "size")) > 1:
                setattr(self, name, kind())
        for name, known in _BACKENDS.items():
            if getattr(self, name) not in (None, known):
                raise ConfigurationError(f"Unknown {name} {getattr(self, name)!r}. Known: {known}.")
            setattr(self, name, known)
        if self.cp_enabled and self.sp_enabled:
            raise ConfigurationError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both split sequences. Set one of them to 1."
            )
        self._mesh: DeviceMesh | None = None
        self._weight_mesh: DeviceMesh | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension, by its name in the mesh, in the order of the mesh.

        The ranks of the last dimensions exchange the most, so they are neighbors.
        """
        return {
            "pp": self.pp_size or 1,
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
    def shard_size(self) -> int:
        """How many processes share the weights of a copy, if a model is sharded: those of sequences do so too."""
        return self.sizes["dp_shard"] * self.sizes["cp"] * self.sizes["sp"]

    @property
    def tp_options(self) -> TorchTensorParallelConfig:
        """The options of tensor parallelism: the given ones or their defaults."""
        return self.tp_handler or TorchTensorParallelConfig()

    @property
    def cp_options(self) -> TorchContextParallelConfig:
        """The options of context parallelism: the given ones or their defaults."""
        return self.cp_handler or TorchContextParallelConfig()

    @property
    def pp_options(self) -> TorchPipelineParallelConfig:
        """The options of pipeline parallelism: the given ones or their defaults."""
        return self.pp_handler or TorchPipelineParallelConfig()

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
    def pp_enabled(self) -> bool:
        """Whether layers are spread over stages."""
        return self.sizes["pp"] > 1

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
        return self._active("pp", "tp", "cp", "sp")

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

    @property
    def ranks_of_parts(self) -> list[range]:
        """The ranks that hold the same stage and the same part of its matrices, for each such part.

        They average its gradients: each has computed them from other samples, or from another part of the sequences.

        Example:
            >>> ParallelismConfig(cp_size=2, tp_size=2).ranks_of_parts
            [range(0, 4, 2), range(1, 4, 2)]
        """
        split, of_stage = self.sizes["tp"], self.total_size // self.sizes["pp"]
        stages = range(0, self.total_size, of_stage)
        return [range(stage + part, stage + of_stage, split) for stage in stages for part in range(split)]

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def check_world(self, size: int) -> None:
        """Raise unless it takes exactly `size` processes."""
        if self.total_size == size:
            return
        others = self.total_size // self.sizes["dp_replicate"]
        if size % others:
            fix = f"the product of the sizes must divide {size}{self._nearest(size)}"
        else:
            fix = f"set dp_replicate_size={size // others}"
        sizes = ", ".join(f"{name}_size={count}" for name, count in self.sizes.items() if name in _SHOWN or count > 1)
        raise ConfigurationError(
            f"ParallelismConfig({sizes}) takes {self.total_size} processes, and there are {size}. Start "
            f"{self.total_size} processes, or {fix}."
        )

    def _nearest(self, world: int) -> str:
        """Return the smallest change of one size with which the others fit, in words; "" without one."""
        others = self.total_size // self.sizes["dp_replicate"]
        changes = [
            (abs(value - count), name, value)
            for name, count in self.sizes.items()
            if count > 1 and name != "dp_replicate"
            for value in range(1, world + 1)
            if not world % (others // count * value)
        ]
        if not changes:
            return ""
        _, name, value = min(changes)
        replicas = world // (others // self.sizes[name] * value)
        also = f" and dp_replicate_size={replicas}" if replicas != self.sizes["dp_replicate"] else ""
        return f", for example {name}_size={value}{also}"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank in the mesh, by dimension.

        Example:
            >>> ParallelismConfig(dp_shard_size=2, tp_size=2).coordinates(1)
            {'dp_shard': 0, 'tp': 1}
        """
        places: dict[str, int] = {}
        for name in reversed(self.active_mesh_dims):
            rank, places[name] = divmod(rank, self.sizes[name])
        return dict(reversed(places.items()))

    def describe(self, most: int = 8) -> str:
        """Return the dimensions of the mesh, and the coordinates of the first ranks.

        Example:
            >>> ParallelismConfig(dp_shard_size=2, tp_size=2).describe()
            'dp_shard 2 × tp 2; ranks 0 (0, 0), 1 (0, 1), 2 (1, 0), 3 (1, 1)'
        """
        if not self.active_mesh_dims:
            return "one rank"
        dimensions = " × ".join(f"{name} {self.sizes[name]}" for name in self.active_mesh_dims)
        places = [
            f"{rank} ({', '.join(map(str, self.coordinates(rank).values()))})"
            for rank in range(min(self.total_size, most))
        ]
        return f"{dimensions}; ranks {', '.join(places)}{', …' if self.total_size > most else ''}"

    def build_device_mesh(self, device_type: str) -> "DeviceMesh | None":
        """Return the mesh of the dimensions larger than 1; none, if there are none. All processes have to call.

        Its joint dimensions have names too: `mesh["dp"]` (different data), `mesh["dp_shard_cp"]` (shards of the same
        weights) and `mesh["dp_cp"]` (parts of the same loss).
        """
        from torch.distributed.device_mesh import init_device_mesh

        names = self.active_mesh_dims
        if not names:
            return None
        mesh = init_device_mesh(device_type, tuple(self.sizes[name] for name in names), mesh_dim_names=tuple(names))
        joint = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, parts in joint.items():
            if parts:
                # Torch has no public way. No group is made where one of the same ranks exists.
                mesh[tuple(parts)]._flatten(name)  # pyright: ignore[reportPrivateUsage]
        return mesh

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

    def get_weight_mesh(self, device_type: str) -> "DeviceMesh":
        """Return the mesh over which weights are sharded and split. All processes have to call.

        Ranks that hold parts of the same sequences also hold shards of the same weights, so its `dp_shard` has the size
        `shard_size`. FSDP2 shards along that dimension, so it is there even if its size is 1.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if self.sizes["dp_shard"] == self.shard_size > 1:
            mesh = self.get_device_mesh(device_type)
            assert mesh is not None
            return mesh
        if self._weight_mesh is None:
            sizes = {**self.sizes, "dp_shard": self.shard_size}
            names = [*self._active("pp", "dp_replicate"), "dp_shard", *self._active("tp")]
            self._weight_mesh = init_device_mesh(
                device_type, tuple(sizes[name] for name in names), mesh_dim_names=tuple(names)
            )
        return self._weight_mesh

    def _active(self, *names: str) -> list[str]:
        return [name for name in names if self.sizes[name] > 1]
