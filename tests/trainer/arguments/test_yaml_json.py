"""Arguments as plain values and in files."""

import functools
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.parallel.sequence_options import TorchContextParallelConfig
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelConfig
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup

SETTINGS: list[dict[str, Any]] = [
    {},
    {
        "output_dir": Path("runs") / "été",
        "run_name": "1e5",  # a text that looks like a number
        "resume": "12",
        "max_time": timedelta(days=1),
        "num_train_epochs": 0.5,
        "learning_rate": 5e-5,
        "optimizer_kwargs": {"betas": (0.9, 0.95), "eps": 1e-8, "fused": None},
        "lr_scheduler": "wsd",
        "lr_scheduler_kwargs": {"decay_steps": 10, "decay": "cosine"},
        "warmup": "5%",
        "max_grad_norm": None,
        "mixed_precision": "no",
        "log_every": "1:02:03",
        "eval_every": "never",
        "save_every": 500,
        "label_names": ["yes", "on", "null", "0x1F"],
        "sample_weights": [1.0, 1e-9, 1e300],
        "parameter_groups": [
            ParameterGroup("encoder.*", learning_rate=1e-5),
            ParameterGroup("*.bias", frozen=True),
        ],
        "predict_with_generate": True,
        "generation_kwargs": {"num_beams": 4, "suppress_tokens": [1, 2]},
    },
    {"compile": TorchDynamoPlugin(backend="inductor", mode="reduce-overhead", dynamic=False)},
    {"compile": "eager", "ddp": DistributedDataParallelKwargs(comm_hook="fp16", bucket_cap_mb=1)},
    {"parallelism": ParallelismConfig(dp_replicate_size=2, dp_shard_size=4), "fsdp": True},
    {"parallelism": ParallelismConfig(tp_size=2, pp_size=2)},
    {
        "parallelism": ParallelismConfig(
            tp_size=2, tp_handler=TorchTensorParallelConfig(plan={"*.up": "colwise"}, loss_parallel=True)
        )
    },
    {"parallelism": ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig("alltoall"))},
    {"parallelism": ParallelismConfig(sp_size=2)},
    {
        "fsdp": FullyShardedDataParallelPlugin(
            sharding_strategy="HYBRID_SHARD",
            mixed_precision_policy="bf16",
            auto_wrap_policy=["Block", "Head"],
            cpu_offload=True,
        )
    },
    {"fsdp": FullyShardedDataParallelPlugin(mixed_precision_policy={"output_dtype": "fp32"}, reshard_after_forward=4)},
]


@pytest.mark.parametrize("values", SETTINGS)
def test_plain_values_round_trip(values: dict[str, Any]) -> None:
    args = TrainingArguments(**values)
    plain = args.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain | {"report_to": []}
    assert TrainingArguments.from_dict(plain) == args
    assert TrainingArguments.from_dict(json.loads(json.dumps(plain))) == args


@pytest.mark.parametrize("ending", ["json", "yaml", "yml", "YAML"])
@pytest.mark.parametrize("values", SETTINGS)
def test_files_round_trip(values: dict[str, Any], ending: str, tmp_path: Path) -> None:
    args = TrainingArguments(**values)
    file = tmp_path / "new folder" / f"run.{ending}"
    args.to_file(file)
    assert TrainingArguments.from_file(file) == args
    assert TrainingArguments.from_file(str(file)) == args
    if ending != "json":  # others read the same
        assert yaml.safe_load(file.read_text())["optimizer"] == args.optimizer


