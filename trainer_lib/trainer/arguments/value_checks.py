"""Checks of argument values, which return each value in the form that is stored.

Each check takes the name and the value. NumPy's numbers become Python's, paths and intervals become texts, so that
arguments can be written to a file and read back unchanged.
"""

import contextlib
import math
import os
import re
import signal
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, cast

from trainer_lib.filesystem.remote_paths import RemotePath, is_url, path_at
from trainer_lib.foundation.duration import NEVER, Every
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.options.base import check_flag
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.recompute_policy import check_policy
from trainer_lib.processes.exit_codes import REQUESTS
from trainer_lib.trainer.arguments.type_hints import choices, has_fields, members
from trainer_lib.trainer.huggingface.argument_conversion import convert, explain
from trainer_lib.trainer.optim.optimizers import optimizer_names
from trainer_lib.trainer.optim.schedules import NAMES as SCHEDULES
from trainer_lib.trainer.optim.schedules import unknown_schedule

Check = Callable[[str, Any], Any]

AUTO = "auto"

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_ALSO_NEVER = ("no", "none", "off", "false", NEVER)


def check_for(hint: Any) -> Check | None:
    """Return the check that a type implies, without that for `None`; `None` if the type does not say enough.

    Example:
        >>> check_for(typing.Literal["raise", "skip"])("on_error", "raise")
        'raise'
    """
    kinds = [kind for kind in members(hint) if kind is not NoneType]
    if known := choices(hint):
        return choice(*known) if len(kinds) == 1 else None
    if len(kinds) != 1:
        return None
    if has_fields(kinds[0]):
        return instance(kinds[0])
    of_lists = [items for items in typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) in (list, Sequence)]
    if of_lists and has_fields(of_lists[0]):
        return instances(of_lists[0])
    return _BY_TYPE.get(kinds[0])


def whole(at_least: int = 1, below: float = math.inf, hint: str = "") -> Check:
    """Whole numbers of at least `at_least`."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, Integral) and not isinstance(value, bool) and at_least <= int(value) < below:
            return int(value)
        allowed = f"a whole number of at least {at_least}" + ("" if below == math.inf else f" and below {below}")
        converted = _to_number(value)
        fits = converted is not None and converted == int(converted) and at_least <= converted < below
        suggestion = (
            f" Give {name}={int(converted)}." if converted is not None and fits else _by_unit(name, value) or hint
        )
        raise _refusal(name, value, allowed, suggestion)

    return check


def count_or_share(hint: str = "") -> Check:
    """Whole numbers of at least 1, or shares between 0 and 1."""

    def check(name: str, value: Any) -> int | float:
        exact = _number(value)
        if isinstance(value, Integral) and exact is not None and exact >= 1:
            return int(value)
        if exact is not None and 0 < exact < 1:
            return float(exact)
        raise _refusal(name, value, "a whole number of at least 1, or a share between 0 and 1", hint)

    return check


def number(at_least: float | None = None, above: float | None = None, hint: str = "") -> Check:
    """Finite numbers of at least `at_least`, or above `above`."""
    allowed = f"a finite number of at least {at_least}" if above is None else f"a finite number above {above}"

    def fits(value: float) -> bool:
        return value < math.inf and (value > above if above is not None else value >= (at_least or 0))

    def check(name: str, value: Any) -> float:
        if (exact := _number(value)) is not None and fits(exact):
            return value if isinstance(value, int) else float(value)
        converted = _to_number(value) if isinstance(value, str) else None
        can_convert = converted is not None and fits(converted)
        suggestion = f" Give {name}={converted:g}." if can_convert else _by_unit(name, value) or hint
        raise _refusal(name, value, allowed, suggestion)

    return check


def share(name: str, value: Any) -> float:
    """Numbers between 0 and 1."""
    if (exact := _number(value)) is not None and 0 < exact < 1:
        return float(value)
    raise _refusal(name, value, "a number between 0 and 1", " A tenth is 0.1.")


def flag(name: str, value: Any) -> bool:
    """True or false."""
    spellings = {
        "true": True,
        "yes": True,
        "on": True,
        "1": True,
        "false": False,
        "no": False,
        "off": False,
        "0": False,
    }
    if not isinstance(value, bool) and str(value).lower() in spellings:
        raise _refusal(name, value, "True or False", f" Give {name}={spellings[str(value).lower()]}.")
    check_flag(name, value)
    return value


def text(name: str, value: Any) -> str:
    """Texts that are not blank."""
    if not isinstance(value, str) or not value.strip():
        raise _refusal(name, value, "a text that is not blank")
    return str(value)


def folder_name(name: str, value: Any) -> str:
    """Texts that can be part of a folder's name."""
    kept = text(name, value)
    if any(character in kept for character in "/\\\0"):
        raise _refusal(name, value, "part of a folder's name, without slashes", " Give the path as output_dir.")
    return kept


