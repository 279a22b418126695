"""Saving a model in the form that `from_pretrained` reads, with its tokenizer or processor."""

import dataclasses
import inspect
import tempfile
from pathlib import Path
from typing import Any

from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.trainer_interface import TrainerInterface

ARGUMENTS_FILE = "training_arguments.json"


def save_model(trainer: TrainerInterface, folder: AnyPath) -> None:
    """Save the model of a trainer, or each of its models in a folder of its name."""
    if isinstance(folder, RemotePath):
        with tempfile.TemporaryDirectory(prefix="trainer_lib-") as here:
            save_model(trainer, Path(here))
            if trainer.accelerator.is_main_process:
                for path in sorted(Path(here).rglob("*")):
                    if path.is_file():
                        (folder / path.relative_to(here)).put(path)
        trainer.accelerator.wait_for_everyone()
        return
    from trainer_lib.modules.module_kinds import is_peft_model
    from trainer_lib.trainer.publish.prompt_encoders import whole_prompt_encoders

    accelerator = trainer.accelerator
    for name, model in trainer.parts.models.named.items():
        target = folder / name
        bare: Any = accelerator.unwrap_model(model)
        if not hasattr(bare, "save_pretrained"):
            accelerator.save_model(model, target)
            continue
        # It writes its configuration, handles tied weights and (PEFT) saves only the adapter.
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            # PEFT's takes it among its other keywords.
            takes_state = is_peft_model(bare) or "state_dict" in inspect.signature(bare.save_pretrained).parameters
            with whole_prompt_encoders(bare, state):
                bare.save_pretrained(target, **({"state_dict": state} if takes_state else {}))
    if accelerator.is_main_process and hasattr(trainer.processing_class, "save_pretrained"):
        trainer.processing_class.save_pretrained(folder)
    accelerator.wait_for_everyone()


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
