"""Ranks that a scheduler starts find rank, world size, local rank and each other, without a launcher."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.launched import ROOT
from tests.schedulers.slurm_cluster import SlurmCluster
from tests.worlds import run_world
from trainer_lib import ConfigurationError
from trainer_lib.foundation.environment import clear_environment, patch_environment
from trainer_lib.foundation.launcher_variables import read_world, refuse_contradictions
from trainer_lib.process_group import rank_on_machine
from trainer_lib.processes.ports import free_port
from trainer_lib.state import PartialState

SCRIPT = """
import sys
from pathlib import Path

import torch
from trainer_lib import PartialState

state = PartialState(cpu=True)
total = int(state.group.all_reduce(torch.tensor([state.process_index + 1])))
ranks = f"rank {state.process_index} of {state.num_processes}, local {state.local_process_index}"
Path(sys.argv[1], f"rank{state.process_index}").write_text(f"{ranks}, {state.launcher}, sum {total}")
"""

SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "gpu07",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "{rank}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{rank}", "MPI_LOCALNRANKS": "2"}
BY_HAND = {"RANK": "{rank}", "WORLD_SIZE": "2"}


def of_rank(rank: int, variables: Mapping[str, str]) -> dict[str, str]:
    return {name: text.format(rank=rank) for name, text in variables.items()}


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        (SLURM, "srun"),
        (OPEN_MPI, "mpirun"),
        (MPICH, "mpirun"),
        ({**SLURM, **MPICH}, "srun"),
        ({**SLURM, "WORLD_SIZE": "2"}, "srun"),
        (BY_HAND, "torchrun"),
    ],
    ids=["srun", "Open MPI", "MPICH", "srun --mpi=pmi2", "srun with WORLD_SIZE", "RANK and WORLD_SIZE"],
)
def test_ranks_form_a_world(variables: dict[str, str], launcher: str) -> None:
    def body(variables: dict[str, str]) -> list[Any]:
        rank = int(os.environ["RANK"])
        with clear_environment(), patch_environment(**of_rank(rank, variables)):
            state = PartialState(cpu=True)
        total = int(state.group.all_reduce(torch.tensor([rank + 1])))
        return [state.process_index, state.num_processes, state.local_process_index, state.launcher, total]

    results = run_world(body, [{**variables, "MASTER_PORT": str(free_port())}])
    assert results == [[rank, 2, rank, launcher, 3] for rank in range(2)]


def test_ranks_of_one_machine_need_no_name_server_and_no_port() -> None:
    world = read_world(of_rank(0, SLURM))
    assert world is not None
    assert (world.master_addr, world.master_port) == ("127.0.0.1", 15042)
    second_step = read_world(of_rank(0, {**SLURM, "SLURM_STEP_ID": "1"}))
    assert second_step is not None
    assert second_step.master_port != world.master_port


def test_an_mpi_job_derives_its_port() -> None:
    worlds = [read_world({**of_rank(rank, OPEN_MPI), "PMIX_NAMESPACE": job}) for job in "ab" for rank in range(2)]
    ports = [world.master_port for world in worlds if world is not None]
    assert (ports[0], ports[2]) == (ports[1], ports[3])
    assert ports[0] != ports[2]


SEVERAL_MACHINES = {
    **OPEN_MPI,
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "22.0;tcp://10.0.0.7,10.1.0.7:5804;tcp6://[fd00::2]:39939",
}


def test_ranks_of_several_machines_find_each_other_at_mpiruns_machine() -> None:
    world = read_world(of_rank(1, SEVERAL_MACHINES))
    assert world is not None
    assert world.master_addr == "10.0.0.7"
    rank_zero = {**of_rank(0, SEVERAL_MACHINES), "OMPI_MCA_orte_local_daemon_uri": "22.1;tcp://10.0.0.8:44"}
    with pytest.raises(ConfigurationError, match=r"mpirun runs at 10\.0\.0\.7, and rank 0 on another machine"):
        read_world(rank_zero)
    named = read_world({**rank_zero, "MASTER_ADDR": "10.0.0.8"})
    assert named is not None
    assert named.master_addr == "10.0.0.8"


def test_mpirun_inside_a_slurm_job_counts_and_its_daemons_do_not() -> None:
    daemons = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "0"}
    ranks = {**SLURM, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}
    world = read_world(of_rank(1, {**ranks, **daemons}))
    assert world is not None
    assert (world.rank, world.size, world.launcher) == (2, 3, "mpirun")
    refuse_contradictions(of_rank(1, {**ranks, **daemons}))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {**SLURM, "RANK": "0", "WORLD_SIZE": "1"},
            "Two launchers contradict each other: rank 0 of 1 in RANK=0, WORLD_SIZE=1, and rank 1 of 2 in "
            "SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2. Unset the variables of the launcher that did not start",
        ),
        (
            {**SLURM, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"},
            "Two launchers contradict each other: rank 1 of 2 in SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2, and rank 1 of "
            "4 in OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4.",
        ),
        (
            {**SLURM, "WORLD_SIZE": "8"},
            "Two launchers contradict each other: WORLD_SIZE=8, and rank 1 of 2 in SLURM_PROCID=1, "
            "SLURM_STEP_NUM_TASKS=2. Unset WORLD_SIZE: srun gives each process its rank and world size.",
        ),
    ],
    ids=["set by hand", "SLURM and MPI", "half of a world"],
)
def test_launchers_that_contradict_each_other(variables: dict[str, str], message: str) -> None:
    with (
        clear_environment(),
        patch_environment(**of_rank(1, variables)),
        pytest.raises(ConfigurationError) as caught,
    ):
        PartialState(cpu=True, timeout=timedelta(seconds=2))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "inner",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"},
        {"RANK": "5", "WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"},
    ],
    ids=["torchrun", "spawned by one task a node"],
)
def test_a_launcher_that_srun_starts_is_no_contradiction(inner: dict[str, str]) -> None:
    refuse_contradictions(of_rank(1, {**SLURM, **inner}))


def test_a_group_of_the_script_counts_more_than_the_schedulers_variables() -> None:
    def body(folder: str) -> list[Any]:
        rank = int(os.environ["RANK"])
        daemon = of_rank(7, {**SLURM, "SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "9"})
        with clear_environment(), patch_environment(**daemon):
            dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
            state = PartialState(cpu=True)
        return [state.process_index, state.num_processes, state.local_process_index, state.launcher]

    with tempfile.TemporaryDirectory() as folder:
        results = run_world(body, [folder])
    assert results == [[rank, 2, rank, "a process group of the script"] for rank in range(2)]


def test_local_ranks_are_counted_by_machine() -> None:
    def body() -> int:
        group = PartialState().group
        with patch.object(socket, "gethostname", lambda: f"machine{group.rank % 2}"):
            return rank_on_machine(group)

    assert run_world(body, num_processes=4) == [0, 0, 1, 1]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "where.py"
    file.write_text(SCRIPT)
    return file


def report(size: int, launcher: str, local_ranks: list[int]) -> list[str]:
    total = size * (size + 1) // 2
    return [f"rank {rank} of {size}, local {local}, {launcher}, sum {total}" for rank, local in enumerate(local_ranks)]


def reports_in(folder: Path) -> list[str]:
    """What each rank wrote. In what they print, a launcher may put two ranks on a line."""
    return [file.read_text() for file in sorted(folder.glob("rank*"))]


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    "command",
    [
        ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"],
        ["mpiexec.hydra", "-n", "2"],
    ],
    ids=["Open MPI", "MPICH"],
)
def test_real_mpirun(command: list[str], script: Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: openmpi-bin, mpich)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    python = [sys.executable, str(script), str(script.parent)]
    subprocess.run([*command, *python], env=environment, check=True, timeout=400)
    assert reports_in(script.parent) == report(2, "mpirun", [0, 1])


@pytest.mark.slow
@pytest.mark.launch
def test_real_srun(slurm: SlurmCluster, script: Path) -> None:
    def python(folder: str) -> list[str]:
        script.with_name(folder).mkdir()
        return [sys.executable, str(script), str(script.with_name(folder))]

    slurm.run("srun", "-N1", "-n2", *python("one node"))
    assert reports_in(script.with_name("one node")) == report(2, "srun", [0, 1])
    slurm.run("srun", "-N2", "-n3", *python("two nodes"), MASTER_ADDR="127.0.0.1")  # n1 is in no name server
    assert reports_in(script.with_name("two nodes")) == report(3, "srun", [0, 1, 0])
    if shutil.which("mpirun.openmpi") is not None:
        job = script.with_name("job.sh")
        command = shlex.join(["mpirun.openmpi", "--allow-run-as-root", "-np", "3", *python("mpirun")])
        job.write_text(f"#!/bin/bash\n{command}\n")
        slurm.run("sbatch", "--wait", "-N2", "-n3", "-o", str(script.with_name("log")), str(job))
        assert reports_in(script.with_name("mpirun")) == report(3, "mpirun", [0, 1, 0])


@pytest.mark.slow
@pytest.mark.launch
def test_a_script_in_the_shell_of_srun_trains_alone(slurm: SlurmCluster, script: Path) -> None:
    terminal, shell = os.openpty()
    with subprocess.Popen(
        ["srun", "-n2", "--pty", "bash", "--norc"], env=slurm.variables, stdin=shell, stdout=shell, stderr=shell
    ) as process:
        os.close(shell)
        typed = f"{sys.executable} {script} {script.parent}\nexit\n"
        os.write(terminal, typed.encode())
        shown = b""
        with suppress(OSError):  # the end of a terminal
            while part := os.read(terminal, 4096):
                shown += part
        assert process.wait(timeout=60) == 0, shown
    os.close(terminal)
    assert reports_in(script.parent) == ["rank 0 of 1, local 0, None, sum 1"], shown
