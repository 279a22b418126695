"""Arguments: allowed values, errors, and derived values."""

import copy
import dataclasses
import math
import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.trainer.arguments.declaration import settings
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.arguments.value_checks import amount, interval, reports, whole
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup


def arguments(**values: Any) -> TrainingArguments:
    """Return arguments with values of any type."""
    return TrainingArguments(**values)


def error_of(**values: Any) -> str:
    """Return the error that arguments raise."""
    with pytest.raises(ConfigurationError) as caught:
        arguments(**values)
    return str(caught.value)


# -- values ------------------------------------------------------------------------------------------------------


def test_every_argument_is_checked() -> None:
    fields = [field.name for field in dataclasses.fields(TrainingArguments)]
    assert list(settings(TrainingArguments)) == fields
    for name in fields:
        # Every argument refuses an arbitrary object.
        with pytest.raises((ConfigurationError, UnsupportedError), match=rf"\b{name}\b"):
            arguments(**{name: object()})


@pytest.mark.parametrize(
    "name",
    [
        "max_steps",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "schedule_steps",
        "keep_last",
        "prefetch_factor",
        "limit_train_batches",
        "limit_eval_batches",
        "overfit_batches",
    ],
)
@pytest.mark.parametrize("value", [0, -1, True, 2.5, "many", float("nan"), [3]])
def test_counts_are_whole_and_at_least_one(name: str, value: Any) -> None:
    assert error_of(**{name: value}).startswith(f"{name} must be a whole number of at least 1, got {value!r}.")


@pytest.mark.parametrize("name", ["seed", "data_seed", "keep_best", "num_workers"])
@pytest.mark.parametrize("value", [-1, False, 0.5, "0x"])
def test_some_counts_may_be_zero(name: str, value: Any) -> None:
    assert error_of(**{name: value}).startswith(f"{name} must be a whole number of at least 0")
    assert getattr(arguments(**{name: 0}), name) == 0


def test_seeds_are_below_numpys_limit() -> None:
    assert TrainingArguments(seed=2**32 - 1, data_seed=None).seed == 2**32 - 1
    assert error_of(seed=2**32) == ("seed must be a whole number of at least 0 and below 4294967296, got 4294967296.")


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), True, "fast", None, 1j])
def test_rates_are_finite_and_not_negative(name: str, value: Any) -> None:
    assert error_of(**{name: value}) == f"{name} must be a finite number of at least 0, got {value!r}."
    assert getattr(arguments(**{name: 0.0}), name) == 0


