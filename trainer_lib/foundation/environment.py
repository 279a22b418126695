"""The environment variables of launchers and schedulers; no other module reads the environment.

Launchers pass settings to the processes they start in variables: those of torchrun, SLURM and MPI, and the
`ACCELERATE_*` variables of Accelerate's launcher.
"""

import functools
import logging
import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from trainer_lib.foundation import launcher_variables
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.launcher_variables import World, whole_number

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})

# The fields of the FSDP plugin, by kind, and the variables in which launchers pass them on.
_SHARDING_TEXTS = {
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "transformer_cls_names_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "ignored_modules": "FSDP_IGNORED_MODULES",
}
_SHARDING_FLAGS = {
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    "use_orig_params": "FSDP_USE_ORIG_PARAMS",
    "sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "activation_checkpointing_offload": "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
}
# Launchers set FSDP_MIN_NUM_PARAMS for every auto-wrap policy; only the size-based policy uses it.
_SHARDING_COUNTS = {"fsdp_version": "FSDP_VERSION", "size_from": "FSDP_MIN_NUM_PARAMS"}


CHECK_REPORT = "TRAINER_LIB_CHECK_REPORT"  # asks the first `fit` of a script for a check
EVALUATED_RUN = "TRAINER_LIB_EVALUATED_RUN"  # asks it to evaluate the checkpoints of this run
WATCHED_RUN = "TRAINER_LIB_WATCHED_RUN"  # "1": until the run is finished
EVALUATION_BEGUN = "TRAINER_LIB_EVALUATION_BEGUN"  # the file that tells that there was such a `fit`

