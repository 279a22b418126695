"""A trainer sent to another process: what it was given, from which a trainer with its own accelerator is made there."""

import copy
import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.trainer_interface import TrainerInterface

_INPUTS = (
    "train_dataset",
    "eval_dataset",
    "loss_fn",
    "collate_fn",
    "processing_class",
    "metrics",
    "compute_metrics",
    "optimizer",
    "scheduler",
)
_MADE = ("model", "args", "accelerator", "run", "parts", "events", *_INPUTS)


def pack(trainer: TrainerInterface, tool: str, pickler: type[Any]) -> bytes:
    """Return a trainer as bytes: its current weights, data, callbacks, and the attributes that a subclass added.

    Args:
        trainer: The trainer.
        tool: The name of the tool that sends it, for errors.
        pickler: The class of pickler; one that knows lambdas and classes of scripts, such as cloudpickle's.

    Raises:
        ConfigurationError: If a part cannot be pickled.
    """

    class _Pickler(pickler):
        def reducer_override(self, obj: Any) -> Any:
            if obj is trainer:  # parts that refer to it find the new one
                return _blank, (type(trainer),), _inputs(trainer), None, None, _restore
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(trainer)
    except Exception as error:
        raise ConfigurationError(
            f"{tool}() sends the trainer to other processes, but a part of it cannot be pickled: {error}. Make that "
            "part where it is used (a file that a dataset opens when it is first read), or leave it out."
        ) from error
    return buffer.getvalue()


def _inputs(trainer: TrainerInterface) -> dict[str, Any]:
    callbacks = [callback for callback in trainer.events if not (callback.is_display or callback.writes_history)]
    return {
        "model": {name: _on_cpu(trainer, model) for name, model in trainer.model.items()}
        if isinstance(trainer.model, Mapping)
        else _on_cpu(trainer, trainer.model),
        "args": _arguments(trainer),
        "callbacks": callbacks,
        "inputs": {name: getattr(trainer, name) for name in _INPUTS},
        "added": {name: value for name, value in vars(trainer).items() if name not in _MADE},
    }


def _arguments(trainer: TrainerInterface) -> TrainingArguments:
    root = trainer.args.output_folder
    output_dir = str(root.absolute()) if isinstance(root, Path) else trainer.args.output_dir
    # The data are split already.
    return dataclasses.replace(trainer.args, output_dir=output_dir, validation_split=None, progress_bar=False)


def _on_cpu(trainer: TrainerInterface, model: nn.Module) -> nn.Module:
    bare = trainer.accelerator.unwrap_model(model)
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in (*bare.parameters(), *bare.buffers()))
    return bare if is_on_cpu else copy.deepcopy(bare).to("cpu")


def _blank(kind: type[Any]) -> Any:
    return object.__new__(kind)


def _restore(trainer: Any, given: dict[str, Any]) -> None:
    """Construct a trainer as its base class does, and give it the attributes that its own class added."""
    base = [kind for kind in type(trainer).__mro__ if "fit" in vars(kind)][-1]
    base.__init__(trainer, given["model"], given["args"], callbacks=given["callbacks"], **given["inputs"])
    vars(trainer).update(given["added"])
