"""The settings of a launch: each option of Accelerate's launcher, files, variables, and what a script gets."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.commands import write_page
from tests.launchers.test_config_reader import DEEPSPEED
from trainer_lib import ConfigurationError, UnsupportedError
from trainer_lib.commands.launch.launch_environment import script_variables
from trainer_lib.commands.launch.launch_parser import help_text, parse
from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.commands.main import main
from trainer_lib.launchers import device_count
from trainer_lib.launchers.settings.launch_options import GROUPS, MISSING_GROUPS, SETTINGS

# Accelerate's options whose effect is in the variables of the script, with a value, and the variable.
IN_VARIABLES = {
    "cpu": ("", "ACCELERATE_USE_CPU", "True"),
    "mixed_precision": ("bf16", "ACCELERATE_MIXED_PRECISION", "bf16"),
    "enable_cpu_affinity": ("", "ACCELERATE_CPU_AFFINITY", "1"),
    "debug": ("", "ACCELERATE_DEBUG_MODE", "true"),
    "gradient_accumulation_steps": ("4", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
    "dynamo_backend": ("eager", "ACCELERATE_DYNAMO_BACKEND", "EAGER"),
    "dynamo_mode": ("max-autotune", "ACCELERATE_DYNAMO_MODE", "max-autotune"),
    "dynamo_use_fullgraph": ("", "ACCELERATE_DYNAMO_USE_FULLGRAPH", "True"),
    "dynamo_use_dynamic": ("", "ACCELERATE_DYNAMO_USE_DYNAMIC", "True"),
    "dynamo_use_regional_compilation": ("", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "True"),
    "fp8_backend": ("AO", "ACCELERATE_FP8_BACKEND", "ao"),
    "fp8_use_autocast_during_eval": ("", "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", "true"),
    "fp8_margin": ("1", "ACCELERATE_FP8_MARGIN", "1"),
    "fp8_interval": ("2", "ACCELERATE_FP8_INTERVAL", "2"),
    "fp8_format": ("e4m3", "ACCELERATE_FP8_FORMAT", "E4M3"),
    "fp8_amax_history_len": ("4", "ACCELERATE_FP8_AMAX_HISTORY_LEN", "4"),
    "fp8_amax_compute_algo": ("max", "ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "max"),
    "fp8_override_linear_precision": ("no,no,yes", "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION", "false,false,true"),
    "fp8_opt_level": ("O1", "ACCELERATE_FP8_OPT_LEVEL", "O1"),
    "fp8_enable_fsdp_float8_all_gather": ("no", "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "false"),
    "fp8_pad_inner_dim": ("no", "ACCELERATE_FP8_PAD_INNER_DIM", "false"),
    "use_fsdp": ("", "ACCELERATE_USE_FSDP", "true"),
    "fsdp_version": ("1", "FSDP_VERSION", "1"),
    "fsdp_offload_params": ("true", "FSDP_OFFLOAD_PARAMS", "true"),
    "fsdp_min_num_params": ("1000", "FSDP_MIN_NUM_PARAMS", "1000"),
    "fsdp_sharding_strategy": ("SHARD_GRAD_OP", "FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP"),
    "fsdp_reshard_after_forward": ("false", "FSDP_RESHARD_AFTER_FORWARD", "false"),
    "fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP", "FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"),
    "fsdp_transformer_layer_cls_to_wrap": ("Block", "FSDP_TRANSFORMER_CLS_TO_WRAP", "Block"),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE"),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT"),
    "fsdp_forward_prefetch": ("true", "FSDP_FORWARD_PREFETCH", "true"),
    "fsdp_use_orig_params": ("false", "FSDP_USE_ORIG_PARAMS", "false"),
    "fsdp_cpu_ram_efficient_loading": ("false", "FSDP_CPU_RAM_EFFICIENT_LOADING", "false"),
    "fsdp_sync_module_states": ("false", "FSDP_SYNC_MODULE_STATES", "false"),
    "fsdp_activation_checkpointing": ("true", "FSDP_ACTIVATION_CHECKPOINTING", "true"),
    "use_parallelism_config": ("", "ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
    "parallelism_config_dp_replicate_size": ("2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2"),
    "parallelism_config_dp_shard_size": ("2", "PARALLELISM_CONFIG_DP_SHARD_SIZE", "2"),
    "parallelism_config_tp_size": ("2", "PARALLELISM_CONFIG_TP_SIZE", "2"),
    "parallelism_config_cp_size": ("2", "PARALLELISM_CONFIG_CP_SIZE", "2"),
    "parallelism_config_cp_comm_strategy": ("alltoall", "PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall"),
    "parallelism_config_sp_size": ("2", "PARALLELISM_CONFIG_SP_SIZE", "2"),
    "parallelism_config_sp_seq_length": ("8", "PARALLELISM_CONFIG_SP_SEQ_LENGTH", "8"),
    "parallelism_config_sp_seq_length_is_variable": ("false", "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "false"),
    "parallelism_config_sp_attn_implementation": ("sdpa", "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "sdpa"),
    "use_deepspeed": ("", "ACCELERATE_USE_DEEPSPEED", "true"),
    "deepspeed_config_file": ("ds.json", "ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json"),
    "zero_stage": ("3", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"),
    "offload_optimizer_device": ("cpu", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"),
    "offload_param_device": ("nvme", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme"),
    "offload_optimizer_nvme_path": ("/o", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/o"),
    "offload_param_nvme_path": ("/p", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/p"),
    "gradient_clipping": ("auto", "ACCELERATE_GRADIENT_CLIPPING", "auto"),
    "zero3_init_flag": ("true", "ACCELERATE_DEEPSPEED_ZERO3_INIT", "true"),
    "zero3_save_16bit_model": ("true", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true"),
    "deepspeed_moe_layer_cls_names": ("A,B", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "A,B"),
    "use_megatron_lm": ("", "ACCELERATE_USE_MEGATRON_LM", "true"),
    "megatron_lm_tp_degree": ("2", "MEGATRON_LM_TP_DEGREE", "2"),
    "megatron_lm_pp_degree": ("2", "MEGATRON_LM_PP_DEGREE", "2"),
    "megatron_lm_context_parallel_size": ("2", "MEGATRON_LM_CONTEXT_PARALLEL_SIZE", "2"),
    "megatron_lm_expert_model_parallel_size": ("1", "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE", "1"),
    "megatron_lm_expert_tensor_parallel_size": ("1", "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE", "1"),
    "megatron_lm_num_micro_batches": ("4", "MEGATRON_LM_NUM_MICRO_BATCHES", "4"),
    "megatron_lm_gradient_clipping": ("0.5", "MEGATRON_LM_GRADIENT_CLIPPING", "0.5"),
    "megatron_lm_use_distributed_optimizer": ("true", "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", "true"),
    "megatron_lm_use_custom_fsdp": ("true", "MEGATRON_LM_USE_CUSTOM_FSDP", "true"),
    "megatron_lm_optimizer_cpu_offload": ("false", "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD", "false"),
    "megatron_lm_overlap_cpu_optimizer_d2h_h2d": ("true", "MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D", "true"),
    "megatron_lm_sequence_parallelism": ("true", "MEGATRON_LM_SEQUENCE_PARALLELISM", "true"),
    "megatron_lm_recompute_activations": ("true", "MEGATRON_LM_RECOMPUTE_ACTIVATIONS", "true"),
    "megatron_lm_recompute_granularity": ("full", "MEGATRON_LM_RECOMPUTE_GRANULARITY", "full"),
    "megatron_lm_recompute_method": ("uniform", "MEGATRON_LM_RECOMPUTE_METHOD", "uniform"),
    "megatron_lm_recompute_num_layers": ("1", "MEGATRON_LM_RECOMPUTE_NUM_LAYERS", "1"),
    "megatron_lm_eod_mask_loss": ("true", "MEGATRON_LM_EOD_MASK_LOSS", "true"),
    "megatron_lm_calculate_per_token_loss": ("true", "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS", "true"),
}
# Those whose effect is a world that starts in another way: tests/commands/test_launch.py starts them.
IN_THE_START = {
    "aws_access_key_id", "aws_secret_access_key", "config_file", "gpu_ids", "log_dir",
    "machine_rank", "main_process_ip", "main_process_port", "max_restarts",
    "module", "monitor_interval", "mpirun_hostfile", "multi_gpu", "no_python", "num_cpu_threads_per_process",
    "num_machines", "num_processes", "quiet", "rdzv_backend", "rdzv_conf", "role", "tee",
    "tpu",  # tests/strategies/test_xla.py starts it
    # tests/commands/test_launch_hosts.py starts these.
    "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher",
}  # fmt: skip
# Says of the machines what makes no difference here.
WITHOUT_NEED = {"same_network"}
# Those of features that this version does not have, with a value that asks for them.
REFUSED = {
    "Megatron-LM's own code": [
        "megatron_lm_no_load_optim=true", "megatron_lm_no_save_optim=true",
        "megatron_lm_use_precision_aware_optimizer=true", "megatron_lm_decoder_last_pipeline_num_layers=1",

        "megatron_lm_attention_backend=flash",
        "megatron_lm_attention_dropout=0.1", "megatron_lm_hidden_dropout=0.1",
        "megatron_lm_attention_softmax_in_fp32=true",
        "megatron_lm_use_rotary_position_embeddings=true",
    ],
    "Accelerate's launcher for pods": ["tpu_cluster", "tpu_use_sudo", "vm=a", "env=a"],
    "a launcher that calls a function of the script": ["main_training_function=train"],
    "torch_xla's former casts of all numbers": ["downcast_bf16"],
}  # fmt: skip
# Those whose only values ask for nothing.
IDLE = {
    "no_tpu_cluster": "",
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_sp_backend": "deepspeed",
}
ASKED_FOR = [(feature, option) for feature, options in REFUSED.items() for option in options]


def given(*arguments: str) -> LaunchValues:
    """Return the values of a command line."""
    return LaunchValues(parse([*arguments, "script.py"])[0])


def needed_by(name: str) -> list[str]:
    """Return the options without which another one has no effect."""
    if name.startswith("fsdp_"):
        return ["--use_fsdp"]
    engine = f"use_{SETTINGS[name].group}"
    if name in ("megatron_lm_recompute_method", "megatron_lm_recompute_num_layers"):
        others = ["--megatron_lm_recompute_granularity", "full", "--megatron_lm_recompute_method", "uniform"]
        return [f"--{engine}", *others]
    if engine in ("use_deepspeed", "use_megatron_lm") and name != engine:
        return [f"--{engine}"]
    if name.startswith("fp8_"):
        return ["--mixed_precision", "fp8"]
    return ["--use_parallelism_config"] if name.startswith("parallelism_config_") else []


def test_every_option_of_accelerates_launcher_has_one_of_these_effects() -> None:
    refused = {option.partition("=")[0] for _, option in ASKED_FOR}
    classes: list[set[str]] = [set(IN_VARIABLES), IN_THE_START, WITHOUT_NEED, refused, set(IDLE)]
    known = set[str]().union(*classes)
    assert sum(map(len, classes)) == len(known), "an option has one effect"
    names = {line.split()[0] for line in (Path(__file__).parent / "launch_options.txt").read_text().splitlines()}
    assert names == known
    assert known <= set(SETTINGS)


@pytest.mark.parametrize("name", IN_VARIABLES)
def test_an_option_reaches_the_script_in_its_variable(name: str) -> None:
    value, variable, expected = IN_VARIABLES[name]
    for spelling in (name, name.replace("_", "-")):
        arguments = [*needed_by(name), f"--{spelling}", *([value] if value else [])]
        assert script_variables(given(*arguments))[variable] == expected


def test_a_given_sharding_strategy_is_not_contradicted_by_a_default() -> None:
    strategy = ["--use_fsdp", "--fsdp_sharding_strategy", "SHARD_GRAD_OP"]
    assert "FSDP_RESHARD_AFTER_FORWARD" not in script_variables(given(*strategy))
    both = script_variables(given(*strategy, "--fsdp_reshard_after_forward", "true"))
    assert (both["FSDP_SHARDING_STRATEGY"], both["FSDP_RESHARD_AFTER_FORWARD"]) == ("SHARD_GRAD_OP", "true")


@pytest.mark.parametrize(("feature", "option"), ASKED_FOR)
def test_an_option_of_a_missing_feature_is_refused_with_the_reason(feature: str, option: str) -> None:
    name, _, value = option.partition("=")
    with pytest.raises(UnsupportedError, match=rf"^--{name}.* needs {feature}, which this version does not have\. "):
        parse([f"--{name}", *([value] if value else []), "script.py"])


def test_options_that_ask_for_nothing_are_accepted() -> None:
    arguments = [argument for name, value in IDLE.items() for argument in (f"--{name}", value) if argument]
    for feature in ("tp", "cp", "sp"):
        arguments += [f"--parallelism_config_{feature}_size", "1"]
    parse([*arguments, "--same_network", "--main_training_function", "main", "script.py"])


def test_each_topic_of_help_shows_its_options_and_why_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for topic in GROUPS:
        text = help_text(topic)
        assert len(text.splitlines()) <= 40, "one screen"
        for setting in SETTINGS.values():
            if setting.group == topic and setting.missing is None:
                assert f"--{setting.name}" in text
    for topic in MISSING_GROUPS:
        assert "which this version" in help_text(topic)
    assert len(help_text().splitlines()) <= 44
    assert "--shutdown_timeout" in help_text("all")
    with pytest.raises(ConfigurationError, match=r"Unknown topic 'fdsp'.* Did you mean 'fsdp'\?"):
        help_text("fdsp")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_options_in_help_are_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for topic in GROUPS:
        _, *lines = help_text(topic).split("\n\n")[0].splitlines()
        assert max(map(len, lines)) <= columns
    name = "  --parallelism_config_sp_seq_length_is_variable yes|no"  # longer than its column
    assert name in help_text("parallelism").splitlines()


def test_the_page_has_the_tables_that_follow_from_the_settings() -> None:
    text = write_page.PAGE.read_text()
    assert write_page.with_tables(text) == text, "run python -m tests.commands.write_page"


def test_the_page_says_of_every_option_of_accelerate_whether_it_works() -> None:
    working, refused = write_page.PAGE.read_text().split("#### Refused")
    works = set(re.findall(r"^\| `--(\w+)`", working, re.MULTILINE))
    is_refused = set(re.findall(r"`--(\w+)`", refused.split("\n## ")[0]))
    names = {line.split()[0] for line in (Path(__file__).parent / "launch_options.txt").read_text().splitlines()}
    assert not works & is_refused
    assert names <= works | is_refused
    assert is_refused == {name for name, setting in SETTINGS.items() if setting.missing is not None}


def test_help_can_be_asked_for_behind_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--cpu", "--help", "machines"]) == 0
    assert capsys.readouterr().out.startswith("several machines:\n")


class Launch:
    """Prints what a launch would do, without starting anything."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys = capsys
        monkeypatch.setattr(sys, "executable", "/no/process/is/to/be/started")
        self.script = str(folder / "a script.py")
        Path(self.script).write_text("")

    def values(self, *arguments: str) -> dict[str, tuple[str, str]]:
        """Return the values and their sources that --print-config prints."""
        lines = [
            line.split(maxsplit=2) for line in self.out("--print-config", *arguments).splitlines() if line[0] == " "
        ]
        return {name: (value, source) for name, value, source in lines}

    def out(self, *arguments: str) -> str:
        """Return what a launch prints that succeeds."""
        assert main(["launch", *arguments]) == 0, self._capsys.readouterr().err
        return self._capsys.readouterr().out

    def error(self, *arguments: str) -> str:
        """Return the error of a launch that is refused."""
        assert main(["launch", *arguments]) == 2
        return self._capsys.readouterr().err


