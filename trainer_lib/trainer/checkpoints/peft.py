"""Checkpoints of models with adapters (PEFT), which leave out the frozen base weights.

Base weights are large and no run changes them, so a checkpoint holds only a fingerprint of each.
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
from trainer_lib.modules.quantized_layers import weight_of
from trainer_lib.modules.state import load_module_state, module_state

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator

LEFT_OUT_FILE = "left_out_weights.json"

_SAMPLED = 1024  # values of a weight that its fingerprint is computed from
_SHOWN = 3  # names in a message

Fingerprints = dict[str, int]


class PeftCheckpoints:
    """Leaves base weights out of checkpoints, and restores them when a checkpoint is loaded.

    Args:
        accelerator: The accelerator, with the models and optimizers prepared.
    """

    def __init__(self, accelerator: "Accelerator") -> None:
        self._accelerator = accelerator

    def exclude_base_weights(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """Remove the base weights from the state that is about to be saved, and write their fingerprints."""
        accelerator = self._accelerator
        if accelerator.strategy.gathers_to_rank_zero:  # no rank has whole weights to fingerprint
            return
        if len(weights) != len(models):  # another hook changed the list
            return
        written: dict[str, Fingerprints] = {}
        for index, (model, state) in enumerate(zip(models, weights, strict=True)):
            base = self._base_weights(accelerator.strategy.bare(model))
            parts = {name: value for name, value in state.items() if weight_of(name) in base}  # of quantized weights
            only_in_parts = {weight_of(name) for name in parts} - state.keys()
            base = {name: value for name, value in base.items() if name not in only_in_parts} | parts
            # The state has the values of offloaded weights, and the model has not.
            base = {name: state.get(name, value) if value.is_meta else value for name, value in base.items()}
            for name in base:
                state.pop(name, None)
            if base:
                written[str(index)] = _fingerprints(base)
        if written and accelerator.is_main_process:
            try:
                (Path(folder) / LEFT_OUT_FILE).write_text(json.dumps(written, indent=1))
            except OSError as error:
                raise UnwritableError(f"{folder} could not be written: {error.strerror or error}.") from error

    def restore_base_weights(self, models: list[nn.Module], folder: str) -> None:
        """Load the adapters of models whose base weights a checkpoint leaves out; the base weights stay."""
        written = _read_fingerprints(Path(folder))
        if written and self._accelerator.strategy.gathers_to_rank_zero:
            raise UnsupportedError(
                f"{folder} holds only the adapters of a model, which cannot be loaded into a sharded model. Resume "
                "without sharding, or begin a new run."
            )
        for index, fingerprints in written.items():
            model = self._accelerator.prepared.models[index]
            _load(self._accelerator.strategy.bare(model), Path(folder), fingerprints, index)
            models[:] = [other for other in models if other is not model]

    def _base_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return by name the frozen weights of a model that are in no adapter and in no optimizer."""
        adapters: Mapping[str, Any] | None = getattr(model, "peft_config", None)
        if not isinstance(adapters, Mapping):
            return {}
        groups = [group for optimizer in self._accelerator.prepared.optimizers for group in optimizer.param_groups]
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        return {
            canonical_name(name): parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
            and id(parameter) not in optimized
            and adapters.keys().isdisjoint(name.split("."))
        }


def load_weights(model: nn.Module, checkpoint: AnyPath) -> None:
    """Load the weights of a checkpoint into a model that is not prepared; for a model with adapters, only these.

    Raises:
        StateError: If they do not fit, or the base weights differ from those of the run.
    """
    from trainer_lib.checkpointing.model_weights import checked_weights, load_checkpoint_in_model

    fingerprints = _read_fingerprints(checkpoint).get(0)
    if fingerprints is None:
        load_checkpoint_in_model(model, checkpoint, strict=True)
        return
    with checked_weights(checkpoint) as folder:
        _load(model, folder, fingerprints, 0)


def _read_fingerprints(folder: AnyPath) -> dict[int, Fingerprints]:
    from trainer_lib.tensor_files.file_contents import Json

    file = folder / LEFT_OUT_FILE
    return {int(index): dict(prints) for index, prints in Json.read(file).items()} if file.is_file() else {}


def _load(model: nn.Module, folder: Path, fingerprints: Fingerprints, index: int) -> None:
    from trainer_lib.checkpointing.format.state_parts import StateOptions, Weights

    state = module_state(model)
    current = _fingerprints({name: state[name] for name in fingerprints if isinstance(state.get(name), Tensor)})
    changed = [name for name, fingerprint in fingerprints.items() if current.get(name) != fingerprint]
    if changed:
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise StateError(
            f"{folder} holds only the adapters of a model, and the base weights of this model differ from those it was "
            f"saved with: {', '.join(changed[:_SHOWN])}{more}. Make the model from the same pretrained weights."
        )
    part = Weights(index=index, stateful=model)
    load_module_state(model, {**{name: state[name] for name in fingerprints}, **part.read(folder, StateOptions())})


def _fingerprints(weights: Mapping[str, Tensor]) -> Fingerprints:
    """Return the fingerprints of weights, computed from some values of each."""
    return {name: _fingerprint(weight.detach()) for name, weight in weights.items()}


def _fingerprint(weight: Tensor) -> int:
    values = weight.reshape(-1)
    sampled = values[:: max(1, values.numel() // _SAMPLED)].contiguous().view(torch.uint8)
    return zlib.crc32(f"{weight.dtype} {tuple(weight.shape)}".encode(), zlib.crc32(sampled.cpu().numpy().tobytes()))