# What a report of the environment shows.
_WORLD_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORK_LAUNCHED")
_SETTING_PREFIXES = (
    "ACCELERATE_", "ASCEND_", "CUBLAS_", "CUDA_", "FSDP_", "GLOO_", "HF_", "HIP_", "KMP_", "MKL_", "MPI_",
    "MV2_", "NCCL_", "OMPI_", "OMP_", "PARALLELISM_CONFIG_", "PMI_", "PYTORCH_", "ROCR_", "SLURM_",
    "TOKENIZERS_", "TORCH", "TRAINER_LIB_", "TRANSFORMERS_", "XDG_", "ZE_",
)  # fmt: skip
_SECRET = r"TOKEN(?!IZER)|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE"


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return whether a string means yes (y, yes, t, true, on, 1) or no (n, no, f, false, off, 0).

    Returns 1 or 0, or a `bool` with `to_bool`.
    """
    lowered = value.lower()
    if lowered not in _TRUE | _FALSE:
        raise ConfigurationError(f"{value!r} is neither yes nor no. Known: {', '.join(sorted(_TRUE | _FALSE))}.")
    answer = lowered in _TRUE
    return answer if to_bool else int(answer)


def get_int_from_env(env_keys: list[str] | tuple[str, ...], default: int) -> int:
    """Return the first of `env_keys` that is set to a non-negative integer, else `default`; an empty one is not set."""
    for key in env_keys:
        value = os.environ.get(key)
        if value and whole_number(key, value) >= 0:
            return int(value)
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the yes or no in the variable `key`, or `default`."""
    value = os.environ.get(key)
    try:
        return bool(str_to_bool(value)) if value else default
    except ConfigurationError as error:
        raise ConfigurationError(f"{key}={error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the string in the variable `key`, or `default`."""
    return os.environ.get(key, default)


def variables_that_begin_with(*beginnings: str) -> dict[str, str]:
    """Return the variables whose names begin with one of these."""
    return {name: value for name, value in os.environ.items() if name.startswith(beginnings)}


def debug_mode() -> bool:
    """Whether collectives first check that all ranks have the same shapes."""
    return parse_flag_from_env("ACCELERATE_DEBUG_MODE")


def cpu_requested() -> bool:
    """Whether the launcher asked to stay on the CPU."""
    return parse_flag_from_env("ACCELERATE_USE_CPU")


def cpu_affinity_requested() -> bool:
    """Whether the launcher asked to bind each process to the cores near its GPU."""
    return parse_flag_from_env("ACCELERATE_CPU_AFFINITY")


def device_requested() -> str | None:
    """The device named by the launcher, if any."""
    return os.environ.get("ACCELERATE_TORCH_DEVICE") or None


def xla_requested() -> bool:
    """Whether a variable names a device of torch_xla: its own PJRT_DEVICE, or the launcher's."""
    return bool(os.environ.get("PJRT_DEVICE")) or (device_requested() or "").startswith("xla")


def mixed_precision_requested() -> str:
    """The precision named by the launcher (MIXED_PRECISION in early versions of Accelerate), or "no"."""
    return (os.environ.get("ACCELERATE_MIXED_PRECISION") or os.environ.get("MIXED_PRECISION") or "no").lower()


def fp8_setting(name: str) -> str | None:
    """The launcher's value of an option of fp8, such as "backend" or "margin", if it set one."""
    return os.environ.get(f"ACCELERATE_FP8_{name.upper()}") or None


def accumulation_steps_requested() -> int:
    """The accumulation steps named by the launcher, or 1."""
    return get_int_from_env(["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"], 1)


def uses_sharding() -> bool:
    """Whether the launcher asked for FSDP."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def uses_parallelism_config() -> bool:
    """Whether the launcher set the sizes of replication and sharding."""
    return parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG")


def deepspeed_requested() -> bool:
    """Whether the launcher asked for DeepSpeed."""
    return parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")


def deepspeed_setting(name: str) -> str | None:
    """The launcher's setting of DeepSpeed, such as `DEEPSPEED_ZERO_STAGE` or `GRADIENT_CLIPPING`."""
    text = os.environ.get(f"ACCELERATE_{name}")
    return None if text in (None, "", "None") else text


def megatron_lm_requested() -> bool:
    """Whether the launcher asked for Megatron-LM."""
    return parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM")


def megatron_lm_setting(name: str) -> str | None:
    """The launcher's setting of Megatron-LM for a field of its plugin, such as `tp_degree`."""
    text = os.environ.get(f"MEGATRON_LM_{name.upper()}")
    return None if text in (None, "", "None") else text


def sharding_requested() -> dict[str, Any]:
    """The options of FSDP that the launcher named, by the names of the plugin's fields."""
    options: dict[str, Any] = {
        field: text for field, key in _SHARDING_TEXTS.items() if (text := os.environ.get(key)) not in (None, "", "None")
    }
    for field, key in _SHARDING_FLAGS.items():
        if os.environ.get(key):
            options[field] = parse_flag_from_env(key)
    for field, key in _SHARDING_COUNTS.items():
        if os.environ.get(key):
            options[field] = whole_number(key, os.environ[key])
    return options


def parallelism_requested() -> dict[str, int]:
    """The sizes of the launcher's `ParallelismConfig`, by its fields."""
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "pp_size")
    keys = {name: f"PARALLELISM_CONFIG_{name.upper()}" for name in names}
    return {name: whole_number(key, os.environ[key]) for name, key in keys.items() if os.environ.get(key)}


def context_parallel_strategy() -> str | None:
    """How the launcher wants attention to reach the keys of other ranks, if it says so."""
    return os.environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY") or None


def sequence_parallelism_requested() -> dict[str, Any]:
    """The options of the launcher's sequence parallelism, by the names of Accelerate's fields."""
    prefix, options = "PARALLELISM_CONFIG_SP_", dict[str, Any]()
    if os.environ.get(f"{prefix}SEQ_LENGTH"):
        options["sp_seq_length"] = get_int_from_env([f"{prefix}SEQ_LENGTH"], 0)
    if os.environ.get(f"{prefix}SEQ_LENGTH_IS_VARIABLE"):
        options["sp_seq_length_is_variable"] = parse_flag_from_env(f"{prefix}SEQ_LENGTH_IS_VARIABLE")
    if os.environ.get(f"{prefix}ATTN_IMPLEMENTATION"):
        options["sp_attn_implementation"] = os.environ[f"{prefix}ATTN_IMPLEMENTATION"]
    return options


def processes_per_machine() -> int | None:
    """The number of processes on each machine, if a launcher set it."""
    world = read_world()
    return None if world is None else world.local_size


