"""Arguments on the command line."""

import dataclasses
import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.launched import PYTHON_PATH
from trainer_lib.foundation.errors import MissingPackageError
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.trainer.arguments.command_line import descriptions
from trainer_lib.trainer.arguments.declaration import settings
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup

SCRIPT = """
import sys

from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

assert "jsonargparse" not in sys.modules
args = TrainingArguments.from_cli(max_steps=7)
print(args.max_steps, args.learning_rate, args.save_every, args.optimizer_kwargs)
"""


def run(*options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script with options in a new interpreter."""
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "train.py", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PYTHON_PATH, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.slow
@pytest.mark.launch
def test_a_script_with_options_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learning_rate: 5e-4\nsave_every: 10 steps\noutput_dir: runs\n")
    done = run(
        "--config", "run.yaml", "--save-every", "2 epochs", "--optimizer_kwargs.betas", "[0.9, 0.95]", folder=tmp_path
    )
    assert done.stderr == ""
    assert done.stdout == "7 0.0005 2 epochs {'betas': [0.9, 0.95]}\n"


def test_help_describes_every_argument(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        parse("--help", max_steps=7)
    assert caught.value.code == 0
    output = capsys.readouterr().out
    for field in dataclasses.fields(TrainingArguments):
        assert re.search(rf"\n  --{field.name}[ ,]", output)
    assert "no limit. (default: 7)" in output
    assert "--gc_every N|TEXT" in output
    assert '(0.05 or "5%"); None' in " ".join(output.split())


def parse(*options: str, **defaults: Any) -> TrainingArguments:
    """Return the arguments that the options set."""
    return TrainingArguments.from_cli(options, **defaults)


def test_no_options_mean_the_defaults() -> None:
    assert parse() == TrainingArguments()
    assert parse(max_steps=3) == TrainingArguments(max_steps=3)


def test_options_of_all_kinds() -> None:
    assert parse(
        *("--max_steps", "10", "--learning_rate=1e-3", "--warmup", "3", "--seed", "null", "--run_name", "12"),
        *("--log_every", "5", "--eval_every", "1 epoch", "--max_time", "90 minutes", "--max_grad_norm", "null"),
        *("--drop_last", "true", "--dry_run", "--tf32", "--compile", "eager", "--label_names", "[a, b]"),
        *("--sample_weights", "[1, 2]", "--parameter_groups", "[{pattern: 'a.*', frozen: true}]"),
        *("--lr_scheduler_kwargs", "{min_ratio: 0.1}", "--fsdp.cpu_offload", "true"),
    ) == TrainingArguments(
        max_steps=10,
        learning_rate=1e-3,
        warmup=3,
        seed=None,
        run_name="12",
        log_every=5,
        eval_every="1 epoch",
        max_time="90 minutes",
        max_grad_norm=None,
        drop_last=True,
        dry_run=True,
        tf32=True,
        compile="eager",
        label_names=["a", "b"],
        sample_weights=[1.0, 2.0],
        parameter_groups=[ParameterGroup("a.*", frozen=True)],
        lr_scheduler_kwargs={"min_ratio": 0.1},
        fsdp=FullyShardedDataParallelPlugin(cpu_offload=True),
    )


def test_flags_need_no_value() -> None:
    assert parse("--compile", "--use-cpu", "--max_steps", "1") == TrainingArguments(
        compile=True, use_cpu=True, max_steps=1
    )
    assert parse("--fsdp").fsdp is True
    assert parse("--use_cpu", "false").use_cpu is False
    assert parse("--warmup", "0.1").warmup == 0.1
    assert parse("--warmup", "5%").warmup == "5%"


def test_options_override_files_and_files_override_defaults(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.json"
    first.write_text("seed: 1\nmax_steps: 1\nkeep_last: 1\n")
    second.write_text('{"max_steps": 2, "keep_last": 2}')
    args = parse(
        *("--keep_last", "3", "--config", str(first), "--config", str(second)), seed=0, keep_best=0, max_steps=0
    )
    assert (args.keep_best, args.seed, args.max_steps, args.keep_last) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "3"], "has no argument 'epochs' (given: '3'). Did you mean 'num_train_epochs'?"),
        (["--lerning-rate=3"], "has no argument 'lerning_rate' (given: '3'). Did you mean 'learning_rate'?"),
        (["--bf16"], 'bf16=True of Hugging Face\'s Trainer is given here as mixed_precision="bf16".'),
        (["--push_to_hub", "--max_steps", "3"], "push_to_hub=True of Hugging Face's Trainer has no equivalent here"),
        (["--max_steps", "ten"], "max_steps must be a whole number of at least 1, got 'ten'."),
        (["--max_steps", "1e3"], "got '1e3'. Give max_steps=1000."),
        (["--learning_rate", "nan"], "learning_rate must be a finite number of at least 0, got 'nan'."),
        (["--resume", "auto"], 'resume="auto" looks for a run in output_dir'),
        (["--report_to", "wandbb"], "Unknown tracker 'wandbb'"),
        (["--max_steps", "3", "stray"], "unrecognized arguments: stray"),
        (["--config", "missing.yaml"], "missing.yaml cannot be read"),
    ],
)
def test_errors_end_the_program_with_code_two(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_arguments_of_subclasses() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Derived(TrainingArguments):
        """Arguments of a subclass.

        Args:
            temperature: How hot.
        """

        temperature: float = 1.0

    assert Derived.from_cli(["--temperature", "2", "--max_steps", "3"]) == Derived(temperature=2.0, max_steps=3)
    assert descriptions(Derived)["temperature"] == "How hot."
    assert descriptions(Derived)["max_steps"] == descriptions(TrainingArguments)["max_steps"]


def test_every_argument_is_described_and_grouped() -> None:
    fields = [field.name for field in dataclasses.fields(TrainingArguments)]
    texts = descriptions(TrainingArguments)
    assert sorted(texts) == sorted(fields)
    assert all(texts.values())
    sections = [declared.section for declared in settings(TrainingArguments).values()]
    assert len([*groupby(sections)]) == len(set(sections)) == 10  # one block of fields each


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    with pytest.raises(MissingPackageError, match=r'pip install "trainer_lib\[cli\]"'):
        TrainingArguments.from_cli([])
