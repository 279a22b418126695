"""Arguments that are changed between two calls of a trainer: each takes effect, or is an error."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.tasks import arguments
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    AORecipeKwargs,
    ConfigurationError,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ParallelismConfig,
    ParameterGroup,
    Trainer,
    TrainingArguments,
)
from trainer_lib.callbacks import LambdaCallback
from trainer_lib.callbacks.checkpoint import Checkpoint
from trainer_lib.callbacks.throughput import Throughput
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.foundation.errors import MissingPackageError
from trainer_lib.trainer.arguments.declaration import settings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(6, 6), nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.dropout(self.layer(inputs).tanh())


class Network(nn.Module):
    """Two blocks, which can recompute activations, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def rows(count: int = 40) -> list[dict[str, Any]]:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(3))
    return [
        {"inputs": row, "labels": int(row.sum() > 0), "other": int(row[0] > 0), "length": 1 + index % 7, "size": index}
        for index, row in enumerate(inputs)
    ]


class Columns:
    """Collates the columns that the model takes, and the targets."""

    def __init__(self, labels: str) -> None:
        self._labels = labels

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        targets = torch.tensor([sample[self._labels] for sample in samples])
        return {"inputs": torch.stack([sample["inputs"] for sample in samples]), self._labels: targets}


class Trace(Modifier):
    """Remembers what a run did."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_fit_begin(self, run: Run) -> None:
        options = run.accelerator.dataloader_config
        self.seen = [
            sorted(type(callback).__name__ for callback in run.trainer.events),
            repr(options),
            run.state.max_steps,
        ]

    def on_loss(self, run: Run) -> None:
        assert run.loss_sum is not None
        self.seen.append((run.loss_sum.item(), run.weight))

    def on_step_end(self, run: Run) -> None:
        (optimizer,) = run.optimizers.values()
        self.seen.append((type(optimizer.optimizer).__name__, [group["lr"] for group in optimizer.param_groups]))

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.seen.append({name: value for name, value in metrics.items() if name.endswith(("loss", "accuracy"))})

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.seen.append(sorted(name for name in values if name in ("loss", "grad_norm", "fill")))

    def on_best(self, run: Run, metric: str, value: float) -> None:
        self.seen.append((metric, value))


class Change(NamedTuple):
    """A changed argument, with the arguments beside it."""

    value: Any
    beside: Mapping[str, Any] = MappingProxyType({})
    error: str | None = None
    is_seen: bool = True


_SAVES = {"output_dir": "runs", "save_every": 1, "save_in_background": False}
_MADE = "is read only when a Trainer is made"
CHANGES: dict[str, Change] = {
    "output_dir": Change("runs"),
    "run_name": Change("second", _SAVES),
    "resume": Change("no/such/checkpoint", error="no/such/checkpoint"),
    "seed": Change(7),
    "data_seed": Change(7),
    "num_train_epochs": Change(2, {"num_train_epochs": 1, "max_steps": None}),
    "max_steps": Change(2),
    "max_tokens": Change(100, {"schedule_steps": 4}, error="max_tokens"),
    "max_time": Change("1 hour", is_seen=False),
    "deadline": Change(None, is_seen=False),
    "stop_signals": Change(["SIGUSR1"], is_seen=False),
    "per_device_train_batch_size": Change(4),
    "per_device_eval_batch_size": Change(3, is_seen=False),
    "gradient_accumulation_steps": Change(2),
    "global_batch_size": Change(16),
    "learning_rate": Change(0.01),
    "optimizer": Change("sgd"),
    "optimizer_kwargs": Change({"betas": [0.5, 0.9]}),
    "weight_decay": Change(0.5),
    "parameter_groups": Change([ParameterGroup("blocks.*", frozen=True)]),
    "lr_scheduler": Change("cosine"),
    "lr_scheduler_kwargs": Change({"min_ratio": 0.5}, {"lr_scheduler": "cosine"}),
    "warmup": Change(2),
    "schedule_steps": Change(20),
    "max_grad_norm": Change(0.01),
    "mixed_precision": Change("bf16", error=_MADE),
    "fp8": Change(AORecipeKwargs(), error=_MADE),
    "compile": Change("eager", error=_MADE),
    "gradient_checkpointing": Change(True, is_seen=False),
    "gradient_checkpointing_every": Change(2, {"gradient_checkpointing": True}, error="when the model was prepared"),
    "gradient_checkpointing_policy": Change("matmul", {"gradient_checkpointing": True}, is_seen=False),
    "activation_offload": Change(True, is_seen=False),
    "optimizer_in_backward": Change(True, {"max_grad_norm": None}, error=_MADE),
    "chunked_cross_entropy": Change(True, error="has no effect with a loss_fn"),
    "use_liger_kernel": Change(True, error="use_liger_kernel"),
    "device_map": Change({"": "cpu"}, is_seen=False),
    "max_memory": Change({"cpu": "1GB"}, error="max_memory"),
    "offload_folder": Change("offloaded", error="offload_folder"),
    "fsdp": Change(True, error="fsdp"),
    "deepspeed": Change({"zero_optimization": {"stage": 1}}, error="deepspeed"),
    "parallelism": Change(ParallelismConfig(), error=_MADE),
    "ddp": Change(DistributedDataParallelKwargs(), error=_MADE),
    "local_sgd_steps": Change(2, is_seen=False),
    "outer_learning_rate": Change(0.7, {"local_sgd_steps": 2}, is_seen=False),
    "outer_momentum": Change(0.5, {"local_sgd_steps": 2, "outer_learning_rate": 0.7}, is_seen=False),
    "sync_batchnorm": Change(True, is_seen=False),
    "tf32": Change(True, error="tf32=True has no effect"),
    "deterministic": Change(True, is_seen=False),
    "detect_anomaly": Change(True, is_seen=False),
    "gc_every": Change(2),
    "use_cpu": Change(False, error=_MADE),
    "log_every": Change(2),
    "eval_every": Change(2),
    "eval_delay": Change("3 steps", {"eval_every": 1}),
    "eval_on_start": Change(True),
    "save_every": Change(2, _SAVES),
    "save_in_background": Change(True, _SAVES, is_seen=False),
    "on_save_error": Change("raise", _SAVES, is_seen=False),
    "on_exception": Change("raise", _SAVES, is_seen=False),
    "on_nonfinite": Change("skip", is_seen=False),
    "max_nonfinite": Change(3, {"on_nonfinite": "skip"}, is_seen=False),
    "loss_spike": Change(2.0, {"on_nonfinite": "skip"}, is_seen=False),
    "hang_timeout": Change(None, is_seen=False),
    "keep_last": Change(1, _SAVES),
    "keep_best": Change(3, {**_SAVES, "eval_every": 1, "keep_last": 1}),
    "keep_every": Change(2, {**_SAVES, "keep_last": 1}),
    "metric_for_best": Change("accuracy"),
    "greater_is_better": Change(True, {"metric_for_best": "loss", "eval_every": 1}),
    "load_best_at_end": Change(True, {**_SAVES, "eval_every": 1, "learning_rate": 5.0}),
    "shuffle": Change(False),
    "num_workers": Change("auto", is_seen=False),
    "pin_memory": Change(True, error="pin_memory"),
    "prefetch_factor": Change(3, {"num_workers": 1}, is_seen=False),
    "persistent_workers": Change(True, {"num_workers": 1}, is_seen=False),
    "seed_each_sample": Change(True),
    "low_memory_shuffle": Change(True),
    "drop_last": Change(True, {"per_device_train_batch_size": 24}),
    "group_by_length": Change(True),
    "remove_unused_columns": Change(True, is_seen=False),
    "length_column": Change("size", {"group_by_length": True}),
    "sample_weights": Change([1.0] * 20 + [0.1] * 20),
    "validation_split": Change(0.2, error=_MADE),
    "on_bad_sample": Change("skip", is_seen=False),
    "max_bad_samples": Change(3, {"on_bad_sample": "skip"}, is_seen=False),
    "limit_train_batches": Change(1),
    "limit_eval_batches": Change(1),
    "overfit_batches": Change(1),
    "dry_run": Change(True, error=_MADE),
    "label_names": Change(["other"], {"label_names": ["labels"]}),
    "predict_with_generate": Change(True, error="generate"),
    "generation_kwargs": Change({"max_length": 3}, error="generat"),
    "report_to": Change(["jsonl"], _SAVES, error=_MADE),
    "progress_bar": Change(True, error=_MADE),
}

_READ_WITH_MODEL = [
    *("gradient_checkpointing", "gradient_checkpointing_every", "gradient_checkpointing_policy", "activation_offload"),
    *("device_map", "parameter_groups", "label_names", "seed", "output_dir"),
]


def made(folder: Path, **options: Any) -> Trainer:
    if options.get("output_dir") is not None:
        options["output_dir"] = folder / "runs"
    args = arguments(**{"max_steps": 4, "log_every": 1, "save_every": None, **options})
    labels = (options.get("label_names") or ["labels"])[0]
    return Trainer(
        Network(),
        args,
        train_dataset=rows(),
        eval_dataset=rows(16),
        loss_fn=cross_entropy,
        collate_fn=Columns(labels),
        metrics=["accuracy"],
        callbacks=[Trace()],
    )


def outcome(trainer: Trainer) -> list[Any]:
    """Fit, evaluate and predict, and return all that can be seen of it."""
    trace = next(callback for callback in trainer.events if isinstance(callback, Trace))
    torch.manual_seed(5)  # where arguments seed nothing
    trainer.fit()
    folder = trainer.run.folder
    kept = [] if folder is None else sorted(path.name for path in (folder / "checkpoints").iterdir())
    name = "" if folder is None else folder.name.partition("-")[0]
    weights = [parameter.tolist() for parameter in trainer.unwrapped_model.parameters()]
    seen = trace.seen
    metrics = trainer.evaluate()
    return [
        *seen,
        kept,
        name if trainer.args.run_name else "",
        weights,
        metrics["eval_loss"],
        trainer.predict(rows(8)).predictions.tolist(),
    ]


def test_every_argument_is_changed_below() -> None:
    assert sorted(CHANGES) == sorted(settings(TrainingArguments))


@pytest.mark.parametrize(
    ("name", "before"), [*((name, "fit") for name in CHANGES), *((name, "evaluate") for name in _READ_WITH_MODEL)]
)
def test_a_changed_argument_takes_effect_or_is_an_error(name: str, before: str, tmp_path: Path) -> None:
    change = CHANGES[name]
    used = made(tmp_path / "used", **change.beside)
    assert isinstance(used.model, nn.Module)
    weights = {key: value.clone() for key, value in used.model.state_dict().items()}
    getattr(used, before)()
    used.unwrapped_model.load_state_dict(weights)
    value = tmp_path / "used" / "runs" if name == "output_dir" else change.value
    setattr(used.args, name, value)
    used.collate_fn = Columns((used.args.label_names or ["labels"])[0])
    if change.error is not None:
        with pytest.raises((ConfigurationError, MissingPackageError), match=change.error):
            used.fit()
        return
    fresh = outcome(made(tmp_path / "fresh", **{**change.beside, name: change.value}))
    assert outcome(used) == fresh
    if change.is_seen:
        assert outcome(made(tmp_path / "unchanged", **change.beside)) != fresh


def checkpointed(model: nn.Module) -> list[bool]:
    return ["forward" in vars(block) for block in model.blocks]  # type: ignore[union-attr]


def test_a_model_recomputes_activations_from_the_next_call_on() -> None:
    trainer = made(Path())
    trainer.evaluate()
    trainer.args.gradient_checkpointing = True
    trainer.fit()
    assert checkpointed(trainer.unwrapped_model) == [True, True]


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_offload"])
def test_what_a_prepared_model_cannot_undo_is_an_error_until_it_gets_another(name: str) -> None:
    trainer = made(Path(), **{name: True})
    trainer.evaluate()
    setattr(trainer.args, name, False)
    for call in (trainer.fit, trainer.evaluate, lambda: trainer.predict(rows(8))):
        with pytest.raises(ConfigurationError, match=f"{name} was True when the model was prepared, and is False now"):
            call()
    trainer.model = Network()
    trainer.fit()
    assert checkpointed(trainer.unwrapped_model) == [False, False]


@pytest.mark.parametrize("before", ["evaluate", "fit"])
def test_groups_that_freeze_no_more_let_parameters_train(before: str) -> None:
    """Fit the head first, then all, as in many tutorials; what the user froze stays frozen."""
    trainer = made(Path(), parameter_groups=[ParameterGroup("blocks.*", frozen=True)])
    trainer.unwrapped_model.head.bias.requires_grad_(False)  # type: ignore[union-attr]
    getattr(trainer, before)()
    assert not any(parameter.requires_grad for parameter in trainer.unwrapped_model.blocks.parameters())  # type: ignore[union-attr]
    trainer.args.parameter_groups = []
    trainer.fit()
    frozen = [name for name, parameter in trainer.unwrapped_model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["head.bias"]


class Adapted(nn.Module):
    """Freezes a model and adds a layer, as an adapter does."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.added = base.requires_grad_(False), nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(self.added(inputs))


