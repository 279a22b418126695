"""Checks at the start of `fit`, before the model is prepared."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from trainer_lib.collectives.agreement import check_same_on_all_ranks, raise_on_all_ranks
from trainer_lib.data_loader.build_reader import check_can_seed
from trainer_lib.data_loader.order.epoch_order import iterates_as
from trainer_lib.events.callback import overrides
from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError, did_you_mean
from trainer_lib.foundation.lengths import length_of
from trainer_lib.foundation.public_names.signatures import cannot_take, names_in
from trainer_lib.modules.device_placement import has_offloaded_params
from trainer_lib.modules.quantized_layers import quantized_beside_trained
from trainer_lib.trainer import defaults
from trainer_lib.trainer.arguments.declaration import settings
from trainer_lib.trainer.arguments.value_checks import AUTO
from trainer_lib.trainer.changed_arguments import take_changes
from trainer_lib.trainer.checks import at_construction
from trainer_lib.trainer.checks.foreign_calls import check_attributes
from trainer_lib.trainer.data.datasets import as_dataset
from trainer_lib.trainer.evaluation.eval_sets import check_has_interval, check_intervals, named_sets
from trainer_lib.trainer.evaluation.outputs import Metric
from trainer_lib.trainer.optim.optimizers import NEEDS_CLOSURE
from trainer_lib.trainer.optim.schedules import moves_each_update
from trainer_lib.trainer.overridable import is_overridden
from trainer_lib.trainer.safety.bad_samples import check_can_leave_out
from trainer_lib.trainer.trainer_interface import TrainerInterface

_SHOWN = 8


def check(trainer: TrainerInterface) -> None:
    """Check everything that is known before data is read and the model is prepared; one rank's error raises on all.

    Raises:
        ConfigurationError: If something is wrong or missing.
        PreparationError: If an optimizer has the parameters of another model.
        DistributedOperationException: If the ranks were given different models, data or arguments.
    """
    group = trainer.accelerator.group
    with raise_on_all_ranks(group, "fit"):
        sets = _check(trainer)
    check_same_on_all_ranks(group, _facts(trainer))
    if group.size > 1:
        from trainer_lib.trainer.checks.rank_differences import check_callbacks, check_models
        from trainer_lib.trainer.data.rank_data_check import check_evaluation_data

        check_callbacks(group, trainer.events, trainer.loss_fn)
        if not trainer.parts.models.are_prepared:
            check_models(group, {"": trainer.model} if isinstance(trainer.model, nn.Module) else trainer.model)
        for option, loader in sets.items():
            check_evaluation_data(group, loader, option)


def checked_loader(verb: str, loader: Any) -> DataLoader[Any]:
    """Return what a method returned, if it is a loader."""
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"{verb} returned a {type(loader).__name__}. Return a torch.utils.data.DataLoader, or give data in another "
            f"form as {verb.replace('_dataloader', '_dataset')}=…."
        )
    return loader


def train_loader(trainer: TrainerInterface) -> DataLoader[Any]:
    """Return the loader of the training data, if all ranks have one with the same number of samples."""
    group = trainer.accelerator.group
    with raise_on_all_ranks(group, "train_dataloader"):
        loader = checked_loader("train_dataloader", trainer.train_dataloader())
    _check_global_batch_size(trainer, loader)
    check_can_leave_out(trainer.args, loader, "train_dataset")
    if trainer.args.seed_each_sample:
        check_can_seed(loader)
    is_stream = isinstance(loader.dataset, IterableDataset)  # each rank may have another part of it
    facts = {"the samples to train on": None if is_stream else length_of(loader.dataset)}
    check_same_on_all_ranks(group, facts if is_stream else facts | _order(loader))
    return loader


def _check_global_batch_size(trainer: TrainerInterface, loader: DataLoader[Any]) -> None:
    args, accelerator = trainer.args, trainer.accelerator
    size = loader.batch_size
    if args.global_batch_size is None or size is None or accelerator.split_batches:
        return
    counted = args.train_batch_size_for(accelerator.data_group.size)
    if size != counted:
        raise ConfigurationError(
            f"global_batch_size={args.global_batch_size} counts batches of per_device_train_batch_size={counted} "
            f"samples, and those of the DataLoader have {size}. Give per_device_train_batch_size={size}, or the "
            "dataset instead of the DataLoader."
        )


def eval_loaders(trainer: TrainerInterface, data: Any, option: str, is_one: bool = False) -> dict[str, DataLoader[Any]]:
    """Return the loaders of evaluation sets, if all ranks have them.

    Args:
        trainer: The trainer, whose `eval_dataloader` makes them.
        data: One dataset, or several by name.
        option: What error messages call the data.
        is_one: Whether a dict is one set of columns.
    """
    with raise_on_all_ranks(trainer.accelerator.group, f"The check of {option}"):
        return _loaders(trainer, data, option, is_one)


def check_optimizers(optimizers: Mapping[str, Any], are_stepped_here: bool) -> None:
    """Check what `configure_optimizer` returned.

    Args:
        optimizers: The optimizers by name.
        are_stepped_here: Whether the training loop calls their `step()`, not a custom `training_step`.

    Raises:
        ConfigurationError: If it contains something other than optimizers, or one without learning rates.
        UnsupportedError: If one needs a closure.
    """
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, Optimizer):
            where = "configure_optimizer" if name == "default" else f"configure_optimizer, for {name!r},"
            raise ConfigurationError(
                f"{where} returned a {type(optimizer).__name__}. Return a torch.optim.Optimizer, or a dict of them by "
                "name; configure_scheduler returns schedules."
            )
        if are_stepped_here and cannot_take(type(optimizer).step, "self") is not None:
            raise UnsupportedError(
                f"The {type(optimizer).__name__} given as optimizer is not supported: {NEEDS_CLOSURE}; or override "
                "training_step(model, batch), call step(closure) of self.optimizers['default'] there, and return None."
            )
        if any("lr" not in group for group in optimizer.param_groups):
            raise ConfigurationError(
                f"The {type(optimizer).__name__} given as optimizer has parameter groups without 'lr', the learning "
                "rate, which schedules and logs need. Set group['lr'] in each group. If it wraps several optimizers, "
                'give them by name: Trainer(optimizer={"a": …, "b": …}).'
            )


def check_loss_parameters(trainer: TrainerInterface, optimizers: Mapping[str, Optimizer]) -> None:
    """Check that the parameters of a `loss_fn` with weights of its own are trained.

    Raises:
        ConfigurationError: If one is in no model and in no optimizer.
    """
    loss_fn = trainer.loss_fn
    if not isinstance(loss_fn, nn.Module):
        return
    trained = {id(parameter) for model in _models(trainer) for parameter in model.parameters()}
    for optimizer in optimizers.values():
        trained.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    for name, parameter in loss_fn.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            kind = type(loss_fn).__name__
            raise ConfigurationError(
                f"loss_fn={kind} has the parameter {name}, which is in no model and in no optimizer, so it would be "
                "neither trained nor saved. Make it a part of the model, model.loss_fn = loss_fn, or freeze it: "
                "loss_fn.requires_grad_(False)."
            )


def check_schedule_names(given: Any, optimizers: Mapping[str, Any]) -> None:
    """Check that schedules given by name have the names of optimizers."""
    for name in given if isinstance(given, Mapping) else ():
        if name not in optimizers:
            raise ConfigurationError(
                f"scheduler names {name!r}, and the optimizers are {', '.join(optimizers)}."
                f"{did_you_mean(name, optimizers)}"
            )


def checked_schedule(schedule: Any, optimizer: Optimizer) -> Any:
    """Return a schedule, if it belongs to this optimizer."""
    if not hasattr(schedule, "step") or isinstance(schedule, type):
        raise ConfigurationError(
            f"configure_scheduler returned a {type(schedule).__name__}. Return a schedule, such as those of "
            "torch.optim.lr_scheduler, or None."
        )
    kind = type(schedule).__name__
    problem = cannot_take(schedule.step) if moves_each_update(schedule) else None
    if problem is not None or not hasattr(schedule, "get_last_lr"):
        raise ConfigurationError(
            f"{kind}{f'.step{problem}' if problem else ' has no get_last_lr'}. A schedule steps "
            "once for each update, without arguments, and tells its rates. Wrap it in a class with step(), "
            "get_last_lr(), state_dict() and load_state_dict(state) (docs/other_libraries.md shows one for timm), or "
            'take one by name: TrainingArguments(lr_scheduler="cosine").'
        )
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise PreparationError(
            f"The {kind} belongs to another optimizer than the one in training: it would change the "
            "learning rate of that optimizer. Make it from the optimizer that configure_scheduler is given."
        )
    return schedule


def _check(trainer: TrainerInterface) -> dict[str, DataLoader[Any]]:
    """Check on this rank, and return the loaders of the evaluation sets, by the names that errors call them."""
    take_changes(trainer)
    at_construction.check_given(trainer)
    check_attributes(trainer)
    if trainer.train_dataset is None and not _has_own(trainer, "train_dataloader"):
        raise ConfigurationError("fit() needs data: Trainer(train_dataset=…), or override train_dataloader().")
    if not _has_own(trainer, "train_dataloader") and not isinstance(trainer.train_dataset, DataLoader):
        as_dataset(trainer.train_dataset, "train_dataset")
    elif trainer.args.per_device_train_batch_size == AUTO and trainer.args.global_batch_size is not None:
        raise ConfigurationError(
            'per_device_train_batch_size="auto" chooses the batch size for global_batch_size, but a DataLoader has its '
            "batch size already. Leave global_batch_size out, or give the dataset."
        )
    _check_models(trainer)
    _check_optimizer(trainer)
    _check_folder(trainer)
    return _check_evaluation(trainer)


# -- the model -------------------------------------------------------------------------------------------------------


def _check_models(trainer: TrainerInterface) -> None:
    for model in _models(trainer):
        if not trainer.parts.loss.is_overridden:
            _check_has_forward(model)
        _check_has_values(model)
        _check_not_quantized(model)
    if not _has_own(trainer, "configure_optimizer") and trainer.optimizer is None:  # which may train other parameters
        _check_trains_parameters(trainer)


def _check_has_forward(model: nn.Module) -> None:
    if inspect.getattr_static(type(model), "forward") is nn.Module.forward and "forward" not in vars(model):
        raise ConfigurationError(
            f"{type(model).__name__} has no forward, so it cannot be called. Derive a class with one, or override "
            "compute_loss(model, batch)."
        )


def _check_has_values(model: nn.Module) -> None:
    """Raise for a parameter without a shape or values, unless a hook brings them for the forward."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigurationError(
                f"The parameter {name} of {type(model).__name__} is in a lazy layer and has no shape yet. Call the "
                "model once, model(batch), before you give it to the Trainer."
            )
        if parameter.is_meta and not has_offloaded_params(model.get_submodule(name.rpartition(".")[0])):
            raise ConfigurationError(
                f"The parameter {name} of {type(model).__name__} is on the meta device and has no values. Load the "
                "model without a device_map that leaves parts of it on disk, or fill it: "
                "model.to_empty(device='cpu'), then initialize it."
            )


