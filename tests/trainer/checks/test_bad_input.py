"""Whoever gets it wrong hears so at once, in words that help, and before anything of the model is touched."""

import copy
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from tests.worlds import run_world
from trainer_lib import Accelerator, LossResult, ParallelismConfig, Trainer, TrainingArguments
from trainer_lib.callbacks.checkpoint import Checkpoint
from trainer_lib.callbacks.early_stopping import EarlyStopping
from trainer_lib.callbacks.memory_snapshot import MemorySnapshot
from trainer_lib.callbacks.profile import Profile
from trainer_lib.callbacks.trackers import TensorBoardCallback, TrackerCallback
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import (
    ConfigurationError,
    PreparationError,
    SignatureError,
    StateError,
    TrainerLibError,
)
from trainer_lib.launchers import ProcessFailedError
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.state import PartialState
from trainer_lib.trainer.fit.accelerator_setup.build_accelerator import accumulation_steps

INPUTS, CLASSES = torch.randn(16, 4), torch.randint(0, 2, (16,))
DATA = (INPUTS, CLASSES)
MAKE: Any = Trainer  # as whoever does not look at types calls it
SECONDS = 2.0  # of processor time; most take some hundredths


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([(INPUTS[index % 16], CLASSES[index % 16]) for index in range(self.samples)])