def name_of(argument: str) -> Check:
    """Names of something that the Trainer also takes as an object."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise _refusal(name, value, "a name", f" Give an object to the Trainer: Trainer(…, {argument}=…).")
        return str(value)

    return check


def texts(name: str, value: Any) -> list[str]:
    """Lists of texts."""
    if isinstance(value, str):
        raise _refusal(name, value, "a list of texts", f" Give {name}=[{shown(value)}].")
    if not isinstance(value, Sequence) or not all(isinstance(item, str) and item for item in value):
        raise _refusal(name, value, "a list of texts")
    return [str(item) for item in value]


def keywords(name: str, value: Any) -> dict[str, Any]:
    """Dicts from names to values."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _refusal(name, value, "a dict of arguments by name")
    return {key: _lists(item) for key, item in value.items()}


def choice(*known: str) -> Check:
    """One of some texts."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or str(value) not in known:
            raise ConfigurationError(unknown(name, str(value) if isinstance(value, str) else value, known))
        return str(value)

    return check


def instance(expected: type, or_flag: bool = False) -> Check:
    """Objects of a class, or a flag: True for a default object, False for none."""

    def check(name: str, value: Any) -> Any:
        if isinstance(value, expected) or (or_flag and isinstance(value, bool)):
            return value
        allowed = f"a {expected.__name__}" + (", True or False" if or_flag else "")
        hint = f" Give {name}={expected.__name__}(**{shown(value)})." if isinstance(value, Mapping) else ""
        raise _refusal(name, value, allowed, hint)

    return check


def instances(expected: type) -> Check:
    """Lists of objects of a class."""

    def check(name: str, value: Any) -> list[Any]:
        if isinstance(value, expected):
            raise _refusal(name, value, f"a list of {expected.__name__}", f" Give {name}=[…].")
        if not isinstance(value, Sequence) or not all(isinstance(item, expected) for item in value):
            raise _refusal(name, value, f"a list of {expected.__name__}")
        return list(value)

    return check


def parameter_groups(name: str, value: Any) -> list[Any]:
    """Lists of `ParameterGroup`."""
    if isinstance(value, (list, tuple)) and not value:
        return []
    from trainer_lib.trainer.optim.parameter_groups import ParameterGroup

    return instances(ParameterGroup)(name, value)


def recompute_policy(name: str, value: Any) -> str | list[str]:
    """A policy of activation checkpointing by name, or the names of operations."""
    if not isinstance(value, str) and not (isinstance(value, Sequence) and all(isinstance(v, str) for v in value)):
        raise _refusal(
            name,
            value,
            '"matmul", "attention", or a list of names such as ["aten.mm"]',
            " A function goes to the engine: Accelerator(kwargs_handlers=[MemoryKwargs(…)]).",
        )
    check_policy(name, value)
    return value if isinstance(value, str) else list(value)


def path(name: str, value: Any) -> str:
    """Paths."""
    if isinstance(value, RemotePath):
        return str(value)
    if not isinstance(value, (str, os.PathLike)) or not str(value).strip():
        raise _refusal(name, value, "a path")
    return os.fspath(value)


def folder(name: str, value: Any) -> str:
    """Paths and URLs of folders, which may not exist yet."""
    kept = path(name, value)
    path_at(kept)
    if not is_url(kept) and path_at(kept).is_file():
        raise ConfigurationError(f"{name}={kept!r} is a file. Give a folder; it is created if it does not exist.")
    return kept


def device_map(name: str, value: Any) -> str | dict[str, int | str]:
    """The name of a device map, or the device of each module by name."""
    from trainer_lib.device_map import MAPS

    if isinstance(value, str):
        return choice(*MAPS)(name, value)
    if not isinstance(value, Mapping) or not value:
        raise _refusal(name, value, f"one of {', '.join(MAPS)}, or the devices of modules by name")
    return {str(module): _device(f"{name}[{module!r}]", device) for module, device in cast("Any", value).items()}


def memory_limits(name: str, value: Any) -> dict[int | str, int | str]:
    """How much memory of each device may be used."""
    from trainer_lib.foundation.byte_sizes import convert_file_size_to_int

    if not isinstance(value, Mapping) or not value:
        raise _refusal(name, value, 'the memory of each device, such as {0: "10GB", "cpu": "30GB"}')
    limits = {_device(f"{name}'s key", device): limit for device, limit in cast("Any", value).items()}
    for device, limit in limits.items():
        if isinstance(limit, str):
            convert_file_size_to_int(limit)
        elif isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 0:
            raise _refusal(f"{name}[{device!r}]", limit, 'a number of bytes, or a text such as "10GB"')
    return limits


def _device(name: str, value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, (Integral, str)):
        raise _refusal(name, value, "the index of an accelerator, 'cpu' or 'disk'")
    return int(value) if not isinstance(value, str) or value.isdecimal() else value


def resume(name: str, value: Any) -> str:
    """Whether to resume an earlier run, and which one."""
    if isinstance(value, bool):
        raise _refusal(name, value, '"never", "auto" or a path', f' Give {name}="{"auto" if value else NEVER}".')
    kept = path(name, value)
    if kept.lower() in ("latest", "last", "newest", "true") and not Path(kept).exists():
        raise _refusal(name, value, '"never", "auto" or a path', f' Give {name}="auto" to resume the newest run.')
    return kept


def interval(name: str, value: Any) -> str | int | float:
    """How often: amounts of training, or "never"."""
    if isinstance(value, str) and value == NEVER:
        return NEVER
    if value is None or value is False or (isinstance(value, str) and value.lower() in _ALSO_NEVER):
        raise ConfigurationError(f'{name}={shown(value)} is not an interval. To turn it off, give {name}="{NEVER}".')
    return _amount_of_training(name, value)


def intervals(name: str, value: Any) -> str | int | float | dict[str, str | int | float]:
    """How often: one interval, or intervals by the names of evaluation sets."""
    if not isinstance(value, Mapping):
        return interval(name, value)
    by_set = cast("Mapping[Any, Any]", value)
    if not by_set or not all(isinstance(key, str) for key in by_set):
        raise _refusal(name, value, 'an interval, or intervals by the names of sets, such as {"dev": "100 steps"}')
    kept = {key: interval(f"{name}[{key!r}]", every) for key, every in by_set.items()}
    if all(every == NEVER for every in kept.values()):
        raise ConfigurationError(f'{name}={shown(value)} evaluates no set. Give {name}="{NEVER}".')
    return kept


def amount(name: str, value: Any) -> str | int | float:
    """How often: amounts of training, except tokens."""
    kept = _amount_of_training(name, value)
    if Every.parse(value, name).unit == "tokens":
        raise ConfigurationError(
            f"{name}={shown(value)}: only max_tokens, log_every, eval_every and save_every count tokens. Give steps, "
            "epochs, samples or a time."
        )
    return kept


def tokens(name: str, value: Any) -> str | int:
    """Numbers of tokens."""
    return value if isinstance(value, str) and read_tokens(name, value) else read_tokens(name, value)


def read_tokens(name: str, value: Any) -> int:
    """Return a number of tokens: "10B", "500_000 tokens" or a whole number."""
    if isinstance(value, str):
        amount_text = value.strip()
        has_unit = amount_text.lower().endswith(("token", "tokens"))
        every = Every.parse(amount_text if has_unit else f"{amount_text} tokens", name)
        return int(every.amount)
    return whole()(name, value)


def _amount_of_training(name: str, value: Any) -> str | int | float:
    if isinstance(value, str) and value.lower().removesuffix("s") in ("epoch", "step"):
        raise ConfigurationError(
            f'{name}={shown(value)} has no number. Give {name}="1 {value.lower().removesuffix("s")}".'
        )
    every = Every.parse(value, name)
    return value if isinstance(value, (str, int)) else str(every)


def counted_amount(name: str, value: Any) -> str | int | float:
    """Amounts of training that are the same on every rank: not time."""
    kept = amount(name, value)
    if Every.parse(value, name).unit == "seconds":
        raise _refusal(name, value, 'an amount of training, such as "500 steps" or "2 epochs", and not a time')
    return kept


def duration(name: str, value: Any) -> str | float:
    """How long: seconds, a text, or a `timedelta`."""
    read_duration(name, value)
    if isinstance(value, timedelta):
        return str(Every.parse(value, name))
    return value if isinstance(value, (str, int)) else float(value)


def read_duration(name: str, value: Any) -> float:
    """Return the seconds of a duration."""
    if not isinstance(value, (str, Real, timedelta, Every)):
        hint = f" Give timedelta({', '.join(f'{unit}=…' for unit in value)})." if isinstance(value, Mapping) else ""
        raise _refusal(name, value, 'a time, such as "90 minutes", "1-12:00:00", 3600 or a timedelta', hint)
    seconds = _number(value)
    every = Every(seconds, "seconds") if seconds is not None and 0 < seconds < math.inf else Every.parse(value, name)
    if every.unit != "seconds":
        raise ConfigurationError(
            f'{name}={shown(value)} is not a time. Give one, such as "90 minutes", "1-12:00:00" or 3600.'
        )
    return float(every.amount)


def moment(name: str, value: Any) -> str | float:
    """A point in time, or "auto"."""
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    if isinstance(value, timedelta) or (isinstance(value, str) and _is_duration(value)):
        raise ConfigurationError(
            f"{name}={shown(value)} is a duration. Give it as max_time, or give a point in time: datetime.now() + …."
        )
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            datetime.fromisoformat(value)
            return value
    elif isinstance(value, datetime):
        return value.isoformat()
    elif (seconds := _number(value)) is not None and 0 < seconds < math.inf:
        return value if isinstance(value, int) else seconds
    raise _refusal(name, value, 'a date and time such as "2030-01-31T18:00", seconds since 1970, or "auto"')


def signals(name: str, value: Any) -> list[str]:
    """Names of signals that a process can catch."""
    if isinstance(value, (str, int)):
        raise _refusal(name, value, "a list of signals", f" Give {name}=[{shown(value)}].")
    if not isinstance(value, Iterable):
        raise _refusal(name, value, "a list of signals")
    return list(dict.fromkeys(_signal(name, item) for item in value))


def _signal(name: str, value: Any) -> str:
    kept = value.upper() if isinstance(value, str) else value
    if isinstance(value, Integral) and not isinstance(value, bool):
        kept = next((known.name for known in signal.Signals if known == value), value)
    if isinstance(kept, str) and not kept.startswith("SIG"):
        kept = f"SIG{kept}"
    if kept in ("SIGKILL", "SIGSTOP"):
        raise ConfigurationError(f"{name}: {kept} cannot be caught by a program. Leave it out.")
    if kept not in REQUESTS:
        raise ConfigurationError(unknown(name, value, REQUESTS))
    return str(kept)


def _is_duration(text: str) -> bool:
    with contextlib.suppress(ConfigurationError):
        return Every.parse(text).unit == "seconds"
    return False


def warmup(name: str, value: Any) -> str | int | float:
    """How long to warm up: steps, or a fraction of all steps."""
    read_warmup(name, value)
    if isinstance(value, (str, int)):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def read_warmup(name: str, value: Any) -> int | float:
    """Return a number of steps as an `int`, or a fraction of all steps as a `float` below 1."""
    exact = _number(value)
    if exact is not None and isinstance(value, Integral) and exact >= 0:
        return int(value)
    if exact is not None and not isinstance(value, Integral) and 0 <= exact < 1:
        return exact
    if isinstance(value, str):
        if value.strip().endswith("%"):
            percent = _to_number(value.strip()[:-1])
            if percent is not None and 0 <= percent < 100:
                return percent / 100
        else:
            every = Every.parse(value, name)
            if every.unit == "steps":
                return int(every.amount)
    raise ConfigurationError(
        f'{name}={shown(value)} is not a warm-up. Give steps ("100 steps" or 100), or a fraction of all steps below 1 '
        '(0.05 or "5%").'
    )


def warmup_steps(warmup: int | float | str | None, total_steps: int | None) -> int:
    """Return the number of steps of a warm-up, in a run of `total_steps` steps.

    Raises:
        ConfigurationError: If the warm-up is a fraction of the steps and these are unknown.
    """
    length = 0 if warmup is None else read_warmup("warmup", warmup)
    if isinstance(length, int):
        return length
    if total_steps is None:
        raise ConfigurationError(
            f"warmup={warmup!r} is a fraction of all steps, and their number is unknown. Give max_steps or "
            'schedule_steps, or a warm-up in steps, such as "100 steps".'
        )
    # Rounded first: 0.1 * 30 is a little more than 3.
    return math.ceil(round(length * total_steps, 6))


def optimizer_name(name: str, value: Any) -> str:
    """Names of optimizers, and dotted paths."""
    kept = name_of("optimizer")(name, value)
    # These pass here: building the optimizer refuses them with a reason.
    if "." in kept or kept.lower() in (*optimizer_names(), "lbfgs"):
        return kept
    raise ConfigurationError(_hugging_face_hint("optim", kept, name) or _unknown_name(name, kept, optimizer_names()))


def schedule_name(name: str, value: Any) -> str:
    """Names of learning rate schedules, and dotted paths."""
    kept = name_of("scheduler")(name, value)
    if "." in kept or kept in SCHEDULES:
        return kept
    raise ConfigurationError(_hugging_face_hint("lr_scheduler_type", kept, name) or unknown_schedule(kept))


def precision(name: str, value: Any) -> str:
    """Names of precisions."""
    from trainer_lib.options.precision_options import check_precision

    return check_precision(value, name)


def sharding(name: str, value: Any) -> Any:
    """Whether to shard the model with FSDP2, and how."""
    if isinstance(value, (str, list)):  # Hugging Face's form
        raise ConfigurationError(explain({name: value})[0])
    return instance(FullyShardedDataParallelPlugin, or_flag=True)(name, value)


def deepspeed(name: str, value: Any) -> Any:
    """DeepSpeed's config: a path, a dict or a plugin."""
    from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin

    if isinstance(value, os.PathLike):
        value = os.fspath(cast("os.PathLike[str]", value))
    if isinstance(value, Mapping):
        value = dict(cast(Mapping[str, Any], value))
    if not isinstance(value, DeepSpeedPlugin):
        if not isinstance(value, (str, dict)):
            raise _refusal(name, value, "the path of a JSON file, a dict or a DeepSpeedPlugin")
        DeepSpeedPlugin(value)  # raises for what is wrong in it
    return value


