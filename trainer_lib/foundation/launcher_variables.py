"""Rank, world size and rendezvous address, from the variables of torchrun, SLURM and MPI."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

# srun numbers its steps from 0; the batch script, an interactive shell and the extern step have numbers above these.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0

_SHELLS = ("ash", "bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh")

LOCAL_RANK_IS_OURS = "TRAINER_LIB_LOCAL_RANK"
"""The variable beside a `LOCAL_RANK` that this library set for another package."""

_LOCALHOST = "127.0.0.1"
_FIRST_PORT, _PORTS = 15000, 17000  # below those that Linux gives to connections

# Rank, world size, local rank and local size, by the programs that set them.
_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_MPI_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
_MPIRUN_URI, _DAEMON_URI = "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri"
# Set by launchers that may themselves run under srun or mpirun.
_NESTED_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "FORK_LAUNCHED")


@frozen_dataclass(kw_only=True)
class World:
    """The rank and world size of this process, as its launcher set them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    master_addr: str | None = None
    master_port: int | None = None
    variables: str = field(default="", compare=False)  # rank and world size, as they were set


def read_world(env: Mapping[str, str]) -> World | None:
    """Return the rank and world size that the launcher set, or `None` without a launcher."""
    slurm, mpi = _slurm_world(env), _mpi_world(env)
    scheduled = mpi if slurm is None or (mpi is not None and _is_within(mpi, slurm)) else slurm
    return _torchrun_world(env, scheduled) or _with_address(scheduled, env)


def refuse_contradictions(env: Mapping[str, str]) -> None:
    """Raise if the variables of two launchers give this process different ranks or world sizes."""
    world = read_world(env)
    if world is None or any(env.get(name) for name in _NESTED_LAUNCHERS):
        return
    for other in (_slurm_world(env), _mpi_world(env)):
        if other is None or (other.rank, other.size) == (world.rank, world.size) or _is_within(world, other):
            continue
        raise ConfigurationError(
            f"Two launchers contradict each other: rank {world.rank} of {world.size} in {world.variables}, and rank "
            f"{other.rank} of {other.size} in {other.variables}. Unset the variables of the launcher that did not "
            "start this process, before you start it."
        )


def first_slurm_node(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    Example:
        >>> first_slurm_node("gpu[07-09,12],login1")
        'gpu07'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)  # up to a comma outside of brackets
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else "")


def whole_number(key: str, value: str) -> int:
    """Return the whole number in a variable.

    Raises:
        ConfigurationError: If its value is something else.
    """
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(f"{key}={value!r} is not a whole number.") from None


def _is_within(inner: World, outer: World) -> bool:
    """Whether a launcher that runs once on each machine, under the outer one, may have started the inner world."""
    return outer.local_size == 1 and inner.size > outer.size


def _torchrun_world(env: Mapping[str, str], scheduled: World | None) -> World | None:
    missing = [key for key in ("RANK", "WORLD_SIZE") if key not in env]
    if len(missing) == 2:
        if scheduled is None and env.get("LOCAL_RANK", "-1") != "-1" and LOCAL_RANK_IS_OURS not in env:
            raise ConfigurationError(
                f"LOCAL_RANK={env['LOCAL_RANK']} is set but RANK and WORLD_SIZE are not. "
                "Start with torchrun or `trainer-lib launch`, which set all three, or unset LOCAL_RANK."
            )
        return None
    if missing and scheduled is not None:
        _check_half(missing[0], scheduled, env)
        return None
    if missing:
        raise ConfigurationError(
            f"{missing[0]} is missing while {'WORLD_SIZE' if missing[0] == 'RANK' else 'RANK'} is set. "
            "Set both (torchrun and `trainer-lib launch` do), or neither."
        )
    rank, size = whole_number("RANK", env["RANK"]), whole_number("WORLD_SIZE", env["WORLD_SIZE"])
    local_size = whole_number("LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE", str(size)))
    local_rank = whole_number("LOCAL_RANK", env.get("LOCAL_RANK", str(rank % max(local_size, 1))))
    return _checked(World(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher="torchrun", **_master(env),
        variables=_shown(env, "RANK", "WORLD_SIZE"),
    ))  # fmt: skip


def _check_half(missing: str, scheduled: World, env: Mapping[str, str]) -> None:
    """Check the one of RANK and WORLD_SIZE that a job script sets for processes of a scheduler."""
    name, expected = ("WORLD_SIZE", scheduled.size) if missing == "RANK" else ("RANK", scheduled.rank)
    if whole_number(name, env[name]) != expected:
        raise ConfigurationError(
            f"Two launchers contradict each other: {name}={env[name]}, and rank {scheduled.rank} of {scheduled.size} "
            f"in {scheduled.variables}. Unset {name}: {scheduled.launcher} gives each process its rank and world size."
        )