class Head(nn.Module):
    """A layer, and what it returns of a batch."""

    def __init__(self, answer: Callable[[Tensor, Any], Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.answer = answer

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.layer(x)
        return scores if self.answer is None else self.answer(scores, labels)


class Masked(nn.Module):
    """One that needs a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.layer(x) * mask


class WeighedLoss(nn.Module):
    """A loss with weights of its own, such as those of face recognition."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.eye(2))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ self.weights, targets)


def arguments(**options: Any) -> TrainingArguments:
    settings: dict[str, Any] = {"use_cpu": True, "progress_bar": False, "max_steps": 3, **options}
    return TrainingArguments(**settings)


def trainer(model: Any = None, kind: Any = Trainer, **options: Any) -> Any:
    """Return a trainer that would train, but for what is given; options of the arguments are taken out."""
    fields = set(TrainingArguments.__dataclass_fields__) - {"optimizer"}
    trainer_options = {name: options.pop(name) for name in list(options) if name in fields}
    settings: dict[str, Any] = {"train_dataset": DATA, "loss_fn": F.cross_entropy, **options}
    return kind(nn.Linear(4, 2) if model is None else model, arguments(**trainer_options), **settings)


def trainer_class(**methods: Any) -> type[Trainer]:
    """Return a subclass of Trainer with these methods."""
    return type("Own", (Trainer,), methods)


def own(y_true: Tensor, y_pred: Tensor) -> Tensor:
    """Return what a function of scikit-learn or Keras does."""
    return (y_true == y_pred).float()


class Touched:
    """What of a model could be touched."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = self.look()

    def look(self) -> list[Any]:
        modes = [module.training for module in self.model.modules()]
        tensors = [
            (name, id(parameter), parameter.device, parameter.requires_grad, parameter.grad)
            for name, parameter in self.model.named_parameters()
        ]
        return [modes, tensors, sorted(vars(self.model)), type(self.model)]

    def check(self, weights: dict[str, Any]) -> None:
        assert self.look() == self.before
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, weights[name])


class Steps(Callback):
    """Counts the updates."""

    def __init__(self) -> None:
        self.count = 0

    def on_optimizer_step_begin(self, run: Run) -> None:
        self.count += 1


def refused(
    error: type[TrainerLibError],
    words: str,
    call: Callable[[], Any],
) -> BaseException:
    """Check that a call is refused quickly, in words that have all of these in this order (between `…`)."""
    began = time.process_time()
    with pytest.raises(error) as caught:
        call()
    assert time.process_time() - began < SECONDS
    text, place = str(caught.value), 0
    for part in words.split("…"):
        position = text.find(part, place)
        assert position >= 0, f"{part!r} is not in {text!r}"
        place = position + len(part)
    return caught.value


# -- when it is given ------------------------------------------------------------------------------------------------

CONSTRUCTED: dict[str, tuple[type[TrainerLibError], str, Callable[[], Any]]] = {
    "a model's class": (
        ConfigurationError,
        "torch.nn.Module…Linear(",
        lambda: MAKE(nn.Linear),
    ),
    "no model": (ConfigurationError, "model must be…got a NoneType", lambda: MAKE(None)),
    "a model's name": (ConfigurationError, "got a str…from_pretrained('gpt2')", lambda: MAKE("gpt2")),
    "a list of models": (ConfigurationError, "a dict of them by name, got a list", lambda: MAKE([nn.Linear(1, 1)])),
    "models without any": (ConfigurationError, "empty", lambda: MAKE({})),
    "models that are none": (ConfigurationError, "'d' is a int", lambda: MAKE({"g": nn.Linear(1, 1), "d": 3})),
    "arguments as a dict": (
        ConfigurationError,
        "got a dict…TrainingArguments(**args)",
        lambda: MAKE(nn.Linear(4, 2), {"max_steps": 3}),
    ),
    "arguments as a path": (
        ConfigurationError,
        "from_file('args.yaml')",
        lambda: MAKE(nn.Linear(4, 2), Path("args.yaml")),
    ),
    "the arguments' class": (ConfigurationError, "TrainingArguments(", lambda: MAKE(Head(), TrainingArguments)),
    "data in the arguments' place": (ConfigurationError, "got a tuple…train_dataset=", lambda: MAKE(Head(), DATA)),
    "data by position": (
        SignatureError,
        "model and args by position…got a tuple…train_dataset=",
        lambda: MAKE(Head(), arguments(), DATA),
    ),
    "a misspelt name": (
        SignatureError,
        "no 'eval_dataste'…Did you mean 'eval_dataset'?",
        lambda: MAKE(Head(), eval_dataste=DATA),
    ),
    "Hugging Face's data_collator": (SignatureError, "collate_fn", lambda: MAKE(Head(), data_collator=list)),
    "Hugging Face's optimizers": (
        SignatureError,
        "optimizer and scheduler",
        lambda: MAKE(Head(), optimizers=(None, None)),
    ),
    "an argument of the arguments": (
        SignatureError,
        "TrainingArguments(max_steps=",
        lambda: MAKE(Head(), max_steps=3),
    ),
    "a loss's class": (ConfigurationError, "CrossEntropyLoss()", lambda: trainer(loss_fn=nn.CrossEntropyLoss)),
    "a loss by name": (ConfigurationError, "functional.mse_loss", lambda: trainer(loss_fn="mse_loss")),
    "a loss of outputs alone": (SignatureError, "outputs, targets…(o)", lambda: trainer(loss_fn=lambda o: o.sum())),
    "a loss of three": (SignatureError, "missing…'w'…compute_loss", lambda: trainer(loss_fn=lambda o, t, w: o.sum())),
    "a module's loss of three": (SignatureError, "missing", lambda: trainer(loss_fn=nn.TripletMarginLoss())),
    "a loss of each sample": (ConfigurationError, "'none'", lambda: trainer(loss_fn=nn.MSELoss(reduction="none"))),
    "a loss that sums": (
        ConfigurationError,
        "reduction='mean'…(got 'sum')…LossResult(",
        lambda: trainer(loss_fn=functools.partial(F.mse_loss, reduction="sum")),
    ),
    "a collate function by name": (ConfigurationError, "collate_fn='pad'", lambda: trainer(collate_fn="pad")),
    "a collate function's class": (ConfigurationError, "Give an object", lambda: trainer(collate_fn=nn.Linear)),
    "a collate function of two": (SignatureError, "list of samples…'b'", lambda: trainer(collate_fn=lambda a, b: a)),
    "a tokenizer by name": (ConfigurationError, "'bert'…from_pretrained", lambda: trainer(processing_class="bert")),
    "an optimizer by name": (
        ConfigurationError,
        'got a str…TrainingArguments(optimizer="sgd")',
        lambda: MAKE(Head(), arguments(), optimizer="sgd"),
    ),
    "a list of optimizers": (ConfigurationError, "several by name", lambda: MAKE(Head(), optimizer=[1])),
    "an optimizer of nothing": (SignatureError, "parameters", lambda: MAKE(Head(), optimizer=lambda: None)),
    "a schedule by name": (
        ConfigurationError,
        'got a str…lr_scheduler="cosine"',
        lambda: trainer(scheduler="cosine"),
    ),
    "a schedule's class that needs more": (
        SignatureError,
        "StepLR…step_size…lambda optimizer: StepLR(optimizer",
        lambda: trainer(scheduler=StepLR),
    ),
    "a schedule of an optimizer not given": (
        ConfigurationError,
        "StepLR…not given…lambda optimizer",
        lambda: trainer(scheduler=StepLR(SGD(Head().parameters(), 0.1), 1)),
    ),
    "a schedule of another optimizer": (
        ConfigurationError,
        "another optimizer",
        lambda: trainer(scheduler=StepLR(SGD(Head().parameters(), 0.1), 1), optimizer=SGD(Head().parameters(), 0.1)),
    ),
    "a callback's class": (ConfigurationError, "the class Steps…Steps(", lambda: trainer(callbacks=[Steps])),
    "a callback alone": (ConfigurationError, "list…got a Steps", lambda: trainer(callbacks=Steps())),
    "callbacks by name": (ConfigurationError, "list…got a dict", lambda: trainer(callbacks={"a": Steps()})),
    "no callback": (ConfigurationError, "not a Callback", lambda: trainer(callbacks=[print])),
    "a callback twice": (ConfigurationError, "twice", lambda: trainer(callbacks=[callback := Steps(), callback])),
    "a misspelt event": (
        ConfigurationError,
        "on_step_ended…'on_step_end'",
        lambda: trainer(callbacks=[type("Late", (Callback,), {"on_step_ended": lambda self, run: None})()]),
    ),
    "a misspelt metric": (
        ConfigurationError,
        "'acuracy'…accuracy…Did you mean 'accuracy'",
        lambda: trainer(eval_dataset=DATA, metrics=["acuracy"]),
    ),
    "a metric of one argument": (
        SignatureError,
        "The metric 'f1' is called with predictions and labels…(prediction) does not fit…compute_metrics",
        lambda: trainer(eval_dataset=DATA, metrics={"f1": lambda prediction: 1.0}),
    ),
    "a metric that takes the labels first": (
        SignatureError,
        "own takes the labels first (y_true, y_pred)…own(prediction.label_ids, prediction.predictions)",
        lambda: trainer(eval_dataset=DATA, metrics={"own": own}),
    ),
    "compute_metrics of three": (
        SignatureError,
        "compute_metrics is called with one argument…(p, labels, more) does not fit",
        lambda: trainer(eval_dataset=DATA, compute_metrics=lambda p, labels, more: {}),
    ),
    "a loss that takes the targets first": (
        SignatureError,
        "loss_fn(outputs, targets), but own takes the targets first (y_true, y_pred)",
        lambda: trainer(loss_fn=own),
    ),
    "a metric's class": (ConfigurationError, "Give an object", lambda: trainer(eval_dataset=DATA, metrics=[nn.Linear])),
    "no function": (ConfigurationError, "function, got a int", lambda: trainer(eval_dataset=DATA, compute_metrics=3)),
    "metrics of no set": (
        ConfigurationError,
        "'tset'…Did you mean 'test'",
        lambda: trainer(eval_dataset={"test": DATA}, compute_metrics={"tset": len}),
    ),
    "a metric that may be more or less": (
        ConfigurationError,
        "'zork'…greater_is_better=True",
        lambda: trainer(eval_dataset=DATA, metric_for_best="zork"),
    ),
    "no sets": (ConfigurationError, "eval_dataset is an empty dict", lambda: trainer(eval_dataset={})),
    "a set with a number": (ConfigurationError, "a set 1", lambda: trainer(eval_dataset={1: DATA})),
    "an engine's class": (ConfigurationError, "Accelerator(", lambda: trainer(accelerator=Accelerator)),
    "no engine": (ConfigurationError, "got a int", lambda: trainer(accelerator=3)),
    "another precision than the engine's": (
        ConfigurationError,
        "mixed_precision='bf16'…'no'…Accelerator(",
        lambda: trainer(accelerator=Accelerator(cpu=True), use_cpu=False, mixed_precision="bf16"),
    ),
    "what is said to an engine, beside one": (
        ConfigurationError,
        "fsdp=True…Accelerator(",
        lambda: trainer(accelerator=Accelerator(cpu=True), use_cpu=False, fsdp=True),
    ),
    "another accumulation than the engine's": (
        ConfigurationError,
        "accumulates 4…gradient_accumulation_steps=4",
        lambda: trainer(accelerator=Accelerator(cpu=True, gradient_accumulation_steps=4), use_cpu=False),
    ),
    "compute_loss without a batch": (
        SignatureError,
        "Own.compute_loss…compute_loss(model, batch)",
        lambda: trainer(kind=trainer_class(compute_loss=lambda self, batch: batch)),
    ),
    "configure_scheduler without a name": (
        SignatureError,
        "(optimizer, total_steps, name)",
        lambda: trainer(kind=trainer_class(configure_scheduler=lambda self, optimizer, total_steps: None)),
    ),
    "no steps": (ConfigurationError, "max_steps…at least 1, got 0", lambda: trainer(max_steps=0)),
    "negative steps": (ConfigurationError, "max_steps…at least 1, got -1", lambda: trainer(max_steps=-1)),
    "no accumulation": (ConfigurationError, "got 0", lambda: trainer(gradient_accumulation_steps=0)),
    "an odd global batch": (ConfigurationError, "12…8 or 16", lambda: trainer(global_batch_size=12)),
    "a warm-up longer than all": (ConfigurationError, "warmup=50…max_steps=3", lambda: trainer(warmup=50)),
    "an automatic batch size of evaluations": (
        ConfigurationError,
        "per_device_eval_batch_size='auto' is not supported…by itself",
        lambda: trainer(per_device_eval_batch_size="auto"),
    ),
    "a folder that is a file": (ConfigurationError, "is a file", lambda: trainer(output_dir=__file__)),
    "a name with a slash": (ConfigurationError, "without slashes, got 'a/b'", lambda: trainer(run_name="a/b")),
    "saves without a folder": (ConfigurationError, "Give output_dir", lambda: trainer(save_every="1 step")),
    "the best without a folder": (ConfigurationError, "Give output_dir", lambda: trainer(load_best_at_end=True)),
}


@pytest.mark.parametrize("case", CONSTRUCTED)
def test_what_cannot_be_meant_is_refused_when_it_is_given(case: str) -> None:
    refused(*CONSTRUCTED[case])


# -- when fit begins, and the model is untouched ---------------------------------------------------------------------


def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame({"x": [1.0], "labels": [0]})[:0]


def meta() -> nn.Module:
    return nn.Linear(4, 2, device="meta")


BEFORE: dict[str, tuple[type[TrainerLibError], str, dict[str, Any]]] = {
    "a global batch of a loader with other batches": (
        ConfigurationError,
        "global_batch_size=16…per_device_train_batch_size=8…have 4. Give per_device_train_batch_size=4",
        {"train_dataset": lambda: DataLoader(TensorDataset(*DATA), batch_size=4), "global_batch_size": 16},
    ),
    "no data": (ConfigurationError, "fit() needs data", {"train_dataset": None}),
    "an empty list": (ConfigurationError, "train_dataset is empty", {"train_dataset": []}),
    "an empty tuple": (ConfigurationError, "train_dataset is empty", {"train_dataset": ()}),
    "empty tensors": (ConfigurationError, "train_dataset is empty", {"train_dataset": (INPUTS[:0], CLASSES[:0])}),
    "an empty frame": (ConfigurationError, "train_dataset is empty", {"train_dataset": frame}),
    "an empty loader": (
        ConfigurationError,
        "train_dataset is empty",
        {"train_dataset": lambda: DataLoader(TensorDataset(INPUTS[:0], CLASSES[:0]))},
    ),
    "tensors of different lengths": (ConfigurationError, "0: 16, 1: 5", {"train_dataset": (INPUTS, CLASSES[:5])}),
    "a path": (ConfigurationError, "'data.csv', a name or path", {"train_dataset": "data.csv"}),
    "a generator": (ConfigurationError, "list_iterator…read only once", {"train_dataset": iter([1, 2])}),
    "a dataset's class": (ConfigurationError, "the class TensorDataset", {"train_dataset": TensorDataset}),
    "a number": (ConfigurationError, "train_dataset is a int", {"train_dataset": 5}),
    "several sets": (
        ConfigurationError,
        "'a', 'b'…give one",
        {"train_dataset": {"a": TensorDataset(*DATA), "b": TensorDataset(*DATA)}},
    ),
    "less than a batch": (
        ConfigurationError,
        "drop_last=True…16…32",
        {"drop_last": True, "per_device_train_batch_size": 32},
    ),
    "weights for other samples": (
        ConfigurationError,
        "one weight per sample: it has 2…16 samples",
        {"sample_weights": [1.0, 2.0]},
    ),
    "a column that is not there": (
        ConfigurationError,
        "'len'…x, labels…length_column",
        {
            "train_dataset": {"x": INPUTS, "labels": CLASSES},
            "group_by_length": True,
            "length_column": "len",
        },
    ),
    "an empty set": (ConfigurationError, "eval_dataset is empty", {"eval_dataset": []}),
    "a set by path": (ConfigurationError, "eval_dataset['dev'] is 'dev.csv'", {"eval_dataset": {"dev": "dev.csv"}}),
    "a set of nothing": (ConfigurationError, "eval_dataset['dev'] is a NoneType", {"eval_dataset": {"dev": None}}),
    "evaluations of nothing": (ConfigurationError, "eval_every='1 step'…eval_dataset", {"eval_every": "1 step"}),
    "a first evaluation of nothing": (ConfigurationError, "eval_on_start=True…eval_dataset", {"eval_on_start": True}),
    "a plateau of nothing": (
        ConfigurationError,
        'lr_scheduler="plateau" needs evaluations',
        {"lr_scheduler": "plateau"},
    ),
    "the best of no evaluations": (ConfigurationError, "metric_for_best='f1'…eval_", {"metric_for_best": "f1"}),
    "stopping without evaluations": (
        ConfigurationError,
        "EarlyStopping…eval_dataset",
        {"callbacks": lambda: [EarlyStopping()]},
    ),
    "stopping by a misspelt metric": (
        ConfigurationError,
        "'eval_los'…eval_loss…Did you mean 'eval_loss'",
        {"callbacks": lambda: [EarlyStopping("eval_los", greater_is_better=False)], "eval_dataset": DATA},
    ),
    "the best by a misspelt metric": (
        ConfigurationError,
        "'acuracy'…eval_loss, eval_accuracy…Did you mean 'eval_accuracy'",
        {"eval_dataset": DATA, "metrics": ["accuracy"], "metric_for_best": "acuracy", "greater_is_better": True},
    ),
    "the best of no set in particular": (
        ConfigurationError,
        "'accuracy'…eval_a_accuracy, eval_b_loss",
        {"eval_dataset": {"a": DATA, "b": DATA}, "metrics": ["accuracy"], "metric_for_best": "accuracy"},
    ),
    "checkpoints without a folder": (
        ConfigurationError,
        "Checkpoint…output_dir",
        {"callbacks": lambda: [Checkpoint(every="1 step")]},
    ),
    "a folder that cannot be": (
        ConfigurationError,
        "cannot be written to: Not a directory",
        {"output_dir": f"{__file__}/runs"},
    ),
    "a checkpoint that is not there": (ConfigurationError, "/nowhere/x…no checkpoint", {"resume": "/nowhere/x"}),
    "a checkpoint that is a file": (
        ConfigurationError,
        "is a file, and a checkpoint is a folder…load_checkpoint_in_model(model, file)",
        {"resume": __file__},
    ),
    "a frozen model": (
        ConfigurationError,
        "All 2 parameters of Linear",
        {"model": lambda: Head().layer.requires_grad_(False)},
    ),
    "a model without parameters": (ConfigurationError, "ReLU has no parameters", {"model": nn.ReLU}),
    "a model that cannot be called": (ConfigurationError, "no forward", {"model": lambda: nn.ModuleList([Head()])}),
    "a model without values": (ConfigurationError, "weight of Linear…meta device", {"model": meta}),
    "an optimizer of another model": (
        PreparationError,
        "SGD…none of them of the given model",
        {"optimizer": lambda: SGD(Head().parameters(), 0.1)},
    ),
    "a loader of a wrong type": (
        ConfigurationError,
        "train_dataloader returned a list…train_dataset=",
        {"kind": trainer_class(train_dataloader=lambda self: [1])},
    ),
    "an evaluation loader of a wrong type": (
        ConfigurationError,
        "eval_dataloader returned a NoneType",
        {"kind": trainer_class(eval_dataloader=lambda self, dataset: None), "eval_dataset": DATA},
    ),
}


def built(options: dict[str, Any]) -> tuple[Trainer, Steps]:
    """Return a trainer of a case: what is to be made afresh for it is there as a function that makes it."""
    afresh = {"model", "train_dataset", "callbacks", "optimizer"}
    made = {
        name: value() if name in afresh and callable(value) and value is not TensorDataset else value
        for name, value in options.items()
    }
    steps = Steps()
    made["callbacks"] = [*made.get("callbacks", ()), steps]
    return trainer(**made), steps


@pytest.mark.parametrize("case", BEFORE)
def test_what_can_be_known_before_is_said_before_the_model_is_touched(case: str) -> None:
    error, words, options = BEFORE[case]
    model_trainer, steps = built(options)
    assert isinstance(model_trainer.model, nn.Module)
    touched, weights = Touched(model_trainer.model), copy.deepcopy(model_trainer.model.state_dict())
    refused(error, words, model_trainer.fit)
    assert model_trainer.run.model is None
    assert steps.count == 0
    if case != "a model without values":
        touched.check(weights)


def test_a_lazy_model_is_refused() -> None:
    model_trainer = trainer(nn.LazyLinear(2))
    refused(ConfigurationError, "weight of LazyLinear…model(batch)", model_trainer.fit)


# -- before the first step -------------------------------------------------------------------------------------------


def answers(answer: Callable[[Tensor, Any], Any]) -> dict[str, Any]:
    return {"model": lambda: Head(answer), "loss_fn": None, "train_dataset": {"x": INPUTS, "labels": CLASSES}}


def loses(function: Callable[..., Any], **more: Any) -> dict[str, Any]:
    return {"loss_fn": function, **more}


def computes(function: Callable[..., Any]) -> dict[str, Any]:
    return {"kind": trainer_class(compute_loss=function)}


def logs(*values: Any) -> dict[str, Any]:
    def compute_loss(self: Trainer, model: Any, batch: Any) -> Tensor:
        self.log(*values)
        return model(batch[0]).sum()

    return computes(compute_loss)


FIRST: dict[str, tuple[type[TrainerLibError], str, dict[str, Any]]] = {
    "an empty stream": (ConfigurationError, "no batch…empty", {"train_dataset": Stream(0)}),
    "a stream shorter than a batch": (
        ConfigurationError,
        "no batch…drop_last",
        {"train_dataset": Stream(3), "drop_last": True},
    ),
    "a loader without a batch": (
        ConfigurationError,
        "16 samples has no batch…drop_last",
        {"train_dataset": lambda: DataLoader(TensorDataset(*DATA), batch_size=32, drop_last=True)},
    ),
    "samples shared out twice": (
        PreparationError,
        "DistributedSampler…shuffle=True",
        {
            "train_dataset": lambda: DataLoader(
                TensorDataset(*DATA), sampler=DistributedSampler(TensorDataset(*DATA), 2, 0)
            )
        },
    ),
    "a schedule without an end": (
        ConfigurationError,
        "'linear'…max_steps…schedule_steps",
        {"train_dataset": Stream(20), "max_steps": None, "num_train_epochs": 1},
    ),
    "a part of what has no length": (
        ConfigurationError,
        "num_train_epochs=0.5",
        {"train_dataset": Stream(20), "max_steps": None, "num_train_epochs": 0.5, "lr_scheduler": "constant"},
    ),
    "logs at parts of what has no length": (
        ConfigurationError,
        'log_every="0.5 epochs"…steps',
        {"train_dataset": Stream(20), "log_every": "0.5 epochs"},
    ),
    "a warm-up as a part of what has no length": (
        ConfigurationError,
        "warmup=0.1…100 steps",
        {
            "train_dataset": Stream(20),
            "warmup": 0.1,
            "max_steps": None,
            "num_train_epochs": 1,
            "lr_scheduler": "constant",
        },
    ),
    "a warm-up longer than the epochs": (
        ConfigurationError,
        "longer than the run (got 50 of 2 steps)",
        {"warmup": 50, "max_steps": None, "num_train_epochs": 1},
    ),
    "samples of nothing": (ConfigurationError, "'0'…NoneType…collate_fn", {"train_dataset": [(None, 0)] * 8}),
    "samples of different shapes": (
        ConfigurationError,
        "shapes differ ((3,) and (4,))…collate_fn",
        {"train_dataset": [(torch.zeros(3 + index % 2), 0) for index in range(8)], "shuffle": False},
    ),
    "no labels": (ConfigurationError, "x and no target…label_names", {"model": Head, "train_dataset": {"x": INPUTS}}),
    "a tensor alone": (ConfigurationError, "(inputs, targets)", {"train_dataset": INPUTS}),
    "misspelt labels": (
        ConfigurationError,
        "x, gold and no target: none of golf…Did you mean 'gold'",
        {"model": Head, "train_dataset": {"x": INPUTS, "gold": CLASSES}, "label_names": ["golf"]},
    ),
    "a name that the model does not take": (
        ConfigurationError,
        "'idx'…Head.forward does not take…x, labels…remove_columns",
        {"model": Head, "train_dataset": {"x": INPUTS, "idx": CLASSES, "labels": CLASSES}},
    ),
    "a name in capitals": (
        ConfigurationError,
        "'X'…Did you mean 'x'",
        {"model": Head, "train_dataset": {"X": INPUTS, "labels": CLASSES}},
    ),
    "another name for what the model takes": (
        ConfigurationError,
        "'image'…Head.forward does not take…x, labels, and 'x' is missing. Rename the fields",
        {"model": Head, "train_dataset": {"image": INPUTS, "labels": CLASSES}},
    ),
    "a name that is missing": (
        ConfigurationError,
        "Masked.forward needs 'mask'…the batch has 'x'",
        {"model": Masked, "train_dataset": {"x": INPUTS, "labels": CLASSES}},
    ),
    "a value that is missing": (
        ConfigurationError,
        "1 value for Masked.forward, which takes x, mask…'mask'",
        {"model": Masked},
    ),
    "a value too many": (
        ConfigurationError,
        "2 values for Linear.forward, which takes input, and there is no loss_fn. If the last value…cross_entropy)",
        {"loss_fn": None},
    ),
    "a model without a loss": (
        ConfigurationError,
        "a dict with logits, and no loss…loss_fn=",
        answers(lambda scores, labels: {"logits": scores}),
    ),
    "a model that returns nothing": (ConfigurationError, "NoneType, and no loss", answers(lambda scores, labels: None)),
    "a model with a loss of each sample": (
        ConfigurationError,
        "The model returned a loss of shape (8,)…LossResult(",
        answers(lambda scores, labels: {"loss": F.cross_entropy(scores, labels, reduction="none")}),
    ),
    "a model with a number as its loss": (
        ConfigurationError,
        "The model returned a float…without calling .item()",
        answers(lambda scores, labels: {"loss": 1.0}),
    ),
    "a text to compare": (
        ConfigurationError,
        "cross_entropy compares tensors, and the model returned a str",
        {"model": lambda: Head(lambda scores, labels: "hello")},
    ),
    "a loss that is lost": (ConfigurationError, "loss_fn returned a NoneType…return missing", loses(lambda o, t: None)),
    "a loss read too early": (
        ConfigurationError,
        "loss_fn returned a float…without calling .item()",
        loses(lambda o, t: F.cross_entropy(o, t).item()),
    ),
    "a custom loss of each sample": (
        ConfigurationError,
        "loss_fn returned a loss of shape (8,)…LossResult(",
        loses(lambda o, t: F.cross_entropy(o, t, reduction="none")),
    ),
    "a loss in a list of one": (
        ConfigurationError,
        "loss_fn returned a loss of shape (1,)",
        loses(lambda o, t: F.cross_entropy(o, t)[None]),
    ),
    "a loss with something": (ConfigurationError, "loss_fn returned a tuple", loses(lambda o, t: (o.mean(), o))),
    "a loss in whole numbers": (ConfigurationError, "() int64…floating", loses(lambda o, t: t.sum())),
    "a detached loss": (
        ConfigurationError,
        "does not require gradients…detached",
        loses(lambda o, t: F.cross_entropy(o, t).detach()),
    ),
    "values of other shapes": (
        ConfigurationError,
        "mse_loss needs outputs and targets of the same shape…(8, 1)…(8,)…targets[:, None]",
        loses(F.mse_loss, model=lambda: nn.Linear(4, 1), train_dataset=(INPUTS, torch.randn(16))),
    ),
    "labels with a point": (
        ConfigurationError,
        "int64…(8,) float32…targets.long()",
        {"train_dataset": (INPUTS, CLASSES.float())},
    ),
    "short labels": (ConfigurationError, "int64…int32", {"train_dataset": (INPUTS, CLASSES.int())}),
    "labels in a column": (
        ConfigurationError,
        "of shape (8,)…got (8, 1)…targets.reshape(8)",
        {"train_dataset": (INPUTS, CLASSES[:, None])},
    ),
    "one-hot labels": (
        ConfigurationError,
        "class indices as targets, of shape (8,)…got (8, 2)",
        {"train_dataset": (INPUTS, F.one_hot(CLASSES, 2))},
    ),
    "labels out of range": (
        ConfigurationError,
        "from 0 to 1 for 2 outputs…7 to 7…8 outputs",
        {"train_dataset": (INPUTS, torch.full((16,), 7))},
    ),
    "negative labels": (
        ConfigurationError,
        "got -1 to -1…from 0, or mark labels to ignore",
        {"train_dataset": (INPUTS, torch.full((16,), -1))},
    ),
    "weights for other classes": (
        ConfigurationError,
        "CrossEntropyLoss cannot compare outputs (8, 2) float32 with targets (8,) int64…weight tensor",
        loses(nn.CrossEntropyLoss(weight=torch.ones(3))),
    ),
    "compute_loss without a loss": (
        ConfigurationError,
        "compute_loss returned a NoneType…return missing",
        computes(lambda self, model, batch: None),
    ),
    "compute_loss with three": (
        ConfigurationError,
        "compute_loss returned a tuple",
        computes(lambda self, model, batch: (model(batch[0]).sum(), 1, 2)),
    ),
    "compute_loss with a float": (
        ConfigurationError,
        "compute_loss returned a float",
        computes(lambda self, model, batch: 1.0),
    ),
    "compute_loss with a matrix": (
        ConfigurationError,
        "compute_loss returned a loss of shape (8, 2)",
        computes(lambda self, model, batch: LossResult(model(batch[0]), weight=8)),
    ),
    "a weight below nothing": (
        ConfigurationError,
        "weight…got -1",
        computes(lambda self, model, batch: LossResult(model(batch[0]).sum(), weight=-1)),
    ),
    "items as a text": (
        ConfigurationError,
        "num_items returns…got '8'",
        {"kind": trainer_class(num_items=lambda self, batch: "8"), "loss_fn": lambda o, t: o.mean()},
    ),
    "a step that returns its loss": (
        ConfigurationError,
        "training_step returned a Tensor…self.backward(",
        {"kind": trainer_class(training_step=lambda self, model, batch: model(batch[0]).sum())},
    ),
    "a step without a weight": (
        ConfigurationError,
        "training_step returned…got None",
        {"kind": trainer_class(training_step=lambda self, model, batch: LossResult(model(batch[0]).sum()))},
    ),
    "an optimizer that is not there": (
        ConfigurationError,
        "'gen'…default",
        {
            "kind": trainer_class(
                training_step=lambda self, model, batch: self.backward(model(batch[0]).sum(), optimizer="gen")
            )
        },
    ),
    "a logged matrix": (
        ConfigurationError,
        "log('a'…takes one number…(2, 3)…get_tracker(",
        logs("a", torch.ones(2, 3)),
    ),
    "a logged text": (ConfigurationError, "got 'x'", logs("a", "x")),
    "a log without a name": (ConfigurationError, "got 3", logs(3, 1.0)),
    "a log that weighs a text": (ConfigurationError, "'x'", logs("a", 1.0, "x")),
    "a second loss": (ConfigurationError, "the training loss is already logged under this name", logs("loss", 1.0)),
    "no optimizer": (
        ConfigurationError,
        "configure_optimizer returned a NoneType",
        {"kind": trainer_class(configure_optimizer=lambda self: None)},
    ),
    "optimizer and schedule in one": (
        ConfigurationError,
        "configure_optimizer returned a tuple…configure_scheduler",
        {"kind": trainer_class(configure_optimizer=lambda self: (SGD(self.model.parameters(), 0.1), None))},
    ),
    "no schedule": (
        ConfigurationError,
        "configure_scheduler returned a str",
        {"kind": trainer_class(configure_scheduler=lambda self, optimizer, total_steps, name="": "linear")},
    ),
    "a schedule that is lost": (ConfigurationError, "scheduler returned None", {"scheduler": lambda optimizer: None}),
    "a schedule of no optimizer": (
        ConfigurationError,
        "'defualt'…Did you mean 'default'",
        {"scheduler": {"defualt": lambda optimizer: StepLR(optimizer, 1)}},
    ),
    "an optimizer that is lost": (
        ConfigurationError,
        "optimizer returned a NoneType",
        {"optimizer": lambda: lambda _: None},
    ),
    "a loss with weights that nothing trains": (
        ConfigurationError,
        "loss_fn=WeighedLoss…weights, which is in no model and in no optimizer…model.loss_fn = loss_fn…requires_grad_",
        {"loss_fn": WeighedLoss()},
    ),
    "models without a step": (
        ConfigurationError,
        "2 models…training_step(models, batch)",
        {"model": lambda: {"g": Head(), "d": Head()}},
    ),
}


@pytest.mark.parametrize("case", FIRST)
def test_the_rest_is_said_before_the_first_step(case: str) -> None:
    error, words, options = FIRST[case]
    model_trainer, steps = built(options)
    before = copy.deepcopy([model.state_dict() for model in models_of(model_trainer)])
    refused(error, words, model_trainer.fit)
    assert steps.count == 0
    assert model_trainer.state.step == 0
    for model, weights in zip(models_of(model_trainer), before, strict=True):
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def models_of(model_trainer: Trainer) -> list[nn.Module]:
    return [model_trainer.model] if isinstance(model_trainer.model, nn.Module) else list(model_trainer.model.values())


def test_an_error_of_the_model_itself_keeps_its_type_and_tells_shapes_and_types() -> None:
    model_trainer = trainer(train_dataset=(INPUTS.double().numpy(), CLASSES.numpy()))
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        model_trainer.fit()
    (note,) = caught.value.__notes__
    assert "step 1" in note
    assert "(8, 4) float64" in note
    assert "the model is of float32" in note
    assert "astype('float32')" in note


def test_a_global_batch_that_the_processes_cannot_share_names_one_that_they_can() -> None:
    options = arguments(global_batch_size=32, per_device_train_batch_size=32)
    words = "global_batch_size=32 is not a multiple…32 × 2 processes = 64. Give 64 or another multiple"
    refused(ConfigurationError, words, lambda: accumulation_steps(options, num_processes=2))


def test_an_error_of_a_metric_tells_which() -> None:
    model_trainer = trainer(metrics={"worse": lambda predictions, labels: 1 / 0}, eval_dataset=DATA)
    with pytest.raises(ZeroDivisionError) as caught:
        model_trainer.evaluate()
    assert caught.value.__notes__ == [
        "In the metric 'worse', in batch 1 of the evaluation, with predictions (8, 2) float32 and labels (8,) int64."
    ]


def test_an_error_of_compute_metrics_tells_what_it_was_given() -> None:
    model_trainer = trainer(compute_metrics=lambda prediction: 1 / 0, eval_dataset=DATA)
    with pytest.raises(ZeroDivisionError) as caught:
        model_trainer.evaluate()
    assert caught.value.__notes__ == [
        "In compute_metrics, with predictions (16, 2) float32 and labels (16,) int64, as NumPy arrays."
    ]


@pytest.mark.parametrize(
    ("samples", "hint"),
    [
        ((torch.zeros(8, 1, 4, 4, dtype=torch.uint8), CLASSES[:8]), "uint8 become float32 by .float() / 255"),
        ((CLASSES[:8], torch.zeros(8, 1, 4, 4)), "last value of a batch is the target: return (inputs, targets)"),
    ],
)
def test_a_batch_that_the_model_cannot_compute_has_a_hint(samples: tuple[Tensor, Tensor], hint: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        trainer(nn.Conv2d(1, 2, 3), train_dataset=samples).fit()
    assert hint in caught.value.__notes__[0]


# -- while it runs, and never silently -------------------------------------------------------------------------------


def test_steps_that_train_nothing_end_in_an_error() -> None:
    model_trainer = trainer(kind=trainer_class(training_step=lambda self, model, batch: None))
    refused(ConfigurationError, "No parameter…self.backward(loss)", model_trainer.fit)


def test_a_step_of_ones_own_may_leave_out_the_first_batches() -> None:
    class Choosy(Trainer):
        def training_step(self, model: Any, batch: Any) -> LossResult | None:
            if self.state.step >= 2:
                self.backward(model(batch[0]).sum())
            return None

    assert trainer(kind=Choosy).fit().state.step == 3


def test_a_loss_of_nothing_that_the_optimizer_has_is_an_error() -> None:
    class Aside(Trainer):
        def configure_optimizer(self) -> Optimizer:
            return SGD(Head().parameters(), 0.1)

    model_trainer = trainer(kind=Aside)
    refused(ConfigurationError, "No parameter of the optimizer got a gradient…made from this model", model_trainer.fit)
    assert model_trainer.state.step == 0


def test_a_run_in_which_nothing_counts_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trainer(train_dataset=(INPUTS, torch.full((16,), -100))).fit()
    assert "nothing is learned" in caplog.text


def test_a_name_that_is_known_only_after_an_evaluation_is_refused_then() -> None:
    model_trainer = trainer(
        eval_dataset=DATA,
        compute_metrics=lambda value: {"hits": 1.0},
        metric_for_best="hit",
        greater_is_better=True,
        eval_on_start=True,
    )
    refused(ConfigurationError, "'eval_hit'…eval_loss, eval_hits…Did you mean 'eval_hits'", model_trainer.fit)
    assert model_trainer.state.step == 0


def test_what_a_callback_adds_to_an_evaluation_can_be_the_best() -> None:
    class Adds(Callback):
        def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
            metrics["eval_speed"] = 1.0

    model_trainer = trainer(eval_dataset=DATA, callbacks=[Adds()], metric_for_best="speed", greater_is_better=True)
    best = model_trainer.fit().state.best
    assert best is not None
    assert best.metric == "eval_speed"


def test_a_callback_that_wants_a_checkpoint_hears_that_there_is_no_folder() -> None:
    class Asks(Callback):
        def on_step_end(self, run: Run) -> None:
            run.control.save = True

    refused(ConfigurationError, "Give output_dir", trainer(callbacks=[Asks()]).fit)


def test_a_dry_run_saves_nothing_whoever_asks(tmp_path: Path) -> None:
    model_trainer = trainer(callbacks=[Checkpoint(every="1 step")], output_dir=str(tmp_path / "runs"), dry_run=True)
    assert model_trainer.fit().state.step == 2
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_leaves_out_what_writes_into_the_folder_of_the_run(tmp_path: Path) -> None:
    callbacks = [TensorBoardCallback(), TrackerCallback("jsonl"), Profile(after=0, steps=1), MemorySnapshot()]
    model_trainer = trainer(callbacks=callbacks, output_dir=str(tmp_path / "runs"), dry_run=True)
    assert model_trainer.fit().state.step == 2
    assert not list(tmp_path.iterdir())


def test_an_empty_stream_is_nothing_to_evaluate_on() -> None:
    refused(ConfigurationError, "no samples", lambda: trainer().evaluate(Stream(0)))


def test_evaluate_says_what_it_was_given() -> None:
    several = trainer(eval_dataset={"alpha": DATA, "beta": DATA})
    refused(ConfigurationError, "evaluate() needs data", lambda: trainer().evaluate())
    refused(ConfigurationError, "evaluate(dataset) is empty", lambda: trainer().evaluate([]))
    refused(ConfigurationError, "evaluate(dataset)['b'] is empty", lambda: trainer().evaluate({"b": []}))
    refused(ConfigurationError, "prefix must be a text…(got 3)", lambda: trainer().evaluate(DATA, prefix=3))
    refused(ConfigurationError, "trainer.eval_dataset['alpha']", lambda: several.evaluate("alhpa"))
    assert several.run.model is None


def test_evaluation_steps_return_what_evaluations_take() -> None:
    model_trainer = trainer(kind=trainer_class(evaluation_step=lambda self, model, batch: None))
    refused(
        ConfigurationError,
        "evaluation_step returned a NoneType…EvaluationOutput(",
        lambda: model_trainer.evaluate(DATA),
    )


def test_predict_says_what_it_was_given_and_needs_no_labels(tmp_path: Path) -> None:
    model_trainer = trainer(Head())
    refused(ConfigurationError, "predict() needs data", lambda: model_trainer.predict(None))
    refused(ConfigurationError, "predict(dataset) is empty", lambda: model_trainer.predict(INPUTS[:0]))
    assert model_trainer.run.model is None
    assert model_trainer.predict({"x": INPUTS}).predictions.shape == (16, 2)
    assert model_trainer.predict(INPUTS).predictions.shape == (16, 2)
    (tmp_path / "there").write_text("mine")
    refused(ConfigurationError, "new folder", lambda: model_trainer.predict(INPUTS, to=tmp_path / "there"))


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_fit_takes_no_data_and_knows_what_resume_may_be(tmp_path: Path) -> None:
    model_trainer = trainer(output_dir=str(tmp_path))
    refused(SignatureError, "go to the constructor…train_dataset=", lambda: MAKE.fit(model_trainer, DATA))
    refused(ConfigurationError, 'resume="auto"', lambda: model_trainer.fit(resume=True))
    refused(ConfigurationError, "'atuo'…Did you mean 'auto'", lambda: model_trainer.fit(resume="atuo"))
    refused(ConfigurationError, "Give output_dir", lambda: trainer().fit(resume="auto"))
    assert model_trainer.run.model is None


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer(output_dir=str(tmp_path)).fit()
    (run,) = tmp_path.iterdir()
    other = trainer(nn.Linear(4, 3))
    weights = copy.deepcopy(other.unwrapped_model.state_dict())
    refused(StateError, "another model…weight…(2, 4) and here (3, 4)", lambda: other.fit(resume=run))
    assert other.state.step == 0
    assert all(torch.equal(value, weights[name]) for name, value in other.unwrapped_model.state_dict().items())


def test_a_finished_run_stays_finished_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = trainer(output_dir=str(tmp_path))
    first.fit()
    again = trainer(output_dir=str(tmp_path), resume="auto")
    assert again.fit().state.step == 3
    for weight, other in zip(again.model.parameters(), first.model.parameters(), strict=True):  # type: ignore[union-attr]
        assert torch.equal(weight, other)
    assert "finished: there is nothing to train" in caplog.text


def test_a_checkpoint_at_the_limit_leaves_nothing_to_train_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(output_dir=str(tmp_path)).fit()
    (run,) = tmp_path.iterdir()
    assert trainer(output_dir=str(tmp_path), max_steps=2).fit(resume=run).state.step == 3
    assert "nothing left to train: the run is at step 3" in caplog.text


def test_the_best_that_comes_last_is_saved_and_loaded(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "load_best_at_end": True,
        "save_every": "never",
        "output_dir": str(tmp_path),
        "learning_rate": 0.1,
    }
    result = trainer(eval_dataset=DATA, **options).fit()
    assert result.state.best is not None
    assert result.best_checkpoint is not None


# -- engines ---------------------------------------------------------------------------------------------------------


def test_fp16_on_a_cpu_is_scaled() -> None:
    model_trainer = trainer(mixed_precision="fp16")
    model_trainer.fit()
    assert model_trainer.accelerator.scaler is not None
    assert model_trainer.accelerator.scaler.is_enabled()


def test_another_precision_in_the_same_process_is_refused_and_not_taken_over() -> None:
    first = trainer(mixed_precision="bf16")
    refused(ConfigurationError, "None means 'no'…already uses 'bf16'…free_memory()", trainer)
    first.accelerator.free_memory()
    assert trainer().accelerator.mixed_precision == "no"


@pytest.mark.parametrize("options", [{"compile": "eager"}, {"fsdp": True}, {"parallelism": ParallelismConfig()}])
def test_settings_of_a_living_trainer_are_not_inherited(options: dict[str, Any]) -> None:
    first = trainer(**options)
    (name,) = options
    refused(ConfigurationError, f"{name}=…in this process was made with {name} already…free_memory()", trainer)
    assert trainer(**options).accelerator.distributed_type == first.accelerator.distributed_type
    first.accelerator.free_memory()
    state = trainer().accelerator.state
    assert (state.fsdp_plugin, state.parallelism_config, state.dynamo_plugin.is_active) == (None, None, False)


def test_an_optimizer_made_before_trains_and_so_does_its_class() -> None:
    model = Head()
    optimizer = SGD(model.parameters(), 0.1)
    for options in (
        {"model": model, "optimizer": optimizer},
        {"optimizer": SGD},
        {"optimizer": {"default": optimizer}, "model": model},
    ):
        assert trainer(**options).fit().state.step == 3


def test_a_wrapped_constructor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.__init__

    def wrapped(self: Trainer, *args: Any, **options: Any) -> None:
        original(self, *args, **options)

    monkeypatch.setattr(Trainer, "__init__", wrapped)
    assert trainer().fit().state.step == 3


def test_arrays_train() -> None:
    assert trainer(train_dataset=(INPUTS.numpy(), CLASSES.numpy())).fit().state.step == 3


# -- two ranks: no rank hangs, and all ranks raise the error -----------------------------------------------------------


def errors_of_ranks(body: Callable[[int], Any]) -> list[tuple[str, str]]:
    """Return the error that each of two ranks ended with: its type and its message."""

    def on_each() -> tuple[str, str]:
        try:
            made = body(PartialState(cpu=True).process_index)
            made() if callable(made) else made.fit()
        except TrainerLibError as error:
            return type(error).__name__, str(error)
        return "", ""

    began = time.monotonic()
    answers = run_world(on_each, timeout=60)
    assert time.monotonic() - began < 20
    return answers


UNEVEN: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "an empty dataset": ("train_dataset is empty", lambda rank: {"train_dataset": [] if rank else DATA}),
    "a set that is a path": ("'dev.csv'", lambda rank: {"eval_dataset": "dev.csv" if rank else DATA}),
    "a frozen model": ("are frozen", lambda rank: {"model": nn.Linear(4, 2).requires_grad_(not rank)}),
    "a loader of nothing": (
        "train_dataloader returned a NoneType",
        lambda rank: {"kind": trainer_class(train_dataloader=lambda self: None)} if rank else {},
    ),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_what_one_process_finds_wrong_all_hear(case: str) -> None:
    words, options = UNEVEN[case]
    first, second = errors_of_ranks(lambda rank: trainer(**options(rank)))
    assert second[0] == "ConfigurationError"
    assert words in second[1]
    assert first[0] == "ConfigurationError"
    assert "failed on rank 1: " in first[1]
    assert words in first[1]


DIFFERENT: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "other data": (
        "16 on rank 0, 8 on rank 1",
        lambda rank: {"train_dataset": (INPUTS[:8], CLASSES[:8]) if rank else DATA},
    ),
    "other steps": ("max_steps: 3 on rank 0, 4 on rank 1", lambda rank: {"max_steps": 3 + rank}),
    "another model": ("parameters", lambda rank: {"model": nn.Linear(4, 2 + rank)}),
    "other sets": ("dev: 16", lambda rank: {"eval_dataset": {"dev": DATA} if rank else {"test": DATA}}),
    "other metrics": (
        "eval_accuracy",
        lambda rank: {"eval_dataset": DATA, "metrics": ["accuracy"] if rank else []},
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_processes_that_are_about_to_do_different_things_all_say_so(case: str) -> None:
    words, options = DIFFERENT[case]
    for error, text in errors_of_ranks(lambda rank: trainer(**options(rank))):
        assert error == "DistributedOperationException"
        assert words in text


def test_an_evaluation_without_data_on_one_process_is_none() -> None:
    def body(rank: int) -> Any:
        model_trainer = trainer()
        return lambda: model_trainer.evaluate([] if rank else DATA)

    (first, why), (second, _) = errors_of_ranks(body)
    assert (first, second) == ("ConfigurationError", "ConfigurationError")
    assert "failed on rank 1: evaluate(dataset) is empty" in why


def test_a_folder_that_cannot_be_written_to_ends_all() -> None:
    for error, text in errors_of_ranks(lambda rank: trainer(output_dir=f"{__file__}/runs")):
        assert error == "ConfigurationError"
        assert "cannot be written to" in text


def test_a_process_that_raises_in_a_step_ends_all_and_is_told() -> None:
    def body() -> None:
        rank = PartialState(cpu=True).process_index

        def compute_loss(self: Trainer, model: Any, batch: Any) -> Tensor:
            if rank:
                raise KeyError("colour")
            return model(batch[0]).sum()

        trainer(kind=trainer_class(compute_loss=compute_loss)).fit()

    began = time.monotonic()
    with pytest.raises(ProcessFailedError) as caught:
        run_world(body, timeout=60)
    assert time.monotonic() - began < 20
    assert "KeyError: 'colour'" in str(caught.value)
    assert "In step 1, with the batch" in str(caught.value)


class PerEpoch:
    """A schedule whose step is told the epoch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int) -> None:
        raise AssertionError


def test_schedules_that_need_arguments_are_told_how_to_wrap() -> None:
    with pytest.raises(ConfigurationError, match=r"PerEpoch\.step\(epoch: int\).* missing.*steps once for each update"):
        trainer(scheduler=PerEpoch).fit()
    without_rates = type("Silent", (PerEpoch,), {"step": lambda self: None})
    with pytest.raises(ConfigurationError, match=r"Silent has no get_last_lr.*Wrap it"):
        trainer(scheduler=without_rates).fit()


class Unused(Head):
    """One with a layer that nothing goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


def test_parameters_that_get_no_gradient_are_named_and_can_be_allowed() -> None:
    for error, text in errors_of_ranks(lambda rank: trainer(Unused())):
        assert error == "ConfigurationError"
        assert "find_unused_parameters" in text
        assert "ddp=" in text

    def allowed() -> int:
        return trainer(Unused(), ddp=DistributedDataParallelKwargs(find_unused_parameters=True)).fit().state.step

    assert run_world(allowed, timeout=60) == [3, 3]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_layer_dropped_on_one_rank_is_named(accumulation: int) -> None:
    """Otherwise ranks reduce different things, and the process is killed."""

    class LayerDrop(Head):
        def __init__(self) -> None:
            super().__init__()
            self.extra, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            self.calls += 1
            drops = self.calls == 2 * accumulation and PartialState().process_index == 0
            return super().forward(x if drops else self.extra(x), labels)

    def body() -> None:
        trainer(LayerDrop(), per_device_train_batch_size=4, gradient_accumulation_steps=accumulation).fit()

    named = r"2 of the 4 .* on rank 0: extra.weight" if accumulation == 1 else r"Some of the 4 .* on rank 0\."
    with pytest.raises(ProcessFailedError, match=named):
        run_world(body, timeout=60)
