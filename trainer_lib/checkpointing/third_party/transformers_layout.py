"""A Trainer's checkpoint in the layout of Hugging Face's Trainer: its `checkpoint-N`."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trainer_lib.checkpointing.format.layout import ENGINE_NAME, SAMPLER_NAME
from trainer_lib.checkpointing.third_party.exported_state import numbered_state, transformers_generators
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.tensor_files.file_contents import Content, Json, Pickled
from trainer_lib.tensor_files.weights_index import weight_files

# Names of the parameters that transformers' Trainer excludes from weight decay, besides those of LayerNorm.
NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")

_CONTROL = ("should_epoch_stop", "should_evaluate", "should_log", "should_save", "should_training_stop")

NOT_SAVED = {
    SAMPLER_NAME: "transformers skips the batches of the epoch by the number of steps; its shuffled order is its own "
    "(from seed and epoch)",
    ENGINE_NAME: "transformers does not save the gradients of an unfinished accumulation window",
    "training_args.bin": "a pickled class: give transformers.TrainingArguments again",
}


def transformers_files(
    weights: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    scheduler: Mapping[str, Any],
    scaler: Any,
    generators: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> dict[str, Content]:
    """Return the files of a checkpoint.

    Args:
        weights: The weights of the model.
        optimizer: The state of the optimizer, by names.
        scheduler: The state of the schedule.
        scaler: The state of the loss scaler; `None` without one.
        generators: The generators of each rank.
        run: The counts of the run.
        arguments: The arguments of the run.
    """
    grouped = _in_two_groups(optimizer, weights)
    count = len(grouped["param_groups"])
    files = weight_files({name: value for name, value in weights.items() if isinstance(value, Tensor)}, "50GB")
    files["optimizer.pt"] = Pickled(numbered_state(grouped))
    files["scheduler.pt"] = Pickled(_of_groups(scheduler, count))
    if scaler is not None:
        files["scaler.pt"] = Pickled(scaler)
    for rank, state in enumerate(generators):
        name = "rng_state.pth" if len(generators) == 1 else f"rng_state_{rank}.pth"
        files[name] = Pickled(transformers_generators(state, rank, len(generators)))
    return files | {"trainer_state.json": Json(_trainer_state(run) | _settings(arguments), is_indented=True)}


def _in_two_groups(optimizer: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with the groups of transformers: parameters with weight decay, and those without."""
    groups: list[dict[str, Any]] = [
        {key: value for key, value in group.items() if key != "name"} for group in optimizer["param_groups"]
    ]
    if len(groups) == 1:
        decayed = [name for name in groups[0]["params"] if _decays(name, weights)]
        others = [name for name in groups[0]["params"] if name not in set(decayed)]
        groups = [{**groups[0], "params": decayed}, {**groups[0], "params": others, "weight_decay": 0.0}]
    rates: set[float] = {float(group["lr"]) for group in groups}
    if len(groups) != 2 or len(rates) != 1 or groups[1].get("weight_decay"):
        raise UnsupportedError(
            f"The optimizer has {len(groups)} parameter groups with the learning rates "
            f"{', '.join(map(str, sorted(rates)))}, and transformers' Trainer makes two that differ in weight decay "
            "alone. Convert with --to accelerate, or give transformers.Trainer the weights and an optimizer of yours."
        )
    return {**optimizer, "param_groups": groups}


def _decays(name: str, weights: Mapping[str, Any]) -> bool:
    stem = name.rpartition(".")[0]
    weight = weights.get(name)
    # A LayerNorm has a bias and no running statistics.
    is_layer_norm = (
        weight is not None and weight.ndim == 1 and f"{stem}.bias" in weights and f"{stem}.running_mean" not in weights
    )
    return not is_layer_norm and not NOT_DECAYED.search(name.lower())


def _of_groups(scheduler: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the state of a schedule for so many groups, which all have the same rate."""
    state = dict(scheduler)
    for name in ("base_lrs", "_last_lr", "lr_lambdas"):
        if isinstance(state.get(name), list):
            state[name] = (state[name] * count)[:count]
    return state


def _trainer_state(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of transformers' `TrainerState`."""
    best = run.get("best")
    length = run.get("steps_per_epoch")
    done = run["steps_in_epoch"] / length if length else 0.0
    history = [
        {name: value for name, value in entry.items() if isinstance(value, (int, float)) and math.isfinite(value)}
        for entry in run["history"]
    ]
    return {
        "epoch": run["epoch"] + done,
        "global_step": run["step"],
        "max_steps": run.get("max_steps") or 0,
        "num_train_epochs": math.ceil(run.get("max_epochs") or 0),
        "num_input_tokens_seen": run.get("tokens") or 0,
        "log_history": history,
        "best_metric": None if best is None else best["value"],
        "best_global_step": None if best is None else best["step"],
        # The next save of transformers' Trainer needs the entry.
        "stateful_callbacks": {"TrainerControl": {"args": dict.fromkeys(_CONTROL, False), "attributes": {}}},
    }


def _settings(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the batch size and the intervals in steps, which transformers' Trainer takes from a checkpoint."""
    names = {"logging_steps": "log_every", "eval_steps": "eval_every", "save_steps": "save_every"}
    intervals = {name: str(arguments.get(ours)).removesuffix("steps").strip() for name, ours in names.items()}
    steps = {name: int(text) for name, text in intervals.items() if text.isdigit()}
    return {"train_batch_size": int(arguments.get("per_device_train_batch_size") or 1), **steps}
