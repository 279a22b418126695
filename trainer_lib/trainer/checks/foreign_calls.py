"""Errors for calls and overrides in the manner of other trainers, with what to use here."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import CodeType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch import nn

from trainer_lib.events.callback import EVENTS
from trainer_lib.filesystem.remote_paths import RemotePath
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import SignatureError, did_you_mean
from trainer_lib.trainer.arguments.rules import CHECKS
from trainer_lib.trainer.checks.foreign_names import CONSTRUCTOR, MEMBERS, OVERRIDES, RENAMED

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_OF_VERBS: dict[str, dict[str, str]] = {
    "fit": {
        "resume_from_checkpoint": "resume",
        "ckpt_path": "resume",
        "trial": "search(space, n)",
        "ignore_keys_for_eval": "evaluation_step(model, batch), which a subclass overrides",
    },
    "evaluate": {
        "eval_dataset": "dataset",
        "dataloaders": "dataset",
        "ignore_keys": "evaluation_step(model, batch), which a subclass overrides",
    },
    "predict": {
        "test_dataset": "dataset",
        "dataloaders": "dataset",
        "ignore_keys": "evaluation_step(model, batch), which a subclass overrides",
    },
}
# Names of Hugging Face's trainer that mean the same here, and are taken as well.
_SYNONYMS = {"evaluate": {"metric_key_prefix": "prefix"}, "predict": {"metric_key_prefix": "prefix"}}
_NEAR = 0.85


def explains_foreign_calls(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a method of the trainer answer a call that another trainer would take with the call to make here."""
    name, parameters = method.__name__, list(inspect.signature(method).parameters.values())[1:]
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    synonyms, takes_more = _SYNONYMS.get(name, {}), len(known) < len(parameters)

    @functools.wraps(method)
    def call(self: S, *positional: P.args, **named: P.kwargs) -> R:
        options: dict[str, Any] = {synonyms.get(key, key): value for key, value in named.items()}
        generates = takes_more and bool(getattr(getattr(self, "args", None), "predict_with_generate", False))
        _check_call(name, known, positional, options, generates)
        return cast(Any, method)(self, *positional, **options)

    return call


def _check_call(
    name: str, known: Sequence[str], positional: Sequence[Any], named: Mapping[str, Any], generates: bool
) -> None:
    # What nobody knows is for `generate`, where predictions are what a model writes.
    strange = {
        key: value for key, value in named.items() if key not in known and (not generates or key in _OF_VERBS[name])
    }
    resume = positional[0] if positional else named.get("resume")
    takes_data = name == "fit" and not _is_resume(resume)
    if not takes_data and len(positional) <= len(known) and not strange and not _is_model(positional):
        return
    given = [*(shown(value) for value in positional), *(f"{key}={shown(value)}" for key, value in named.items())]
    lines = [f"{name} takes {' and '.join(known)}, got {name}({', '.join(given)})."]
    renamed = _OF_VERBS[name]
    if name != "fit" and "batch_size" in strange:
        strange["per_device_eval_batch_size"] = strange.pop("batch_size")
    lines += [f"{key} is {renamed[key]} here.{_value(key, value)}" for key, value in strange.items() if key in renamed]
    rest = {key: value for key, value in strange.items() if key not in renamed}
    if name == "fit" and (takes_data or rest or len(positional) > 1):
        lines.append(f"The model, data and arguments go to the constructor: {_construction(rest, takes_data)}.fit().")
    elif rest or _is_model(positional) or len(positional) > len(known):
        lines.append(
            f"The model and arguments go to the constructor, and labels are part of the dataset: "
            f"{_construction(rest, False)}.{name}(dataset)."
        )
    raise SignatureError(" ".join(lines))


def _construction(named: Mapping[str, Any], has_data: bool) -> str:
    """Return the call that makes the trainer for what another trainer's `fit` was given."""
    args: list[str] = []
    options = ["train_dataset=…"] if has_data else []
    for key, value in named.items():
        ours = RENAMED.get(key, key)
        if ours in CHECKS:
            args.append(f"{ours}={shown(value)}")
        else:
            options.append(f"{CONSTRUCTOR.get(key, key).partition(',')[0].partition(' ')[0]}=…")
    arguments = f"TrainingArguments({', '.join(args)})"
    return f"Trainer({', '.join(dict.fromkeys(('model', arguments, *options)))})"


def _value(name: str, value: Any) -> str:
    if name not in ("resume_from_checkpoint", "ckpt_path"):
        return ""
    if value in (None, False):
        return " Leave it out."
    return ' Give resume="auto".' if value is True or value in ("last", "best") else ""


def _is_resume(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool, int, os.PathLike, RemotePath))


def _is_model(positional: Sequence[Any]) -> bool:
    return any(isinstance(value, nn.Module) for value in positional)


def missing_member(kind: type, name: str, known: Iterable[str]) -> str:
    """Return the message for an attribute that a trainer does not have."""
    hint = f" Use {MEMBERS[name]}." if name in MEMBERS else did_you_mean(name, known)
    if name in OVERRIDES and name not in MEMBERS:
        hint = f" What you override here is {OVERRIDES[name]}."
    return f"{kind.__name__} has no attribute {name!r}.{hint}"


def check_overrides(trainer: object, base: type, verbs: Iterable[str], options: Iterable[str]) -> None:
    """Raise for methods of a subclass that nothing calls here, though they look like overrides.

    These are methods that other trainers call, misspelt verbs, events of callbacks, and what an argument of the
    constructor hides. A method that the subclass calls itself is its own.

    Raises:
        SignatureError: With what to override instead.
    """
    kind = type(trainer)
    classes = kind.__mro__[: kind.__mro__.index(base)]
    hidden = {name for name in options if vars(trainer).get(name) is None}
    own = {name: value for cls in classes for name, value in vars(cls).items() if not _is_ours(cls)}
    for name, value in own.items():
        if (instead := _instead(name, value, list(verbs), hidden, set(own))) is None or hasattr(base, name):
            continue
        if not _is_called(name, own):
            raise SignatureError(f"{kind.__name__}.{name} is never called. {instead}")


def _instead(name: str, value: Any, verbs: Sequence[str], hidden: set[str], own: set[str]) -> str | None:
    if name in hidden and not isinstance(value, property):
        return f"{name} is an argument of the constructor, which hides it: give Trainer(…, {name}=…)."
    if not inspect.isroutine(value):
        return None
    another = "If it is a method of your own, give it another name."
    if name in OVERRIDES:
        return f"Override {OVERRIDES[name]}. {another}"
    if name in EVENTS:
        return f"{name} is an event of callbacks: write it in a Callback, and give Trainer(…, callbacks=[…])."
    near = get_close_matches(name, verbs, n=1, cutoff=_NEAR)
    if not near or near[0] in own or name.startswith("_"):
        return None
    return f"Did you mean {near[0]!r}? {another}"


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("trainer_lib.")


def _is_called(name: str, own: Mapping[str, Any]) -> bool:
    """Whether another method of the subclass refers to this one."""
    others = [inspect.unwrap(value) for other, value in own.items() if other != name and callable(value)]
    return any(name in _names_in(getattr(other, "__code__", None)) for other in others)


def _names_in(code: CodeType | None) -> set[str]:
    if code is None:
        return set()
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*(_names_in(part) for part in inner))
