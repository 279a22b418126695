"""How ranks replicate or shard models, resolved from the plugin, the mesh sizes and the launcher."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from trainer_lib.foundation import environment
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig


class Arrangement(NamedTuple):
    """How models are sharded (`None`: not at all), the sizes of the mesh (`None`: not set), and notes for the user."""

    fsdp_plugin: FullyShardedDataParallelPlugin | None
    parallelism_config: ParallelismConfig | None
    notes: Sequence[str] = ()


def arrange(
    fsdp_plugin: Any, parallelism_config: Any, num_processes: int, tp_plugin: Any = None, *, zero_shards: bool = False
) -> Arrangement:
    """Return the arrangement given by the arguments, or else by the launcher's variables.

    Args:
        fsdp_plugin: How models are sharded.
        parallelism_config: The sizes of the mesh.
        num_processes: The world size.
        tp_plugin: How matrices are split, in the form of an older option.
        zero_shards: DeepSpeed shards models over all ranks, so `dp_shard_size` asks for no FSDP.

    Raises:
        ConfigurationError: If they contradict each other, or do not fit the number of ranks.
    """
    _check_types(fsdp_plugin, parallelism_config, tp_plugin)
    plugin = fsdp_plugin or (FullyShardedDataParallelPlugin() if environment.uses_sharding() else None)
    notes = () if plugin is None else plugin.notes
    if plugin is not None and not plugin.shards:
        plugin = None
    config = parallelism_config or (ParallelismConfig() if environment.uses_parallelism_config() else None)
    if tp_plugin is not None:
        config = _splitting(tp_plugin, parallelism_config, num_processes, shards=plugin is not None)
    if config is not None and config.total_size == 1:
        config = None  # a mesh of one rank is the default
    if config is not None:
        config.check_world(num_processes)
        if config.dp_shard_enabled and plugin is None and not zero_shards:
            plugin = FullyShardedDataParallelPlugin()
    if plugin is None:
        return Arrangement(None, config, notes)
    if config is None:
        config = _sharding_all(plugin, num_processes)
    elif config.shard_size == 1:
        raise ConfigurationError(
            f"ParallelismConfig(dp_replicate_size={config.dp_replicate_size}) keeps a whole model on each rank, and "
            "the FSDP plugin shards it. Set dp_shard_size too, or leave the plugin out."
        )
    elif plugin.is_hybrid and not config.dp_replicate_enabled:
        raise ConfigurationError(
            f"sharding_strategy={plugin.sharding_strategy!r} replicates over machines, and "
            f"ParallelismConfig(dp_shard_size={config.dp_shard_size}) does not. Set dp_replicate_size too."
        )
    return Arrangement(plugin, config, notes)


def _sharding_all(plugin: FullyShardedDataParallelPlugin, num_processes: int) -> ParallelismConfig:
    if not plugin.is_hybrid:
        return ParallelismConfig(dp_replicate_size=1, dp_shard_size=num_processes)
    local = environment.processes_per_machine()
    if local is None or num_processes % local:
        raise ConfigurationError(
            f"sharding_strategy={plugin.sharding_strategy!r} shards over the ranks of each machine, and the number of "
            f"ranks per machine is unknown (world size {num_processes}). Set "
            "ParallelismConfig(dp_replicate_size=…, dp_shard_size=…)."
        )
    return ParallelismConfig(dp_replicate_size=num_processes // local, dp_shard_size=local)


def _splitting(
    plugin: TorchTensorParallelPlugin, config: ParallelismConfig | None, num_processes: int, shards: bool
) -> ParallelismConfig:
    if config is not None:
        raise ConfigurationError(
            f"torch_tp_plugin={plugin} and parallelism_config={config} both say how ranks are arranged. Leave "
            "torch_tp_plugin out, and give ParallelismConfig(tp_size=…)."
        )
    rest = max(num_processes // plugin.tp_size, 1)
    replicas, parts = (1, rest) if shards else (rest, 1)
    return ParallelismConfig(replicas, parts, tp_size=plugin.tp_size)


def _check_types(fsdp_plugin: Any, parallelism_config: Any, tp_plugin: Any) -> None:
    for name, value, kind in (
        ("fsdp_plugin", fsdp_plugin, FullyShardedDataParallelPlugin),
        ("parallelism_config", parallelism_config, ParallelismConfig),
        ("torch_tp_plugin", tp_plugin, TorchTensorParallelPlugin),
    ):
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{name} must be a {kind.__name__} (got {shown(value)}).")
