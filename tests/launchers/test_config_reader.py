"""The values of configuration files, and the line of each wrong one."""

from pathlib import Path
from typing import Any

import pytest

from trainer_lib import ConfigurationError
from trainer_lib.launchers.settings.config_file import load_config_from_file
from trainer_lib.launchers.settings.config_reader import SECTIONS, read_values
from trainer_lib.launchers.settings.launch_options import SETTINGS
from trainer_lib.launchers.settings.setting import THREE_YES_OR_NO, Kind

# The keys and values of files that older versions of Accelerate wrote.
FSDP = """\
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
"""
DEEPSPEED = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 2
distributed_type: DEEPSPEED
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
"""


def test_an_older_file_of_fsdp() -> None:
    values = read_values(FSDP, "config.yaml")
    assert values["fsdp_config"] == {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "1",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
    }
    assert (values["num_processes"], values["distributed_type"], values["downcast_bf16"]) == (2, "FSDP", False)
    assert "main_process_ip" not in values


def test_an_older_file_of_deepspeed() -> None:
    values = read_values(DEEPSPEED, "config.yaml")
    assert values["deepspeed_config"] == {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero_stage": 2,
    }
    assert values["fsdp_config"] == {}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("mixed_precision: no", {"mixed_precision": "no"}),  # YAML reads it as false
        ("distributed_type: NO", {"distributed_type": "NO"}),
        ("distributed_type: TPU", {"distributed_type": "XLA"}),
        ("gpu_ids: 0,1", {"gpu_ids": "0,1"}),
        ("gpu_ids: 0", {"gpu_ids": "0"}),
        ("num_processes: -1", {}),
        ("num_processes: null", {}),
        ("fp16: true", {"mixed_precision": "fp16"}),
        ("fp16: true\nmixed_precision: bf16", {"mixed_precision": "bf16"}),
        ("dynamo_backend: INDUCTOR", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}),
        ("dynamo_backend: NO", {}),
        ("dynamo_config: {backend: inductor}", {"dynamo_config": {"dynamo_backend": "inductor"}}),
        ("fsdp_config: {min_num_params: 1e8}", {"fsdp_config": {"fsdp_min_num_params": 100000000}}),
        (
            "fsdp_config:\n  transformer_layer_cls_to_wrap: [A, B]",
            {"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "A,B"}},
        ),
        ("fp8_config: {backend: TE, amax_history_length: 4}", {
            "fp8_config": {"fp8_backend": "te", "fp8_amax_history_len": 4}
        }),
        ("parallelism_config: {dp_shard_size: 2}", {"parallelism_config": {"parallelism_config_dp_shard_size": 2}}),
        ("megatron_lm_config: {megatron_lm_tp_degree: 2}", {"megatron_lm_config": {"megatron_lm_tp_degree": 2}}),
        ("mpirun_config: {mpirun_ccl: '1'}", {"mpirun_config": {"mpirun_ccl": "1"}}),
        ("ipex_config: {ipex: false}", {}),
        ("commands: [a, b]\ntpu_env: null", {"commands": ["a", "b"], "tpu_env": []}),
        ('{\n\t"use_cpu": true,\n\t"num_processes": 2\n}', {"use_cpu": True, "num_processes": 2}),
        ("mixed_precision: fp8", {"mixed_precision": "fp8"}),
    ],
)  # fmt: skip
def test_what_a_file_may_hold(text: str, values: dict[str, Any]) -> None:
    assert read_values(text, "config.yaml") == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml must hold options by name, as `num_processes: 2` (got nothing)."),
        ("- 1", "c.yaml must hold options by name, as `num_processes: 2` (got a list)."),
        (
            "a: 1\n\tb: 2",
            "c.yaml, line 2: there is a tab, and YAML allows only spaces. Replace the tab by spaces.",
        ),
        (
            "use_cpu: true\nnum_processes: {",
            "c.yaml, line 2: this is neither JSON nor YAML: expected the node content, but found '<stream end>'. "
            "Write one `key: value` a line, with the keys of a part indented by two spaces.",
        ),
        (
            "use_cpu: true\ndebug: true\nuse_cpu: false",
            "c.yaml, line 3: `use_cpu` is here again; line 1 has it too. Leave out one of the two.",
        ),
        (
            "\nnum_processes: two",
            "c.yaml, line 2: `num_processes` must be a whole number of at least 1 (got 'two').",
        ),
        (
            'num_processes: "2"',
            "c.yaml, line 1: `num_processes` must be a whole number of at least 1 (got the text '2'). "
            "Write 2 without quotes.",
        ),
        ("machine_rank: [1]", "c.yaml, line 1: `machine_rank` must be a whole number of at least 0 (got a list)."),
        ("use_cpu: maybe", "c.yaml, line 1: `use_cpu` must be yes or no (got 'maybe')."),
        (
            "num_proceses: 3",
            "c.yaml, line 1: `num_proceses` is not a known key. The nearest one is `num_processes`: write that, or "
            "remove the line.",
        ),
        (
            "debug: false\nfsdp_confg:\n  fsdp_version: 2",
            "c.yaml, line 2: `fsdp_confg` is not a known key. The nearest one is `fsdp_config`: write that, or "
            "remove the line.",
        ),
        (
            "fsdp_config:\n  offload_param: true",
            "c.yaml, line 2: `offload_param` is not a known key of `fsdp_config`. The nearest one is "
            "`fsdp_offload_params`: write that, or remove the line.",
        ),
        (
            "fsdp_config: FULL_SHARD",
            "c.yaml, line 1: `fsdp_config` must hold options by name (got 'FULL_SHARD'). Indent its keys below it.",
        ),
        (
            "fsdp_config:\n  fsdp_version: 2\n  version: 2",
            "c.yaml, line 3: `version` is in `fsdp_config` twice. Leave out one of the two.",
        ),
        (
            "mixed_precision: bf61",
            "c.yaml, line 1: Unknown mixed_precision 'bf61'. Known: bf16, bf16-true, fp16, fp8, no. Did you mean ",
        ),
        ("debug: true\n[1, 2]: 3", "c.yaml, line 2: A key must be a name (got a list). Write `key: value`."),
        ("num_processes: !!python/object/apply:os.abort []", "c.yaml, line 1: `num_processes` must be a whole number"),
        ("<<: {num_processes: 2}", "c.yaml, line 1: `<<` is not a known key."),
        ("num_processes: 2.5", "c.yaml, line 1: `num_processes` must be a whole number of at least 1 (got '2.5')."),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\nzero_stage: 2",
            "c.yaml, line 3: `zero_stage` belongs to `deepspeed_config`: write it below that line, indented by two "
            "spaces.",
        ),
        (
            "fsdp_config:\nfsdp_backward_prefetch_policy: BACKWARD_PRE",
            "c.yaml, line 2: `fsdp_backward_prefetch_policy` belongs to `fsdp_config`: write it below that line",
        ),
        (
            "ipex_config: {ipex: true}",
            "`ipex_config` is not a known key. This version does not use IPEX: leave it out.",
        ),
        (
            "use_mps_device: true",
            "`use_mps_device` is not a known key. MPS is used where it is available: leave it out.",
        ),
        ("machine_rank: 'auto'", "`machine_rank` must be a whole number of at least 0 (got 'auto')."),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_the_correction(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_values(text, "c.yaml")
    assert message in str(error.value)


def test_all_that_is_wrong_is_named_in_order() -> None:
    with pytest.raises(ConfigurationError) as error:
        read_values("num_machines: x\nbad: 1\nnum_machines: 2\nuse_cpu: 3", "c.yaml")
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        f"c.yaml, line {line}" for line in range(1, 5)
    ]


def example(kind: Kind) -> Any:
    """Return a value of a setting that is no default."""
    if kind is THREE_YES_OR_NO:
        return [True, False, True]
    if kind.choices:
        return int(kind.choices[-1]) if kind.choices[-1].isdigit() else kind.choices[-1]
    return {"N": 3, "X": 0.5, "": True, "yes|no": True}.get(kind.metavar, "text")


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_every_key_goes_from_accelerate_to_this_library_and_back(ending: str, tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    sections: dict[str, Any] = {
        section: {name: example(setting.kind) for name, setting in SETTINGS.items() if setting.section == section}
        for section in SECTIONS
    }
    plain: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "fp8", "use_cpu": True,
        "debug": True, "num_processes": 4, "machine_rank": 1, "num_machines": 2, "gpu_ids": "0,1",
        "main_process_ip": "host", "main_process_port": 2950, "rdzv_backend": "c10d", "same_network": True,
        "main_training_function": "train", "enable_cpu_affinity": True, "downcast_bf16": True, "tpu_name": "tpu",
        "tpu_zone": "zone", "tpu_use_cluster": True, "tpu_use_sudo": True, "command_file": "file", "commands": ["a"],
        "tpu_vm": ["b"], "tpu_env": ["c"],
    }  # fmt: skip
    assert plain.keys() | sections.keys() == set(config_args.ClusterConfig.__dataclass_fields__), "no key is left out"
    theirs, ours = tmp_path / f"theirs.{ending}", tmp_path / f"ours.{ending}"
    written = config_args.ClusterConfig(**plain, **sections)
    (written.to_yaml_file if ending == "yaml" else written.to_json_file)(str(theirs))
    load_config_from_file(theirs).write(ours)
    assert config_args.load_config_from_file(str(ours)).to_dict() == {**plain, **sections}


def test_every_key_of_sagemaker_goes_from_accelerate_to_this_library_and_back(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    written = {
        name: name for name in config_args.SageMakerConfig.__dataclass_fields__
    } | {
        "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL", "mixed_precision": "bf16",
        "use_cpu": True, "debug": True, "num_machines": 2, "additional_args": {"volume_size": 30},
        "dynamo_config": {"dynamo_backend": "inductor"}, "enable_cpu_affinity": True,
    }  # fmt: skip
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    config_args.SageMakerConfig(**written).to_yaml_file(str(theirs))
    load_config_from_file(theirs).write(ours)
    assert config_args.load_config_from_file(str(ours)).to_dict() == written
