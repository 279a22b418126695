"""Errors for calls and overrides that other trainers accept, with what to use here."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch import nn

from trainer_lib.filesystem.remote_paths import RemotePath
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import SignatureError, did_you_mean
from trainer_lib.foundation.public_names.signatures import names_in
from trainer_lib.trainer.arguments.declaration import settings
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.checks.foreign_names import CONSTRUCTOR, MEMBERS, OVERRIDES, RENAMED

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_ONLY_GIVEN = ("callbacks", "train_metrics")  # which are no attributes
_FROM_CHECKPOINT = "a trainer from Trainer.from_checkpoint(folder, model, …)"
_OF_VERBS: dict[str, dict[str, str]] = {
    "fit": {
        "resume_from_checkpoint": "resume",
        "ckpt_path": "resume",
        "trial": "search(space, n)",
        "ignore_keys_for_eval": "evaluation_step(model, batch), which a subclass overrides",
    },
    "evaluate": {
        "ckpt_path": _FROM_CHECKPOINT,
        "eval_dataset": "dataset",
        "dataloaders": "dataset",
        "ignore_keys": "evaluation_step(model, batch), which a subclass overrides",
    },
    "predict": {
        "ckpt_path": _FROM_CHECKPOINT,
        "return_predictions": "to, a folder to which predictions are written instead of being returned",
        "test_dataset": "dataset",
        "dataloaders": "dataset",
        "ignore_keys": "evaluation_step(model, batch), which a subclass overrides",
    },
}
_OF_GENERATION = dict.fromkeys(
    ("max_length", "max_new_tokens", "min_length", "num_beams", "do_sample", "temperature", "top_k", "top_p"),
    "an argument of generate, which is called with TrainingArguments(predict_with_generate=True)",
)
_OF_TOOLS = {
    **dict.fromkeys(("min_lr", "start_lr"), "lowest"),
    **dict.fromkeys(("max_lr", "end_lr"), "highest"),
    **dict.fromkeys(("num_training", "num_it", "num_iter"), "updates"),
    "steps_per_trial": "updates",
    "max_val": "largest",
    "hp_space": "space",
    "n_trials": "n",
    "num_trials": "n",
    "compute_objective": 'metric="eval_…"',
    "direction": "greater_is_better (maximize is True)",
    "hp_name": "nothing: trials are named by their number",
}
# Of methods that are called in another form: what to give.
FORMS = {
    "find_batch_size": "Give find_batch_size(largest=1024, updates=2).",
    "find_learning_rate": "Give find_learning_rate(lowest=1e-7, highest=10.0, updates=100).",
    "log": "Log values one by one: for name, value in values.items(): trainer.log(name, value).",
    "push_to_hub": 'Give the repository: push_to_hub("owner/name", commit_message="…").',
    "search": "Give search(space, n), with space={name: [values] or (low, high)}, or a function of a trial.",
}
# Arguments of Lightning's `log`, which need no setting here.
_OF_LOG = (
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group"),
    *("add_dataloader_idx", "metric_attribute", "rank_zero_only"),
)
# Hugging Face's names for the same parameters, which are accepted too.
_SYNONYMS = {"evaluate": {"metric_key_prefix": "prefix"}, "predict": {"metric_key_prefix": "prefix"}}
_NEAR = 0.85


def explains_foreign_calls(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a trainer's method answer a call in another trainer's form with an error that shows the call to make.

    In a notebook, errors of your own code are shown without the library's frames.
    """
    name, parameters = method.__name__, list(inspect.signature(method).parameters.values())[1:]
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    synonyms, takes_more = _SYNONYMS.get(name, {}), len(known) < len(parameters)

    @functools.wraps(method)
    def call(self: S, *positional: P.args, **named: P.kwargs) -> R:
        options: dict[str, Any] = {synonyms.get(key, key): value for key, value in named.items()}
        generates = takes_more and bool(getattr(getattr(self, "args", None), "predict_with_generate", False))
        _check_call(name, known, positional, options, generates)
        try:
            return cast(Any, method)(self, *positional, **options)
        except Exception as error:
            from trainer_lib.foundation.notebook_tracebacks import hide_library_frames

            hide_library_frames(error)
            raise

    return call