@pytest.mark.parametrize("name", ["num_train_epochs", "max_grad_norm"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "x"])
def test_amounts_are_finite_and_positive(name: str, value: Any) -> None:
    assert error_of(**{name: value}).startswith(f"{name} must be a finite number above 0, got {value!r}.")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_steps": "100"}, "at least 1, got '100'. Give max_steps=100."),
        ({"max_steps": 1e4}, "at least 1, got 10000.0. Give max_steps=10000."),
        ({"max_steps": "1e3"}, "at least 1, got '1e3'. Give max_steps=1000."),
        ({"max_steps": -1}, "at least 1, got -1. For no limit, leave it out."),
        ({"num_train_epochs": 0}, "above 0, got 0. For no limit, leave it out."),
        ({"learning_rate": "5e-5"}, "at least 0, got '5e-5'. Give learning_rate=5e-05."),
        ({"max_grad_norm": 0}, "above 0, got 0. To leave gradients as they are, give None."),
        ({"gradient_accumulation_steps": 0}, "got 0. For no accumulation, leave it out."),
        ({"keep_last": 0}, "got 0. To keep all, give None."),
        ({"shuffle": "False"}, "shuffle must be True or False, got 'False'. Give shuffle=False."),
        ({"use_cpu": 1}, "use_cpu must be True or False, got 1. Give use_cpu=True."),
        ({"dry_run": None}, "dry_run must be True or False, got None."),
        ({"tf32": "maybe"}, "tf32 must be True or False, got 'maybe'."),
        (
            {"mixed_precision": "bf61"},
            "Unknown mixed_precision 'bf61'. Known: bf16, bf16-true, fp16, fp8, no. Did you mean 'bf16'?",
        ),
        ({"mixed_precision": True}, "Unknown mixed_precision True. Known: bf16, bf16-true, fp16, fp8, no."),
        ({"optimizer": "adamv"}, "Unknown optimizer 'adamv'. Known: adadelta"),
        ({"optimizer": "adamv"}, "Did you mean 'adam'? Or give a dotted path."),
        ({"optimizer": "adamw_torch_fused"}, 'is given here as optimizer="adamw".'),
        ({"optimizer": torch.optim.SGD}, "Give an object to the Trainer: Trainer(…, optimizer=…)."),
        ({"lr_scheduler": "linaer"}, "Unknown lr_scheduler 'linaer'. Known: constant"),
        ({"lr_scheduler": "StepLR"}, 'Give the path of torch\'s: lr_scheduler="torch.optim.lr_scheduler.StepLR"'),
        ({"lr_scheduler": "linaer"}, "Did you mean 'linear'? Or give a dotted path."),
        ({"lr_scheduler": "warmup_stable_decay"}, 'is given here as lr_scheduler="wsd"'),
        ({"lr_scheduler": 3}, "Give an object to the Trainer: Trainer(…, scheduler=…)."),
        ({"optimizer_kwargs": "x"}, "optimizer_kwargs must be a dict of arguments by name, got 'x'."),
        ({"generation_kwargs": {1: 2}}, "generation_kwargs must be a dict of arguments by name, got {1: 2}."),
        ({"label_names": "labels"}, "must be a list of texts, got 'labels'. Give label_names=['labels']."),
        ({"label_names": [1]}, "label_names must be a list of texts, got [1]."),
        ({"run_name": " "}, "run_name must be a text that is not blank, got ' '."),
        ({"output_dir": ""}, "output_dir must be a path, got ''."),
        ({"output_dir": __file__}, "is a file. Give a folder; it is created if it does not exist."),
        ({"resume": True}, 'must be "never", "auto" or a path, got True. Give resume="auto".'),
        ({"resume": False}, 'Give resume="never".'),
        ({"resume": "latest"}, "got 'latest'. Give resume=\"auto\" to resume the newest run."),
        (
            {"parameter_groups": ParameterGroup("x", frozen=True)},
            "must be a list of ParameterGroup, got ParameterGroup",
        ),
        ({"parameter_groups": [{"pattern": "x"}]}, "must be a list of ParameterGroup, got [{'pattern': 'x'}]."),
        ({"ddp": {"static_graph": True}}, "Give ddp=DistributedDataParallelKwargs(**{'static_graph': True})."),
        ({"parallelism": 2}, "parallelism must be a ParallelismConfig, got 2."),
        ({"fsdp": 3}, "fsdp must be a FullyShardedDataParallelPlugin, True or False, got 3."),
        (
            {"fsdp": "shard_grad_op auto_wrap"},
            "is given here as fsdp=FullyShardedDataParallelPlugin(reshard_after_forward=False).",
        ),
        (
            {"compile": "max-autotune"},
            "compile='max-autotune' is a mode, not a backend. Give compile=TorchDynamoPlugin(backend=\"inductor\", "
            'mode="max-autotune").',
        ),
        ({"compile": 1}, "compile must be True, False, the name of a backend or a TorchDynamoPlugin, got 1."),
        ({"metric_for_best": "eval_joy"}, "cannot be inferred from the name of the metric 'eval_joy'"),
        ({"sample_weights": "abc"}, "sample_weights must be finite numbers of at least 0, one for each sample"),
        ({"sample_weights": []}, "sample_weights must be finite numbers"),
        ({"sample_weights": [0.0, 0.0]}, "and not all 0, got 2 of them that are 0."),
        ({"sample_weights": [1.0, -1.0]}, "sample_weights must be finite numbers"),
        ({"sample_weights": [1.0, math.nan, 1, 1, 1, 1]}, "got nan for sample 1."),
    ],
)
def test_errors_name_the_value_and_what_is_allowed(values: dict[str, Any], message: str) -> None:
    assert message in error_of(**values)


