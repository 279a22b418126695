"""What a fit prepares before its first step: models, loader, optimizers, limits and schedules, in this order."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from trainer_lib.callbacks.jsonl import JsonlLog
from trainer_lib.events import Control, Run, RunState
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.lengths import length_of
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.runs import RunFolder
from trainer_lib.seeding import set_seed
from trainer_lib.trainer import defaults
from trainer_lib.trainer.checks import before_fit
from trainer_lib.trainer.fit.accelerator_setup.build_accelerator import accumulation_steps
from trainer_lib.trainer.fit.accelerator_setup.dispatched_models import refuse_offloaded_training
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.optim import optimizer_modes
from trainer_lib.trainer.prepared_models import begin_training
from trainer_lib.trainer.trainer_interface import TrainerInterface


def set_up(trainer: TrainerInterface, folder: RunFolder | None, control: Control) -> FitContext:
    """Prepare what a trainer was given, and return it as the context of a fit.

    Args:
        trainer: The trainer, whose methods make the parts.
        folder: The run's folder; `None`: nothing is written.
        control: The requests of the run.
    """
    args, accelerator, events = trainer.args, trainer.accelerator, trainer.events
    if folder is not None and not any(callback.writes_history for callback in events):
        events.add(JsonlLog(folder.history_file, skipped_steps=accelerator.mixed_precision == "fp16"))
    steps = accumulation_steps(args, accelerator.data_group.size)
    plan = next((plan for callback in events if (plan := callback.update_plan())), None)
    accelerator.gradient_accumulation_steps = steps if plan is None else plan.begin(steps)
    if args.seed is not None:
        set_seed(args.seed)
    unprepared = before_fit.train_loader(trainer)
    models = defaults.prepare_models(trainer)
    refuse_offloaded_training(models.listed)
    for model in models.listed:
        begin_training(model, accelerator.unwrap_model(model))
    loader = accelerator.prepare_data_loader(unprepared)
    loader.trim_repeats()
    if accelerator.use_distributed:  # a single rank would draw a shuffle only to compare it with itself
        from trainer_lib.trainer.data import rank_data_check

        rank_data_check.check_training_data(accelerator.group, unprepared.dataset, loader)
    optimizers = _optimizers(trainer)
    prepared = {name: accelerator.prepare_optimizer(optimizer) for name, optimizer in optimizers.items()}
    optimizer_modes.train(prepared.values())
    state = RunState(run_id="" if folder is None else folder.run_id, status="running")
    _set_limits(state, args, loader, accelerator.gradient_accumulation_steps, plan)
    schedule_length = args.schedule_steps or state.max_steps
    schedulers = _schedulers(trainer, optimizers, schedule_length)
    if accelerator.use_distributed:
        from trainer_lib.trainer.checks.rank_differences import check_optimizers

        check_optimizers(accelerator.data_group, optimizers, schedulers)
    run = Run(
        trainer=trainer,
        args=args,
        state=state,
        control=control,
        accelerator=accelerator,
        model=models.model_or_models,
        optimizers=prepared,
        schedulers={name: accelerator.wrap_scheduler(scheduler) for name, scheduler in schedulers.items()},
        folder=None if folder is None else folder.here,
    )
    return FitContext(
        run=run,
        accelerator=accelerator,
        events=events,
        loader=loader,
        named_models=models.named,
        means=trainer.parts.means,
        loss=trainer.parts.loss,
        evaluation=trainer.parts.evaluation,
        folder=folder,
        update_plan=plan,
        schedule_length=schedule_length,
        in_sandbox=trainer.parts.in_sandbox,
    )


def infinite_buffers(context: FitContext) -> frozenset[str]:
    """Return the buffers that a model begins with infinities in, such as masks of attention."""
    modules = [context.accelerator.unwrap_model(model) for model in context.models]
    buffers = [pair for module in modules for pair in module.named_buffers(remove_duplicate=False)]
    floats = [(name, buffer) for name, buffer in buffers if buffer.is_floating_point() and not buffer.is_meta]
    return frozenset(canonical_name(name) for name, buffer in floats if bool(torch.isinf(buffer).any()))


def _set_limits(state: RunState, args: Any, loader: Any, accumulated: int, plan: Any) -> None:
    batches = length_of(loader)
    if batches is not None:
        if not batches:
            raise ConfigurationError(
                f"The training data of {_size(loader)} samples has no batch. With drop_last=True it needs a whole "
                "batch for each process: use a smaller batch size, or leave drop_last out."
            )
        state.steps_per_epoch = math.ceil(batches / accumulated)
    epochs = args.epoch_limit
    state.max_epochs, state.max_steps, state.max_tokens = epochs, args.max_steps, args.token_limit
    if epochs is not None and state.steps_per_epoch is not None:
        steps = math.ceil(epochs * state.steps_per_epoch - 1e-9)
        if plan is not None and batches is not None:
            steps = plan.updates(batches, epochs)
        state.max_steps = steps if args.max_steps is None else min(steps, args.max_steps)
    elif epochs is not None and epochs != int(epochs):
        raise ConfigurationError(
            f"num_train_epochs={epochs} needs the length of an epoch, which is unknown for this data. Give "
            "whole epochs, or max_steps."
        )


def _optimizers(trainer: TrainerInterface) -> dict[str, Any]:
    made: Any = trainer.configure_optimizer()
    named: dict[str, Any] = dict(made) if isinstance(made, Mapping) else {"default": made}
    if not named:
        raise ConfigurationError("configure_optimizer returned no optimizer. Return one, or a dict of them by name.")
    before_fit.check_optimizers(named, are_stepped_here=not trainer.parts.loss.has_own_step)
    before_fit.check_loss_parameters(trainer, named)
    return named


def _schedulers(
    trainer: TrainerInterface, optimizers: Mapping[str, Optimizer], total_steps: int | None
) -> dict[str, Any]:
    """Return the schedules, by the names of their optimizers."""
    before_fit.check_schedule_names(trainer.scheduler, optimizers)
    schedules = {
        name: trainer.configure_scheduler(optimizer, total_steps, name) for name, optimizer in optimizers.items()
    }
    if trainer.parts.loss.has_own_step or trainer.args.local_sgd_steps is not None:
        for optimizer in optimizers.values():
            # torch would warn of the order of calls where a training_step leaves an optimizer out of the first update,
            # or where this rank trains by itself and has no samples in it.
            optimizer.__dict__["_opt_called"] = True
    return {
        name: before_fit.checked_schedule(schedule, optimizers[name])
        for name, schedule in schedules.items()
        if schedule is not None
    }


def _size(loader: Any) -> Any:
    length = length_of(loader.dataset)
    return "an unknown number of" if length is None else length
