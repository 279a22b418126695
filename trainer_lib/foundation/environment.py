"""The environment variables of launchers and schedulers; no other module reads the environment.

Launchers pass settings to the processes they start in variables: those of torchrun, SLURM and MPI, and the
`ACCELERATE_*` variables of Accelerate's launcher.
"""

import functools
import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})

# srun numbers its steps from 0; the batch script, an interactive shell and the extern step have numbers above these.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0

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
}
# Launchers set FSDP_MIN_NUM_PARAMS for every auto-wrap policy; only the size-based policy uses it.
_SHARDING_COUNTS = {"fsdp_version": "FSDP_VERSION", "size_from": "FSDP_MIN_NUM_PARAMS"}


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank and world size of this process, as its launcher set them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    master_addr: str | None = None
    master_port: int | None = None


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
    """Return the first of `env_keys` that is set to a non-negative integer, else `default`."""
    for key in env_keys:
        value = os.environ.get(key)
        if value is not None and _whole_number(key, value) >= 0:
            return int(value)
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the yes or no in the variable `key`, or `default`."""
    return bool(str_to_bool(os.environ[key])) if os.environ.get(key) else default


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the string in the variable `key`, or `default`."""
    return os.environ.get(key, default)


def debug_mode() -> bool:
    """Whether collectives first check that all ranks have the same shapes."""
    return parse_flag_from_env("ACCELERATE_DEBUG_MODE")


def cpu_requested() -> bool:
    """Whether the launcher asked to stay on the CPU."""
    return parse_flag_from_env("ACCELERATE_USE_CPU")


def device_requested() -> str | None:
    """The device named by the launcher, if any."""
    return os.environ.get("ACCELERATE_TORCH_DEVICE") or None