def test_an_automatic_batch_size_divides_the_global_batch_size() -> None:
    args = TrainingArguments(per_device_train_batch_size="auto")
    assert (args.train_batch_size_for(4), args.eval_batch_size) == (64, 64)
    for samples, processes, size in ((96, 1, 48), (96, 2, 48), (7, 1, 7), (2 * 67, 2, 67), (2 * 67, 1, 67)):
        args = TrainingArguments(per_device_train_batch_size="Auto", global_batch_size=samples)  # type: ignore[arg-type]
        assert args.train_batch_size_for(processes) == size
    with pytest.raises(
        ConfigurationError, match=r"global_batch_size=7 must be a multiple of the number of ranks \(2\). Give 8,"
    ):
        TrainingArguments(per_device_train_batch_size="auto", global_batch_size=7).train_batch_size_for(2)


def test_trackers_have_aliases() -> None:
    assert arguments(report_to="wandb").report_to == ("wandb",)
    assert arguments(report_to=["tensorboard", "comet"]).report_to == ("tensorboard", "comet_ml")
    assert arguments(report_to="all").report_to == ("all",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wandbb", "Unknown tracker 'wandbb'"),
        ("neptune", "The tracker neptune is not supported: its service ended on 5 March 2026"),
        (["mlflow", "mlflow"], "report_to has the tracker 'mlflow' twice"),
        (["none", "mlflow"], 'or "none" alone'),
        (3, "report_to must be the name of a tracker"),
        ({"mlflow": {}}, "report_to must be the name of a tracker"),
    ],
)
def test_unknown_trackers_are_refused(value: Any, message: str) -> None:
    assert message in error_of(report_to=value)


@pytest.mark.parametrize("value", [(), [], "none", ["none"]])
def test_an_empty_list_or_none_turns_trackers_off(value: Any) -> None:
    assert arguments(report_to=value).report_to == ()
    assert reports("report_to", value) == ()


def test_backends_that_torch_removed_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="torch removed nvFuser"):
        TrainingArguments(compile="aot_ts_nvfuser")


def test_values_are_stored_in_plain_form() -> None:
    args = arguments(
        output_dir=Path("runs"),
        resume=Path("runs/checkpoint"),
        max_steps=np.int64(5),
        learning_rate=np.float32(0.5),
        max_time=timedelta(minutes=2),
        warmup=np.int64(3),
        log_every=Every(2, "epochs"),
        save_every=timedelta(hours=1),
        gc_every=Every(9, "steps"),
        optimizer_kwargs={"betas": (0.9, 0.95), "more": {"pair": (1, (2,))}},
        label_names=("labels", "labels_2"),
        sample_weights=torch.tensor([1, 2]),
        report_to=[],
    )
    assert (args.output_dir, args.resume) == ("runs", "runs/checkpoint")
    assert (args.max_steps, args.learning_rate, args.warmup) == (5, 0.5, 3)
    assert [type(value) for value in (args.max_steps, args.learning_rate, args.warmup)] == [int, float, int]
    assert (args.max_time, args.log_every, args.save_every, args.gc_every) == (
        "120 seconds",
        "2 epochs",
        "3600 seconds",
        "9 steps",
    )
    assert args.optimizer_kwargs == {"betas": [0.9, 0.95], "more": {"pair": [1, [2]]}}
    assert (args.label_names, args.sample_weights) == (["labels", "labels_2"], [1.0, 2.0])


def test_arguments_do_not_share_the_dicts_you_pass() -> None:
    values = {"momentum": 0.9}
    args = TrainingArguments(optimizer_kwargs=values)
    values["momentum"] = 0.1
    assert args.optimizer_kwargs == {"momentum": 0.9}
    assert TrainingArguments().optimizer_kwargs is not TrainingArguments().optimizer_kwargs


