"""This file is how the processes share the work, from all the ways to say it: plugin, mesh sizes, launcher."""

from typing import Any, NamedTuple

from trainer_lib.foundation import environment
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig


class Arrangement(NamedTuple):
    """How models are sharded (`None`: not at all), and how the processes are arranged (`None`: nobody says)."""

    fsdp_plugin: FullyShardedDataParallelPlugin | None
    parallelism_config: ParallelismConfig | None


def arrange(fsdp_plugin: Any, parallelism_config: Any, num_processes: int) -> Arrangement:
    """Return what follows from the arguments, or else from the launcher's variables.

    Raises:
        ConfigurationError: If they contradict each other, or do not fit the number of processes.
    """
    _check_types(fsdp_plugin, parallelism_config)
    plugin = fsdp_plugin or (FullyShardedDataParallelPlugin() if environment.uses_sharding() else None)
    config = parallelism_config or (ParallelismConfig() if environment.uses_parallelism_config() else None)
    if config is not None and config.total_size == 1:
        config = None  # it says nothing
    if config is not None:
        config.check_world(num_processes)
        if config.dp_shard_enabled and plugin is None:
            plugin = FullyShardedDataParallelPlugin()
    if plugin is None:
        return Arrangement(None, config)
    if config is None:
        config = _sharding_all(plugin, num_processes)
    elif not config.dp_shard_enabled:
        raise ConfigurationError(
            f"ParallelismConfig(dp_replicate_size={config.dp_replicate_size}) gives each process a whole model, and "
            "the FSDP plugin shards it. Give dp_shard_size too, or leave the plugin out."
        )
    elif plugin.is_hybrid and not config.dp_replicate_enabled:
        raise ConfigurationError(
            f"sharding_strategy={plugin.sharding_strategy!r} replicates over machines, and "
            f"ParallelismConfig(dp_shard_size={config.dp_shard_size}) does not. Give dp_replicate_size too."
        )
    return Arrangement(plugin, config)


def _sharding_all(plugin: FullyShardedDataParallelPlugin, num_processes: int) -> ParallelismConfig:
    if not plugin.is_hybrid:
        return ParallelismConfig(dp_replicate_size=1, dp_shard_size=num_processes)
    local = environment.processes_per_machine()
    if local is None or num_processes % local:
        raise ConfigurationError(
            f"sharding_strategy={plugin.sharding_strategy!r} shards over the processes of each machine, and it is not "
            f"known how the {num_processes} processes are spread. Say it by ParallelismConfig(dp_replicate_size=…, "
            "dp_shard_size=…)."
        )
    return ParallelismConfig(dp_replicate_size=num_processes // local, dp_shard_size=local)


def _check_types(fsdp_plugin: Any, parallelism_config: Any) -> None:
    for name, value, kind in (
        ("fsdp_plugin", fsdp_plugin, FullyShardedDataParallelPlugin),
        ("parallelism_config", parallelism_config, ParallelismConfig),
    ):
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{name} must be a {kind.__name__}, got {shown(value)}.")
