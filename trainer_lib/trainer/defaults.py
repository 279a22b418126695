"""Default implementations of the methods that a `Trainer`'s subclass can override."""

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainer_lib.callbacks.checkpoint import Checkpoint
from trainer_lib.callbacks.console import Printer
from trainer_lib.callbacks.gc_interval import GarbageSchedule
from trainer_lib.callbacks.learning_rate import LearningRateMonitor
from trainer_lib.callbacks.progress_bar import ProgressBar
from trainer_lib.callbacks.throughput import Throughput
from trainer_lib.events import Callback
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.lengths import length_of
from trainer_lib.progress import is_live
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.data import dataloaders
from trainer_lib.trainer.data.collate import RenamedLabels
from trainer_lib.trainer.data.datasets import as_dataset
from trainer_lib.trainer.data.unused_columns import DropUnusedColumns, used_columns
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.losses.loss_result import Weight
from trainer_lib.trainer.losses.model_io import predictions_of
from trainer_lib.trainer.optim.hidden_matrices import OPTIMIZERS, split_hidden_matrices
from trainer_lib.trainer.optim.optimizers import build_optimizer
from trainer_lib.trainer.optim.schedules import build_schedule
from trainer_lib.trainer.prepared_models import PreparedModels
from trainer_lib.trainer.trainer_interface import TrainerInterface


def callbacks(args: TrainingArguments, given: Sequence[Callback]) -> list[Callback]:
    """Return the given callbacks and the default ones, without those of whose class there is a given one.

    A dry run, which writes nothing, has no trackers.
    """
    if args.dry_run:
        given = [callback for callback in given if getattr(callback, "tracker_name", None) is None]
    defaults: list[Callback] = [LearningRateMonitor(), Throughput(fill=args.group_by_length)]
    if args.output_dir is not None:
        defaults.append(_checkpoint(args, given))
    if args.gc_every is not None:
        defaults.append(GarbageSchedule(args.gc_every))
    defaults += _reporting(args, given)
    shows_bar = is_live(sys.stderr) if args.progress_bar is None else args.progress_bar
    if shows_bar:
        defaults.append(ProgressBar())
    elif not any(isinstance(callback, Callback) and callback.is_display for callback in given):
        # A notebook's charts show what the lines say. What is no callback is refused later.
        defaults.append(Printer())
    known = [getattr(other, "unfiltered", other) for other in given]
    without_given = [callback for callback in defaults if not any(isinstance(other, type(callback)) for other in known)]
    return [*without_given, *given]


def _checkpoint(args: TrainingArguments, given: Sequence[Callback]) -> Checkpoint:
    """Return the default callback that saves and deletes checkpoints; raise if a given one overrules an argument."""
    default = Checkpoint(keep_last=args.keep_last, keep_best=args.keep_best, keep_every=args.keep_every)
    unfiltered = [getattr(callback, "unfiltered", callback) for callback in given]
    for checkpoint in (callback for callback in unfiltered if isinstance(callback, type(default))):
        for name in ("keep_last", "keep_best", "keep_every"):
            value, own = getattr(default, name), getattr(checkpoint, name)
            if value not in (own, getattr(Checkpoint(), name)):
                raise ConfigurationError(
                    f"{name}={getattr(args, name)!r} has no effect, because callbacks has a "
                    f"{type(checkpoint).__name__}, whose {name} is {own if own is None else str(own)}. Give it "
                    f"{name}={getattr(args, name)!r}, or leave the argument out."
                )
    return default


def others(callbacks: Iterable[Callback], excluded: Iterable[Callback]) -> list[Callback]:
    """Return the callbacks that are not among the excluded ones: by identity, since a dataclass may compare tensors."""
    known = {id(callback) for callback in excluded}
    return [callback for callback in callbacks if id(callback) not in known]