def compilation(name: str, value: Any) -> Any:
    """Whether to compile the model, and how."""
    if isinstance(value, (bool, TorchDynamoPlugin)):
        return value
    if not isinstance(value, str) or not value.strip():
        raise _refusal(name, value, "True, False, the name of a backend or a TorchDynamoPlugin")
    if value in _MODES:
        raise ConfigurationError(
            f"{name}={shown(value)} is a mode, not a backend. "
            f'Give {name}=TorchDynamoPlugin(backend="inductor", mode="{value}").'
        )
    TorchDynamoPlugin(backend=value)  # raises for backends that torch has removed
    return value


def batch_size(name: str, value: Any) -> int | str:
    """Batch sizes, or "auto"."""
    if isinstance(value, str) and value.lower() == AUTO:
        return AUTO
    return whole(hint=f' Give {name}="auto" to take what fits into memory.' if isinstance(value, str) else "")(
        name, value
    )


def worker_count(name: str, value: Any) -> int | str:
    """A number of workers, or "auto"."""
    return value if value == AUTO else whole(at_least=0, hint=f' Give {name}="auto" to measure.')(name, value)


def eval_batch_size(name: str, value: Any) -> int:
    """Batch sizes of evaluations."""
    if isinstance(value, str) and value.lower() == AUTO:
        raise ConfigurationError(
            f"{name}={shown(value)} is not supported: an evaluation splits a batch that does not fit into memory by "
            "itself. Give a number, or leave it out."
        )
    return whole()(name, value)


