"""Conversions of Hugging Face's training arguments that have another name or form in this library.

Arguments that are neither in this table nor in `foreign_names` have the same name and meaning.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from trainer_lib.foundation.duration import NEVER
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.trainer.optim.optimizer_packages import PATHS


class Made:
    """An object in a conversion's result, shown as the call that makes it.

    Args:
        kind: Its class.
        **options: The arguments of its constructor.
    """

    kind: type
    options: dict[str, Any]

    def __init__(self, kind: type, **options: Any) -> None:
        self.kind, self.options = kind, options

    def __repr__(self) -> str:
        """Return the call."""
        return f"{self.kind.__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def make(self) -> Any:
        """Return the object."""
        return self.kind(**self.options)


# Takes Hugging Face's arguments by name; returns this library's by name, or a text: why there is no equivalent.
Conversion = Callable[[Mapping[str, Any]], dict[str, Any] | str]

OTHER_FORM: dict[tuple[str, ...], Conversion] = {}


def _form(*names: str) -> Callable[[Conversion], Conversion]:
    def enter(conversion: Conversion) -> Conversion:
        OTHER_FORM[names] = conversion
        return conversion

    return enter


def _rename(name: str, ours: str) -> None:
    OTHER_FORM[(name,)] = lambda arguments: {ours: arguments[name]}


for _name, _ours in {
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "no_cuda": "use_cpu",
    "full_determinism": "deterministic",
    "load_best_model_at_end": "load_best_at_end",
    "dataloader_drop_last": "drop_last",
    "dataloader_num_workers": "num_workers",
    "dataloader_pin_memory": "pin_memory",
    "dataloader_persistent_workers": "persistent_workers",
    "dataloader_prefetch_factor": "prefetch_factor",
    "length_column_name": "length_column",
    "sortish_sampler": "group_by_length",
}.items():
    _rename(_name, _ours)


def _interval(strategy: Any, steps: Any, arguments: Mapping[str, Any]) -> str:
    """Return an interval from the two arguments that Hugging Face has for it, and those for the length of the run."""
    strategy = str(strategy).lower()
    if strategy == "no":
        return NEVER
    if strategy in ("epoch", "epochs"):
        return "1 epoch"
    if not isinstance(steps, (int, float)) or not 0 < steps < 1:
        return _steps(steps)
    if arguments.get("max_steps", -1) > 0:  # a fraction of all steps
        return _steps(math.ceil(arguments["max_steps"] * steps))
    epochs = f"{steps * arguments.get('num_train_epochs', 3.0):g}"
    return f"{epochs} epoch{'' if epochs == '1' else 's'}"


def _steps(count: Any) -> str:
    count = int(count) if isinstance(count, float) and count == int(count) else count
    return f"{count} step{'' if count == 1 else 's'}"


@_form("logging_strategy", "logging_steps")
def _logging(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    strategy, steps = arguments.get("logging_strategy", "steps"), arguments.get("logging_steps", 500)
    return {"log_every": _interval(strategy, steps, arguments)}


@_form("eval_strategy", "eval_steps", "evaluation_strategy", "eval_delay")
def _evaluating(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    strategy = arguments.get("eval_strategy", arguments.get("evaluation_strategy", "steps"))
    steps = arguments.get("eval_steps")
    interval = _interval(strategy, 500 if steps is None else steps, arguments)
    if not arguments.get("eval_delay") or interval == NEVER:
        return {"eval_every": interval}
    unit = "epochs" if str(getattr(strategy, "value", strategy)).lower() == "epoch" else "steps"
    return {"eval_every": interval, "eval_delay": f"{arguments['eval_delay']:g} {unit}"}


@_form("save_strategy", "save_steps")
def _saving(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    strategy = str(arguments.get("save_strategy", "steps")).lower()
    if strategy in ("best", "no"):
        return {"save_every": NEVER, "keep_best": int(strategy == "best")}  # 1 saves each new best model
    return {"save_every": _interval(strategy, arguments.get("save_steps", 500), arguments)}


@_form("save_total_limit")
def _retention(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    limit = arguments["save_total_limit"]
    return {"keep_last": limit if limit is None or limit > 0 else None}  # 0 keeps all there


@_form("metric_for_best_model", "greater_is_better")
def _best(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    metric = arguments.get("metric_for_best_model")
    if metric is None:
        return "it has no effect without metric_for_best_model, in either library"
    named = {"metric_for_best": metric if str(metric).startswith("eval_") else f"eval_{metric}"}
    return named | {name: arguments[name] for name in ("greater_is_better",) if arguments.get(name) is not None}


@_form("warmup_steps", "warmup_ratio")
def _warmup(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    # As in transformers: steps take precedence over a ratio, and a number of steps below 1 is a ratio.
    value = arguments.get("warmup_steps") or arguments.get("warmup_ratio") or 0
    schedule = str(arguments.get("lr_scheduler_type"))
    if value and schedule in ("constant", "reduce_lr_on_plateau"):
        return f'it has no effect with lr_scheduler_type="{schedule}" there'
    return {"warmup": _steps(value) if value >= 1 else float(value) or None}


_SCHEDULES = {
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "reduce_lr_on_plateau": "plateau",
    "cosine_with_min_lr": "cosine",
}
# Schedules with other rates than ours, and options that ours lack: functions of transformers, which take their options.
_OF_TRANSFORMERS = {
    "cosine_warmup_with_min_lr": "transformers.get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    "warmup_stable_decay": "transformers.get_wsd_schedule",
}
_SCHEDULE_OPTIONS = {
    "min_lr_rate": "min_ratio",
    "min_lr_ratio": "min_ratio",
    "num_decay_steps": "decay_steps",
    "decay_type": "decay",
}
_NO_WSD_OPTIONS = ("num_stable_steps", "warmup_type", "num_cycles")


@_form("lr_scheduler_type", "lr_scheduler_kwargs")
def _schedule(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    name, options = str(arguments.get("lr_scheduler_type", "linear")), dict(arguments.get("lr_scheduler_kwargs") or {})
    ours = _SCHEDULES.get(name, name)
    if name == "greedy":
        return "there is no schedule 'greedy'; give a schedule object: Trainer(…, scheduler=…)"
    if name in _OF_TRANSFORMERS and (ours != "wsd" or not options.keys().isdisjoint(_NO_WSD_OPTIONS)):
        return {"lr_scheduler": _OF_TRANSFORMERS[name], "lr_scheduler_kwargs": options}
    if ours == "cosine" and options.get("min_lr") is not None:
        options["min_lr_rate"] = options.pop("min_lr") / arguments.get("learning_rate", 5e-5)
    if ours == "wsd":
        options.setdefault("decay_type", "cosine")  # the default of transformers
    options = {_SCHEDULE_OPTIONS.get(option, option): value for option, value in options.items() if value is not None}
    return {"lr_scheduler": ours, "lr_scheduler_kwargs": options} if options else {"lr_scheduler": ours}


_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adafactor": "transformers.Adafactor",  # torch's scales each update by the size of the weights
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
    # Schedule-free ones need a constant schedule, and low-rank ones train other matrices there.
    **{
        name: name for name in PATHS if not name.startswith(("schedule_free", "galore", "apollo", "muon", "adamw_bf16"))
    },
}
_UPDATES_IN_BACKWARD = ("lomo", "adalomo")  # no gradients are left to clip: max_grad_norm has no effect there
_WITH_ARGUMENTS = ("sgd", "adagrad", "rmsprop")  # optim_args are options of torch's classes
# The defaults of the optimizers that transformers hands adam_beta1 and adam_beta2, by a part of their names.
_BETAS = {"adam": [0.9, 0.999], "ademamix": [0.9, 0.999, 0.9999], "lion": [0.9, 0.99]}


@_form("optim", "adam_beta1", "adam_beta2", "adam_epsilon", "adafactor")
def _optimizer(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    name = "adafactor" if arguments.get("adafactor") else str(arguments.get("optim", "adamw_torch"))
    if name not in _OPTIMIZERS and not _is_schedule_free(name, arguments):
        return _no_optimizer(name)
    is_named = "optim" in arguments or arguments.get("adafactor")
    named: dict[str, Any] = {"optimizer": _OPTIMIZERS.get(name, name)} if is_named else {}
    if name in _UPDATES_IN_BACKWARD:
        named["max_grad_norm"] = None
    options = _options_of_optimizer(name, arguments)
    return named | ({"optimizer_kwargs": options} if options else {})


def _is_schedule_free(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a schedule-free optimizer is used as such: with a constant rate, and no warm-up to hand to it."""
    has_warmup = arguments.get("warmup_steps") or arguments.get("warmup_ratio")
    is_constant = str(arguments.get("lr_scheduler_type")) == "constant"
    return name in PATHS and name.startswith("schedule_free") and is_constant and not has_warmup


