"""The job of a script: what its trainer would train when it first calls `fit`, without training."""

import contextlib
import dataclasses
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from trainer_lib.commands.plan.training_job import MakeOptimizer, TrainingJob, loss_or_outputs, with_length
from trainer_lib.foundation.errors import ConfigurationError, TrainerLibError, UnsupportedError
from trainer_lib.foundation.tensors.batch_fields import split
from trainer_lib.modules.init_on_device import init_empty_weights
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.trainer.arguments.import_path import parameters_of
from trainer_lib.trainer.checks import before_fit
from trainer_lib.trainer.losses.label_shift import is_shifted_by_name
from trainer_lib.trainer.losses.loss_result import LossResult
from trainer_lib.trainer.losses.model_io import call_model, predictions_of
from trainer_lib.trainer.losses.objectives import without_cache
from trainer_lib.trainer.overridable import is_overridden
from trainer_lib.trainer.tools.check_request import fits_handed_to
from trainer_lib.trainer.trainer_interface import TrainerInterface

# Loading a batch in this process, and what is not simulated.
_READING = {
    "num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False, "compile": False,
    "use_liger_kernel": False,
}  # fmt: skip


class ScriptJob(NamedTuple):
    """What a script would train.

    Args:
        job: The training.
        config: The sizes of its mesh.
        plugin: Its options of FSDP2.
        notes: What is not simulated.
    """

    job: TrainingJob
    config: ParallelismConfig
    plugin: FullyShardedDataParallelPlugin | None
    notes: list[str]


def trainer_of_script(script: str, arguments: Sequence[str], with_weights: bool) -> TrainerInterface:
    """Run a script up to its first `fit`, and return the trainer.

    Args:
        script: The path.
        arguments: The arguments of the script.
        with_weights: Whether the weights of its models take memory; else they are shapes.

    Raises:
        ConfigurationError: If the script fails before, or ends without `fit`.
    """
    found: list[TrainerInterface] = []
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).resolve().parent)]
    weights = contextlib.nullcontext() if with_weights else init_empty_weights()
    try:
        # What the script prints is not the plan.
        with contextlib.redirect_stdout(sys.stderr), fits_handed_to(found.append), weights:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if not found and end.code not in (0, None):
            raise ConfigurationError(f"{script} ended with {end.code!r} before Trainer.fit().") from end
    except TrainerLibError:
        raise
    except Exception as error:
        fix = "" if with_weights else " If it computes with weights, which are shapes here, give --with_weights."
        raise ConfigurationError(
            f"{script} failed before Trainer.fit(): {type(error).__name__}: {error}.{fix}"
        ) from error
    finally:
        sys.argv, sys.path[:] = argv, path
    if not found:
        raise ConfigurationError(
            f"{script} ended without Trainer.fit(), so there is nothing to plan. Give a script that trains with a "
            "Trainer, or a model."
        )
    return found[0]


def job_of_script(
    trainer: TrainerInterface, sizes: Mapping[str, Any], changes: Mapping[str, Any], sequence_length: int | None
) -> ScriptJob:
    """Return the job of a trainer.

    Args:
        trainer: The trainer, whose `fit` was called.
        sizes: Sizes of the mesh that replace those of its arguments.
        changes: Training arguments that replace its own.
        sequence_length: The length of the sequences; `None`: that of the first batch.
    """
    args = dataclasses.replace(trainer.args, **{**_READING, **changes})
    if args.deepspeed is not None:
        raise UnsupportedError(
            "deepspeed is not simulated. Plan with `--dp_shard`, which shards as ZeRO's stage 3 does."
        )
    if not isinstance(trainer.model, nn.Module):
        raise UnsupportedError(f"`trainer-lib plan` simulates one model, and the trainer has {len(trainer.model)}.")
    notes = [f"{name} is not simulated." for name in ("compile", "use_liger_kernel") if getattr(trainer.args, name)]
    given = args.parallelism or ParallelismConfig()
    config = dataclasses.replace(given, **sizes)
    trainer.args = args
    batch = next(iter(before_fit.checked_loader("train_dataloader", trainer.train_dataloader())))
    if sequence_length is not None:
        batch = with_length(batch, sequence_length)
    if is_overridden(type(trainer), "configure_optimizer"):
        notes.append(f"configure_optimizer is not called: the optimizer is {args.optimizer!r} (--optimizer).")
    if is_overridden(type(trainer), "training_step"):
        notes.append("training_step is not called: what it computes besides the loss is not counted.")
    shifts = trainer.loss_fn is None and is_shifted_by_name(trainer.model)
    make = None if "optimizer" in changes else _make_optimizer(trainer.optimizer)
    plugin = FullyShardedDataParallelPlugin() if args.fsdp is True else args.fsdp or None
    job = TrainingJob(trainer.model, batch, args, _Loss(trainer), make, shifts)
    return ScriptJob(job, config, plugin, notes)


class _Loss:
    """The loss of a trainer, without what needs the values of a batch.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the loss of a batch."""
        trainer = self._trainer
        if is_overridden(type(trainer), "compute_loss"):
            value = trainer.compute_loss(model, batch)
            return value.loss if isinstance(value, LossResult) else value[0] if isinstance(value, tuple) else value
        loss_fn = trainer.loss_fn
        if loss_fn is None:
            return loss_or_outputs(model, batch)
        inputs, targets = split(batch, trainer.args.label_names)
        outputs = call_model(model, inputs, **without_cache(model))
        is_of_torch = str(getattr(getattr(loss_fn, "func", loss_fn), "__module__", type(loss_fn).__module__))
        value = loss_fn(predictions_of(outputs) if is_of_torch.startswith("torch.") else outputs, targets)
        return value.loss if isinstance(value, LossResult) else value


def _make_optimizer(given: Any) -> MakeOptimizer | None:
    """Return a function that makes an optimizer as the script's: the same class, or by its function."""
    if given is None:
        return None
    if isinstance(given, Optimizer):
        kind: Any = type(given)
        options = {name: value for name, value in given.defaults.items() if name in parameters_of(kind)}
        return lambda groups: kind([{"params": group["params"]} for group in groups], **options)
    if isinstance(given, Mapping):
        raise UnsupportedError("Several optimizers by name are not simulated. Name one of them with --optimizer.")
    return lambda groups: given([parameter for group in groups for parameter in group["params"]])
