"""Saving a model in the form that `from_pretrained` reads, with its tokenizer or processor."""

import dataclasses
import inspect
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.trainer_interface import TrainerInterface

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator

ARGUMENTS_FILE = "training_arguments.json"


def save_model(trainer: TrainerInterface, folder: AnyPath) -> None:
    """Save the model of a trainer, or each of its models in a folder of its name."""
    accelerator = trainer.accelerator
    if isinstance(folder, RemotePath):
        with tempfile.TemporaryDirectory(prefix="trainer_lib-") as here:
            save_model(trainer, Path(here))
            if accelerator.is_main_process:
                _upload(Path(here), folder)
        accelerator.wait_for_everyone()
        return
    for name, model in trainer.parts.models.named.items():
        if hasattr(accelerator.unwrap_model(model), "save_pretrained"):
            _save_pretrained(accelerator, model, folder / name)
        else:
            accelerator.save_model(model, folder / name)
    if accelerator.is_main_process and hasattr(trainer.processing_class, "save_pretrained"):
        trainer.processing_class.save_pretrained(folder)
    accelerator.wait_for_everyone()


def _upload(source: Path, folder: RemotePath) -> None:
    for path in sorted(source.rglob("*")):
        if path.is_file():
            (folder / path.relative_to(source)).put(path)


def _save_pretrained(accelerator: "Accelerator", model: nn.Module, folder: AnyPath) -> None:
    """Save a model by its own method: it writes its configuration, handles tied weights, and saves only an adapter."""
    from trainer_lib.modules.module_kinds import is_peft_model
    from trainer_lib.trainer.publish.prompt_encoders import whole_prompt_encoders

    bare: Any = accelerator.unwrap_model(model)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        # PEFT's method takes the state among its other keywords.
        takes_state = is_peft_model(bare) or "state_dict" in inspect.signature(bare.save_pretrained).parameters
        with whole_prompt_encoders(bare, state):
            bare.save_pretrained(folder, **({"state_dict": state} if takes_state else {}))


def write_companion_files(trainer: TrainerInterface, folder: Path) -> None:
    """Write the files that make a checkpoint self-contained: arguments, model configuration, processor."""
    trainer.args.to_file(folder / ARGUMENTS_FILE, unwritable="leave out")
    beside: list[Any] = [getattr(trainer.unwrapped_model, "config", None), trainer.processing_class]
    for companion in beside:
        if hasattr(companion, "save_pretrained"):
            companion.save_pretrained(folder)


def read_arguments(checkpoint: AnyPath, arguments_class: type[TrainingArguments]) -> TrainingArguments:
    """Return the arguments of the run that wrote a checkpoint.

    Raises:
        CheckpointError: If the checkpoint does not hold them.
        ConfigurationError: If they are not those of the class.
    """
    file = checkpoint / ARGUMENTS_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{checkpoint} has no {ARGUMENTS_FILE}, so it is not a checkpoint of a Trainer. Give the arguments: "
            f"Trainer(model, args).fit(resume={str(checkpoint)!r})."
        )
    from trainer_lib.trainer.arguments import yaml_json

    saved, _ = yaml_json.read_values(file)
    unknown = saved.keys() - {field.name for field in dataclasses.fields(arguments_class)}
    if unknown:
        raise ConfigurationError(
            f"{file} has arguments that {arguments_class.__name__} does not declare: {', '.join(sorted(unknown))}. "
            "Give the class that the run used: from_checkpoint(…, arguments_class=…)."
        )
    return arguments_class.from_file(file)