def mixed_precision_requested() -> str:
    """The precision named by the launcher, or "no"."""
    return (os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()


def accumulation_steps_requested() -> int:
    """The accumulation steps named by the launcher, or 1."""
    return get_int_from_env(["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"], 1)


def uses_sharding() -> bool:
    """Whether the launcher asked for FSDP."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def uses_parallelism_config() -> bool:
    """Whether the launcher set the sizes of replication and sharding."""
    return parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG")


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
            options[field] = _whole_number(key, os.environ[key])
    return options


def parallelism_requested() -> dict[str, int]:
    """The sizes of the launcher's `ParallelismConfig`, by its fields."""
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    keys = {name: f"PARALLELISM_CONFIG_{name.upper()}" for name in names}
    return {name: _whole_number(key, os.environ[key]) for name, key in keys.items() if os.environ.get(key)}


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
    engines = {
        "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
        "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
        "ACCELERATE_USE_TP": "tensor parallelism",
    }
    for key, engine in engines.items():
        if parse_flag_from_env(key):
            raise UnsupportedError(f"{key} requests {engine}, which this version does not support. Unset {key}.")


def dynamo_setting(name: str) -> str | None:
    """The launcher's setting of torch.compile: `BACKEND` or `MODE`."""
    return os.environ.get(f"ACCELERATE_DYNAMO_{name}") or None


def dynamo_flag(name: str) -> bool | None:
    """The launcher's flag for torch.compile: `USE_FULLGRAPH`, `USE_DYNAMIC` and others."""
    value = dynamo_setting(name)
    return None if value is None else bool(str_to_bool(value))


def log_level_requested() -> str | None:
    """The log level named by the launcher, if any."""
    return os.environ.get("ACCELERATE_LOG_LEVEL") or None


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


def error_file() -> Path | None:
    """Return the file where the launcher looks for the reason of a failure, if there is a launcher."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def elastic_attempt() -> str | None:
    """The number of the restart under torch's elastic agent if it provides its store; otherwise `None`."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def read_world() -> World | None:
    """Return the rank and world size that the launcher set, or `None` without a launcher.

    torchrun's variables take precedence over SLURM's, and SLURM's over MPI's.
    """
    return _torchrun_world(os.environ) or _slurm_world(os.environ) or _mpi_world(os.environ)


def job_end_time() -> float | None:
    """When the scheduler ends this job, in seconds since 1970, if it sets a variable (SLURM 22.05 and later)."""
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


def with_defaults(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process for a child process, with `variables` as defaults."""
    return {**variables, **os.environ}


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
    """Decorate a function, or every test of a class, to restore the `ACCELERATE_*` variables afterwards."""
    if isinstance(func_or_cls, type):
        for name, member in list(vars(func_or_cls).items()):
            if callable(member) and name.startswith("test"):
                setattr(func_or_cls, name, purge_accelerate_environment(member))
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


def _torchrun_world(env: Mapping[str, str]) -> World | None:
    if "RANK" not in env and "WORLD_SIZE" not in env:
        if "LOCAL_RANK" in env and env["LOCAL_RANK"] != "-1":
            raise ConfigurationError(
                f"LOCAL_RANK={env['LOCAL_RANK']} is set but RANK and WORLD_SIZE are not. "
                "Start with torchrun or `trainer-lib launch`, which set all three, or unset LOCAL_RANK."
            )
        return None
    missing = [key for key in ("RANK", "WORLD_SIZE") if key not in env]
    if missing:
        raise ConfigurationError(
            f"{missing[0]} is missing while {'WORLD_SIZE' if missing[0] == 'RANK' else 'RANK'} is set. "
            "Set both (torchrun and `trainer-lib launch` do), or neither."
        )
    rank, size = _whole_number("RANK", env["RANK"]), _whole_number("WORLD_SIZE", env["WORLD_SIZE"])
    local_size = _whole_number("LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE", str(size)))
    local_rank = _whole_number("LOCAL_RANK", env.get("LOCAL_RANK", str(rank % max(local_size, 1))))
    return _checked(World(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher="torchrun", **_master(env)
    ))  # fmt: skip


def _slurm_world(env: Mapping[str, str]) -> World | None:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_SLURM_STEP or "SLURM_PROCID" not in env:
        return None
    size_key = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    size = _whole_number(size_key, env.get(size_key, "1"))
    if size == 1:
        return None
    master = _master(env)
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    if master["master_addr"] is None and nodes:
        master["master_addr"] = first_slurm_node(nodes)
    if master["master_port"] is None:
        # All tasks of a job derive the same port, and two jobs on one node rarely derive the same.
        master["master_port"] = 15000 + _whole_number("SLURM_JOB_ID", env.get("SLURM_JOB_ID", "0")) % 20000
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE"))
    node = _whole_number("SLURM_NODEID", env.get("SLURM_NODEID", "0"))
    return _checked(World(
        rank=_whole_number("SLURM_PROCID", env["SLURM_PROCID"]),
        size=size,
        local_rank=_whole_number("SLURM_LOCALID", env.get("SLURM_LOCALID", "0")),
        local_size=size if tasks is None else _tasks_of_node(tasks, node),
        launcher="srun",
        **master,
    ))  # fmt: skip


def _tasks_of_node(tasks: str, node: int) -> int:
    """Return the number of tasks on a node, from SLURM's list for all nodes: "4,2" or "2(x3),1"."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", tasks)
    tasks_by_node = [int(count) for count, repeats in counts for _ in range(int(repeats or 1))]
    if node >= len(tasks_by_node):
        raise ConfigurationError(
            f"SLURM_NODEID={node} is not among the nodes of SLURM_STEP_TASKS_PER_NODE={tasks!r}. Start the processes "
            "with srun, which sets both."
        )
    return tasks_by_node[node]


def first_slurm_node(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    Example:
        >>> first_slurm_node("gpu[07-09,12],login1")
        'gpu07'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)  # up to a comma outside of brackets
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else "")


def _mpi_world(env: Mapping[str, str]) -> World | None:
    for rank_key, size_key, local_rank_key, local_size_key in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if rank_key in env and size_key in env:
            rank, size = _whole_number(rank_key, env[rank_key]), _whole_number(size_key, env[size_key])
            if size == 1:
                return None
            return _checked(World(
                rank=rank,
                size=size,
                local_rank=_whole_number(local_rank_key, env.get(local_rank_key, str(rank))),
                local_size=_whole_number(local_size_key, env.get(local_size_key, str(size))),
                launcher="mpirun",
                **_master(env),
            ))  # fmt: skip
    return None


def _master(env: Mapping[str, str]) -> dict[str, Any]:
    port = env.get("MASTER_PORT")
    return {
        "master_addr": env.get("MASTER_ADDR"),
        "master_port": None if port is None else _whole_number("MASTER_PORT", port),
    }


def _checked(world: World) -> World:
    if not 0 <= world.rank < world.size:
        raise ConfigurationError(f"Rank {world.rank} does not fit a world of {world.size} ({world.launcher}).")
    return world


def _whole_number(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(f"{key}={value!r} is not a whole number.") from None