def test_a_model_that_was_frozen_by_hand_stays_frozen_when_it_is_set() -> None:
    trainer = made(Path(), parameter_groups=[ParameterGroup("blocks.*", frozen=True)])
    trainer.fit()
    trainer.model = Adapted(trainer.unwrapped_model)
    trainer.args.parameter_groups = []
    trainer.fit()
    trained = [name for name, parameter in trainer.unwrapped_model.named_parameters() if parameter.requires_grad]
    assert trained == ["added.weight", "added.bias"]


def test_a_sharded_model_takes_other_learning_rates_of_groups() -> None:
    def body() -> list[float]:
        trainer = made(Path(), fsdp=True, lr_scheduler="constant")
        trainer.args.parameter_groups = [ParameterGroup("head.*", learning_rate=0.25)]
        trainer.fit()
        trainer.args.parameter_groups = [ParameterGroup("head.*", learning_rate=0.125)]
        trainer.fit()
        (optimizer,) = trainer.run.optimizers.values()
        trainer.args.parameter_groups = [ParameterGroup("head.*", frozen=True)]
        with pytest.raises(ConfigurationError, match=r"parameter_groups was .* when the model was prepared"):
            trainer.fit()
        return sorted({group["lr"] for group in optimizer.param_groups})

    assert all(0.125 in rates and 0.25 not in rates for rates in run_world(body))