def _check_trains_parameters(trainer: TrainerInterface) -> None:
    named = " and ".join(type(model).__name__ for model in _models(trainer))
    parameters = [parameter for model in _whole_models(trainer) for parameter in model.parameters()]
    if not parameters:
        raise ConfigurationError(f"{named} has no parameters, so there is nothing to train.")
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigurationError(
            f"All {len(parameters)} parameters of {named} are frozen, so there is nothing to train. Set "
            "requires_grad=True on some: model.requires_grad_(True)."
        )


def _check_not_quantized(model: nn.Module) -> None:
    quantized = quantized_beside_trained(model)
    if quantized is not None:
        raise ConfigurationError(
            f"{quantized} of {type(model).__name__} is quantized and cannot be trained, and all that is not quantized "
            "would be. Attach adapters (peft.get_peft_model), or freeze what you do not want to train: "
            "model.requires_grad_(False), then requires_grad_(True) on the rest."
        )


def _check_optimizer(trainer: TrainerInterface) -> None:
    model_parameters = {id(parameter) for model in _models(trainer) for parameter in model.parameters()}
    given = trainer.optimizer
    prepared = trainer.parts.models.are_prepared  # preparing may have replaced the parameters
    for optimizer in given.values() if isinstance(given, Mapping) else [given]:
        if not isinstance(optimizer, Optimizer) or prepared or _has_own(trainer, "configure_optimizer"):
            continue
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in model_parameters for parameter in members):
            raise PreparationError(
                f"The {type(optimizer).__name__} given as optimizer has {len(members)} parameters, none of them of the "
                "given model. Make it from this model's parameters, after copying or loading the model, or give a "
                "function: optimizer=lambda parameters: …."
            )