@_form("optim_args")
def _optimizer_arguments(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    if str(arguments.get("optim")) not in _WITH_ARGUMENTS:
        return "give optimizer_kwargs={…}, by the optimizer's own parameter names"
    pairs = (pair.split("=") for pair in str(arguments["optim_args"]).replace(" ", "").split(",") if pair)
    return {"optimizer_kwargs": {name: _option(value) for name, value in pairs}}


def _option(text: str) -> bool | float:
    words = {"true": True, "yes": True, "false": False, "no": False}
    return words[text.lower()] if text.lower() in words else float(text)


def _no_optimizer(name: str) -> str:
    if name.startswith("schedule_free"):
        return (
            f'give optimizer="{name}" with lr_scheduler="constant"; its warm-up is '
            'optimizer_kwargs={"warmup_steps": …}'
        )
    if name in PATHS:
        return f'optimizer="{name}" trains all matrices of hidden layers here; give that if you want it'
    return f"there is no name for {name!r}; give an optimizer object: Trainer(…, optimizer=…)"


def _options_of_optimizer(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that transformers hands to an optimizer, where they differ from its defaults."""
    if name == "adafactor":
        return {"scale_parameter": False, "relative_step": False}
    kind = next((kind for kind in _BETAS if kind in name), None)
    if kind is None:  # Adam's options have no effect on other optimizers, as in transformers
        return {}
    betas = [arguments.get("adam_beta1", 0.9), arguments.get("adam_beta2", 0.999), *_BETAS[kind][2:]]
    eps = 1e-8 if kind == "lion" else arguments.get("adam_epsilon", 1e-8)
    return ({"betas": betas} if betas != _BETAS[kind] else {}) | ({"eps": eps} if eps != 1e-8 else {})


@_form("bf16", "fp16", "fp16_backend", "half_precision_backend")
def _precision(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    if arguments.get("bf16"):
        return {"mixed_precision": "bf16"}
    return {"mixed_precision": "fp16" if arguments.get("fp16") else None}


@_form("activation_checkpointing", "gradient_checkpointing")
def _checkpointing(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    return {
        "gradient_checkpointing": bool(
            arguments.get("activation_checkpointing", arguments.get("gradient_checkpointing"))
        )
    }


@_form("torch_compile", "torch_compile_backend", "torch_compile_mode", "torchdynamo")
def _compile(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    backend = arguments.get("torch_compile_backend") or arguments.get("torchdynamo") or "inductor"
    mode = arguments.get("torch_compile_mode")
    if mode is not None:
        return {"compile": Made(TorchDynamoPlugin, backend=str(backend), mode=mode)}
    if backend != "inductor":
        return {"compile": str(backend)}
    return {"compile": bool(arguments.get("torch_compile", True))}


@_form("resume_from_checkpoint")
def _resume(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    value = arguments["resume_from_checkpoint"]
    return {"resume": str(value) if value and not isinstance(value, bool) else "auto" if value else NEVER}


@_form("disable_tqdm")
def _progress(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    return {"progress_bar": None if arguments["disable_tqdm"] is None else not arguments["disable_tqdm"]}


@_form("train_sampling_strategy")
def _sampling(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    strategy = str(arguments["train_sampling_strategy"])
    known = {
        "random": {"shuffle": True},
        "sequential": {"shuffle": False},
        "group_by_length": {"group_by_length": True},
    }
    return known.get(strategy, f"there is no sampling {strategy!r}; give a DataLoader with its own sampler")


@_form("max_steps", "num_train_epochs")
def _limits(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    # In transformers max_steps overrides epochs; in this library the limit reached first would end the run.
    steps = arguments.get("max_steps", -1)
    return {"max_steps": steps} if steps > 0 else {"num_train_epochs": arguments.get("num_train_epochs")}


@_form("max_grad_norm")
def _clipping(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    return {"max_grad_norm": arguments["max_grad_norm"] or None}


@_form("report_to")
def _reports(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    names = arguments["report_to"]
    names = [names] if isinstance(names, str) else list(names or [])
    if names in ([], ["none"]):
        return {"report_to": ()}
    from trainer_lib.tracking.registry import ALL, known_names

    missing = [name for name in names if name not in (*known_names(), ALL)]
    if missing:
        return f"there is no tracker {missing[0]!r}; known: {', '.join(known_names())}"
    return {"report_to": tuple(names)}


_DDP = {
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_broadcast_buffers": "broadcast_buffers",
    "ddp_static_graph": "static_graph",
}


@_form(*_DDP)
def _ddp(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    options = {ours: arguments[name] for name, ours in _DDP.items() if arguments.get(name) is not None}
    return {"ddp": Made(DistributedDataParallelKwargs, **options) if options else None}


@_form("parallelism_config")
def _parallelism(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    from trainer_lib.parallelism_config import ParallelismConfig

    config = arguments["parallelism_config"]
    sizes = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    options = {name: getattr(config, name) for name in sizes if getattr(config, name, 1) not in (None, 1)}
    return {"parallelism": Made(ParallelismConfig, **options) if config is not None else None}


_SHARDING = {
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "offload_params": "cpu_offload",
    "version": "fsdp_version",
}
_SHARDING_MODES: dict[str, dict[str, Any]] = {
    "full_shard": {"reshard_after_forward": True},
    "shard_grad_op": {"reshard_after_forward": False},
    "hybrid_shard": {"sharding_strategy": "HYBRID_SHARD"},
    "hybrid_shard_zero2": {"sharding_strategy": "_HYBRID_SHARD_ZERO2"},
    "offload": {"cpu_offload": True},
    "auto_wrap": {},
}


@_form("fsdp", "fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
def _sharding(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    modes, config = arguments.get("fsdp", True), arguments.get("fsdp_config") or {}
    if not modes:
        return {"fsdp": None}
    if isinstance(config, str):
        return f"files such as {config!r} are not supported; give FullyShardedDataParallelPlugin(…)"
    options: dict[str, Any] = {}
    for mode in modes.split() if isinstance(modes, str) else list(modes) if isinstance(modes, (list, tuple)) else []:
        if str(mode) not in _SHARDING_MODES:
            return f"there is no sharding mode {str(mode)!r}; give FullyShardedDataParallelPlugin(…)"
        options |= _SHARDING_MODES[str(mode)]
    for name, value in {**config, **{name: arguments[name] for name in arguments if name.startswith("fsdp_")}}.items():
        plain = name.removeprefix("fsdp_")
        # 0 parameters and no XLA are Hugging Face's values for options that are not used.
        if plain == "config" or (not value and (plain == "min_num_params" or plain.startswith("xla"))):
            continue
        options[_SHARDING.get(plain, plain)] = value
    return {"fsdp": Made(FullyShardedDataParallelPlugin, **options) if options else True}


@_form("generation_max_length", "generation_num_beams", "generation_config")
def _generation(arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    if not arguments.get("predict_with_generate", True):
        return "it has no effect with predict_with_generate=False, in either library"
    names = {
        "generation_max_length": "max_length",
        "generation_num_beams": "num_beams",
        "generation_config": "generation_config",
    }
    return {
        "generation_kwargs": {ours: arguments[name] for name, ours in names.items() if arguments.get(name) is not None},
        "predict_with_generate": True,
    }