def test_a_yaml_file_as_people_write_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "# a first try\n"
        "learning_rate: 5e-5\n"
        "weight_decay: 1E-2\n"
        "max_steps: 10_000\n"
        "warmup: 5%\n"
        "eval_every: 1 epoch\n"
        "optimizer_kwargs: {betas: [0.9, .95], eps: 1.e-8}\n"
        "fsdp:\n"
        "  cpu_offload: true\n"
        "parameter_groups:\n"
        "  - {pattern: 'head.*', learning_rate: 1e-3}\n"
    )
    assert TrainingArguments.from_file(file) == TrainingArguments(
        learning_rate=5e-5,
        weight_decay=0.01,
        max_steps=10_000,
        warmup="5%",
        eval_every="1 epoch",
        optimizer_kwargs={"betas": [0.9, 0.95], "eps": 1e-8},
        fsdp=FullyShardedDataParallelPlugin(cpu_offload=True),
        parameter_groups=[ParameterGroup("head.*", learning_rate=1e-3)],
    )


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert TrainingArguments.from_file(tmp_path / "run.yaml") == TrainingArguments()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.yaml",
            "max_steps: 1\n\nlerning_rate: 1\n",
            "a.yaml, line 3: TrainingArguments has no argument 'lerning_rate'",
        ),
        ("a.json", '{\n"max_steps": 1,\n"save_steps": 5}', "a.json, line 3: save_steps=5 of Hugging Face's Trainer is"),
        ("a.yaml", "seed: 1\nmax_steps: -3\n", "a.yaml, line 2: max_steps must be a whole number"),
        ("a.yaml", "seed: 1\nresume: auto\n", 'a.yaml, line 2: resume="auto" looks for a run'),
        ("a.yaml", "seed: 1\nfsdp: {ofload: true}\n", "a.yaml, line 2: Unknown field of fsdp 'ofload'. Known: "),
        ("a.yaml", "seed: 1\nseed: 2\n", "a.yaml, line 2: seed is given twice. Give it once."),
        ("a.json", '{"seed": 1, "seed": 2}', "a.json: seed is given twice. Give it once."),
        ("a.yaml", "seed: [1\nmax_steps: 2\n", "a.yaml, line 2: invalid YAML: "),
        (
            "a.yaml",
            "seed: !!python/object/apply:os.getpid []\n",
            "a.yaml, line 1: invalid YAML: could not determine a",
        ),
        ("a.json", '{"seed": 1,\n"max_steps"}', "a.json, line 2: invalid JSON: "),
        ("a.yaml", "- 1\n", "a.yaml must hold a mapping from argument names to values, and holds a list."),
        ("a.json", "3", "a.json must hold a mapping from argument names to values, and holds a int."),
        ("a.yaml", "1: 2\n", "Arguments must be a mapping from names to values, got a dict."),
        ("a.toml", "seed = 1\n", "Unknown file extension '.toml'. Known: .json, .yaml, .yml."),
        ("a.json", '{"learning_rate": NaN}', "learning_rate must be a finite number of at least 0, got nan."),
    ],
)
def test_errors_name_the_file_and_the_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        TrainingArguments.from_file(tmp_path / name)
    assert message in str(refused.value)
    assert str(tmp_path / name) in str(refused.value)


def test_errors_keep_their_class(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("compile: {backend: nvprims_nvfuser}\n")
    with pytest.raises(UnsupportedError, match=r"run\.yaml: .*'nvprims_nvfuser' is not supported"):
        TrainingArguments.from_file(tmp_path / "run.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"run\.yaml cannot be read: No such file or directory\."):
        TrainingArguments.from_file(tmp_path / "run.yaml")
    (tmp_path / "run.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"run\.json is not a text file in UTF-8: "):
        TrainingArguments.from_file(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer_kwargs": {"a": [1, torch.ones(1)]}}, "optimizer_kwargs.a[1] is tensor([1.]), which cannot be"),
        ({"lr_scheduler_kwargs": {"a": float("inf")}}, "lr_scheduler_kwargs.a is inf, which cannot be"),
        ({"compile": TorchDynamoPlugin(backend=lambda graph, _: graph)}, "compile.backend is <function "),
        (
            {"fsdp": FullyShardedDataParallelPlugin(auto_wrap_policy=functools.partial(print))},
            "fsdp.auto_wrap_policy is functools.partial(",
        ),
        ({"optimizer_kwargs": {"a": {1: 2}}}, "optimizer_kwargs.a is {1: 2}, which cannot be saved"),
    ],
)
def test_values_without_a_plain_form_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        TrainingArguments(**values).to_dict()
    assert message in str(refused.value)
    assert str(refused.value).endswith(" Leave it out here, and set it in the program.")


def test_values_without_a_plain_form_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = TrainingArguments(max_steps=3, compile=TorchDynamoPlugin(backend=print))
    for _ in range(2):  # warns once for any number of files
        args.to_file(tmp_path / "run.json", unwritable="leave out")
    assert TrainingArguments.from_file(tmp_path / "run.json") == TrainingArguments(max_steps=3)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "compile.backend is <built-in function print>, which cannot be saved: files hold numbers, texts, lists and "
        "mappings. compile is not saved: give it again when you resume the run."
    ]
    with pytest.raises(ConfigurationError, match="Unknown unwritable 'skip'"):
        args.to_dict(unwritable="skip")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([("seed", 1)], "Arguments must be a mapping from names to values, got a list."),
        ({"parameter_groups": [{"patern": "x"}]}, "Unknown field of parameter_groups[0] 'patern'."),
        ({"parameter_groups": [{"frozen": True}]}, "parameter_groups[0] is not a valid ParameterGroup: "),
        ({"ddp": {"bucket_cap_mb": 0}}, "bucket_cap_mb must be a finite number above 0, got 0."),
        ({"steps": 3}, "TrainingArguments has no argument 'steps' (given: 3). Did you mean 'max_steps'?"),
    ],
)
def test_invalid_mappings_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        TrainingArguments.from_dict(values)
    assert message in str(refused.value)
