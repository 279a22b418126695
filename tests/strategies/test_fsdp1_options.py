"""FSDP1's options, as scripts for Accelerate give them: what each does under FSDP2, on several processes."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import toy
from tests.strategies.sharded import Block, Stack, stack
from tests.worlds import run_world
from trainer_lib import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from trainer_lib.foundation.environment import patch_environment

Plugin: Any = FullyShardedDataParallelPlugin


def _step(accelerator: Accelerator, network: Any, optimizer: Any) -> float:
    inputs, targets, _ = toy.data()
    loss = toy.losses(network, inputs[:8], targets[:8]).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _prepared(**plugin: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(**plugin))
    network = stack()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    return accelerator, network, optimizer


def _losses_alone(steps: int) -> list[float]:
    network = stack()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    inputs, targets, _ = toy.data()
    losses: list[float] = []
    for _ in range(steps):
        loss = toy.losses(network, inputs[:8], targets[:8]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# -- a whole state on all ranks ---------------------------------------------------------------------------------


def _with_whole_states(folder: Path) -> dict[str, Any]:
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullOptimStateDictConfig, FullStateDictConfig

    fsdp_plugin = FullyShardedDataParallelPlugin(
        state_dict_config=FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )
    accelerator = Accelerator(fsdp_plugin=fsdp_plugin, cpu=True)
    network = stack()
    network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=0.1))
    first = [_step(accelerator, network, optimizer) for _ in range(2)]
    accelerator.save_state(folder / "state")
    whole = {name: value.clone() for name, value in accelerator.get_state_dict(network).items()}
    then = [_step(accelerator, network, optimizer) for _ in range(2)]
    accelerator.load_state(folder / "state")
    again = [_step(accelerator, network, optimizer) for _ in range(2)]
    return {
        "type": (accelerator.distributed_type, accelerator.is_fsdp2, accelerator.state.fsdp_plugin is fsdp_plugin),
        "losses": first + then,
        "again": again,
        "shapes": {name: tuple(value.shape) for name, value in whole.items()},
        "whole": whole,
        "files": sorted(path.name for path in (folder / "state").iterdir() if "model" in path.name),
    }


@pytest.mark.slow
def test_a_plugin_with_whole_states_on_all_ranks_trains_and_resumes(tmp_path: Path) -> None:
    main, other = run_world(_with_whole_states, (tmp_path,))
    assert main["type"] == other["type"] == (DistributedType.FSDP, True, True)
    assert main["again"] == main["losses"][2:] == other["again"]
    assert main["files"] == ["model.safetensors"], "one file for all processes"
    assert main["shapes"] == {name: tuple(value.shape) for name, value in Stack().state_dict().items()}
    assert main["whole"].keys() == other["whole"].keys(), "rank0_only=False"
    for name, value in main["whole"].items():
        torch.testing.assert_close(other["whole"][name], value, rtol=0, atol=0)


# -- NO_SHARD ---------------------------------------------------------------------------------------------------


def _unsharded() -> tuple[Any, ...]:
    accelerator, network, optimizer = _prepared(sharding_strategy="NO_SHARD")
    losses = [_step(accelerator, network, optimizer) for _ in range(2)]
    kind, plugin = accelerator.distributed_type, accelerator.state.fsdp_plugin
    again = Accelerator(cpu=True, fsdp_plugin=Plugin(sharding_strategy="NO_SHARD"))
    return kind, plugin, accelerator.is_fsdp2, type(network).__name__, losses, again.is_fsdp2


def test_no_shard_is_ddp() -> None:
    for kind, plugin, is_fsdp2, name, losses, again in run_world(_unsharded):
        assert (kind, plugin, is_fsdp2, again) == (DistributedType.MULTI_CPU, None, False, False)
        assert name == "DistributedDataParallel"
        assert losses == pytest.approx(_losses_alone(2), rel=1e-6)


def _unsharded_by_the_launcher() -> DistributedType:
    with patch_environment(ACCELERATE_USE_FSDP="true", FSDP_SHARDING_STRATEGY="NO_SHARD"):
        return Accelerator(cpu=True).distributed_type


def test_the_launchers_no_shard_is_ddp() -> None:
    assert run_world(_unsharded_by_the_launcher) == [DistributedType.MULTI_CPU] * 2


# -- one warning ------------------------------------------------------------------------------------------------


def _warned() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("trainer_lib")
    logger.addHandler(handler)
    try:
        for _ in range(2):
            Accelerator(
                cpu=True, fsdp_plugin=Plugin(fsdp_version=1, sharding_strategy="SHARD_GRAD_OP", use_orig_params=False)
            ).free_memory()
        Accelerator(cpu=True, fsdp_plugin=Plugin(sharding_strategy="FULL_SHARD", use_orig_params=True)).free_memory()
    finally:
        logger.removeHandler(handler)
    return messages


def test_one_warning_names_the_options_of_fsdp2() -> None:
    assert run_world(_warned) == [
        [
            "This version shards with FSDP2, and translates the options of FSDP1: fsdp_version=1 is fsdp_version=2; "
            "use_orig_params=False is use_orig_params=True (FSDP2 always keeps the model's own parameters); "
            "sharding_strategy='SHARD_GRAD_OP' is reshard_after_forward=False."
        ],
        [],
    ]


# -- prefetching ------------------------------------------------------------------------------------------------


def _prefetches(name: str | None) -> int:
    """Return how many blocks are gathered in a backward before they are needed."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    accelerator, network, optimizer = _prepared(backward_prefetch=name)
    _step(accelerator, network, optimizer)  # the order of blocks is known from here on
    ahead: list[bool] = []
    original: Any = FSDPParamGroup._prefetch_unshard

    def counted(group: Any, direction: str) -> None:
        ahead.append(direction == "backward" and not group.is_unsharded)
        original(group, direction)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "_prefetch_unshard", staticmethod(counted))
        _step(accelerator, network, optimizer)
    return sum(ahead)