def reports(name: str, value: Any) -> tuple[str, ...]:
    """Names of trackers; "all" for those that are installed and configured."""
    names: Any = [value] if isinstance(value, str) else value
    if isinstance(names, (bytes, Mapping)) or not isinstance(names, Iterable):
        raise _refusal(name, value, "the name of a tracker, or a list of names")
    names = list(names)
    if not names or names == ["none"]:
        return ()
    if "none" in names:
        raise _refusal(name, value, 'names of trackers, or "none" alone')
    from trainer_lib.tracking.registry import ALL, canonical

    names = [ALL if tracker == ALL else canonical(tracker) for tracker in names]
    repeated = next((tracker for tracker in names if names.count(tracker) > 1), None)
    if repeated is not None:
        raise ConfigurationError(f"{name} has the tracker {repeated!r} twice. Give it once.")
    return tuple(names)


_WEIGHTS = "finite numbers of at least 0, one for each sample and not all 0"


def weights(name: str, value: Any) -> list[float]:
    """One weight for each sample."""
    if not isinstance(value, (str, bytes, Mapping)) and hasattr(value, "tolist"):
        value = value.tolist()  # a tensor or an array
    is_sequence = not isinstance(value, (str, bytes, Mapping)) and isinstance(value, Iterable)
    kept = list(value) if is_sequence else []
    numbers: list[float] = []
    for index, weight in enumerate(kept):
        exact = _number(weight)
        if exact is None or not 0 <= exact < math.inf:
            raise ConfigurationError(f"{name} must be {_WEIGHTS}, got {shown(weight)} for sample {index}.")
        numbers.append(exact)
    if not any(numbers):
        got = f"{len(kept)} of them that are 0" if kept else shown(value)
        raise ConfigurationError(f"{name} must be {_WEIGHTS}, got {got}.")
    return numbers


