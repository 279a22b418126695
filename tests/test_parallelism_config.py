"""How processes are arranged: sizes, meshes, and what does not fit."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from trainer_lib.foundation import environment
from trainer_lib.foundation.environment import parse_flag_from_env, patch_environment
from trainer_lib.options.parallel.pipeline_options import TorchPipelineParallelConfig
from trainer_lib.options.parallel.sequence_options import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelConfig
from trainer_lib.utils import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    importlib.import_module("torch.distributed.fsdp")


def test_sizes_and_names() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (8, 8, 1)
    assert config.active_mesh_dims == config.dp_dim_names == config.dp_cp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.dp_shard_cp_dim_names == ["dp_shard"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == []
    assert config.dp_replicate_enabled
    assert config.dp_shard_enabled
    assert (config.tp_enabled, config.cp_enabled, config.sp_enabled) == (False, False, False)
    assert config.to_json()["dp_shard_size"] == 4
    assert ParallelismConfig().total_size == 1
    assert ParallelismConfig().active_mesh_dims == []


def test_sizes_of_the_launcher() -> None:
    with patch_environment(PARALLELISM_CONFIG_DP_REPLICATE_SIZE="2", PARALLELISM_CONFIG_DP_SHARD_SIZE="3"):
        assert ParallelismConfig().sizes == {"pp": 1, "dp_replicate": 2, "dp_shard": 3, "cp": 1, "sp": 1, "tp": 1}
        assert ParallelismConfig(dp_shard_size=4).total_size == 8
        assert ParallelismConfig(dp_shard_size=4).tp_enabled is False
    with patch_environment(PARALLELISM_CONFIG_TP_SIZE="2"):
        assert ParallelismConfig().active_mesh_dims == ["tp"]
    with patch_environment(PARALLELISM_CONFIG_CP_SIZE="2", PARALLELISM_CONFIG_CP_COMM_STRATEGY="alltoall"):
        assert ParallelismConfig().active_mesh_dims == ["cp"]
        assert TorchContextParallelConfig().method == "ring"
        handler = ParallelismConfig().cp_handler
        assert handler is not None
        assert handler.cp_comm_strategy == "alltoall"


def test_the_options_of_each_dimension_can_be_read() -> None:
    config = ParallelismConfig(sp_size=2, tp_size=2)
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")
    assert config.sp_handler is not None
    assert config.sp_handler.sp_seq_length_is_variable
    assert config.tp_handler is not None
    assert config.cp_handler is config.pp_handler is None
    assert config.tp_options is config.tp_handler
    assert (config.cp_options, config.pp_options) == (TorchContextParallelConfig(), TorchPipelineParallelConfig())
    split = ParallelismConfig(cp_size=2, pp_size=2)
    assert (split.cp_options, split.pp_options) == (split.cp_handler, split.pp_handler)
    assert split.tp_options == TorchTensorParallelConfig()
    kernel = DeepSpeedSequenceParallelConfig(sp_attn_implementation="kernels-community/flash-attn2")
    assert ParallelismConfig(sp_size=2, sp_handler=kernel).sp_handler is kernel


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dp_shard_size": 0}, ConfigurationError, "dp_shard_size must be a whole number of at least 1, got 0."),
        ({"dp_replicate_size": "2"}, ConfigurationError, "dp_replicate_size must be a whole number of at least 1"),
        ({"tp_size": 0}, ConfigurationError, "tp_size must be a whole number of at least 1"),
        ({"cp_size": 2, "sp_size": 2}, ConfigurationError, "cp_size=2 and sp_size=2 both split sequences"),
        ({"cp_handler": "ring"}, ConfigurationError, "cp_handler must be a TorchContextParallelConfig .got 'ring'"),
        ({"sp_handler": 1}, ConfigurationError, "sp_handler must be a DeepSpeedSequenceParallelConfig .got 1"),
        ({"tp_handler": "auto"}, ConfigurationError, "tp_handler must be a TorchTensorParallelConfig .got 'auto'"),
        ({"cp_backend": "jax"}, ConfigurationError, "Unknown cp_backend 'jax'. Known: torch."),
    ],
)
def test_what_is_not_there_is_said(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ParallelismConfig(**options)


def test_a_mesh_is_for_one_kind_of_device() -> None:
    config = ParallelismConfig(dp_shard_size=2)
    with pytest.raises(ConfigurationError, match="The mesh is not built"):
        config.get_device_mesh()
    assert ParallelismConfig().get_device_mesh("cpu") is None


PLUGIN: Any = FullyShardedDataParallelPlugin
CONFIG: Any = ParallelismConfig
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"parallelism_config": CONFIG(dp_shard_size=2)},
        r"\(dp_replicate_size=1, dp_shard_size=2\) takes 2 processes, and",
    ),
    ({"parallelism_config": "both"}, "parallelism_config must be a ParallelismConfig .got 'both'"),
    ({"fsdp_plugin": "full_shard"}, "fsdp_plugin must be a FullyShardedDataParallelPlugin .got 'full_shard'"),
    ({"fsdp_plugin": PLUGIN(sharding_strategy="HYBRID_SHARD")}, "ranks per machine is unknown .world size 1"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_fit_one_process_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, **options)


def test_options_of_ddp_are_ignored_with_fsdp(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=PLUGIN(), kwargs_handlers=[DistributedDataParallelKwargs()])
    assert type(accelerator.strategy).__name__ == "FSDP"
    (warning,) = [record.message for record in caplog.records if "DistributedDataParallelKwargs" in record.message]
    assert warning == "DistributedDataParallelKwargs are ignored: FSDP shards the models, and DDP does not run."


def _kinds() -> list[Any]:
    values: list[Any] = []
    for options in (
        {"parallelism_config": CONFIG(dp_replicate_size=2)},
        {"parallelism_config": CONFIG(dp_shard_size=2)},
        {"parallelism_config": CONFIG(), "fsdp_plugin": PLUGIN()},
        {"fsdp_plugin": PLUGIN(sharding_strategy="HYBRID_SHARD")},
        {"fsdp_plugin": PLUGIN(), "parallelism_config": CONFIG(dp_replicate_size=2)},
        {"fsdp_plugin": PLUGIN(sharding_strategy="HYBRID_SHARD"), "parallelism_config": CONFIG(dp_shard_size=2)},
        {"fsdp_plugin": PLUGIN(reshard_after_forward=2)},
    ):
        try:
            accelerator = Accelerator(cpu=True, **options)
            network = accelerator.prepare(nn.Linear(2, 2))
        except ConfigurationError as error:
            values.append(str(error))
            accelerator = Accelerator(cpu=True)
        else:
            mesh, config = accelerator.torch_device_mesh, accelerator.parallelism_config
            assert config is not None
            values.append(
                (
                    str(accelerator.distributed_type),
                    config.active_mesh_dims,
                    mesh.mesh_dim_names,
                    (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank),
                    type(network).__name__,
                )
            )
        accelerator.free_memory()
    return values


def test_sizes_choose_the_strategy() -> None:
    for rank, kinds in enumerate(run_world(_kinds, (), 2, timeout=60)):
        sharded = ("FSDP", ["dp_shard"], ("dp_shard",), (0, rank), "FSDPLinear")
        assert kinds[:4] == [
            ("MULTI_CPU", ["dp_replicate"], ("dp_replicate",), (rank, 0), "DistributedDataParallel"),
            sharded,
            sharded,
            sharded,  # one machine has nothing to replicate over
        ]
        assert "keeps a whole model on each rank" in kinds[4]
        assert "replicates over machines, and ParallelismConfig(dp_shard_size=2) does not" in kinds[5]
        assert kinds[6].startswith("reshard_after_forward must be True, False, or a divisor of the 2 ranks")


def _launched() -> Any:
    accelerator = Accelerator()
    network: Any = accelerator.prepare(nn.Linear(2, 2))
    accelerator.backward(network(torch.full((1, 2), float(accelerator.process_index))).sum())
    assert network.weight.grad.full_tensor().tolist() == [[0.5, 0.5]] * 2, "the mean of both"
    config = accelerator.parallelism_config
    assert config is not None
    return accelerator.distributed_type, config.sizes["dp_shard"], list(network.weight.to_local().shape)


def test_what_the_launcher_says_is_done() -> None:
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    sizes = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    assert run_world(_launched, (), 2, timeout=60, **fsdp) == [("FSDP", 2, [1, 2])] * 2
    assert run_world(_launched, (), 2, timeout=60, **sizes) == [("FSDP", 2, [1, 2])] * 2
    hybrid = {**fsdp, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "LOCAL_WORLD_SIZE": "1"}
    assert run_world(_launched, (), 2, timeout=60, **hybrid) == [("FSDP", 1, [2, 2])] * 2


def test_a_script_alone_shards_in_a_group_of_one() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=PLUGIN())
    assert accelerator.distributed_type == DistributedType.FSDP
    assert accelerator.state.backend == "gloo"
    assert accelerator.torch_device_mesh is None, "no dimension is larger than 1"
    network: Any = accelerator.prepare(nn.Linear(2, 2))
    assert type(network).__name__ == "FSDPLinear"
    accelerator.free_memory()
    plain = Accelerator(cpu=True)
    assert plain.distributed_type == DistributedType.NO
    assert type(plain.prepare(nn.Linear(2, 2))) is nn.Linear


def test_transformers_learns_what_to_load() -> None:
    def is_sharded() -> tuple[bool, bool]:
        return environment.uses_sharding(), parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING")

    accelerator = Accelerator(cpu=True, fsdp_plugin=PLUGIN(cpu_ram_efficient_loading=True))
    assert is_sharded() == (True, True)
    accelerator.free_memory()
    assert is_sharded() == (False, False), "the next engine shards nothing unless asked"
    with patch_environment(ACCELERATE_USE_FSDP="", FSDP_CPU_RAM_EFFICIENT_LOADING=""):
        enable_fsdp_ram_efficient_loading()
        assert is_sharded() == (True, True)
        disable_fsdp_ram_efficient_loading()
        assert is_sharded() == (True, False)
    assert is_sharded() == (False, False)


def test_other_settings_come_too_late_until_the_first_are_released() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=(plugin := PLUGIN()))
    Accelerator(cpu=True, fsdp_plugin=plugin)
    with pytest.raises(ConfigurationError, match=r"^fsdp_plugin=.* came too late"):
        Accelerator(cpu=True, fsdp_plugin=PLUGIN(reshard_after_forward=False))
    with pytest.raises(ConfigurationError, match=r"parallelism_config=.* came too late"):
        Accelerator(cpu=True, parallelism_config=CONFIG(dp_shard_size=2))
    accelerator.free_memory()
    Accelerator(cpu=True, fsdp_plugin=PLUGIN(reshard_after_forward=False))


@pytest.mark.parametrize(
    ("sizes", "world", "fix"),
    [
        ({"tp_size": 2}, 4, "set dp_replicate_size=2"),
        ({"dp_replicate_size": 2, "tp_size": 4}, 6, "must divide 6, for example tp_size=3[.]"),
        ({"dp_shard_size": 4}, 6, "must divide 6, for example dp_shard_size=3 and dp_replicate_size=2[.]"),
        ({"tp_size": 2, "cp_size": 4}, 6, "must divide 6, for example cp_size=3[.]"),
        ({"tp_size": 4, "sp_size": 4}, 6, "the product of the sizes must divide 6[.]"),
    ],
)
def test_sizes_that_do_not_fit_the_world_name_some_that_do(sizes: dict[str, Any], world: int, fix: str) -> None:
    config = ParallelismConfig(**sizes)
    with pytest.raises(ConfigurationError, match=f"takes {config.total_size} processes, and there are {world}.*{fix}"):
        config.check_world(world)


def test_joint_dimensions_of_the_mesh_have_names() -> None:
    def sizes() -> Any:
        mesh = ParallelismConfig(dp_shard_size=2, cp_size=2).get_device_mesh(Accelerator(cpu=True).device.type)
        assert mesh is not None
        with warnings.catch_warnings():  # torch's, of names of joint dimensions
            warnings.simplefilter("ignore", UserWarning)
            groups = {name: mesh[name].get_group() for name in ("dp", "dp_shard_cp", "dp_cp", "dp_shard", "cp")}
        return mesh.mesh_dim_names, {name: torch.distributed.get_process_group_ranks(groups[name]) for name in groups}

    names, ranks = run_world(sizes, (), 4)[1]
    assert names == ("dp_shard", "cp")
    assert ranks == {"dp": [1, 3], "dp_shard_cp": [0, 1, 2, 3], "dp_cp": [0, 1, 2, 3], "dp_shard": [1, 3], "cp": [0, 1]}


def test_coordinates_are_those_of_the_mesh() -> None:
    def places() -> Any:
        config = ParallelismConfig(dp_shard_size=2, tp_size=2)
        mesh = config.get_device_mesh(Accelerator(cpu=True).device.type)
        assert mesh is not None
        rank = torch.distributed.get_rank()
        return mesh.mesh_dim_names, mesh.get_coordinate(), list(config.coordinates(rank).values())

    for names, torchs, ours in run_world(places, (), 4):
        assert names == ("dp_shard", "tp")
        assert list(torchs) == ours
    assert ParallelismConfig(tp_size=16).describe(most=2) == "tp 16; ranks 0 (0), 1 (1), …"
    assert ParallelismConfig().describe() == "one rank"