def test_objects_are_stored_as_they_are() -> None:
    objects: dict[str, Any] = {
        "compile": TorchDynamoPlugin(backend="eager"),
        "fsdp": FullyShardedDataParallelPlugin(),
        "parallelism": ParallelismConfig(dp_shard_size=2),
    }
    args = arguments(**objects)
    assert all(getattr(args, name) is value for name, value in objects.items())
    ddp = DistributedDataParallelKwargs(static_graph=True)
    assert TrainingArguments(ddp=ddp, compile="eager").ddp is ddp
    group = ParameterGroup("*.bias", frozen=True)
    assert TrainingArguments(parameter_groups=[group]).parameter_groups == [group]


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lerning_rate", 0.1, "TrainingArguments has no argument 'lerning_rate' (given: 0.1). Did you mean"),
        ("epochs", 3, "has no argument 'epochs' (given: 3). Did you mean 'num_train_epochs'?"),
        ("lr", 0.1, "Did you mean 'learning_rate'?"),
        ("batch_size", 4, "Did you mean 'per_device_train_batch_size'?"),
        ("fast_dev_run", True, "Did you mean 'dry_run'?"),
        ("xyzzy", 1, "has no argument 'xyzzy' (given: 1). The nearest names are max_memory, dry_run, "),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, value: Any, message: str) -> None:
    assert message in error_of(**{name: value})


def test_one_error_lists_all_unknown_names() -> None:
    lines = error_of(max_step=1, save_steps=5, learning_rate=-1, eval_strategy="epoch").splitlines()
    assert len(lines) == 3
    assert "'max_step'" in lines[0]
    assert "save_steps=5" in lines[1]
    assert 'eval_strategy="epoch"' in lines[2]


def test_arguments_are_keyword_only() -> None:
    message = "TrainingArguments takes arguments by name only, got 'out'. Give output_dir='out'."
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        TrainingArguments("out")  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match=r"by name only, got 3\.$"):
        TrainingArguments(3)  # type: ignore[misc]


def test_names_of_subclasses_are_known() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Derived(TrainingArguments):
        temperature: float = 1.0

    assert Derived(temperature=2.0, max_steps=3).temperature == 2.0
    with pytest.raises(
        ConfigurationError, match=r"no argument 'temprature' .given: 2\.0.\. Did you mean 'temperature'"
    ):
        Derived(temprature=2.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="learning_rate must be"):
        Derived(learning_rate=-1)
    with pytest.raises(ConfigurationError, match="no argument 'temperature'"):
        TrainingArguments(temperature=1.0)  # type: ignore[call-arg]


def test_copies_are_equal_and_replaced_values_are_checked() -> None:
    args = TrainingArguments(max_steps=3, fsdp=FullyShardedDataParallelPlugin(), optimizer_kwargs={"eps": 1e-6})
    assert copy.deepcopy(args) == pickle.loads(pickle.dumps(args)) == copy.copy(args) == args
    assert dataclasses.replace(args, max_steps=4).max_steps == 4
    with pytest.raises(ConfigurationError, match="max_steps must be"):
        dataclasses.replace(args, max_steps=0)
    with pytest.raises(ConfigurationError, match="no argument 'max_step'"):
        dataclasses.replace(args, max_step=0)  # type: ignore[call-arg]