def _hugging_face_hint(theirs: str, value: str, ours: str) -> str | None:
    """Return what to give instead of a name of Hugging Face's; `None` if it is not one of theirs either."""
    converted, _ = convert({theirs: value}, set())
    return None if converted.get(ours, value) == value else explain({theirs: value})[0]


def _unknown_name(name: str, value: str, known: Iterable[str]) -> str:
    return unknown(name, value, known) + " Or give a dotted path."


def _refusal(name: str, value: Any, allowed: str, hint: str = "") -> ConfigurationError:
    return ConfigurationError(f"{name} must be {allowed}, got {shown(value)}.{hint}")


def _by_unit(name: str, value: Any) -> str:
    """Return which limit to give for a text such as Composer's "500ba" or "10ep"."""
    limits = {"b": "max_steps", "s": "max_steps", "e": "num_train_epochs"}
    found = re.fullmatch(r"([0-9]+)\s*(ba|batch(?:es)?|steps?|ep|epochs?)", value) if isinstance(value, str) else None
    return f" Give {limits[found[2][0]]}={found[1]}." if found and name in limits.values() else ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def _to_number(value: Any) -> float | None:
    """Return a text or a number as a finite float; `None` if it is neither."""
    if isinstance(value, bool) or not isinstance(value, (str, Real)):
        return None
    try:
        converted = float(value)
    except ValueError:
        return None
    return converted if math.isfinite(converted) else None


def _lists(value: Any) -> Any:
    """Return a nested value with lists instead of tuples, as files hold it."""
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return {key: _lists(item) for key, item in value.items()} if isinstance(value, dict) else value


_BY_TYPE: dict[Any, Check] = {
    bool: flag,
    str: text,
    list[str]: texts,
    Sequence[str]: texts,
    dict[str, Any]: keywords,
    Mapping[str, Any]: keywords,
}