def test_several_processes_train_what_is_frozen_no_more() -> None:
    def body() -> list[list[float]]:
        trainer = made(Path(), parameter_groups=[ParameterGroup("blocks.*", frozen=True)])
        before = [parameter.tolist() for parameter in trainer.unwrapped_model.parameters()]
        trainer.fit()
        trainer.args.parameter_groups = []
        trainer.fit()
        after = [parameter.tolist() for parameter in trainer.unwrapped_model.parameters()]
        assert all(one != other for one, other in zip(before, after, strict=True))
        return after

    first, second = run_world(body)
    assert first == second


def test_a_folder_that_is_set_later_keeps_as_many_checkpoints_as_asked(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    trainer.fit()
    trainer.args.output_dir, trainer.args.save_every, trainer.args.keep_last = tmp_path / "runs", 1, 1
    trainer.args.eval_every = "never"
    trainer.fit()
    assert len(list(tmp_path.glob("runs/*/checkpoints/*"))) == 1
    trainer.args.output_dir = trainer.args.save_every = None
    trainer.fit()  # without a callback that needs a folder
    assert len(list(tmp_path.glob("runs/*"))) == 1


def test_default_callbacks_that_were_removed_or_given_stay_so(tmp_path: Path) -> None:
    trainer = made(tmp_path, output_dir="runs")
    own = Throughput(fill=False)
    trainer.events.remove(Throughput)
    trainer.events.remove(Checkpoint)
    trainer.events.add(own)
    trainer.args.keep_last, trainer.args.group_by_length = 1, True
    trainer.fit()
    assert [callback for callback in trainer.events if isinstance(callback, (Throughput, Checkpoint))] == [own]


@dataclass
class Holds(Callback):
    """A callback that compares its values, as dataclasses do, and sees which checkpoints a save leaves."""

    weights: Tensor
    steps: list[int] = field(default_factory=list[int])

    def on_save_end(self, run: Run, folder: Path) -> None:
        self.steps = [checkpoint["step"] for checkpoint in run.state.checkpoints]


def test_callbacks_that_compare_tensors_follow_default_ones_that_are_replaced(tmp_path: Path) -> None:
    args = arguments(output_dir=tmp_path / "runs", max_steps=4, save_every=1, save_in_background=False)
    callbacks = [Holds(torch.ones(2)), Holds(torch.ones(2))]
    trainer = Trainer(
        Network(), args, train_dataset=rows(), loss_fn=cross_entropy, collate_fn=Columns("labels"), callbacks=callbacks
    )
    trainer.args.keep_last = 1
    trainer.fit()
    assert [callback.steps for callback in callbacks] == [[4], [4]]


@pytest.mark.parametrize("call", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("per_device_eval_batch_size", 0, "per_device_eval_batch_size must be"),
        ("per_device_eval_batchsize", 4, "Did you mean 'per_device_eval_batch_size'"),
        ("mixed_precision", "bf16", "mixed_precision is read only when a Trainer is made: it was None"),
    ],
)
def test_evaluations_check_arguments_too(call: str, name: str, value: Any, message: str) -> None:
    trainer = made(Path())
    setattr(trainer.args, name, value)
    with pytest.raises(ConfigurationError, match=message):
        getattr(trainer, call)(rows(8))