def enable_fsdp_ram_efficient_loading() -> None:
    """Let transformers load the weights of models that will be sharded in the main process only."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # transformers checks both variables
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"


def disable_fsdp_ram_efficient_loading() -> None:
    """Let transformers load the weights of models in each process."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def threads_requested() -> str | None:
    """The number of OpenMP threads in `OMP_NUM_THREADS`, if set."""
    return os.environ.get("OMP_NUM_THREADS") or None


def refuse_unsupported_engines() -> None:
    """Raise if a launcher requests an engine that this version does not support, rather than ignore it."""
    if parse_flag_from_env("ACCELERATE_USE_TP"):
        raise UnsupportedError(
            "ACCELERATE_USE_TP requests tensor parallelism by an older variable. Unset it, and set "
            "ACCELERATE_USE_PARALLELISM_CONFIG=true and PARALLELISM_CONFIG_TP_SIZE."
        )


def dynamo_setting(name: str) -> str | None:
    """The launcher's setting of torch.compile: `BACKEND` or `MODE`."""
    return os.environ.get(f"ACCELERATE_DYNAMO_{name}") or None


def dynamo_flag(name: str) -> bool | None:
    """The launcher's flag for torch.compile: `USE_FULLGRAPH`, `USE_DYNAMIC` and others."""
    return None if dynamo_setting(name) is None else parse_flag_from_env(f"ACCELERATE_DYNAMO_{name}")


def log_level_requested() -> str | None:
    """The log level named by ACCELERATE_LOG_LEVEL, or by LOG_LEVEL if its value is a level of `logging`; if any."""
    general = os.environ.get("LOG_LEVEL", "").upper()  # other programs have levels of their own in it
    return os.environ.get("ACCELERATE_LOG_LEVEL") or (general if general in logging.getLevelNamesMapping() else None)


def make_cublas_deterministic() -> None:
    """Give cuBLAS workspaces of a fixed size, without which its sums may differ between runs.

    Call it before the first use of cuBLAS. A value that is already set stays.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def expected_world_size() -> int | None:
    """The number of processes that `trainer-lib launch` started, to compare with the world that formed."""
    size = get_int_from_env(["TRAINER_LIB_WORLD_SIZE"], 0)
    return size or None


def store_file() -> str | None:
    """The file of the rendezvous of the processes of one machine, if their launcher set one."""
    return os.environ.get("TRAINER_LIB_STORE_FILE") or None


def launched_by_fork() -> bool:
    """Whether `notebook_launcher` or `debug_launcher` forked this process."""
    return parse_flag_from_env("FORK_LAUNCHED")


def launcher_kills_stopped_ranks() -> bool:
    """Whether the launcher kills ranks that cannot end themselves within seconds; torch's agents take half a minute."""
    return launched_by_fork() or parse_flag_from_env("TRAINER_LIB_KILLS_STOPPED_RANKS")


def error_file() -> Path | None:
    """Return the file where the launcher looks for the reason of a failure, if there is a launcher."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def check_report_file() -> Path | None:
    """Return the file for the report, if `trainer-lib check` started this script: its first `fit` is then a check."""
    path = os.environ.get(CHECK_REPORT)
    return Path(path) if path else None


def evaluated_run() -> tuple[str, bool] | None:
    """Return the run whose checkpoints the first `fit` of this script evaluates, and whether until the run is finished.

    It is `None` unless `trainer-lib evaluate` started the script.
    """
    path = os.environ.get(EVALUATED_RUN)
    return (path, os.environ.get(WATCHED_RUN) == "1") if path else None


def tell_of_evaluation() -> None:
    """Tell `trainer-lib evaluate` on this machine that the script has called `fit`."""
    Path(os.environ[EVALUATION_BEGUN]).touch()


def elastic_attempt() -> str | None:
    """The number of the restart under torch's elastic agent if it provides its store; otherwise `None`."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def local_rank_set(rank: int) -> AbstractContextManager[None]:
    """Set `LOCAL_RANK` for a package that reads it, where no launcher did, for the length of a `with` block."""
    return patch_environment(LOCAL_RANK=rank, **{launcher_variables.LOCAL_RANK_IS_OURS: 1})