def _check_folder(trainer: TrainerInterface) -> None:
    args = trainer.args
    savers = [type(callback.unfiltered).__name__ for callback in trainer.events if callback.saves_checkpoints]
    if args.output_dir is None and not args.dry_run and savers:
        raise ConfigurationError(
            f"{savers[0]} saves checkpoints and needs a folder for them. Give TrainingArguments(output_dir=…)."
        )


# -- the evaluation --------------------------------------------------------------------------------------------------


def _check_evaluation(trainer: TrainerInterface) -> dict[str, DataLoader[Any]]:
    if trainer.eval_dataset is not None:
        check_intervals(trainer)
    if _has_own(trainer, "evaluate"):
        return {}
    if trainer.eval_dataset is None:
        _check_not_asked_for(trainer)
        return {}
    loaders = _loaders(trainer, trainer.eval_dataset, "eval_dataset")
    _check_best(trainer)
    return {f"eval_dataset[{name!r}]" if name else "eval_dataset": loader for name, loader in loaders.items()}


def _loaders(trainer: TrainerInterface, data: Any, option: str, is_one: bool = False) -> dict[str, DataLoader[Any]]:
    known = trainer.eval_dataset
    if isinstance(data, str) and isinstance(known, Mapping):
        near = data if data in known else (get_close_matches(data, list(known), n=1) or [next(iter(known))])[0]
        raise ConfigurationError(
            f"{option} is the text {data!r}. To evaluate one of the sets: evaluate({{{near!r}: "
            f"trainer.eval_dataset[{near!r}]}})."
        )
    overrides_verb = _has_own(trainer, "eval_dataloader")
    loaders: dict[str, DataLoader[Any]] = {}
    sets = {"": data} if is_one else named_sets(trainer, data, option)
    for name, dataset in sets.items():
        label = f"{option}[{name!r}]" if name else option
        loader = trainer.eval_dataloader(dataset) if overrides_verb else defaults.eval_loader(trainer, dataset, label)
        loaders[name] = checked_loader("eval_dataloader", loader)
        if not is_one:  # predict leaves out no sample
            check_can_leave_out(trainer.args, loaders[name], label)
    return loaders