@pytest.fixture
def launch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    """Return what prints a launch."""
    return Launch(capsys, monkeypatch, tmp_path)


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a configuration file, and returns its name."""

    def write(text: str) -> str:
        file = tmp_path / "launch.yaml"
        file.write_text(text)
        return str(file)

    return write


def test_options_override_variables_these_the_file_and_that_the_defaults(
    launch: Launch, config: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config("num_processes: 3\nmixed_precision: fp16\nuse_cpu: true\ngpu_ids: 0,1\ndebug: true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    values = launch.values("--config-file", file, "--num_processes", "2")
    assert values["num_processes"] == ("2", "--num_processes")
    assert values["mixed_precision"] == ("bf16", "$ACCELERATE_MIXED_PRECISION")
    assert values["cpu"] == ("yes", file)
    assert values["debug"] == ("yes", file)
    assert values["max_restarts"] == ("0", "default")
    assert launch.values("--config_file", file, "--mixed_precision", "no")["mixed_precision"] == (
        "no",
        "--mixed_precision",
    )
    assert launch.values("--config_file", file, "--debug=no")["debug"] == ("no", "--debug")
    assert launch.values()["num_processes"] == ("1", "detected")


def test_the_file_that_counts_is_read_and_named(settings_home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = settings_home / "huggingface" / "accelerate" / "default_config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("num_processes: 2\nuse_cpu: true")
    assert main(["launch", "--no_python", "true"]) == 0
    assert capfd.readouterr().err == f"trainer-lib launch: settings from {file}\n"
    assert main(["launch", "--quiet", "--no_python", "echo", "a"]) == 0
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("a\na\n", "")


@pytest.mark.parametrize(
    ("text", "arguments", "name", "value"),
    [
        ("distributed_type: FSDP", [], "use_fsdp", "yes"),
        ("distributed_type: FSDP\nuse_cpu: true", [], "use_fsdp", "yes"),
        ("distributed_type: FSDP", ["--cpu"], "use_fsdp", "yes"),
        ("distributed_type: MULTI_CPU\nuse_cpu: false", [], "cpu", "yes"),
        ("distributed_type: MULTI_GPU", ["--cpu"], "multi_gpu", "no"),
        ("distributed_type: MULTI_GPU\nuse_cpu: true", [], "multi_gpu", "no"),
        ("distributed_type: DEEPSPEED", ["--use_fsdp"], "use_fsdp", "yes"),
        ("parallelism_config: {dp_replicate_size: 1}", [], "use_parallelism_config", "yes"),
        ("fsdp_config: {offload_params: true}", [], "fsdp_offload_params", "yes"),
        ("num_machines: 1\nmain_training_function: main\ndowncast_bf16: 'no'", [], "num_machines", "1"),
        ("distributed_type: MULTI_CPU\ndowncast_bf16: 'yes'", [], "cpu", "yes"),
        ("main_training_function: train\nnum_machines: 1", [], "num_machines", "1"),
        ("distributed_type: XLA\ndowncast_bf16: 'yes'", ["--use_fsdp"], "use_fsdp", "yes"),
        ("deepspeed_config: {zero_stage: 3}", [], "use_deepspeed", "no"),
        ("deepspeed_config: {zero_stage: 3}", ["--use_deepspeed"], "zero_stage", "3"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}", [], "zero_stage", "1"),
        ("deepspeed_config: {gradient_accumulation_steps: 3}", [], "gradient_accumulation_steps", "-"),
        ("fp8_config: {backend: TE}", [], "mixed_precision", "no"),
        ("fp8_config: {backend: AO}\nmixed_precision: fp8", [], "fp8_backend", "ao"),
    ],
)
def test_what_a_file_asks_for(
    launch: Launch, config: Callable[[str], str], text: str, arguments: list[str], name: str, value: str
) -> None:
    assert launch.values("--config_file", config(text), *arguments)[name][0] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "distributed_type: DEEPSPEED\nnum_machines: 2\ndeepspeed_config: {deepspeed_multinode_launcher: pdsh}",
            "deepspeed_multinode_launcher=pdsh needs --deepspeed_hostfile, a file with a line for each machine. Give",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}",
            "{}, line 2: `zero_stage` must be one of 0, 1, 2, 3 (got '4')",
        ),
        (
            "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_no_load_optim: true}",
            "`megatron_lm_no_load_optim: True` in {} needs Megatron-LM's own code, which",
        ),
        ("distributed_type: TPU", "--tpu needs --num_processes, the number of chips"),
        ("distributed_type: TPU\nnum_processes: 2", "torch_xla cannot be imported beside torch "),
        ("distributed_type: MULTI_GPU", "{} needs two accelerators or more, and there are none to train on here."),
        ("distributed_type: XLA\ndowncast_bf16: 'yes'", "`downcast_bf16: True` in {} needs torch_xla's former casts"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: no.json}",
            "The DeepSpeed config no.json cannot be read: No such file or directory.",
        ),
        ("gpu_ids: 4,5", "{}: `gpu_ids` 4,5 was given, and this machine has no accelerator. Leave it out."),
        ("mpirun_config: {mpirun_hostfile: hosts}", "The hostfile 'hosts' is not there."),
        (
            "machine_rank: 0\nrdzv_backend: static\nmpirun_config: {mpirun_hostfile: hosts}",
            "The hostfile 'hosts' is not there.",
        ),
        (
            "rdzv_backend: c10d\nmpirun_config: {mpirun_hostfile: hosts}",
            "rdzv_backend ({}) has no effect with --mpirun_hostfile",
        ),
        ("parallelism_config: {cp_comm_strategy: a}", "{}, line 1: `cp_comm_strategy` must be one of allgather, "),
        ("mixed_precision: fp16-true", "mixed_precision='fp16-true' is not supported by this version"),
        ("num_processes: 3\nnum_machines: 2", "3 does not divide evenly by 2 machines"),
        ("parallelism_config: {dp_shard_size: 2}\ndistributed_type: FSDP", "takes 2 processes, and there are 1"),
        ("num_processes: 29500", "num_processes must be at most 1024 on a machine (got 29500)."),
        ("num_processes: two", "{}, line 1: `num_processes` must be a whole number of at least 1 (got 'two')."),
    ],
)
def test_what_a_file_asks_for_that_cannot_be(
    launch: Launch, config: Callable[[str], str], text: str, message: str
) -> None:
    file = config(text)
    assert message.format(file) in launch.error("--config_file", file, launch.script)


def test_an_older_file_of_deepspeed_asks_for_its_values(config: Callable[[str], str]) -> None:
    variables = script_variables(given("--config_file", config(DEEPSPEED)))
    assert {name: text for name, text in variables.items() if "DEEPSPEED" in name or "GRADIENT" in name} == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    }


def test_a_file_that_nobody_named_is_refused_with_a_way_out(launch: Launch, settings_home: Path) -> None:
    file = settings_home / "huggingface" / "accelerate" / "default_config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_no_load_optim: true}")
    error = launch.error(launch.script)
    assert f"`megatron_lm_no_load_optim: True` in {file} needs Megatron-LM's own code" in error
    assert "`trainer-lib config` writes another one, and --config_file names one for this launch." in error


def test_torchruns_names_are_understood(launch: Launch) -> None:
    values = launch.values("--nproc_per_node=2", "--nnodes", "2", "--node_rank", "1", "--rdzv_endpoint", "host:2950")
    assert values["num_processes"] == ("4", "--nproc_per_node")
    assert values["num_machines"] == ("2", "--num_machines")
    assert values["machine_rank"] == ("1", "--machine_rank")
    assert values["main_process_ip"] == ("host", "--rdzv_endpoint")
    assert values["main_process_port"] == ("2950", "--rdzv_endpoint")
    values = launch.values("--nnodes", "2", "--master_addr", "host", "--master-port", "5", "--rdzv_id", "job")
    assert [values[name][0] for name in ("main_process_ip", "main_process_port", "rdzv_id")] == ["host", "5", "job"]
    assert launch.values("--standalone", "--nproc-per-node", "auto")["num_processes"] == ("1", "detected")
    values = launch.values("--nproc_per_node", "cpu")
    assert values["num_processes"][0] == str(os.cpu_count())
    assert values["cpu"] == ("yes", "--nproc_per_node")


def test_a_dry_run_prints_command_and_variables(launch: Launch) -> None:
    text = launch.out(
        "--dry-run", "--cpu", "--num_processes", "2", "--mixed_precision", "bf16", launch.script, "--lr", "1 e"
    )
    assert text.startswith("Number of processes on machine 0 of 1: 2\nEach has these variables:\n")
    assert "  ACCELERATE_MIXED_PRECISION=bf16\n" in text
    assert "  RANK=0, 1\n" in text
    assert f"and this command:\n  python '{launch.script}' --lr '1 e'\nNothing was started.\n" in text
    text = launch.out("--dry_run", "-m", "package.module")
    assert "\n  python -m package.module\n" in text
    machines = ["--num_machines", "2", "--machine_rank", "1", "--num_processes", "4", "--main_process_ip", "host"]
    text = launch.out("--dry_run", *machines, "--no_python", "true")
    assert "  RANK=2, 3\n" in text
    assert "  MASTER_PORT=29500\n" in text


# What Accelerate sets and this launcher does not, or in another way, and why.
OTHERWISE = {
    "FSDP_VERSION": "2 if nothing else is asked for: there is no other version here",
    "KMP_AFFINITY": "it would pin all processes of a machine to the same cores",
    "KMP_BLOCKTIME": "the same",
    "MASTER_ADDR": "set for each process, with its rank",
    "MASTER_PORT": "the same, and any port that is free",
    "OMP_NUM_THREADS": "the cores are shared out",
    "PARALLELISM_CONFIG_CP_BACKEND": "of a feature that is not there",
    "PARALLELISM_CONFIG_SP_BACKEND": "of a feature that is not there",
}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cpu"],
        ["--mixed_precision", "bf16", "--cpu"],
        ["--debug"],
        ["--enable_cpu_affinity"],
        ["--dynamo_backend", "inductor", "--dynamo_mode", "reduce-overhead", "--dynamo_use_dynamic"],
        ["--multi_gpu", "--num_processes", "2", "--mixed_precision", "fp16"],
        ["--use_fsdp", "--num_processes", "2"],
        ["--use_fsdp", "--num_processes", "2", "--fsdp_version", "2", "--fsdp_reshard_after_forward", "false"],
        [
            "--use_fsdp", "--num_processes", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
            "--fsdp_transformer_layer_cls_to_wrap", "Block", "--fsdp_offload_params", "true",
            "--fsdp_state_dict_type", "FULL_STATE_DICT", "--fsdp_cpu_ram_efficient_loading", "false",
            "--fsdp_activation_checkpointing", "true", "--fsdp_forward_prefetch", "true",
        ],
        [
            "--use_fsdp", "--fsdp_version", "2", "--num_processes", "4", "--use_parallelism_config",
            "--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2",
        ],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_script_gets_the_variables_that_accelerate_would_set(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerates = accelerates_variables(arguments, monkeypatch)
    baseline = accelerates_variables([], monkeypatch)
    expected = {name: value for name, value in accelerates.items() if value != baseline.get(name)}
    expected = {name: value for name, value in expected.items() if name not in OTHERWISE}
    variables = script_variables(given(*arguments))
    assert expected.items() <= variables.items()
    # And nothing that Accelerate's launcher would not set, or would set to something else.
    more = {name for name, value in variables.items() if accelerates.get(name) != value} - set(OTHERWISE)
    assert more == set()


def accelerates_variables(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the variables that Accelerate's launcher sets for these options, on a machine without accelerators."""
    launcher: Any = pytest.importorskip("accelerate.commands.launch")
    functions: Any = pytest.importorskip("accelerate.utils.launch")
    monkeypatch.setattr(launcher, "default_config_file", "/nonexistent")
    monkeypatch.setattr(functions, "is_port_in_use", lambda port: False)
    args, *_ = launcher._validate_launch_command(launcher.launch_command_parser().parse_args([*arguments, "script.py"]))
    if args.use_fsdp or args.multi_gpu:
        variables = functions.prepare_multi_gpu_env(args)
    else:
        _, variables = functions.prepare_simple_launcher_cmd_env(args)
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}


def test_parsers_of_other_programs_get_the_same_options() -> None:
    from trainer_lib.commands.launch import launch_command_parser

    commands = argparse.ArgumentParser().add_subparsers()
    for parser in (launch_command_parser(), launch_command_parser(commands)):
        options = parser.parse_args(
            ["--num-processes", "2", "--fsdp-offload-params", "true", "-m", "script", "--lr", "1"]
        )
        assert (options.num_processes, options.fsdp_offload_params, options.module) == (2, True, True)
        assert options.training_script_args == ["--lr", "1"]
        assert options.use_fsdp is None


def test_devices_of_a_file_are_left_alone_on_the_cpu(
    launch: Launch, config: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config("gpu_ids: 0,1\nnum_processes: 2")
    assert "this machine has no accelerator" in launch.error("--config_file", file, launch.script)
    assert "CUDA_VISIBLE_DEVICES" not in launch.out("--dry_run", "--cpu", "--config_file", file, launch.script)
    monkeypatch.setattr(device_count, "visible_devices", lambda ids, name: {"CUDA_VISIBLE_DEVICES": ids})
    assert "  CUDA_VISIBLE_DEVICES=0,1\n" in launch.out("--dry_run", "--config_file", file, launch.script)
