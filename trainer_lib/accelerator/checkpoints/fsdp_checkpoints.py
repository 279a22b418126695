"""The weights and optimizer states of sharded models in Accelerate's layout: one file, or the shards of all ranks.

`save_state` and `load_state` do without these: their checkpoints are atomic and hold the whole state of a training.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.accelerator.accelerator import Accelerator
from trainer_lib.checkpointing.format.layout import OPTIMIZER_NAME
from trainer_lib.checkpointing.save.torch_save import save_object
from trainer_lib.checkpointing.third_party.safe_pickles import read_pickle
from trainer_lib.checkpointing.third_party.torch_shards import Target, TensorPath, read_shards, write_shards
from trainer_lib.collectives.agreement import raise_on_all_ranks, run_on_main_process
from trainer_lib.foundation.errors import CheckpointError, UnsupportedError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.options.accelerate_constants import FSDP_MODEL_NAME
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a sharded model's weights: one file for FULL_STATE_DICT, else a folder of shards. All ranks call it.

    Args:
        fsdp_plugin: Its `state_dict_type` says which.
        accelerator: The accelerator that prepared the model.
        model: The prepared model.
        output_dir: The folder to write to.
        model_index: The number of the model in the name.
        adapter_only: Only the parameters that are trained, such as those of an adapter of PEFT.
        use_dcp: Write shards with `torch.distributed.checkpoint`; else each rank writes a file of its own, which only
            as many ranks can read.
    """
    place = _Place(accelerator, Path(output_dir), FSDP_MODEL_NAME, model_index)
    state = accelerator.strategy.model_state(model, whole=not fsdp_plugin.writes_shards)
    if adapter_only:
        trained = _trained(accelerator, model)
        state = {name: value for name, value in state.items() if name in trained}
    place.write(state, "model", fsdp_plugin.writes_shards, use_dcp)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load the weights that `save_fsdp_model` wrote, with the same options. All ranks call it.

    Raises:
        CheckpointError: If there are none, or they cannot be read.
        StateError: If they do not fit the model.
    """
    place = _Place(accelerator, Path(input_dir), FSDP_MODEL_NAME, model_index)
    shards = accelerator.strategy.model_state(model, whole=False)

    def target(path: TensorPath, size: torch.Size, dtype: torch.dtype) -> Tensor:
        return _like(shards.get(str(path[-1])), size, dtype)

    state = place.read("model", fsdp_plugin.writes_shards, use_dcp, target)
    accelerator.strategy.load_model_state(model, state, strict=not adapter_only)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the optimizer state of a sharded model; see `save_fsdp_model`. All ranks call it."""
    place = _Place(accelerator, Path(output_dir), OPTIMIZER_NAME, optimizer_index)
    whole = not fsdp_plugin.writes_shards
    state = accelerator.strategy.optimizer_state(_inner(optimizer), [model], whole=whole)
    place.write(state, "optimizer", fsdp_plugin.writes_shards, use_dcp)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load the optimizer state that `save_fsdp_optimizer` wrote, with the same options. All ranks call it.

    An optimizer's state holds the parameters that it trains, so `adapter_only` makes no difference.

    Raises:
        CheckpointError: If there is none, or it cannot be read.
        StateError: If it does not fit the optimizer.
    """
    del adapter_only
    place = _Place(accelerator, Path(input_dir), OPTIMIZER_NAME, optimizer_index)
    shards = accelerator.strategy.model_state(model, whole=False)

    def target(path: TensorPath, size: torch.Size, dtype: torch.dtype) -> Tensor:
        return _like(shards.get(str(path[2])) if path[1] == "state" else None, size, dtype)

    # Shards hold no empty dict, which is the state of an optimizer that has not stepped.
    state = {"state": {}, **place.read("optimizer", fsdp_plugin.writes_shards, use_dcp, target)}
    accelerator.strategy.load_optimizer_state(_inner(optimizer), [model], state)


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Load whole weights from rank 0 into a sharded model, and return it. All ranks call it.

    Args:
        accelerator: The accelerator that prepared the model.
        model: The prepared model.
        full_sd: The whole weights; those of the other ranks do not count.
        cpu_offload: Accepted: shards stay where the plugin's `cpu_offload` keeps them.

    Raises:
        StateError: If names or shapes differ.
    """
    del cpu_offload
    _refuse_unsharded(accelerator)
    accelerator.strategy.load_model_state(model, full_sd if accelerator.is_main_process else {})
    return model


@frozen_dataclass
class _Place:
    """Where a state is: the folder, the first word of its name, and its number."""

    accelerator: Accelerator
    folder: Path
    stem: str
    index: int

    def write(self, state: dict[str, Any], kind: str, in_shards: bool, use_dcp: bool) -> None:
        _refuse_unsharded(self.accelerator)
        if in_shards and use_dcp:
            write_shards(self.of_shards, {kind: state})
        elif in_shards or self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_object(state, self.of_rank if in_shards else self.whole, False)
        self.accelerator.wait_for_everyone()

    def read(self, kind: str, in_shards: bool, use_dcp: bool, target: Target) -> dict[str, Any]:
        _refuse_unsharded(self.accelerator)
        if not in_shards:
            # Raises on all ranks if rank 0 cannot read; only rank 0 has the file's tensors.
            state: dict[str, Any] = {}
            run_on_main_process(self.accelerator.group, f"load_fsdp_{kind}", lambda: state.update(self._read()))
            return state
        if not use_dcp:
            with raise_on_all_ranks(self.accelerator.group, f"load_fsdp_{kind}", CheckpointError):
                return _adopted(read_pickle(self.of_rank), target)
        folder = self.folder if self.folder.name == self.of_shards.name else self.of_shards
        return read_shards(folder, target)[kind]

    def _read(self) -> dict[str, Any]:
        return read_pickle(self.whole)

    @property
    def of_shards(self) -> Path:
        return self.folder / f"{self.stem}_{self.index}"

    @property
    def of_rank(self) -> Path:
        return self.folder / f"{self.stem}_{self.index}_rank{self.accelerator.process_index}.bin"

    @property
    def whole(self) -> Path:
        return self.folder / f"{self.stem}{f'_{self.index}' if self.index else ''}.bin"


def _like(parameter: Any, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor to read into: a shard, where a parameter of this size is sharded."""
    if parameter is not None and parameter.shape == size:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)


def _adopted(value: Any, target: Target, path: TensorPath = ()) -> Any:
    """Return a state with its shards in this world's mesh instead of the one that wrote them."""
    if isinstance(value, dict):
        return {key: _adopted(item, target, (*path, key)) for key, item in value.items()}
    if not hasattr(value, "to_local"):
        return value
    shard: Any = target(("", *path), value.shape, value.dtype)
    local = value.to_local()
    if not hasattr(shard, "to_local") or shard.to_local().shape != local.shape:
        raise CheckpointError(
            f"The shard of {'.'.join(map(str, path))} has the shape {tuple(local.shape)}, and this rank holds another "
            "part. Load it on as many ranks as wrote it, with the same model."
        )
    shard.to_local().copy_(local)
    return shard


def _trained(accelerator: Accelerator, model: nn.Module) -> set[str]:
    return {name for name, parameter in accelerator.unwrap_model(model).named_parameters() if parameter.requires_grad}


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def _refuse_unsharded(accelerator: Accelerator) -> None:
    if not accelerator.is_fsdp2:
        raise UnsupportedError(
            "This accelerator does not shard models, so their states are whole on each rank. Use save_state and "
            "load_state, or give the Accelerator an fsdp_plugin."
        )