def _check_not_asked_for(trainer: TrainerInterface) -> None:
    args, asked = trainer.args, _asks_for_evaluations(trainer)
    if args.validation_split is not None and trainer.train_dataset is None:
        raise ConfigurationError(
            f"validation_split={args.validation_split:g} holds out rows of train_dataset, but no train_dataset is "
            "given. Give Trainer(train_dataset=…) or Trainer(eval_dataset=…)."
        )
    if asked is not None:
        raise ConfigurationError(
            f"{asked} needs evaluations, but there is no evaluation set. Give Trainer(eval_dataset=…), or leave it out."
        )
    if args.eval_every is None and (trainer.metrics is not None or trainer.compute_metrics is not None):
        given = "metrics" if trainer.metrics is not None else "compute_metrics"
        raise ConfigurationError(
            f"{given}=… is computed in evaluations, but there is no evaluation set. Give Trainer(eval_dataset=…), or "
            'eval_every="never" to call evaluate(dataset) yourself.'
        )


def _asks_for_evaluations(trainer: TrainerInterface) -> str | None:
    """Return the option that needs evaluations, if there is one."""
    args = trainer.args
    is_ours = trainer.scheduler is None and not _has_own(trainer, "configure_scheduler")
    options = {
        f"eval_every={args.eval_every!r}": args.eval_every not in (None, "never"),
        f"eval_delay={args.eval_delay!r}": args.eval_delay is not None,
        "eval_on_start=True": args.eval_on_start,
        "load_best_at_end=True": args.load_best_at_end,
        f"metric_for_best={args.metric_for_best!r}": args.metric_for_best is not None,
        'lr_scheduler="plateau"': args.lr_scheduler == "plateau" and is_ours,
    }
    callbacks = [(type(callback.unfiltered).__name__, callback.needs_evaluation) for callback in trainer.events]
    return next((option for option, is_asked in [*options.items(), *callbacks] if is_asked), None)