def _reporting(args: TrainingArguments, given: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks of the trackers in `report_to`, except those that are given."""
    if not args.report_to:
        return []
    from trainer_lib.callbacks.trackers import callback_for
    from trainer_lib.tracking.registry import resolve

    known = [callback.tracker_name for callback in given]
    names = [str(name) for name in resolve(list(args.report_to), "report_to") if name not in known]
    made = [callback_for(name) for name in names]
    for callback in made:
        if callback.needs_folder and args.output_dir is None:
            raise ConfigurationError(
                f"report_to={callback.tracker_name!r} writes files, and there is no folder for them. Give output_dir."
            )
    return list(made)


def prepare_models(trainer: TrainerInterface) -> PreparedModels:
    """Return the prepared models of a trainer; the first call prepares them."""
    models = trainer.parts.models
    if not models.are_prepared:
        freezes = any(callback.freezes_weights for callback in trainer.events)
        with trainer.accelerator.strategy.weights_may_freeze() if freezes else nullcontext():
            models.prepare(trainer.model, trainer.args, trainer.accelerator)
        trainer.run.model = models.model_or_models
    return models


def optimizers(trainer: TrainerInterface) -> Optimizer | dict[str, Optimizer]:
    """Return the given optimizers, made from the parameters if functions are given, or those the arguments name."""
    bare = {name: trainer.accelerator.unwrap_model(model) for name, model in prepare_models(trainer).named.items()}
    given = trainer.optimizer
    if isinstance(given, Mapping):
        unknown_names = [name for name in given if name not in bare]
        if unknown_names and not all(isinstance(optimizer, Optimizer) for optimizer in given.values()):
            if list(bare) == [""]:
                raise ConfigurationError(
                    f"optimizer names {unknown_names[0]!r}, and there is one model, without a name. Give one "
                    "optimizer, or a function that makes it."
                )
            raise ConfigurationError(
                f"optimizer names {unknown_names[0]!r}, and the models are {', '.join(bare)}."
                f"{did_you_mean(unknown_names[0], bare)}"
            )
        return {name: _optimizer(trainer, optimizer, bare.get(name)) for name, optimizer in given.items()}
    if given is not None or list(bare) == [""]:
        return _optimizer(trainer, given, next(iter(bare.values())))
    return {name: _optimizer(trainer, None, model) for name, model in bare.items()}


def _optimizer(trainer: TrainerInterface, given: Any, model: nn.Module | None) -> Optimizer:
    made = given if isinstance(given, Optimizer) else _made_optimizer(trainer, given, model)
    if given is not None:
        from trainer_lib.trainer.optim.given_optimizers import warn_of_ignored_arguments

        warn_of_ignored_arguments(made, trainer.args)
    return made


def _made_optimizer(trainer: TrainerInterface, given: Any, model: nn.Module | None) -> Optimizer:
    from trainer_lib.trainer.optim.parameter_groups import group_parameters, groups_of_part, named_alike

    assert model is not None  # what is to be made has a model
    args = trainer.args
    # A rank of a pipeline holds some layers: patterns match the names of all, and the ranks have the same groups.
    whole = trainer.accelerator.strategy.whole_shapes(model)
    source = model if named_alike(model, whole) else whole
    groups = group_parameters(source, args.weight_decay, args.parameter_groups)
    if args.optimizer.lower() in OPTIMIZERS and given is None:
        groups = split_hidden_matrices(source, groups)
    if source is whole:
        groups = groups_of_part(groups, whole, model)
    if given is not None and not (isinstance(given, type) and issubclass(given, Optimizer)):
        made = given([parameter for group in groups for parameter in group["params"]])
        if not isinstance(made, Optimizer):
            raise ConfigurationError(f"optimizer returned a {type(made).__name__}. Return a torch.optim.Optimizer.")
        return made
    return build_optimizer(
        given or args.optimizer,
        groups,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        device=trainer.accelerator.device,
        **args.optimizer_kwargs,
    )


def scheduler(trainer: TrainerInterface, name: str, optimizer: Optimizer, total_steps: int | None) -> Any:
    """Return the given schedule, made for the optimizer if a function is given, or the one that the arguments name."""
    args, given = trainer.args, trainer.scheduler
    if isinstance(given, Mapping):
        given = given.get(name)
    if given is not None:
        is_made = hasattr(given, "step") and not isinstance(given, type)
        made = given if is_made else given(optimizer)
        if made is None:
            raise ConfigurationError(
                "scheduler returned None: is a return missing? For a constant learning rate: "
                'TrainingArguments(lr_scheduler="constant").'
            )
        return made
    options = dict(args.lr_scheduler_kwargs)
    evaluation = trainer.parts.evaluation
    if args.lr_scheduler == "plateau" and "mode" not in options and evaluation.best_metric is not None:
        options["mode"] = "max" if evaluation.greater_is_better else "min"
    return build_schedule(
        args.lr_scheduler,
        optimizer,
        warmup_steps=args.warmup_steps_for(total_steps),
        total_steps=total_steps,
        **options,
    )


def train_loader(trainer: TrainerInterface, dataset: Any) -> DataLoader[Any]:
    """Return the loader of the training data."""
    args = trainer.args
    return dataloaders.train_loader(
        dataset,
        batch_size=args.train_batch_size_for(trainer.accelerator.data_group.size),
        collate_fn=_collate_fn(trainer),
        processing_class=trainer.processing_class,
        shuffle=args.shuffle,
        drop_last=args.drop_last,
        group_by_length=args.group_by_length,
        length_column=args.length_column,
        sample_weights=args.sample_weights,
        limit_batches=args.limit_train_batches,
        overfit_batches=args.overfit_batches,
        seed=args.seed if args.data_seed is None else args.data_seed,
        **_reading(trainer, dataset, args.train_batch_size_for(trainer.accelerator.data_group.size)),
    )


def eval_loader(trainer: TrainerInterface, dataset: Any, option: str = "eval_dataset") -> DataLoader[Any]:
    """Return the loader of evaluation data, which errors call `option`."""
    args = trainer.args
    return dataloaders.eval_loader(
        dataset,
        batch_size=args.eval_batch_size,
        collate_fn=_collate_fn(trainer),
        processing_class=trainer.processing_class,
        option=option,
        # A sample that is skipped would leave a gap in the order that predictions are put back into.
        longest_samples_first=args.predict_with_generate and args.on_bad_sample == "raise",
        length_column=args.length_column,
        limit_batches=args.limit_eval_batches if args.overfit_batches is None else args.overfit_batches,
        **_reading(trainer, dataset, args.eval_batch_size),
    )


def _collate_fn(trainer: TrainerInterface) -> Any:
    collate_fn = trainer.collate_fn
    if collate_fn is None and _takes_labels(trainer):
        collate_fn = RenamedLabels(dataloaders.collator(None, trainer.processing_class))
    if not trainer.args.remove_unused_columns:
        return collate_fn
    return DropUnusedColumns(dataloaders.collator(collate_fn, trainer.processing_class), used_columns(trainer))


def _takes_labels(trainer: TrainerInterface) -> bool:
    """Whether the model is one of transformers, whose targets have the name "labels"."""
    if trainer.args.label_names is not None or "transformers" not in sys.modules:
        return False
    from trainer_lib.modules.forwards import forward_signature
    from trainer_lib.modules.module_kinds import is_transformers_model
    from trainer_lib.modules.unwrapping import without_adapter

    inner = without_adapter(trainer.model)
    return is_transformers_model(inner) and "labels" in forward_signature(inner).parameters


def _reading(trainer: TrainerInterface, dataset: Any, batch_size: int) -> dict[str, Any]:
    args, num_workers = trainer.args, _num_workers(trainer, dataset, batch_size)
    # Each rank measures by itself: options of workers must not fail on those that choose none.
    chose_none = num_workers == 0 and args.num_workers == "auto" and not isinstance(dataset, DataLoader)
    return {
        "num_processes": trainer.accelerator.data_group.size,
        "num_workers": num_workers,
        "pin_memory": args.pin_memory,
        "prefetch_factor": None if chose_none else args.prefetch_factor,
        "persistent_workers": args.persistent_workers and not chose_none,
    }


def _num_workers(trainer: TrainerInterface, dataset: Any, batch_size: int) -> int:
    """Return the number of workers; "auto" is measured in each call, once for each dataset."""
    if isinstance(trainer.args.num_workers, int):
        return trainer.args.num_workers
    if isinstance(dataset, DataLoader):  # it has its own
        return 0
    counts, key = trainer.parts.worker_counts, (id(dataset), batch_size)
    if key not in counts:
        from trainer_lib.trainer.data.worker_count import measured_workers

        collate_fn = dataloaders.collator(_collate_fn(trainer), trainer.processing_class)
        counts[key] = measured_workers(as_dataset(dataset, "the dataset"), batch_size, collate_fn)
    return counts[key].workers


def evaluation_output(
    trainer: TrainerInterface, model: Any, batch: Any, keeps_outputs: bool = True
) -> EvaluationOutput:
    """Return loss, predictions and labels of a batch; predictions that are not kept are freed, or never converted."""
    loss = trainer.parts.loss
    if not (trainer.args.predict_with_generate or loss.is_overridden):
        labels = loss.labels(batch)
        outputs, value = loss.evaluate(model, batch, keeps_outputs)
        if value is not None:
            return _output(trainer, batch, value, labels)
        return EvaluationOutput(
            predictions=predictions_of(outputs),
            labels=labels,
            ignored_label=loss.ignored_label,
            shifted_labels=loss.shifted_labels(batch, labels),
        )
    with trainer.parts.means.apart(batch) as logged:
        if trainer.args.predict_with_generate:
            output = _generated(trainer, model, batch)
        else:
            labels = loss.labels(batch)
            output = _output(trainer, batch, trainer.compute_loss(model, batch), labels)
    return dataclasses.replace(output, logged=logged) if logged else output


def _output(trainer: TrainerInterface, batch: Any, value: Any, labels: Any) -> EvaluationOutput:
    loss, logged = trainer.parts.loss, None
    result = loss.as_result(value, batch)
    weight = 0.0 if result.weight is None else result.weight
    if result.logs is not None:
        with trainer.parts.means.apart(batch) as logged:
            trainer.parts.means.add_all(result.logs, weight)
    return EvaluationOutput(
        loss_sum=result.loss,
        weight=weight,
        predictions=predictions_of(result.outputs),
        labels=labels,
        ignored_label=loss.ignored_label,
        logged=logged,
        shifted_labels=loss.shifted_labels(batch, labels),
    )


def _generated(trainer: TrainerInterface, model: Any, batch: Any) -> EvaluationOutput:
    from trainer_lib.trainer.evaluation.generation import generate_step

    bare = trainer.accelerator.unwrap_model(model)

    def loss_of(_: Any, named: Any) -> tuple[Tensor, Weight]:
        result = trainer.parts.loss.as_result(trainer.compute_loss(model, named), named)
        weight = 0.0 if result.weight is None else result.weight
        trainer.parts.means.add_all(result.logs, weight)
        return result.loss, weight

    return generate_step(
        bare,
        batch,
        {**(trainer.args.generation_kwargs or {}), **trainer.parts.generation_options},
        trainer.processing_class,
        loss_of=loss_of,
        in_lockstep=trainer.accelerator.strategy.is_in_lockstep,
    )


def run_fingerprint(trainer: TrainerInterface) -> dict[str, Any]:
    """Return the models and the data of a run, which `resume="auto"` compares."""
    named: dict[str, nn.Module] = (
        {"model": trainer.model} if isinstance(trainer.model, nn.Module) else dict(trainer.model)
    )
    data = trainer.train_dataset
    if isinstance(data, DataLoader):
        data = data.dataset
    try:
        samples = None if data is None else length_of(as_dataset(data, "train_dataset"))
    except ConfigurationError:  # an overridden train_dataloader may accept any data
        samples = None
    return {
        "models": {
            name: [type(model).__name__, sum(parameter.numel() for parameter in model.parameters())]
            for name, model in named.items()
        },
        "data": [type(trainer.train_dataset).__name__, samples],
    }