# -- contradictions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"gradient_accumulation_steps": 2, "global_batch_size": 16},
            "gradient_accumulation_steps=2 and global_batch_size=16 set the same thing. Give one of them.",
        ),
        (
            {"per_device_train_batch_size": 6, "global_batch_size": 20},
            "global_batch_size=20 must be a multiple of per_device_train_batch_size=6. Give 18 or 24,",
        ),
        ({"global_batch_size": 4}, "global_batch_size=4 must be a multiple of per_device_train_batch_size=8. Give 8,"),
        ({"resume": "auto"}, 'resume="auto" looks for a run in output_dir, which is not set. Give output_dir.'),
        ({"save_every": "1 epoch"}, "save_every='1 epoch' saves checkpoints in output_dir, which is not set."),
        ({"load_best_at_end": True}, "load_best_at_end=True loads a checkpoint of output_dir, which is not set."),
        (
            {"load_best_at_end": True, "output_dir": "runs", "keep_best": 0},
            "load_best_at_end=True needs the best checkpoint, and keep_best=0 deletes it.",
        ),
        (
            {"load_best_at_end": True, "output_dir": "runs", "eval_every": "never"},
            'load_best_at_end=True needs evaluations to rank checkpoints, and eval_every="never" makes none.',
        ),
        ({"greater_is_better": False}, "greater_is_better=False has no effect without metric_for_best."),
        ({"optimizer_kwargs": {"lr": 1}}, "optimizer_kwargs has 'lr', which learning_rate sets. Give learning_rate,"),
        ({"optimizer_kwargs": {"weight_decay": 1}}, "has 'weight_decay', which weight_decay sets."),
        ({"lr_scheduler_kwargs": {"num_warmup_steps": 1}}, "has 'num_warmup_steps', which warmup sets."),
        ({"warmup": 11, "schedule_steps": 10}, "warmup=11 must not be longer than schedule_steps=10."),
        ({"warmup": "11 steps", "max_steps": 10}, "warmup='11 steps' must not be longer than max_steps=10."),
        ({"group_by_length": True, "sample_weights": [1]}, "both choose the samples of a batch."),
        (
            {"group_by_length": True, "shuffle": False},
            "shuffle=False keeps the order of the data, which group_by_length changes.",
        ),
        (
            {"sample_weights": [1], "shuffle": False},
            "shuffle=False keeps the order of the data, which sample_weights changes.",
        ),
        (
            {"overfit_batches": 1, "limit_train_batches": 1},
            "overfit_batches=1 and limit_train_batches both choose the batches.",
        ),
        (
            {"overfit_batches": 1, "limit_eval_batches": 1},
            "overfit_batches=1 and limit_eval_batches both choose the batches.",
        ),
        (
            {"overfit_batches": 1, "group_by_length": True},
            "overfit_batches=1 and group_by_length both choose the batches.",
        ),
        ({"prefetch_factor": 2}, "prefetch_factor=2 has no effect with num_workers=0."),
        ({"persistent_workers": True}, "persistent_workers=True has no effect with num_workers=0."),
        (
            {"low_memory_shuffle": True, "shuffle": False},
            "low_memory_shuffle=True has no effect with shuffle=False, which sets another order.",
        ),
        (
            {"low_memory_shuffle": True, "group_by_length": True},
            "low_memory_shuffle=True has no effect with group_by_length=True, which sets another order.",
        ),
        ({"use_cpu": True, "tf32": True}, "tf32=True has no effect with use_cpu=True."),
        ({"use_cpu": True, "pin_memory": True}, "pin_memory=True has no effect with use_cpu=True."),
        ({"fsdp": True, "ddp": DistributedDataParallelKwargs()}, "fsdp and ddp are both given"),
        (
            {
                "fsdp": FullyShardedDataParallelPlugin(activation_checkpointing=True),
                "gradient_checkpointing": True,
            },
            "gradient_checkpointing=True and fsdp.activation_checkpointing=True set the same",
        ),
        (
            {"predict_with_generate": True, "parallelism": ParallelismConfig(pp_size=2)},
            "predict_with_generate=True does not work with pp_size=2: no rank of a pipeline has the whole model. Leave",
        ),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs has no effect with predict_with_generate=False."),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    assert message in error_of(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"resume": "auto", "output_dir": "runs"},
        {"save_every": "never"},
        {"load_best_at_end": True, "output_dir": "runs", "save_every": "never"},
        {"load_best_at_end": True, "output_dir": "runs", "eval_every": "never", "eval_on_start": True},
        {"metric_for_best": "joy", "greater_is_better": True},
        {"metric_for_best": "eval_test_f1"},
        {"warmup": 10, "max_steps": 5, "schedule_steps": 10},
        {"overfit_batches": 2, "dry_run": True},
        {"prefetch_factor": 2, "persistent_workers": True, "num_workers": 1},
        {"fsdp": False, "ddp": DistributedDataParallelKwargs()},
        {"fsdp": True, "gradient_checkpointing": True},
        {"use_cpu": True, "tf32": False, "pin_memory": False},
        {"deterministic": True, "compile": True},
        {"generation_kwargs": {"num_beams": 2}, "predict_with_generate": True},
        {"optimizer": "torch.optim.AdamW", "lr_scheduler": "some.schedule"},
    ],
)
def test_consistent_arguments_are_accepted(values: dict[str, Any]) -> None:
    args = arguments(**values)
    assert all(getattr(args, name) == value for name, value in values.items())


# -- amounts of training -----------------------------------------------------------------------------------------


def test_default_intervals() -> None:
    args = TrainingArguments()
    assert args.log_interval == Every(50, "steps")
    assert args.eval_interval == Every(1, "epochs")
    assert args.save_interval is None
    assert args.gc_interval is None
    assert TrainingArguments(output_dir="runs").save_interval == Every(1, "epochs")