def explains_form(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method answer a call that does not fit its parameters with an error that shows the call to make."""

    @functools.wraps(method)
    def call(self: S, *positional: P.args, **named: P.kwargs) -> R:
        try:
            return method(self, *positional, **named)
        except TypeError as error:
            raised_in = error.__traceback__ and error.__traceback__.tb_next
            if raised_in is not None:  # in the method, which has taken the arguments
                raise
            renamed = [f"{key} is {_OF_TOOLS[key]} here." for key in named if key in _OF_TOOLS]
            name = method.__name__
            if name == "log" and (extra := [key for key in named if key in _OF_LOG]):
                raise SignatureError(
                    f"log takes name, value and weight. Leave out {' and '.join(extra)}: each log has the mean over "
                    "the batches, steps and ranks since the one before, and TrainingArguments(log_every=…) says how "
                    "often."
                ) from None
            problem = f"{name}{str(error).partition(name)[2]}."
            raise SignatureError(" ".join([problem, *renamed, FORMS[name]])) from None

    return call


def _check_call(
    name: str, known: Sequence[str], positional: Sequence[Any], named: Mapping[str, Any], generates: bool
) -> None:
    """Raise for a call with arguments that a verb does not take."""
    # Unknown options go to `generate` if predictions are generated.
    unknown = {
        key: value for key, value in named.items() if key not in known and (not generates or key in _OF_VERBS[name])
    }
    resume = positional[0] if positional else named.get("resume")
    takes_data = name == "fit" and not _is_resume(resume)
    if name == "fit" and positional and type(resume) is int:
        unknown = {"epochs": resume, **unknown}
    has_more = len(positional) > len(known) or _is_model(positional)
    if not (takes_data or has_more or unknown):
        return
    given = [*(shown(value) for value in positional), *(f"{key}={shown(value)}" for key, value in named.items())]
    lines = [f"{name} takes {' and '.join(known)}, got {name}({', '.join(given)})."]
    if name == "fit":
        lines += _advice_on_fit(unknown, takes_data, has_more=len(positional) > 1)
    else:
        lines += _advice_on_evaluation(name, unknown, has_more)
    raise SignatureError(" ".join(lines))


def _advice_on_fit(unknown: Mapping[str, Any], takes_data: bool, has_more: bool) -> list[str]:
    """Return what to give instead of arguments that another trainer's `fit` takes."""
    renamed = _OF_VERBS["fit"]
    lines = [f"{key} is {renamed[key]} here.{_value('fit', key, unknown[key])}" for key in unknown if key in renamed]
    rest = {key: value for key, value in unknown.items() if key not in renamed}
    if takes_data or rest or has_more:
        lines.append(f"The model, data and arguments go to the constructor: {_construction(rest, takes_data)}.fit().")
    return lines


def _advice_on_evaluation(name: str, unknown: dict[str, Any], has_more: bool) -> list[str]:
    """Return what to give instead of arguments that another trainer's `evaluate` or `predict` takes."""
    renamed = {**_OF_VERBS[name], **_OF_GENERATION}
    if "batch_size" in unknown:
        unknown["per_device_eval_batch_size"] = unknown.pop("batch_size")
    lines = [f"{key} is {renamed[key]} here.{_value(name, key, unknown[key])}" for key in unknown if key in renamed]
    rest = {key: value for key, value in unknown.items() if key not in renamed}
    if rest or has_more:
        lines.append(
            f"The model and arguments go to the constructor, and labels are part of the dataset: "
            f"{_construction(rest, False)}.{name}(dataset)."
        )
    return lines


def _construction(named: Mapping[str, Any], has_data: bool) -> str:
    """Return the constructor call for arguments that another trainer's `fit` takes."""
    args: list[str] = []
    options = ["train_dataset=…"] if has_data else []
    for key, value in named.items():
        ours = RENAMED.get(key, key)
        if ours in settings(TrainingArguments):
            args.append('resume="auto"' if ours == "resume" else f"{ours}={shown(value)}")
        else:
            option = CONSTRUCTOR.get(key, key).partition(",")[0].partition(" ")[0]
            options.append(option if "=" in option else f"{option}=…")
    arguments = f"TrainingArguments({', '.join(args)})"
    return f"Trainer({', '.join(dict.fromkeys(('model', arguments, *options)))})"


def _value(verb: str, name: str, value: Any) -> str:
    if verb != "fit" or name not in ("resume_from_checkpoint", "ckpt_path"):
        return ""
    if value in (None, False):
        return " Leave it out."
    if value == "best":
        return " Give the folder, such as resume=result.best_checkpoint of what fit returned."
    return ' Give resume="auto".' if value is True or value == "last" else ""


def _is_resume(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool, int, os.PathLike, RemotePath))


