"""Checks of a `Trainer`'s constructor arguments, made before anything is changed."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, SignatureError, did_you_mean
from trainer_lib.foundation.public_names.signatures import (
    cannot_take,
    function_name,
    parameter_names,
    takes_targets_first,
)
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.arguments.unknown_names import check_assigned
from trainer_lib.trainer.checks.foreign_calls import check_overrides
from trainer_lib.trainer.checks.foreign_names import CONSTRUCTOR, OTHERWISE, RENAMED
from trainer_lib.trainer.huggingface.transformers_kinds import is_transformers_kind
from trainer_lib.trainer.losses.loss_result import summed
from trainer_lib.trainer.overridable import is_overridden
from trainer_lib.trainer.safety.deadline import check_ahead
from trainer_lib.trainer.trainer_interface import TrainerInterface

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator

_NO_NAME = (
    "accelerator must be a trainer_lib.Accelerator, got a str. The Trainer finds the machine's accelerator by itself; "
    "TrainingArguments(use_cpu=True) trains on the CPU."
)

_VERBS = {
    "compute_loss": ("model", "batch"),
    "training_step": ("model", "batch"),
    "evaluation_step": ("model", "batch"),
    "num_items": ("batch",),
    "configure_optimizer": (),
    "configure_scheduler": ("optimizer", "total_steps", "name"),
    "train_dataloader": (),
    "eval_dataloader": ("dataset",),
}


def check(trainer: TrainerInterface, base: type) -> None:
    """Check the arguments, except those that a subclass of `base` handles itself by overriding a method."""
    check_verbs(trainer)
    check_overrides(trainer, base, _VERBS, inspect.signature(base).parameters)
    check_given(trainer)


def check_given(trainer: TrainerInterface) -> None:
    """Check what a trainer was given, which may have been set since."""
    check_loss(trainer, trainer.loss_fn)
    check_collate(trainer.collate_fn)
    check_processing_class(trainer.processing_class)
    check_optimizer(trainer.optimizer)
    check_scheduler(trainer.scheduler, trainer.optimizer)
    check_ahead(trainer.args.deadline)


def check_new_model(trainer: TrainerInterface, model: Any) -> None:
    """Check a model that is set on a trainer."""
    checked_model(model)
    if trainer.run.state.status == "running":
        raise ConfigurationError("model cannot be set while fit() runs. Set it before or after fit().")


def check_loss(trainer: TrainerInterface, loss_fn: Any) -> None:
    """Check a loss function, unless a subclass computes the loss itself."""
    if loss_fn is None or is_overridden(type(trainer), "compute_loss"):
        return
    check_loss_function(loss_fn)
    if trainer.args.chunked_cross_entropy:
        raise ConfigurationError(
            "chunked_cross_entropy=True has no effect with a loss_fn, which gets whole logits. Leave out loss_fn, so "
            "that the model computes its loss, or set chunked_cross_entropy=False."
        )


def check_verbs(trainer: TrainerInterface) -> None:
    """Check that methods of a subclass accept the arguments they are called with."""
    for verb, arguments in _VERBS.items():
        if (problem := cannot_take(getattr(trainer, verb), *arguments)) is not None:
            raise SignatureError(
                f"{type(trainer).__name__}.{verb} is called as {verb}({', '.join(arguments)}), and {problem}."
            )
        if arguments == ("model", "batch") and "batch" in (names := parameter_names(getattr(trainer, verb)))[:1]:
            raise SignatureError(
                f"{type(trainer).__name__}.{verb} is called as {verb}(model, batch), and takes ({', '.join(names)}): "
                f"its batch would be the model. Write {verb}(self, model, batch)."
            )
    if (names := parameter_names(trainer.log))[:1] == ["logs"]:  # as in Hugging Face's Trainer
        raise SignatureError(
            f"{type(trainer).__name__}.log({', '.join(names)}) is not called when values are logged: log(name, value) "
            "adds one value to the next log. To see or to add values at a log, override on_log(run, values) in a "
            "Callback, and give Trainer(…, callbacks=[…])."
        )


def check_names(init: Callable[..., None], positional: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Check that a constructor can be called with these arguments.

    Raises:
        SignatureError: If it cannot, with the nearest known name.
    """
    parameters = list(inspect.signature(init).parameters.values())[1:]
    if any(
        parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters
    ):  # a decorator wraps it
        return
    known = [parameter.name for parameter in parameters]
    if unknown := [name for name in named if name not in known]:
        lines = [f"Trainer takes no {name!r}.{_instead(name, known)}" for name in unknown]
        raise SignatureError("\n".join([*lines, *([_NO_NAME] if isinstance(named.get("accelerator"), str) else [])]))
    in_order = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(positional) > len(in_order):
        raise SignatureError(
            f"Trainer takes only {' and '.join(in_order)} by position, and got a "
            f"{type(positional[len(in_order)]).__name__} after them. Give it by name, such as train_dataset=…."
        )