def _check_best(trainer: TrainerInterface) -> None:
    """Check the metric names that arguments and callbacks refer to, as far as the names are known before training."""
    monitored = [
        (metric, f"{type(callback.unfiltered).__name__}(metric={metric!r})", callback.needs_evaluation)
        for callback in trainer.events
        if (metric := callback.monitored_metric) is not None
    ]
    asked = [(metric, option) for metric, option, needs_evaluation in monitored if needs_evaluation]
    if trainer.args.metric_for_best is not None and trainer.parts.evaluation.best_metric is not None:
        asked.append((trainer.parts.evaluation.best_metric, f"metric_for_best={trainer.args.metric_for_best!r}"))
    for name, option in asked + [
        (metric, option) for metric, option, needs_evaluation in monitored if not needs_evaluation
    ]:
        check_has_interval(trainer, name, option)
    for name, option in asked:
        check_metric(trainer, name, option)


def check_metric(trainer: TrainerInterface, name: str, option: str) -> None:
    """Check that evaluations have a metric, as far as their names are known before training.

    Raises:
        ConfigurationError: If they do not.
    """
    known, stems = _metric_names(trainer)
    if name not in known and not name.startswith(tuple(stems)):
        raise ConfigurationError(
            f"{option} is not a metric of the evaluations. These are: {', '.join(known)}."
            f"{did_you_mean(name, known)} Add metrics by Trainer(metrics=…) or compute_metrics=…. To act on a value "
            "that training logs, write on_log(run, values) in a Callback."
        )


def _metric_names(trainer: TrainerInterface) -> tuple[list[str], list[str]]:
    """Return the names of metrics, and the prefixes of those whose full names are not known yet."""
    known: list[str] = []
    stems: list[str] = []
    for name in named_sets(trainer, trainer.eval_dataset):
        stem = f"eval_{name}" if name else "eval"
        measures = trainer.parts.evaluation.measures(name)
        known += [f"{stem}_loss", *(f"{stem}_{metric}" for metric in measures.metrics)]
        stems += [
            f"{stem}_{metric_name}_" for metric_name, metric in measures.metrics.items() if _may_be_several(metric)
        ]
        # A callback may add metrics.
        foreign = any(overrides(callback, "on_evaluate_end") and _is_foreign(callback) for callback in trainer.events)
        if measures.compute is not None or foreign or _may_log(type(trainer)):
            stems.append(f"{stem}_")
    sets = list(named_sets(trainer, trainer.eval_dataset))
    if len(sets) > 1:
        known += [f"eval_mean_{name}" for name in _in_all_sets(known, sets)]
        stems += [f"eval_mean_{stem}" for stem in _in_all_sets(stems, sets)]
    return known, stems


