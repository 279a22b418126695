"""`TrainingArguments` read by parsers of dataclasses: transformers' `HfArgumentParser`."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers.hf_argparser import HfArgumentParser

from trainer_lib import DistributedDataParallelKwargs, TrainingArguments


@dataclass
class ModelArguments:
    """Stands for the dataclasses that scripts have beside `TrainingArguments`."""

    model_name: str = "tiny"


@pytest.fixture(scope="module")
def parser() -> Any:
    """Return transformers' parser of our arguments and of a script's."""
    return HfArgumentParser([ModelArguments, TrainingArguments])  # pyright: ignore[reportArgumentType]


def parse(parser: Any, options: str) -> tuple[ModelArguments, TrainingArguments]:
    """Parse a command line, in which `~` stands for a blank in a value."""
    words = [word if word.startswith("--") else word.replace("~", " ") for word in options.split()]
    return parser.parse_args_into_dataclasses(words, look_for_args_file=False)


def test_defaults_are_those_of_the_constructor(parser: Any) -> None:
    _, args = parse(parser, "")
    assert args == TrainingArguments()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--learning_rate 1e-3 --max-steps 10 --seed null", {"learning_rate": 1e-3, "max_steps": 10, "seed": None}),
        (
            "--output_dir runs --save_every 100 --log_every 5~steps --warmup 5%",
            {"save_every": 100, "log_every": "5 steps", "warmup": "5%"},
        ),
        ("--eval_every {dev:~100~steps,test:~1~epoch}", {"eval_every": {"dev": "100 steps", "test": "1 epoch"}}),
        (
            "--num_workers 2 --per_device_train_batch_size auto",
            {"num_workers": 2, "per_device_train_batch_size": "auto"},
        ),
        ("--output_dir 7 --run_name 8", {"output_dir": "7", "run_name": "8"}),
        ("--compile --fsdp true --tf32 false", {"compile": True, "fsdp": True, "tf32": False}),
        ("--compile inductor --mixed_precision no", {"compile": "inductor", "mixed_precision": "no"}),
        (
            "--report_to tensorboard wandb --sample_weights 1 2.5",
            {"report_to": ("tensorboard", "wandb"), "sample_weights": [1, 2.5]},
        ),
        ("--optimizer_kwargs {betas:~[0.9,~0.95]}", {"optimizer_kwargs": {"betas": [0.9, 0.95]}}),
        ("--ddp {find_unused_parameters:~true}", {"ddp": DistributedDataParallelKwargs(find_unused_parameters=True)}),
        ("--gradient_checkpointing_policy matmul --gradient_checkpointing", {"gradient_checkpointing": True}),
        ("--max_bad_samples 0.5 --max_time 90~minutes", {"max_bad_samples": 0.5, "max_time": "90 minutes"}),
    ],
)
def test_options_are_read_as_their_argument_says(parser: Any, options: str, expected: dict[str, Any]) -> None:
    model, args = parse(parser, f"--model_name large {options}")
    assert model.model_name == "large"
    assert {name: getattr(args, name) for name in expected} == expected


def test_flags_that_are_on_can_be_turned_off(parser: Any) -> None:
    on = [name for name, value in vars(TrainingArguments()).items() if value is True]
    _, args = parse(parser, " ".join(f"--no_{name}" for name in on))
    assert on
    assert not any(getattr(args, name) for name in on)


def test_a_wrong_value_ends_the_program_with_what_is_allowed(parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(parser, "--save_every often")
    assert (
        "argument --save_every/--save-every: save_every='often' is not a duration. Give a number"
        in capsys.readouterr().err
    )


def test_help_has_the_sentence_of_each_argument(parser: argparse.ArgumentParser) -> None:
    text = " ".join(parser.format_help().split())
    assert "The seed for weights, dropout and the order of the data" in text
    assert "5%" in text  # a percent sign is argparse's own character


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_files_are_read(parser: Any, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"run.{suffix}"
    written = TrainingArguments(max_steps=10, eval_every="5 steps", report_to=["wandb"], optimizer_kwargs={"eps": 1e-6})
    written.to_file(file)
    _, args = parser.parse_json_file(file) if suffix == "json" else parser.parse_yaml_file(file)
    assert args == written
