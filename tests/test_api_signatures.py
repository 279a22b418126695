"""The parameters, attributes and constants of Accelerate's public names are those of ours.

`api_signatures.txt` has a line for each name, as Accelerate has it; `…` stands for what the list does not say:

    module.name (parameter, other=default)      what a function, a method or the making of an object takes
    module.Class.attribute                      an attribute or a property
    module.Enum {MEMBER, OTHER}                 the members of an enum
    module.NAME = value                         a constant
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from trainer_lib import Accelerator, ParallelismConfig
from trainer_lib.data_loader import BatchSamplerShard, DataLoaderDispatcher, SkipBatchSampler
from trainer_lib.state import AcceleratorState, GradientState, PartialState

LINES = Path(__file__).with_name("api_signatures.txt").read_text().splitlines()

# Where ours differ, and why.
EXCEPTIONS = {
    "accelerator.Accelerator": "gradient_accumulation_steps=None is 1, or what the launcher says",
    "data_loader.DataLoaderAdapter": "the base class of prepared loaders; prepare_data_loader makes one",
    "data_loader.DataLoaderAdapter.adjust_state_dict_for_prefetch": "a position never counts batches read ahead",
    "data_loader.DataLoaderShard.adjust_state_dict_for_prefetch": "a position never counts batches read ahead",
    "optimizer.patch_optimizer_step": "tells a loss scaler's skipped step, which step_was_skipped says",
    "utils.InitProcessGroupKwargs": "backend=None is nccl on GPUs, gloo on CPUs, or what the launcher says",
    "utils.find_tied_parameters": "its keyword arguments are for its own recursion",
}


@pytest.fixture
def objects() -> dict[str, Any]:
    """One object of each class that has attributes of its own, by its name in the list."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    adam = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda _: 1.0)
    _, optimizer, schedule, loader = accelerator.prepare(model, adam, schedule, DataLoader(range(4)))  # type: ignore[arg-type]
    batches = BatchSampler(SequentialSampler(range(4)), 2, drop_last=False)
    return {
        "accelerator.Accelerator": accelerator,
        "state.AcceleratorState": AcceleratorState(),
        "state.GradientState": GradientState(),
        "state.PartialState": PartialState(),
        "data_loader.BatchSamplerShard": BatchSamplerShard(batches),
        "data_loader.DataLoaderDispatcher": DataLoaderDispatcher(range(4)),
        "data_loader.DataLoaderShard": loader,
        "data_loader.SkipBatchSampler": SkipBatchSampler(batches),
        "optimizer.AcceleratedOptimizer": optimizer,
        "scheduler.AcceleratedScheduler": schedule,
        "parallelism_config.ParallelismConfig": ParallelismConfig(),
    }


def test_every_name_is_as_in_accelerate(objects: dict[str, Any]) -> None:
    differences = {name: how for name, how in (compared(line, objects) for line in LINES) if how}
    assert {name: how for name, how in differences.items() if name not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) == set(differences)  # none is out of date


@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("accelerator.Accelerator.gathered", "is missing"),
        ("accelerator.Accelerator.gather (tensor, dim=0)", "has no dim"),
        ("accelerator.Accelerator.gather (tensors)", "has no tensors"),
        ("accelerator.Accelerator.reduce (tensor, scale=1.0, reduction='sum')", "order"),
        ("accelerator.Accelerator.reduce (tensor, reduction='mean', scale=1.0)", "reduction='sum'"),
        ("accelerator.Accelerator.prepare (*models)", None),
        ("accelerator.Accelerator.reduce (tensor, **kwargs)", "takes no **kwargs"),
        ("utils.RNGType {TORCH, DICE}", "has no members DICE"),
        ("utils.MODEL_NAME = 'model'", "'pytorch_model'"),
    ],
)
def test_a_difference_is_noticed(line: str, how: str | None) -> None:
    found = compared(line, {})[1]
    assert found is None if how is None else how in str(found)


def compared(line: str, objects: dict[str, Any]) -> tuple[str, str | None]:
    """Return the name in a line, and how ours differs; `None` if it does not."""
    match = re.fullmatch(r"([\w.]+)(?: (?:\((.*)\)|\{(.*)\}|= (.*)))?", line)
    assert match is not None, line
    name, arguments, members, constant = match.groups()
    try:
        value = object_named(name, objects)
    except AttributeError:
        return name, "is missing"
    if (getattr(value, "__doc__", None) or "").startswith("Not available: "):
        return name, None
    if members is not None:
        missing = [member for member in members.split(", ") if member not in value.__members__]
        return name, f"has no members {', '.join(missing)}" if missing else None
    if constant is not None:
        return name, None if constant in ("…", repr(value)) else f"is {value!r}"
    return name, None if arguments is None else signature_difference(value, arguments)


def object_named(name: str, objects: dict[str, Any]) -> Any:
    module, first, *rest = name.split(".")
    value = getattr(importlib.import_module(f"trainer_lib.{module}"), first)
    if rest and not (value.__doc__ or "").startswith("Not available: "):
        value = getattr(objects.get(f"{module}.{first}", value), rest[0])
    return value


def signature_difference(value: Any, arguments: str) -> str | None:
    """Return how a signature differs from what Accelerate's callers may pass, by position or by name."""
    theirs = [part.partition("=") for part in re.findall(r"(?:[^,'{(\[]|'[^']*'|\(.*?\)|\[.*?\]|\{.*?\})+", arguments)]
    names = [name.strip() for name, _, _ in theirs]
    if names == ["*args", "**kwargs"]:  # a decorator of theirs hides what it takes
        return None
    ours = {name: one for name, one in inspect.signature(value).parameters.items() if name != "self"}
    kinds = {parameter.kind for parameter in ours.values()}
    # What follows *args is passed by name.
    first_named = next((index for index, name in enumerate(names) if name.startswith("*")), len(names))
    expected = [name for name in names[:first_named] if name != "…"]
    in_order = [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    for name, is_given, default in ((name, *rest) for name, (_, *rest) in zip(names, theirs, strict=True)):
        if name.startswith("**"):
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                return f"takes no {name}"
        elif name.startswith("*"):
            if inspect.Parameter.VAR_POSITIONAL not in kinds:
                return f"takes no {name}"
        elif name not in ours and name != "…":
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                return f"has no {name}"
        elif is_given and default != "…" and repr(ours[name].default) != default:
            return f"has {name}={ours[name].default!r}"
    return None if in_order[: len(expected)] == expected else f"has the order {in_order}"