def test_backward_prefetch_says_how_many_blocks_are_gathered_ahead() -> None:
    assert run_world(_prefetches, ("BACKWARD_PRE",)) == run_world(_prefetches, (None,)) == [3, 3]
    assert run_world(_prefetches, ("BACKWARD_POST",)) == run_world(_prefetches, ("NO_PREFETCH",)) == [0, 0]


# -- precision --------------------------------------------------------------------------------------------------


def _in_bfloat16(name: str) -> tuple[Any, ...]:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    bf16 = torch.bfloat16
    policy: dict[str, Any] = {
        "MixedPrecision": MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16),
        "MixedPrecisionPolicy": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16),
        "dict": {"param_dtype": bf16, "reduce_dtype": bf16, "buffer_dtype": bf16},
    }
    accelerator, network, optimizer = _prepared(mixed_precision_policy=policy[name])
    types: list[torch.dtype] = []
    network.blocks[1].inner.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    loss = _step(accelerator, network, optimizer)
    chosen = accelerator.strategy.plugin.mixed_precision_policy  # pyright: ignore[reportAttributeAccessIssue]
    return types, chosen.reduce_dtype, next(network.parameters()).dtype, network.shift.dtype, loss


@pytest.mark.parametrize("name", ["MixedPrecision", "MixedPrecisionPolicy", "dict"])
def test_policies_of_precision_of_both_versions(name: str) -> None:
    for types, reduced_in, kept_in, buffers, loss in run_world(_in_bfloat16, (name,)):
        assert types == [torch.bfloat16]
        assert (reduced_in, kept_in, buffers) == (torch.bfloat16, torch.float32, torch.float32)
        assert loss == pytest.approx(_losses_alone(1)[0], rel=2e-2)


# -- hybrid sharding --------------------------------------------------------------------------------------------


def _hybrid(name: str) -> tuple[Any, ...]:
    accelerator, network, optimizer = _prepared(sharding_strategy=name)
    losses = [_step(accelerator, network, optimizer) for _ in range(2)]
    weight = network.first.weight
    return losses, [str(placement) for placement in weight.placements], tuple(weight.device_mesh.shape)