def test_each_change_of_groups_in_place_takes_effect() -> None:
    trainer = made(Path(), parameter_groups=[ParameterGroup("head.bias", frozen=True)])
    trainer.evaluate()
    for pattern, count in (("blocks.0.*", 3), ("blocks.1.*", 5)):
        cast("list[ParameterGroup]", trainer.args.parameter_groups).append(ParameterGroup(pattern, frozen=True))
        trainer.evaluate()
        assert sum(not parameter.requires_grad for parameter in trainer.unwrapped_model.parameters()) == count


def test_callbacks_of_an_evaluation_see_arguments_that_were_set() -> None:
    seen: list[int] = []
    trainer = made(Path())
    trainer.events.add(LambdaCallback(on_evaluate_end=lambda run, metrics: seen.append(run.args.seed)))
    trainer.args = arguments(seed=7)
    trainer.evaluate()
    assert seen == [7]


def test_the_loaders_of_a_given_accelerator_keep_its_options() -> None:
    options = DataLoaderConfiguration(data_seed=3)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    trainer = Trainer(Network(), arguments(), eval_dataset=rows(), loss_fn=cross_entropy, accelerator=accelerator)
    trainer.collate_fn, trainer.args.seed = Columns("labels"), 7
    trainer.evaluate()
    assert accelerator.dataloader_config is options


def test_an_argument_that_a_callback_changes_during_a_fit_does_not_end_it() -> None:
    def change(run: Run) -> None:
        run.args.mixed_precision = "bf16"

    trainer = made(Path(), eval_every=1)
    trainer.events.add(LambdaCallback(on_step_end=change))
    assert trainer.fit().state.step == 4


def test_workers_are_measured_for_each_dataset() -> None:
    class Slow(list[dict[str, Any]]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    trainer = made(Path(), num_workers="auto", max_steps=1, eval_every="never")
    first, second = Slow(rows()), Slow(rows())
    trainer.train_dataset = first
    trainer.fit()
    reads, trainer.train_dataset = first.reads, second
    trainer.fit()
    assert reads == second.reads > 8  # measured, and trained on