def _slurm_world(env: Mapping[str, str]) -> World | None:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_SLURM_STEP or "SLURM_PROCID" not in env:
        return None
    if _is_in_shell_of_srun(env):
        return None
    size_key = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    size = whole_number(size_key, env.get(size_key, "1"))
    if size == 1:
        return None
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE"))
    node = whole_number("SLURM_NODEID", env.get("SLURM_NODEID", "0"))
    local_size = size if tasks is None else _tasks_of_node(tasks, node)
    # All tasks of a step derive the same port, and two steps on one node rarely derive the same.
    job = whole_number("SLURM_JOB_ID", env.get("SLURM_JOB_ID", "0"))
    return _checked(World(
        rank=whole_number("SLURM_PROCID", env["SLURM_PROCID"]),
        size=size,
        local_rank=whole_number("SLURM_LOCALID", env.get("SLURM_LOCALID", "0")),
        local_size=local_size,
        launcher="srun",
        # One machine needs no name server.
        master_addr=_LOCALHOST if local_size == size else first_slurm_node(nodes) or None,
        master_port=_FIRST_PORT + (job + 7919 * int(step)) % _PORTS,
        variables=_shown(env, "SLURM_PROCID", size_key),
    ))  # fmt: skip


def _is_in_shell_of_srun(env: Mapping[str, str]) -> bool:
    """Whether this process belongs to an interactive shell (`srun -n4 --pty bash`), whose other tasks end at once."""
    if "SLURM_PTY_PORT" not in env:
        return False
    try:
        words = Path(f"/proc/{env.get('SLURM_TASK_PID')}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return False
    program, *options = words
    # With a command or a script, the shells of all tasks run it.
    is_interactive = all(re.fullmatch(r"--\w.*|-[^-c]+", option) for option in options)
    return Path(program).name.lstrip("-") in _SHELLS and is_interactive


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


def _mpi_world(env: Mapping[str, str]) -> World | None:
    for rank_key, size_key, local_rank_key, local_size_key in _MPI_NAMES:
        if rank_key in env and size_key in env:
            rank, size = whole_number(rank_key, env[rank_key]), whole_number(size_key, env[size_key])
            if size == 1:
                return None
            local_size = whole_number(local_size_key, env.get(local_size_key, str(size)))
            job = next((env[name] for name in _MPI_JOB_NAMES if env.get(name)), None)
            return _checked(World(
                rank=rank,
                size=size,
                local_rank=whole_number(local_rank_key, env.get(local_rank_key, str(rank))),
                local_size=local_size,
                launcher="mpirun",
                master_addr=None if local_size == size else _address_of_mpirun(env),
                master_port=None if job is None else _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS,
                variables=_shown(env, rank_key, size_key),
            ))  # fmt: skip
    return None


def _address_of_mpirun(env: Mapping[str, str]) -> str | None:
    """Return the address of the machine of Open MPI's mpirun, where rank 0 is by default."""
    address = _address_in(env.get(_MPIRUN_URI, ""))
    is_elsewhere = address is not None and _address_in(env.get(_DAEMON_URI, "")) not in (None, address)
    if env.get("OMPI_COMM_WORLD_RANK") == "0" and is_elsewhere and "MASTER_ADDR" not in env:
        raise ConfigurationError(
            f"mpirun runs at {address}, and rank 0 on another machine, so the ranks cannot find rank 0. Give its "
            "address: mpirun -x MASTER_ADDR=ADDRESS …"
        )
    return address


def _address_in(uri: str) -> str | None:
    """Return the first address of Open MPI's "2228224.0;tcp://10.0.0.1,10.0.1.1:44049;…"."""
    found = re.search(r";tcp4?://([^,:;]+)", uri)
    return found.group(1) if found else None


def _with_address(world: World | None, env: Mapping[str, str]) -> World | None:
    """Return the world of a scheduler with the address that variables give, if they do."""
    named = {name: value for name, value in _master(env).items() if value is not None}
    return None if world is None else World(**{**vars(world), **named})


def _master(env: Mapping[str, str]) -> dict[str, Any]:
    port = env.get("MASTER_PORT")
    return {
        "master_addr": env.get("MASTER_ADDR"),
        "master_port": None if port is None else whole_number("MASTER_PORT", port),
    }


def _shown(env: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)


def _checked(world: World) -> World:
    if not 0 <= world.rank < world.size:
        raise ConfigurationError(f"Rank {world.rank} does not fit a world of {world.size} ({world.launcher}).")
    return world