def checked_arguments(args: Any) -> TrainingArguments:
    """Return the arguments, or the defaults; convert those of Hugging Face's Trainer."""
    if args is None:
        return TrainingArguments()
    if isinstance(args, TrainingArguments):
        check_assigned(args)
        TrainingArguments.__post_init__(args)  # values that were assigned since it was made
        return args
    if is_transformers_kind(type(args), "TrainingArguments"):
        return TrainingArguments.from_transformers(args)
    if isinstance(args, Mapping):
        hint = " Give TrainingArguments(**args)."
    elif isinstance(args, type):
        hint = f" This is a class. Give an object: {args.__name__}(…)."
    elif isinstance(args, str) or hasattr(args, "__fspath__"):
        hint = f" To read a file: TrainingArguments.from_file({str(args)!r})."
    else:
        hint = " Give data and all other options by name, such as train_dataset=…."
    raise ConfigurationError(f"args must be trainer_lib.TrainingArguments, got a {type(args).__name__}.{hint}")


def checked_model(model: Any) -> nn.Module | Mapping[str, nn.Module]:
    """Return the model, or the models by name."""
    if isinstance(model, nn.Module):
        return model
    hint = ""
    if isinstance(model, type):
        hint = f" Give an object: {model.__name__}(…)."
    elif isinstance(model, str):
        hint = f" Load it first, such as AutoModel.from_pretrained({model!r})."
    elif isinstance(model, Mapping):
        wrong = [name for name, module in model.items() if not isinstance(module, nn.Module)]
        if model and not wrong:
            return model
        hint = f" {wrong[0]!r} is a {type(model[wrong[0]]).__name__}." if wrong else " It is empty."
    raise ConfigurationError(
        f"model must be a torch.nn.Module, or a dict of them by name, got a {type(model).__name__}.{hint}"
    )


def checked_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks as a list, those of Hugging Face's Trainer adapted. The dispatcher checks each of them."""
    if callbacks is None:
        return []
    if isinstance(callbacks, (list, tuple)):
        adapted = {id(callback): _adapted(callback) for callback in callbacks}
        return [adapted[id(callback)] for callback in callbacks]  # the same object twice gives one adapter
    hint = f" Give [{type(callbacks).__name__}(…)]." if not isinstance(callbacks, (Mapping, str)) else ""
    raise ConfigurationError(f"callbacks must be a list of callbacks, got a {type(callbacks).__name__}.{hint}")


def _adapted(callback: Any) -> Any:
    kind = callback if isinstance(callback, type) else type(callback)
    if not is_transformers_kind(kind, "TrainerCallback"):
        return callback
    from trainer_lib.trainer.huggingface.callback_adapter import adapt_callback

    return adapt_callback(callback)


def check_loss_function(loss_fn: Any) -> None:
    """Check `loss_fn`, which is called as `loss_fn(outputs, targets)` and returns a mean.

    Raises:
        ConfigurationError: If it is not a function, or does not average.
        SignatureError: If it takes other arguments.
    """
    if isinstance(loss_fn, type):
        raise ConfigurationError(f"loss_fn is the class {loss_fn.__name__}. Give an object: {loss_fn.__name__}().")
    if not callable(loss_fn):
        by_name = f" Give the function: torch.nn.functional.{loss_fn}." if isinstance(loss_fn, str) else ""
        raise ConfigurationError(
            f"loss_fn must be a function of outputs and targets, got a {type(loss_fn).__name__}."
            + (by_name or " For example torch.nn.functional.cross_entropy.")
        )
    function: Any = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    named = [name for name in parameter_names(function) if name == "num_items_in_batch"]
    if (problem := cannot_take(function, "outputs", "targets", named=named)) is not None:
        raise SignatureError(
            f"loss_fn is called as loss_fn(outputs, targets), but {function_name(loss_fn)}{problem}. To pass it other "
            "arguments, override compute_loss(model, batch)."
        )
    if takes_targets_first(function):
        raise SignatureError(
            f"loss_fn is called as loss_fn(outputs, targets), but {function_name(loss_fn)} takes the targets first "
            "(y_true, y_pred). Give loss_fn=lambda outputs, targets: …, with the order that it takes."
        )
    summed(loss_fn)


