"""Tests of the names of other trainers: each gets an error that says what to use here."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import trainer_lib
from tests.trainer.tasks import arguments, network, points, trainer
from trainer_lib import ParameterGroup, Trainer, TrainingArguments, callbacks
from trainer_lib.events import Modifier, Run, RunState
from trainer_lib.foundation.errors import ConfigurationError, SignatureError, UnknownMemberError, UnsupportedError
from trainer_lib.trainer.arguments.declaration import settings
from trainer_lib.trainer.checks import foreign_names
from trainer_lib.trainer.result import FitResult

MAKE: Any = Trainer
LOADER: DataLoader[Any] = DataLoader(TensorDataset(*points()))


def refused(call: Callable[[], Any], kind: type[Exception] = SignatureError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert len(str(caught.value).splitlines()) <= 4
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("train", "Use fit()."),
        ("validate", "Use evaluate()."),
        ("add_callback", "Use Trainer(…, callbacks=[…])."),
        ("global_step", "Use state.step."),
        ("get_train_dataloader", "What you override here is train_dataloader(self)."),
        ("evalute", "Did you mean 'evaluate'?"),
        ("fit_one_cycle", 'Use TrainingArguments(lr_scheduler="one_cycle", num_train_epochs=…), and fit().'),
        ("train_on_batch", "Use fit(), or a loop with the Accelerator."),
        ("log_dict", "Use log(name, value), for each value."),
        ("manual_backward", "Use backward(loss)."),
        ("sanity_checking", "Use state.step; it is 0 in the evaluation of eval_on_start."),
        ("should_stop", "Use run.control.stop."),
    ],
)
def test_a_member_of_another_trainer_is_answered_with_ours(name: str, instead: str) -> None:
    made = trainer()
    assert not hasattr(made, name)
    assert refused(lambda: getattr(made, name), UnknownMemberError) == f"Trainer has no attribute {name!r}. {instead}"


def test_a_name_of_python_is_not_suggested() -> None:
    made: Any = trainer()
    assert refused(lambda: made.init_, UnknownMemberError) == "Trainer has no attribute 'init_'."


def test_should_stop_cannot_be_set() -> None:
    class Stopping(Modifier):
        def on_step_end(self, run: Run) -> None:
            run.trainer.should_stop = True

    with pytest.raises(UnknownMemberError, match=r"no effect\. Set trainer\.run\.control\.stop = True"):
        trainer(callbacks=[Stopping()]).fit()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("training_loss", ' Use metrics["loss"], the last training loss, or the values of "loss" in history.'),
        ("global_step", " Use state.step."),
        ("metric", " Did you mean 'metrics'?"),
        ("zzz", ""),
    ],
)
def test_an_attribute_of_another_result_is_answered_with_ours(name: str, instead: str) -> None:
    result = FitResult(state=RunState())
    assert (
        refused(lambda: getattr(result, name), UnknownMemberError) == f"FitResult has no attribute {name!r}.{instead}"
    )
    assert copy.deepcopy(result).metrics == pickle.loads(pickle.dumps(result)).metrics == {}


@pytest.mark.parametrize(
    ("name", "positional", "named", "message"),
    [
        ("log", [{"x": 1.0}], {}, "log() missing 1 required positional argument: 'value'. Log values one by one: for"),
        ("log", [{"x": 1.0}, 2.0], {}, "Log values one by one: for name, value in values.items(): trainer.log("),
        (
            "push_to_hub",
            [],
            {},
            "argument: 'repo_id'. Give the repository: push_to_hub(\"owner/name\"",
        ),
        (
            "search",
            [],
            {"hp_space": {}, "n_trials": 3},
            "hp_space is space here. n_trials is n here. Give search(space",
        ),
        (
            "find_learning_rate",
            [],
            {"min_lr": 1e-6, "num_it": 50},
            "min_lr is lowest here. num_it is updates here.",
        ),
        (
            "find_batch_size",
            [],
            {"steps_per_trial": 3},
            "steps_per_trial is updates here. Give find_batch_size(largest=",
        ),
        (
            "log",
            ["x"],
            {"value": 1.0, "prog_bar": True, "on_epoch": True},
            "log takes name, value and weight. Leave out prog_bar and on_epoch: each log has the mean over the batches",
        ),
        ("search", [], {"direction": "maximize"}, "direction is greater_is_better (maximize is True) here."),
    ],
)
def test_a_call_in_the_form_of_another_trainer_is_answered_with_ours(
    name: str, positional: list[Any], named: dict[str, Any], message: str
) -> None:
    kind = ConfigurationError if len(positional) > 1 else SignatureError
    assert message in refused(lambda: getattr(trainer(), name)(*positional, **named), kind)


def test_a_type_error_inside_of_a_method_is_not_explained() -> None:
    def space(trial: Any) -> Any:
        return len(3)  # type: ignore[arg-type]

    with pytest.raises(Exception, match="has no len") as caught:
        trainer(eval_dataset=points()).search(space, 1)
    assert not isinstance(caught.value, SignatureError)


class WithOutputs(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        compute: Any = super().compute_loss
        return compute(model, batch, return_outputs=True)[0]


def test_compute_loss_called_as_there_is_answered_with_ours() -> None:
    made = WithOutputs(network(), arguments(), train_dataset=points(), loss_fn=cross_entropy)
    with pytest.raises(TypeError, match="return_outputs") as caught:
        made.fit()
    (note,) = caught.value.__notes__
    assert "returns a LossResult: give return result.mean, result.outputs." in note


class WithItems(Trainer):
    def training_step(self, model: Any, batch: Any, num_items_in_batch: Any = None) -> Any:
        step: Any = super().training_step
        return step(model, batch, num_items_in_batch)


def test_training_step_called_as_there_is_answered_with_ours() -> None:
    made = WithItems(network(), arguments(), train_dataset=points(), loss_fn=cross_entropy)
    with pytest.raises(TypeError, match="positional arguments") as caught:
        made.fit()
    (note,) = caught.value.__notes__
    assert "super().training_step takes (model, batch) alone;" in note


@pytest.mark.parametrize(
    ("name", "instead"),
    [("global_step", " Use step."), ("metrics", " Use run.metrics."), ("stp", " Did you mean 'step'?"), ("zzz", "")],
)
def test_an_attribute_of_another_state_is_answered_with_ours(name: str, instead: str) -> None:
    state = RunState()
    assert refused(lambda: getattr(state, name), UnknownMemberError) == f"RunState has no attribute {name!r}.{instead}"
    assert copy.deepcopy(state) == pickle.loads(pickle.dumps(state)) == state


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_trainer_that_is_copied_says_what_to_copy(copied: Callable[[Any], Any]) -> None:
    message = refused(lambda: copied(trainer()), UnsupportedError)
    assert message.startswith("A Trainer cannot be copied or pickled. Make another one with a copy of the model, ")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("device", " Use accelerator.device of the Trainer."),
        ("main_process_first", " Use PartialState().main_process_first()."),
        ("logging_steps", " TrainingArguments(logging_steps=…) says what Hugging Face's logging_steps is here."),
        ("lr", " Did you mean 'learning_rate'?"),
        ("lerning_rate", " Did you mean 'learning_rate'?"),
        ("zzz", ""),
    ],
)
def test_an_attribute_of_other_arguments_is_answered_with_ours(name: str, instead: str) -> None:
    made = arguments()
    assert not hasattr(made, name)
    assert refused(lambda: getattr(made, name), UnknownMemberError) == (
        f"TrainingArguments has no attribute {name!r}.{instead}"
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("logging_steps", 5, 'logging_steps=5 of Hugging Face\'s Trainer is given here as log_every="5 steps".'),
        ("lerning_rate", 0.1, "no argument 'lerning_rate' (given: 0.1). Did you mean 'learning_rate'?"),
        ("max_steps", "5", "max_steps must be a whole number of at least 1, got '5'."),
        ("eval_delay", 2, "eval_delay=2"),
    ],
)
def test_what_is_assigned_to_arguments_is_checked_by_the_trainer(name: str, value: Any, text: str) -> None:
    args = arguments(eval_every="never")
    setattr(args, name, value)
    assert text in refused(lambda: trainer(args), ConfigurationError)


def test_an_attribute_of_your_own_and_an_argument_may_be_assigned() -> None:
    args: Any = arguments()
    args.task, args.max_steps = "mnist", 2
    made: Any = trainer(args)
    assert (made.args.task, made.fit().state.step) == ("mnist", 2)


def test_an_error_inside_a_property_stays_itself() -> None:
    class Broken(Trainer):
        @property
        def depth(self) -> int:
            return torch.nothing  # type: ignore[attr-defined,no-any-return]

    with pytest.raises(AttributeError, match="module 'torch' has no attribute 'nothing'"):
        _ = Broken(network(), arguments()).depth


def test_the_table_names_what_exists() -> None:
    assert set(foreign_names.OF_TRAINER) <= set(inspect.signature(Trainer).parameters)
    assert not set(foreign_names.OTHERWISE) & set(settings(TrainingArguments))
    assert set(foreign_names.RENAMED.values()) <= set(settings(TrainingArguments))
    assert not [name for name in foreign_names.ATTRIBUTES if hasattr(TrainingArguments, name)]
    assert not set(foreign_names.RENAMED) & set(settings(TrainingArguments))
    assert not [name for name in (*foreign_names.MEMBERS, *foreign_names.OVERRIDES) if hasattr(Trainer, name)]
    for instead in foreign_names.OVERRIDES.values():  # a method written as the hint says is accepted
        for method, parameters in re.findall(r"(\w+)\((self[^)]*)\)", instead):
            expected = list(inspect.signature(getattr(Trainer, method)).parameters)
            assert parameters.split(", ") == expected or method in ("fit", "save_model"), instead
    made: Any = trainer()
    for ours in {use.partition(";")[0] for use in foreign_names.MEMBERS.values() if use[0].islower()}:
        value = made
        for part in ours.partition("(")[0].split("."):
            value = getattr(value, part)


@pytest.mark.parametrize(
    ("positional", "named", "instead"),
    [
        ((), {"resume_from_checkpoint": True}, 'resume_from_checkpoint is resume here. Give resume="auto".'),
        ((), {"ckpt_path": "best"}, "such as resume=result.best_checkpoint of what fit returned."),
        ((network(), LOADER), {}, "Trainer(model, TrainingArguments(), train_dataset=…).fit()."),
        ((LOADER,), {}, "Trainer(model, TrainingArguments(), train_dataset=…).fit()."),
        ((points(),), {}, "Trainer(model, TrainingArguments(), train_dataset=…).fit()."),
        ((), {"resume": points()}, "Trainer(model, TrainingArguments(), train_dataset=…).fit()."),
        (
            (),
            {"steps_per_epoch": 4, "class_weight": {0: 1.0}, "initial_epoch": 2},
            'Trainer(model, TrainingArguments(limit_train_batches=4, resume="auto"), '
            "loss_fn=nn.CrossEntropyLoss(weight=…)).fit().",
        ),
        ((3,), {}, "Trainer(model, TrainingArguments(num_train_epochs=3)).fit()."),
        ((3, 1e-3), {}, "Trainer(model, TrainingArguments(num_train_epochs=3)).fit()."),
        (
            points(),
            {"epochs": 3, "batch_size": 16, "validation_data": points(), "verbose": False},
            "Trainer(model, TrainingArguments(num_train_epochs=3, per_device_train_batch_size=16, progress_bar=False), "
            "train_dataset=…, eval_dataset=…).fit().",
        ),
    ],
)
def test_fit_called_as_elsewhere_says_how_to_call_it(
    positional: tuple[Any, ...], named: dict[str, Any], instead: str
) -> None:
    fit: Any = trainer().fit
    message = refused(lambda: fit(*positional, **named))
    assert message.endswith(instead)
    assert len(message) < 600
    assert "tensor(" not in message


def test_evaluate_and_predict_called_as_elsewhere_say_how_to_call_them() -> None:
    made: Any = trainer()
    assert "eval_dataset is dataset here." in refused(lambda: made.evaluate(eval_dataset=points()))
    told = "ckpt_path is a trainer from Trainer.from_checkpoint(folder, model, …) here."
    assert refused(lambda: made.evaluate(ckpt_path="best")).endswith(told)
    assert "labels are part of the dataset" in refused(lambda: made.evaluate(network(), LOADER))
    message = refused(lambda: made.predict(points()[0], batch_size=4))
    assert "TrainingArguments(per_device_eval_batch_size=4)).predict(dataset)" in message
    message = refused(lambda: made.predict(points(), num_beams=2))
    assert "num_beams is an argument of generate" in message
    assert "predict_with_generate=True" in message
    assert "Trainer(model" not in message

    for call in (lambda: made.evaluate(*points()), lambda: made.predict(*points())):
        assert "Give inputs and labels as one dataset: " in refused(call, ConfigurationError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_every": "10ep"}, "unknown unit 'ep'.*Did you mean 'epochs'"),
        ({"eval_every": "500ba"}, "unknown unit 'ba'.*Did you mean 'steps'"),
        ({"max_steps": "500ba"}, "Give max_steps=500"),
        ({"max_steps": "10ep"}, "Give num_train_epochs=10"),
        ({"num_train_epochs": "10 epochs"}, "Give num_train_epochs=10"),
    ],
)
def test_times_of_composer_are_answered_with_ours(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TrainingArguments(**arguments)


def test_the_tables_of_the_page_name_what_exists() -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming_from.md").read_text()
    ours = [row.split(" | ", 1)[1] for row in re.findall(r"^\| `.* \|$", page, re.MULTILINE)]
    names = [name for row in ours for name in re.findall(r"`(?:trainer\.)?([A-Za-z_]+)(?=[`=(])", row)]
    constructor = inspect.signature(Trainer).parameters
    assert len(names) > 30
    owners = (Trainer, callbacks, trainer_lib)
    for name in names:
        is_argument = name in settings(TrainingArguments) or name in constructor
        assert is_argument or any(hasattr(owner, name) for owner in owners), name


def test_a_setting_of_a_parameter_group_is_named() -> None:
    kind: Any = ParameterGroup
    with pytest.raises(SignatureError, match=r"ParameterGroup 'lr'\. Known: .*\. Give learning_rate"):
        kind("*", lr=0.1)
    with pytest.raises(SignatureError, match="Did you mean 'frozen'"):
        kind("*", freeze=True)


def test_a_constructor_called_as_elsewhere_names_each_argument() -> None:
    lines = refused(lambda: MAKE(max_epochs=3, accelerator="gpu", devices=2)).splitlines()
    assert len(lines) == 3
    assert "TrainingArguments(num_train_epochs=…)" in lines[0]
    assert "--num_processes N" in lines[1]
    assert "use_cpu=True" in lines[2]
    assert "got a str" in refused(lambda: MAKE(network(), accelerator="gpu"), ConfigurationError)


def test_the_device_and_adapters_are_given_otherwise() -> None:
    told = refused(lambda: arguments(device="cuda"), ConfigurationError)
    assert told.endswith("Did you mean 'use_cpu'?")
    told = refused(lambda: MAKE(network(), peft_config=None))
    assert told.endswith("That is model=get_peft_model(model, peft_config) here.")


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"loss_fn": cross_entropy}, "Give it to the Trainer: Trainer(model, args, loss_fn=…)."),
        (
            {"devices": 2},
            "That is --num_processes of the launcher (trainer-lib launch --num_processes N script.py)",
        ),
        ({"min_epochs": 3}, 'To delay EarlyStopping, give eval_delay="3 epochs".'),
        ({"gradient_clip_algorithm": "value"}, "for values, give Trainer(…, callbacks=[ClipValue(0.5)])."),
        ({"enable_checkpointing": False}, 'leave out output_dir, or give save_every="never" and keep_best=0.'),
        ({"eval_every": 0.25}, 'For a part of an epoch, give "0.25 epochs".'),
        ({"limit_train_batches": 0.5}, "Give a number of batches; for no limit, leave it out."),
        ({"limit_eval_batches": 0}, 'for no evaluations give eval_every="never".'),
        ({"max_time": {"hours": 1}}, "Give timedelta(hours=…)."),
        ({"keep_best": -1}, "To keep all checkpoints, give keep_last=None."),
    ],
)
def test_an_argument_as_in_lightning_says_what_to_give(given: dict[str, Any], instead: str) -> None:
    assert instead in refused(lambda: TrainingArguments(**given), ConfigurationError)
    if (name := next(iter(given))) in foreign_names.OTHERWISE:
        assert (
            refused(lambda: MAKE(network(), **given)) == f"Trainer takes no {name!r}. {foreign_names.OTHERWISE[name]}."
        )


def test_double_precision_is_that_of_the_model() -> None:
    assert "model.double()" in refused(lambda: arguments(mixed_precision="64-true"), UnsupportedError)


def test_an_argument_without_a_near_name_lists_the_three_nearest() -> None:
    message = refused(lambda: MAKE(network(), TrainingArguments(zzz=1)), ConfigurationError)  # type: ignore[call-arg]
    assert f"help(TrainingArguments) lists all {len(settings(TrainingArguments))}." in message
    assert message.count(",") == 2
    message = refused(lambda: TrainingArguments(nproc_per_node=2), ConfigurationError)  # type: ignore[call-arg]
    assert "trainer-lib launch --num_processes N" in message


def subclass(**members: Any) -> Trainer:
    return type("Mine", (Trainer,), members)(network(), arguments(), train_dataset=points(), loss_fn=cross_entropy)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("get_train_dataloader", "Override train_dataloader(self)."),
        ("create_optimizer", "Override configure_optimizer(self)."),
        ("configure_optimizers", "Override configure_optimizer(self) and configure_scheduler("),
        ("prediction_step", "Override evaluation_step(self, model, batch)."),
        ("compute_metrics", "give Trainer(…, compute_metrics=…)."),
        ("training_setp", "Did you mean 'training_step'?"),
        ("_prepare_inputs", "change run.batch in on_micro_batch_begin of a Modifier."),
        ("calculate_train_batch_loss", "Override compute_loss(self, model, batch)."),
        ("on_step_end", "write it in a Callback"),
        ("on_train_epoch_end", "Write on_epoch_end(self, run) in a Callback, and give it by callbacks=[…]."),
        ("on_validation_epoch_end", "Write on_evaluate_end(self, run, metrics) in a Callback"),
        ("configure_gradient_clipping", "Override on_backward_end of a Modifier"),
        ("optimizer_step", "Override training_step(self, model, batch), which may step the optimizers itself"),
        ("on_after_batch_transfer", "change run.batch in on_micro_batch_begin of a Modifier."),
    ],
)
def test_an_override_that_nothing_calls_is_an_error(name: str, instead: str) -> None:
    def method(self: Trainer, *args: Any) -> None:
        del self, args

    message = refused(lambda: subclass(**{name: method}))
    assert message.startswith(f"Mine.{name} is never called. ")
    assert instead in message


@pytest.mark.parametrize("verb", ["training_step", "compute_loss", "evaluation_step"])
def test_a_step_with_the_parameters_of_lightning_is_an_error(verb: str) -> None:
    def method(self: Trainer, batch: Any, batch_idx: int) -> None:
        del self, batch, batch_idx

    assert refused(lambda: subclass(**{verb: method})) == (
        f"Mine.{verb} is called as {verb}(model, batch), and takes (batch, batch_idx): its batch would be the model. "
        f"Write {verb}(self, model, batch)."
    )


def test_an_override_of_log_in_the_form_of_hugging_face_names_the_event() -> None:
    def log(self: Trainer, logs: dict[str, float], start_time: float | None = None) -> None:
        del self, logs, start_time

    message = refused(lambda: subclass(log=log))
    assert message.startswith("Mine.log(logs, start_time) is not called when values are logged")
    assert "override on_log(run, values) in a Callback" in message


def test_an_override_of_log_for_one_value_is_accepted() -> None:
    def log(self: Trainer, *args: Any) -> None:
        Trainer.log(self, *args)

    subclass(log=log).log("size", 3.0)


def test_a_class_attribute_that_the_constructor_hides_is_an_error() -> None:
    members: dict[str, Any] = {"collate_fn": staticmethod(lambda samples: samples)}
    assert "give Trainer(…, collate_fn=…)" in refused(lambda: subclass(**members))


def test_methods_of_the_users_own_pass() -> None:
    class Mine(Trainer):
        weight = 0.5

        def compute_losses(self, model: nn.Module, batch: Any) -> Any:  # near a verb, and called below
            return cross_entropy(model(batch[0]), batch[1])

        def train_step(self, model: nn.Module, batch: Any) -> Any:
            return self.compute_losses(model, batch) * self.weight

        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            return self.train_step(model, batch)

        def report(self) -> str:
            return "mine"

    made = Mine(network(), arguments(max_steps=2), train_dataset=points())
    assert made.fit().state.step == 2
    assert made.report() == "mine"