def test_intervals_are_parsed() -> None:
    args = TrainingArguments(
        output_dir="runs", log_every=10, eval_every="0.5 epochs", save_every="2 hours", gc_every="100 steps"
    )
    assert (args.log_every, args.eval_every, args.save_every) == (10, "0.5 epochs", "2 hours")
    assert args.log_interval == Every(10, "steps")
    assert args.eval_interval == Every(0.5, "epochs")
    assert args.save_interval == Every(7200, "seconds")
    assert args.gc_interval == Every(100, "steps")


def test_never_turns_intervals_off() -> None:
    args = TrainingArguments(output_dir="runs", log_every="never", eval_every="never", save_every="never")
    assert (args.log_interval, args.eval_interval, args.save_interval) == (None, None, None)


@pytest.mark.parametrize("value", [False, "no", "none", "off", "False", "Never"])
def test_only_the_word_never_turns_an_interval_off(value: Any) -> None:
    assert (
        error_of(eval_every=value)
        == f'eval_every={value!r} is not an interval. To turn it off, give eval_every="never".'
    )
    assert error_of(log_every=None) == 'log_every=None is not an interval. To turn it off, give log_every="never".'


@pytest.mark.parametrize("value", ["epoch", "steps", "Epochs"])
def test_a_unit_without_a_number_is_refused(value: str) -> None:
    unit = value.lower().removesuffix("s")
    assert error_of(log_every=value) == f'log_every={value!r} has no number. Give log_every="1 {unit}".'


def test_other_intervals_are_refused_by_name() -> None:
    assert error_of(log_every="5 lines").startswith("log_every='5 lines': unknown unit 'lines'")
    assert error_of(output_dir="x", save_every=0) == "save_every=0 must be more than 0, and finite."
    assert error_of(gc_every="never").startswith("gc_every='never' is not a duration.")
    assert interval("x", "never") == "never"
    with pytest.raises(ConfigurationError, match="is not a duration"):
        amount("x", "never")


@pytest.mark.parametrize(
    ("value", "kept", "seconds"),
    [
        (90, 90, 90.0),
        (1.5, 1.5, 1.5),
        (np.float64(2.5), 2.5, 2.5),
        ("90 minutes", "90 minutes", 5400.0),
        ("1-00:00:00", "1-00:00:00", 86400.0),
        (timedelta(seconds=1.5), "1.5 seconds", 1.5),
    ],
)
def test_time_limits(value: Any, kept: Any, seconds: float) -> None:
    args = arguments(max_time=value)
    assert args.max_time == kept
    assert args.time_limit == seconds
    assert TrainingArguments().time_limit is None


@pytest.mark.parametrize("value", ["500 steps", Every(3, "epochs")])
def test_amounts_in_steps_are_not_times(value: Any) -> None:
    assert error_of(max_time=value).startswith(f'max_time={value!r} is not a time. Give one, such as "90 minutes"')


@pytest.mark.parametrize("value", [0, -1, float("inf"), True, "soon", timedelta(0)])
def test_invalid_time_limits_are_refused(value: Any) -> None:
    assert error_of(max_time=value).startswith(f"max_time={value!r} ")


@pytest.mark.parametrize(
    ("warmup", "total", "steps"),
    [
        (None, None, 0),
        (0, None, 0),
        (0.0, 10, 0),
        (100, None, 100),
        ("100 steps", None, 100),
        (0.1, 30, 3),  # not 4: 0.1 * 30 is 3.0000000000000004
        (0.05, 30, 2),
        ("5%", 1000, 50),
        ("0.5 %", 1000, 5),
        (np.float32(0.25), 8, 2),
    ],
)
def test_warmup(warmup: Any, total: int | None, steps: int) -> None:
    assert arguments(warmup=warmup).warmup_steps_for(total) == steps


@pytest.mark.parametrize("value", [-1, -0.1, 1.0, 1.5, True, "100%", "-1%", "x%", "1 epoch", "2 minutes", [1]])
def test_invalid_warmups_are_refused(value: Any) -> None:
    assert error_of(warmup=value).startswith(
        f'warmup={value!r} is not a warm-up. Give steps ("100 steps" or 100), or a'
    )