def read_world() -> World | None:
    """Return the rank and world size that the launcher set, or `None` without a launcher.

    torchrun's variables take precedence over SLURM's, and SLURM's over MPI's, unless mpirun ran inside the SLURM job.
    """
    return launcher_variables.read_world(os.environ)


def launcher_name(world: World | None) -> str | None:
    """The program that started this process as a rank of a world; `None` without a launcher."""
    if world is None or launched_by_fork():
        return None if world is None else "notebook_launcher or debug_launcher"
    is_ours = world.launcher == "torchrun" and expected_world_size() is not None
    return "trainer-lib launch" if is_ours else world.launcher


def refuse_contradicting_launchers() -> None:
    """Raise if the variables of two launchers give this process different ranks or world sizes."""
    launcher_variables.refuse_contradictions(os.environ)


def job_end_time() -> float | None:
    """When the scheduler ends this job, in seconds since 1970, if it sets a variable (SLURM 23.02 and later)."""
    end_time = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(end_time) if end_time.isdigit() and int(end_time) else None  # 0: a job without a limit


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return the lines `KEY=VALUE` of variables, but of none that is empty or has a space, ";", "<", ">" or newline."""
    forbidden = set("; \n<>")
    return [
        f"{key}={value}\n" for key, value in current_env.items() if key and value and not forbidden & {*key, *value}
    ]


def env_var_path_add(env_var_name: str, path_to_add: str | Path) -> str:
    """Return the paths in a variable, separated by colons, with one more at the end; the variable does not change."""
    paths = [path for path in os.environ.get(env_var_name, "").split(":") if path]
    return ":".join([*paths, str(path_to_add)])


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables for the rest of this process, as a launcher does in those it forks."""
    os.environ.update(variables)


def variable(name: str) -> str | None:
    """A variable of another package, such as a tracker's; `None` if it is empty or not set."""
    return os.environ.get(name) or None


def settings_of_launchers() -> dict[str, str]:
    """Return the variables that launchers, schedulers and torch's libraries read, without what might be a secret."""
    names = [name for name in sorted(os.environ) if name in _WORLD_NAMES or name.startswith(_SETTING_PREFIXES)]
    return {
        name: "(set, not shown)" if re.search(_SECRET, name) else _without_login(os.environ[name]) for name in names
    }


def _without_login(value: str) -> str:
    return re.sub(r"//[^/@\s]+@", "//(login)@", value)


def with_defaults(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process for a child process, with `variables` as defaults."""
    return {**variables, **os.environ}


def with_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process for a child process, with `variables` in it."""
    return {**os.environ, **variables}


@contextmanager
def patch_environment(**kwargs: Any) -> Generator[None]:
    """Set variables (names are upper-cased) for the length of a `with` block.

    Example:
        >>> with patch_environment(accelerate_use_cpu="1"):
        ...     cpu_requested()
        True
    """
    before = {key.upper(): os.environ.get(key.upper()) for key in kwargs}
    os.environ.update({key.upper(): str(value) for key, value in kwargs.items()})
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def clear_environment() -> Generator[None]:
    """Empty the environment for the length of a `with` block, and restore it afterwards."""
    before = os.environ.copy()
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or every test of a class and of its subclasses, to restore the `ACCELERATE_*` variables."""
    if isinstance(func_or_cls, type):
        _purge_after_tests(func_or_cls)
        initialize: Any = vars(func_or_cls).get("__init_subclass__")

        def init_subclass(cls: type, **options: Any) -> None:
            if initialize is None:
                super(func_or_cls, cls).__init_subclass__(**options)
            else:
                initialize.__get__(None, cls)(**options)
            _purge_after_tests(cls)

        func_or_cls.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
        return func_or_cls
    function: Callable[..., Any] = func_or_cls

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before = {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_")}
        try:
            return function(*args, **kwargs)
        finally:
            for key in [key for key in os.environ if key.startswith("ACCELERATE_")]:
                del os.environ[key]
            os.environ.update(before)

    return wrapped


def _purge_after_tests(tests: type) -> None:
    for name, member in list(vars(tests).items()):
        if callable(member) and name.startswith("test"):
            setattr(tests, name, purge_accelerate_environment(member))
