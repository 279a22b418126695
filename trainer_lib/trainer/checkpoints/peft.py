"""This file is checkpoints of models with adapters (PEFT): the weights below the adapters stay where they came from.

They are large, and no run changes them, so that a checkpoint only notes what they look like.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import StateError, UnsupportedError, UnwritableError
from trainer_lib.modules.names import canonical_name
from trainer_lib.modules.state import load_module_state, module_state
from trainer_lib.tensor_files.file_contents import Json

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator

LEFT_OUT_FILE = "left_out_weights.json"

_SAMPLED = 1024  # numbers of a weight
_SHOWN = 3  # names in a message

Looks = dict[str, int]


class PeftCheckpoints:
    """Keeps the weights below adapters out of checkpoints, and puts them back when one is loaded.

    Args:
        accelerator: The engine, with the models and optimizers prepared.
    """

    def __init__(self, accelerator: "Accelerator") -> None:
        self._accelerator = accelerator

    def exclude_base_weights(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """Take them out of what is about to be saved, and note what they look like."""
        accelerator = self._accelerator
        if accelerator.strategy.gathers_to_rank_zero:  # no process has whole weights to look at
            return
        if len(weights) != len(models):  # another hook has its own way with them
            return
        noted: dict[str, Looks] = {}
        for index, (model, state) in enumerate(zip(models, weights, strict=True)):
            below = self._below(accelerator.strategy.bare(model))
            for name in below:
                state.pop(name, None)
            if below:
                noted[str(index)] = _looks(below)
        if noted and accelerator.is_main_process:
            try:
                (Path(folder) / LEFT_OUT_FILE).write_text(json.dumps(noted, indent=1))
            except OSError as error:
                raise UnwritableError(f"{folder} could not be written: {error.strerror or error}.") from error

    def restore_base_weights(self, models: list[nn.Module], folder: str) -> None:
        """Load the models that lack them in a checkpoint, with those that they were made with."""
        noted = _noted(Path(folder))
        if noted and self._accelerator.strategy.gathers_to_rank_zero:
            raise UnsupportedError(
                f"{folder} has the adapters of a model alone, and here the model is sharded. Go on without shards, or "
                "begin a new run."
            )
        for index, looks in noted.items():
            model = self._accelerator._models[index]
            _load(self._accelerator.strategy.bare(model), Path(folder), looks, index)
            models[:] = [one for one in models if one is not model]

    def _below(self, model: nn.Module) -> dict[str, Tensor]:
        """Return by name what of a model neither is an adapter nor has an optimizer that could change it."""
        adapters: Mapping[str, Any] | None = getattr(model, "peft_config", None)
        if not isinstance(adapters, Mapping):
            return {}
        groups = [group for optimizer in self._accelerator._optimizers for group in optimizer.param_groups]
        changing = {id(one) for group in groups for one in group["params"]}
        return {
            canonical_name(name): parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
            and id(parameter) not in changing
            and adapters.keys().isdisjoint(name.split("."))
        }


def load_weights(model: nn.Module, checkpoint: AnyPath) -> None:
    """Load the weights of a checkpoint into a model that is not prepared; of one with adapters these alone.

    Raises:
        StateError: If they do not fit, or the weights below adapters are others than those of the run.
    """
    from trainer_lib.checkpointing.model_weights import checked_weights, load_checkpoint_in_model

    looks = _noted(checkpoint).get(0)
    if looks is None:
        load_checkpoint_in_model(model, checkpoint, strict=True)
        return
    with checked_weights(checkpoint) as folder:
        _load(model, folder, looks, 0)


def _noted(folder: AnyPath) -> dict[int, Looks]:
    file = folder / LEFT_OUT_FILE
    return {int(index): dict(looks) for index, looks in Json.read(file).items()} if file.is_file() else {}


def _load(model: nn.Module, folder: Path, looks: Looks, index: int) -> None:
    from trainer_lib.checkpointing.format.state_parts import StateOptions, Weights

    there = module_state(model)
    now = _looks({name: there[name] for name in looks if isinstance(there.get(name), Tensor)})
    others = [name for name, look in looks.items() if now.get(name) != look]
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise StateError(
            f"{folder} has the adapters of a model, and the weights below them are others here: "
            f"{', '.join(others[:_SHOWN])}{more}. Make the model of the same pretrained weights as when it was saved."
        )
    part = Weights(index=index, stateful=model)
    load_module_state(model, {**{name: there[name] for name in looks}, **part.read(folder, StateOptions())})


def _looks(weights: Mapping[str, Tensor]) -> Looks:
    """Return what weights look like, from a few numbers of each."""
    return {name: _look(weight.detach()) for name, weight in weights.items()}


def _look(weight: Tensor) -> int:
    numbers = weight.reshape(-1)
    few = numbers[:: max(1, numbers.numel() // _SAMPLED)].contiguous().view(torch.uint8)
    return zlib.crc32(f"{weight.dtype} {tuple(weight.shape)}".encode(), zlib.crc32(few.cpu().numpy().tobytes()))