def check_collate(collate_fn: Any) -> None:
    """Check `collate_fn`, which is called with a list of samples."""
    if isinstance(collate_fn, type):
        raise ConfigurationError(
            f"collate_fn is the class {collate_fn.__name__}. Give an object: {collate_fn.__name__}(…)."
        )
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigurationError(
            f"collate_fn={shown(collate_fn)} must be a function from a list of samples to a batch."
        )
    if collate_fn is not None and (problem := cannot_take(collate_fn, "samples")) is not None:
        raise SignatureError(
            f"collate_fn is called with a list of samples, but {function_name(collate_fn)}{problem}. Bind its other "
            "arguments by functools.partial."
        )


def check_optimizer(optimizer: Any) -> None:
    """Check optimizers, and functions that make them."""
    for name, candidate in _by_name(optimizer):
        option = _option("optimizer", name)
        if candidate is None or isinstance(candidate, Optimizer):
            continue
        if isinstance(candidate, (list, tuple)):
            raise ConfigurationError(
                f"{option} is a {type(candidate).__name__}. Give one optimizer, or several by name; a schedule is "
                "given as scheduler=…."
            )
        if not callable(candidate):
            by_name = f'"{candidate}"' if isinstance(candidate, str) else "…"
            raise ConfigurationError(
                f"{option} must be an Optimizer, or a function that makes one from parameters, got a "
                f"{type(candidate).__name__}. By name: TrainingArguments(optimizer={by_name})."
            )
        is_class = isinstance(candidate, type) and issubclass(candidate, Optimizer)  # which takes the arguments too
        if not is_class and (problem := cannot_take(candidate, "parameters")):
            raise SignatureError(
                f"{option} is called with the parameters, but {function_name(candidate)}{problem}. Give "
                "lambda parameters: ….",
            )


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Check schedules, and functions that make them."""
    for name, schedule in _by_name(scheduler):
        option = _option("scheduler", name)
        if schedule is None:
            continue
        if _is_schedule(schedule):
            trained = optimizer.get(name) if isinstance(optimizer, Mapping) else optimizer
            _check_moves_optimizer(option, schedule, trained)
        elif not callable(schedule):
            by_name = f"{schedule}" if isinstance(schedule, str) else "…"
            raise ConfigurationError(
                f"{option} must be a schedule, or a function that makes one from an optimizer, got a "
                f'{type(schedule).__name__}. By name: TrainingArguments(lr_scheduler="{by_name}").'
            )
        elif (problem := cannot_take(schedule, "optimizer")) is not None:
            raise SignatureError(
                f"{option} is called with the optimizer, but {function_name(schedule)}{problem}. Give "
                f"lambda optimizer: {getattr(schedule, '__name__', 'make')}(optimizer, …).",
            )


def _check_moves_optimizer(option: str, schedule: Any, optimizer: Any) -> None:
    """Raise unless a ready schedule moves the learning rate of the given optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"{option} is a {type(schedule).__name__} of an existing optimizer, and that optimizer is not "
            "given. Give optimizer=… too, or a function: scheduler=lambda optimizer: ….",
        )
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise ConfigurationError(
            f"{option} is a {type(schedule).__name__} of another optimizer than the given one: it would change "
            "the learning rate of that optimizer. Make it from the given optimizer."
        )


