"""Checkpoints of models with adapters (PEFT), which leave out the frozen base weights.

Base weights are large and no run changes them, so a checkpoint holds only a fingerprint of each.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, StateError, UnsupportedError, UnwritableError
from trainer_lib.foundation.tensors.tensor_operations import as_bytes
from trainer_lib.modules.quantized_layers import weight_of
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.modules.weights.state_dicts import load_module_state, module_state

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator

LEFT_OUT_FILE = "left_out_weights.json"

_SAMPLED = 1024  # values of a weight that its fingerprint is computed from
_MAIN_ADAPTER = "default"  # the one that PEFT saves beside the others' folders
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
            raise _not_sharded(folder)
        for index, fingerprints in written.items():
            model = self._accelerator.strategy.bare(self._accelerator.prepared.models[index])  # as in `models`
            _load(model, Path(folder), fingerprints, index)
            models[:] = [other for other in models if other is not model]
        if not written and _has_adapters_alone(Path(folder)):
            self._load_adapters(models, Path(folder))

    def _load_adapters(self, models: list[nn.Module], folder: Path) -> None:
        """Load the adapters of a checkpoint of Hugging Face's Trainer, which holds nothing else of the model."""
        strategy = self._accelerator.strategy
        adapted = [model for model in models if isinstance(getattr(strategy.bare(model), "peft_config", None), Mapping)]
        if not adapted:
            raise StateError(
                f"{folder} holds only the adapters of a model, and this model has none. Make it with the adapters of "
                "the run, by get_peft_model."
            )
        if strategy.gathers_to_rank_zero:
            raise _not_sharded(str(folder))
        for model in adapted:
            _load_saved_adapters(strategy.bare(model), folder)
        models[:] = [model for model in models if model not in adapted]

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


def _not_sharded(folder: str) -> UnsupportedError:
    return UnsupportedError(
        f"{folder} holds only the adapters of a model, which cannot be loaded into a sharded model. Resume "
        "without sharding, or begin a new run."
    )


def _adapter_file(folder: Path, adapter: str) -> Path:
    """Return the file in which PEFT's `save_pretrained` writes an adapter."""
    return (folder if adapter == _MAIN_ADAPTER else folder / adapter) / "adapter_model.safetensors"


def _has_adapters_alone(folder: Path) -> bool:
    from trainer_lib.tensor_files.weights_index import find_weights

    has_whole_weights = any(find_weights(folder, 0, is_safe) for is_safe in (True, False))
    has_shards = any(folder.glob("pytorch_model_fsdp*"))
    return _adapter_file(folder, _MAIN_ADAPTER).is_file() and not has_whole_weights and not has_shards


def _load_saved_adapters(model: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    from trainer_lib.tensor_files.weights_index import read_weights

    for adapter in model.peft_config:
        file = _adapter_file(folder, adapter)
        if not file.is_file():
            raise CheckpointError(f"{folder} has no adapter {adapter!r}. Make the model with the adapters of the run.")
        weights: dict[str, Tensor] = read_weights(file)
        if not hasattr(model, "get_base_model"):  # a model of transformers to which an adapter was added
            weights = {name.removeprefix("base_model.model."): value for name, value in weights.items()}
        expected = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        wrong = [name for name in expected if name not in weights or weights[name].shape != expected[name].shape]
        if not wrong:
            unexpected = set_peft_model_state_dict(model, weights, adapter).unexpected_keys
            wrong = [name for name in unexpected if name not in expected]
        if wrong:
            raise StateError(
                f"The adapter {adapter!r} in {file} differs from that of the model: {_listed(wrong)}. Make the model "
                "with the same adapter configuration."
            )


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
        raise StateError(
            f"{folder} holds only the adapters of a model, and the base weights of this model differ from those it was "
            f"saved with: {_listed(changed)}. Make the model from the same pretrained weights."
        )
    part = Weights(index=index, stateful=model)
    load_module_state(model, {**{name: state[name] for name in fingerprints}, **part.read(folder, StateOptions())})


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _fingerprints(weights: Mapping[str, Tensor]) -> Fingerprints:
    """Return the fingerprints of weights, computed from some values of each."""
    return {name: _fingerprint(weight.detach()) for name, weight in weights.items()}


def _fingerprint(weight: Tensor) -> int:
    values = weight.reshape(-1)
    sampled = as_bytes(values[:: max(1, values.numel() // _SAMPLED)])
    return zlib.crc32(f"{weight.dtype} {tuple(weight.shape)}".encode(), zlib.crc32(sampled.cpu().numpy().tobytes()))