@pytest.mark.parametrize("name", ["HYBRID_SHARD", pytest.param("HYBRID_SHARD_ZERO2", marks=pytest.mark.slow)])
def test_hybrid_strategies_shard_within_machines(name: str) -> None:
    expected = _losses_alone(2)
    # Two machines of two processes each.
    for losses, placements, shape in run_world(_hybrid, (name,), num_processes=4, LOCAL_WORLD_SIZE="2"):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert (placements, shape) == (["R", "S(0)"], (2, 2))


# -- activation checkpointing -----------------------------------------------------------------------------------


def _on_cpu(**plugin: Any) -> int:
    """Return how many tensors are handed to host memory until the backward."""
    moved: list[torch.Size] = []

    def counted(self: Any, tensor: Any) -> Any:
        del self
        moved.append(tensor.shape)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer_lib.modules.activation_offload._SMALLEST", 0)
        patch.setattr("trainer_lib.modules.activation_offload.HostMemory.to_host", counted)
        accelerator, network, optimizer = _prepared(activation_checkpointing=True, **plugin)
        _step(accelerator, network, optimizer)
    return len(moved)


def _on_cpu_in_both_ways() -> list[int]:
    return [_on_cpu(), _on_cpu(activation_checkpointing_offload=True)]


def test_inputs_of_recomputed_blocks_wait_on_the_cpu() -> None:
    assert run_world(_on_cpu_in_both_ways) == [[0, 3], [0, 3]], "one input of each block"


# -- the type of a state dict, changed in between ---------------------------------------------------------------


def _saves(folder: Path) -> list[list[str]]:
    accelerator, *_ = _prepared()
    accelerator.save_state(folder / "shards")
    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None
    plugin.set_state_dict_type("FULL_STATE_DICT")
    accelerator.save_state(folder / "whole")
    return [sorted(path.name for path in (folder / name).iterdir()) for name in ("shards", "whole")]


def test_the_type_of_a_state_dict_can_change_before_the_last_save(tmp_path: Path) -> None:
    (shards, whole), _ = run_world(_saves, (tmp_path,))
    assert "model.safetensors" not in shards
    assert "model.safetensors" in whole


# -- wrapping ---------------------------------------------------------------------------------------------------


def _wrapped(variables: dict[str, str], options: dict[str, Any]) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    with patch_environment(ACCELERATE_USE_FSDP="true", **variables):
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(**options) if options else None)
        network: Any = accelerator.prepare(stack())
    return [name for name, module in network.named_modules() if isinstance(module, FSDPModule)]


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ({}, {}, BLOCKS),
        ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, {}, []),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "100"}, {}, BLOCKS),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "0"}, {}, []),
        (
            {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LayerNorm"},
            {},
            [f"{name}.norm" for name in BLOCKS],
        ),
        ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, {"transformer_cls_names_to_wrap": ["Block"]}, BLOCKS),
        (
            {},
            {"auto_wrap_policy": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block)},
            BLOCKS,
        ),
    ],
    ids=["blocks", "none", "size", "size 0", "classes", "script", "function"],
)
def test_the_launcher_and_the_script_say_what_is_sharded_separately(
    variables: dict[str, str], options: dict[str, Any], expected: list[str]
) -> None:
    assert run_world(_wrapped, (variables, options), num_processes=1) == [["", *expected]]


def _own_policy_after_construction() -> list[str]:
    """Set the policy on the plugin of an Accelerator, as PEFT's `fsdp_auto_wrap_policy` is used."""
    import functools

    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy

    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(auto_wrap_policy="NO_WRAP"))
    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None
    of_layers = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm))
    of_blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    plugin.auto_wrap_policy = functools.partial(_or_policy, policies=[of_layers, of_blocks])
    network: Any = accelerator.prepare(stack())
    return [name for name, module in network.named_modules() if isinstance(module, FSDPModule)]


def test_a_policy_may_be_set_on_the_accelerators_plugin() -> None:
    (wrapped,) = run_world(_own_policy_after_construction, num_processes=1)
    assert wrapped == ["", *(name for block in BLOCKS for name in (block, f"{block}.norm"))]