def _is_model(positional: Sequence[Any]) -> bool:
    return any(isinstance(value, nn.Module) for value in positional)


def missing_member(kind: type, name: str, known: Iterable[str]) -> str:
    """Return the message for an attribute that a trainer does not have."""
    public = [member for member in known if not member.startswith("_")]
    hint = f" Use {MEMBERS[name]}." if name in MEMBERS else did_you_mean(name, public)
    if name in OVERRIDES and name not in MEMBERS:
        hint = f" What you override here is {OVERRIDES[name]}."
    return f"{kind.__name__} has no attribute {name!r}.{hint}"


def check_overrides(trainer: object, base: type, verbs: Iterable[str], options: Iterable[str]) -> None:
    """Raise for methods of a subclass that look like overrides and that nothing calls.

    These are methods that other trainers call, misspelt method names, events of callbacks, and attributes that an
    argument of the constructor hides. A method that the subclass calls itself is accepted.

    Raises:
        SignatureError: With what to override instead.
    """
    kind = type(trainer)
    classes = kind.__mro__[: kind.__mro__.index(base)]
    hidden = {name for name in options if vars(trainer).get(name) is None}
    members = {name: value for cls in classes for name, value in vars(cls).items() if not _is_ours(cls)}
    for name, value in members.items():
        if (instead := _instead(name, value, list(verbs), hidden, set(members))) is None or (
            hasattr(base, name) and name not in hidden
        ):
            continue
        if not _is_called(name, members):
            raise SignatureError(f"{kind.__name__}.{name} is never called. {instead}")


def check_attributes(trainer: object) -> None:
    """Raise for attributes that were set on a trainer and that nothing reads; those of a subclass are its own.

    Raises:
        SignatureError: With what to set instead.
    """
    kind = type(trainer)
    if not _is_ours(kind):
        return
    for name in vars(trainer):
        if (instead := _instead_of_attribute(kind, name)) is not None:
            raise SignatureError(
                f"The attribute {name!r} was set on the {kind.__name__}, and nothing reads it. {instead}"
            )


@functools.lru_cache  # each evaluation looks at the same few names; bounded, since it keeps classes alive
def _instead_of_attribute(kind: type, name: str) -> str | None:
    options = list(inspect.signature(kind).parameters)
    if name in _ONLY_GIVEN:
        return f"Give it to the constructor: Trainer(…, {name}=…)."
    if name in options or hasattr(kind, name):
        return None
    if name in CONSTRUCTOR:
        return f"That is {CONSTRUCTOR[name]} here."
    near = get_close_matches(name, options, n=1, cutoff=_NEAR)
    return f"Did you mean {near[0]!r}?" if near else None


def _instead(name: str, value: Any, verbs: Sequence[str], hidden: set[str], members: set[str]) -> str | None:
    from trainer_lib.events.callback import EVENTS

    if name in hidden and not isinstance(value, property):
        return f"{name} is an argument of the constructor, which hides it: give Trainer(…, {name}=…)."
    if not inspect.isroutine(value):
        return None
    another = "If you call it yourself, give it another name."
    if name in OVERRIDES:
        return f"Override {OVERRIDES[name]}. {another}"
    if name in EVENTS:
        return f"{name} is an event of callbacks: write it in a Callback, and give Trainer(…, callbacks=[…])."
    if name.startswith("on_") and (ours := _renamed_event(name)) is not None:
        arguments = ", ".join(("self", *EVENTS[ours].arguments))
        return f"Write {ours}({arguments}) in a Callback, and give it by callbacks=[…]. {another}"
    near = get_close_matches(name, verbs, n=1, cutoff=_NEAR)
    if not near or near[0] in members or name.startswith("_"):
        return None
    return f"Did you mean {near[0]!r}? {another}"


def _renamed_event(name: str) -> str | None:
    """Return the event to listen to in place of one of another library."""
    from trainer_lib.events.foreign_events import RENAMED as RENAMED_EVENTS

    return RENAMED_EVENTS.get(name)


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("trainer_lib.")


def _is_called(name: str, members: Mapping[str, Any]) -> bool:
    """Whether another method of the subclass refers to this one."""
    methods = [inspect.unwrap(value) for other, value in members.items() if other != name and callable(value)]
    return any(name in names_in(getattr(method, "__code__", None)) for method in methods)