def _in_all_sets(known: Sequence[str], sets: Sequence[str]) -> list[str]:
    """Return the metrics that every set has, without the prefix of the set."""
    stems = [f"eval_{name}_" for name in sets]
    names = [name.removeprefix(stems[0]) for name in known if name.startswith(stems[0])]
    return [name for name in names if all(f"{stem}{name}" in known for stem in stems)]


def _may_be_several(metric: Metric) -> bool:
    from trainer_lib.trainer.metrics.metric_adapters import ModuleMetric, ObjectMetric

    return isinstance(metric, (ObjectMetric, ModuleMetric)) or _is_foreign(metric)


def _may_log(kind: type) -> bool:
    """Whether the methods of a subclass may log values in evaluations, which become metrics."""
    if not (is_overridden(kind, "compute_loss") or is_overridden(kind, "evaluation_step")):
        return False
    own = [part for part in kind.__mro__ if not part.__module__.startswith("trainer_lib.")]
    codes = [getattr(member, "__code__", None) for part in own for member in vars(part).values()]
    return any(names_in(code) & {"log", "LossResult"} for code in codes)


def _is_foreign(thing: Any) -> bool:
    return not type(thing).__module__.startswith("trainer_lib.")


# -- the other ranks -------------------------------------------------------------------------------------------------


def _facts(trainer: TrainerInterface) -> dict[str, Any]:
    args = trainer.args
    facts: dict[str, Any] = {
        "the models": [
            f"{type(model).__name__} of {sum(p.numel() for p in model.parameters() if p.requires_grad)} trained "
            f"parameters in {sum(1 for p in model.parameters() if p.requires_grad)} tensors"
            for model in _whole_models(trainer)
        ],
    }
    if trainer.eval_dataset is not None:
        sets = named_sets(trainer, trainer.eval_dataset)
        facts["the sets to evaluate on"] = [f"{name or 'eval'}: {_samples(data)}" for name, data in sets.items()]
        facts["the metrics"] = _metric_names(trainer)[0]
        measures = {name: trainer.parts.evaluation.measures(name) for name in sets}
        kinds = [
            f"{name}: {type(metric).__name__}" for each in measures.values() for name, metric in each.metrics.items()
        ]
        facts["the kinds of metrics"] = kinds
        facts["sets with compute_metrics"] = [name or "eval" for name, each in measures.items() if each.compute]
    may_differ = {name for name, declared in settings(type(args)).items() if declared.may_differ}
    return facts | {
        field.name: _short(getattr(args, field.name)) for field in fields(args) if field.name not in may_differ
    }


def _order(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the facts about the sample order that must be the same on all ranks, since each rank takes its part."""
    source: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = source.sampler if iterates_as(source, "BatchSampler") else source
    return {f"the length of the training data's {type(sampler).__name__}": length_of(sampler)}


def _short(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, (list, tuple)) and len(value) > _SHOWN else repr(value)


def _samples(data: Any) -> int | None:
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(dataset, IterableDataset):  # each rank may have another part of it
        return None
    if isinstance(dataset, (tuple, Mapping)):
        columns: Sequence[Any] = list(dataset.values()) if isinstance(dataset, Mapping) else dataset
        return length_of(columns[0]) if columns else 0
    return length_of(dataset)


def _models(trainer: TrainerInterface) -> list[nn.Module]:
    return [trainer.model] if isinstance(trainer.model, nn.Module) else list(trainer.model.values())


def _whole_models(trainer: TrainerInterface) -> list[nn.Module]:
    """Return the models; of those that are prepared, which may be a stage of a pipeline by now, the whole ones."""
    models, strategy = _models(trainer), trainer.accelerator.strategy
    return [strategy.whole_shapes(model) for model in models] if trainer.parts.models.are_prepared else models


def _has_own(trainer: TrainerInterface, verb: str) -> bool:
    """Whether the trainer's class overrides a method."""
    return is_overridden(type(trainer), verb)