def check_accelerator(accelerator: Any, args: TrainingArguments) -> None:
    """Check the given accelerator, and that no argument contradicts it.

    Raises:
        ConfigurationError: If it is not an Accelerator, or an argument contradicts it.
    """
    from trainer_lib.accelerator import Accelerator

    if not isinstance(accelerator, Accelerator):
        hint = " Give an object: Accelerator(…)." if isinstance(accelerator, type) else ""
        if isinstance(accelerator, str):
            raise ConfigurationError(_NO_NAME)
        raise ConfigurationError(
            f"accelerator must be a trainer_lib.Accelerator, got a {type(accelerator).__name__}.{hint}"
        )
    _check_in_backward(accelerator.memory_options.optimizer_in_backward, args)
    _check_saves_activations_once(accelerator, args)
    _check_same_settings(accelerator, args)
    steps = accelerator.gradient_accumulation_steps
    if steps > 1 and args.gradient_accumulation_steps is None and args.global_batch_size is None:
        raise ConfigurationError(
            f"The accelerator accumulates {steps} batches, and the arguments leave gradient_accumulation_steps at 1. "
            f"Give TrainingArguments(gradient_accumulation_steps={steps}), or 1."
        )


def _check_saves_activations_once(accelerator: "Accelerator", args: TrainingArguments) -> None:
    asked = [name for name in ("gradient_checkpointing", "activation_offload") if getattr(args, name)]
    fsdp = accelerator.state.fsdp_plugin
    saves = accelerator.memory_options.saves_activations or (fsdp is not None and fsdp.activation_checkpointing)
    if asked and saves:
        raise ConfigurationError(
            f"{asked[0]}=True, and the accelerator was made with options that save activations too. Set them in one "
            "place: in TrainingArguments, or in the accelerator (MemoryKwargs, or its fsdp_plugin)."
        )


def _check_same_settings(accelerator: "Accelerator", args: TrainingArguments) -> None:
    """Raise if an argument asks for something that the accelerator was made without."""
    made_with = {
        "mixed_precision": accelerator.mixed_precision,
        "use_cpu": accelerator.device.type == "cpu",
        "seed_each_sample": accelerator.dataloader_config.seed_each_sample,
        "low_memory_shuffle": accelerator.dataloader_config.low_memory_shuffle,
    }
    for name in (*made_with, "compile", "fsdp", "deepspeed", "parallelism", "ddp", "fp8"):
        value = getattr(args, name)
        if value and value != made_with.get(name):
            raise ConfigurationError(
                f"{name}={shown(value)} conflicts with the accelerator, which was made "
                f"{f'with {made_with[name]!r}' if name in made_with else 'without it'}. Set it there: "
                "accelerator=Accelerator(…)."
            )


def check_processing_class(processing_class: Any) -> None:
    """Check the tokenizer or processor, which is saved with the model."""
    if isinstance(processing_class, (str, type)):
        name = processing_class if isinstance(processing_class, str) else processing_class.__name__
        raise ConfigurationError(
            f"processing_class must be a tokenizer or processor, got {name!r}. Load it first, such as "
            "AutoTokenizer.from_pretrained(…)."
        )


def _instead(name: str, known: Sequence[str]) -> str:
    if name in CONSTRUCTOR:
        return f" That is {CONSTRUCTOR[name]} here."
    if name in OTHERWISE:
        return f" {OTHERWISE[name]}."
    ours = RENAMED.get(name, name)
    if ours in TrainingArguments.__dataclass_fields__:
        return f" It is one of the arguments: Trainer(model, TrainingArguments({ours}=…))."
    return did_you_mean(name, known) or f" It takes: {', '.join(known)}."


def _by_name(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else [("", value)]


def _option(option: str, name: str) -> str:
    return f"{option}[{name!r}]" if name else option


def _is_schedule(candidate: Any) -> bool:
    return hasattr(candidate, "step") and not isinstance(candidate, type)


def _check_in_backward(is_on: bool, args: TrainingArguments) -> None:
    """Raise if an accelerator of the user's updates weights at another time than the arguments say."""
    wanted = args.steps_in_backward
    if is_on == wanted:
        return
    by_optimizer = wanted and not args.optimizer_in_backward
    option = f"optimizer={args.optimizer!r}" if by_optimizer else f"optimizer_in_backward={wanted}"
    remedy = "Take another optimizer" if by_optimizer else f"Give TrainingArguments(optimizer_in_backward={is_on})"
    raise ConfigurationError(
        f"{option} contradicts the accelerator, which was made with optimizer_in_backward={is_on}. {remedy}, or make "
        f"the accelerator with kwargs_handlers=[MemoryKwargs(optimizer_in_backward={wanted})]."
    )