def test_a_relative_warmup_needs_the_number_of_steps() -> None:
    with pytest.raises(
        ConfigurationError, match=r"warmup='5%' is a fraction of all steps, .* Give max_steps or schedule_"
    ):
        TrainingArguments(warmup="5%").warmup_steps_for(None)


def test_a_run_without_a_limit_has_three_epochs() -> None:
    assert TrainingArguments().epoch_limit == 3.0
    assert TrainingArguments(max_steps=5).epoch_limit is None
    assert TrainingArguments(max_time=5).epoch_limit is None
    assert TrainingArguments(max_steps=5, num_train_epochs=0.5).epoch_limit == 0.5


def test_other_derived_values() -> None:
    args = TrainingArguments(per_device_train_batch_size=3, output_dir="~/runs")
    assert args.eval_batch_size == 3
    assert args.output_folder == Path.home() / "runs"
    assert args.output_dir == "~/runs"
    assert dataclasses.replace(args, per_device_eval_batch_size=5).eval_batch_size == 5
    assert TrainingArguments().output_folder is None


def test_whole_numbers_below_a_limit() -> None:
    check = whole(at_least=2, below=5)
    assert [check("x", value) for value in (2, 4)] == [2, 4]
    for value in (1, 5):
        with pytest.raises(ConfigurationError, match="at least 2 and below 5"):
            check("x", value)


# -- a dry run ---------------------------------------------------------------------------------------------------


def test_effective_returns_the_arguments_themselves_without_a_dry_run() -> None:
    args = TrainingArguments(overfit_batches=3, max_steps=7)
    assert args.effective() is args


def test_a_dry_run_makes_one_pass_over_two_batches_and_keeps_nothing() -> None:
    args = TrainingArguments(
        dry_run=True,
        output_dir="runs",
        resume="auto",
        save_every=10,
        load_best_at_end=True,
        metric_for_best="accuracy",
        max_time=60,
        num_train_epochs=10,
        limit_eval_batches=1,
        eval_every="10 steps",
    )
    dry = args.effective()
    changed = {
        field.name: getattr(dry, field.name)
        for field in dataclasses.fields(args)
        if getattr(dry, field.name) != getattr(args, field.name)
    }
    assert changed == {
        "output_dir": None,
        "resume": "never",
        "save_every": None,
        "load_best_at_end": False,
        "max_time": None,
        "num_train_epochs": 1,
        "limit_train_batches": 2,
        "log_every": "1 step",
    }
    assert dry.limit_eval_batches == 1
    assert dry.effective() == dry


def test_a_dry_run_keeps_the_schedule_of_the_whole_run() -> None:
    dry = TrainingArguments(dry_run=True, max_steps=1000, warmup=100).effective()
    assert (dry.schedule_steps, dry.max_steps, dry.warmup) == (1000, None, 100)
    dry = TrainingArguments(dry_run=True, num_train_epochs=3, warmup="100 steps").effective()
    assert (dry.schedule_steps, dry.warmup) == (None, None)
    assert TrainingArguments(dry_run=True, warmup=0.1).effective().warmup == 0.1
    decaying: dict[str, Any] = {"lr_scheduler": "wsd", "lr_scheduler_kwargs": {"decay_steps": 100, "min_ratio": 0.1}}
    dry = TrainingArguments(dry_run=True, max_steps=1000, **decaying).effective()
    assert dry.lr_scheduler_kwargs == {"decay_steps": 100, "min_ratio": 0.1}
    dry = TrainingArguments(dry_run=True, num_train_epochs=3, **decaying).effective()
    assert dry.lr_scheduler_kwargs == {"min_ratio": 0.1}


def test_a_dry_run_lowers_limits_to_two_batches_at_most() -> None:
    dry = TrainingArguments(dry_run=True, overfit_batches=5).effective()
    assert (dry.overfit_batches, dry.limit_train_batches, dry.limit_eval_batches) == (2, None, None)
    dry = TrainingArguments(dry_run=True, limit_train_batches=1).effective()
    assert (dry.limit_train_batches, dry.limit_eval_batches) == (1, 2)
