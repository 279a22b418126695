"""A real SLURM of two nodes on this machine, for tests: munged, slurmctld and two slurmd on free ports."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.launched import ROOT
from trainer_lib.processes.ports import free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_PATIENCE = 400  # seconds

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={first}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=500
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=500
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=60 PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n1,n2 MaxTime=60 PriorityTier=10
"""


class SlurmCluster:
    """The commands of a running SLURM."""

    def __init__(self, configuration: Path) -> None:
        self.variables = {**os.environ, "SLURM_CONF": str(configuration), "PYTHONPATH": str(ROOT)}

    def run(self, *command: str, timeout: float = _PATIENCE, **variables: str) -> str:
        """Run a command, and return its output and errors."""
        done = subprocess.run(
            command,
            env={**self.variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """Return what SLURM says about a job, such as its `JobState` or `Restarts`."""
        fields = self.run("scontrol", "show", "job", job).split()
        return next(field.partition("=")[2] for field in fields if field.startswith(f"{name}="))

    def wait_for(self, job: str, name: str, *values: str) -> str:
        """Wait until a field of a job has one of some values, and return it."""
        self.wait_until(lambda: self.field(job, name) in values, f"{name} of job {job} is one of {values}")
        return self.field(job, name)

    def start_requeued(self, job: str) -> None:
        """Start a job as soon as it is requeued, after which SLURM waits for two minutes."""
        self.wait_for(job, "Restarts", "1")

        def is_started() -> bool:
            if self.field(job, "JobState") in ("RUNNING", "COMPLETED", "FAILED"):
                return True
            if datetime.fromisoformat(self.field(job, "EligibleTime")) > datetime.now() + timedelta(seconds=10):
                # Not at once: a job that starts in the second in which it was revoked is refused by its node.
                command = ["scontrol", "update", f"JobId={job}", "StartTime=now+2"]
                # Ignored while the processes of the first attempt end.
                subprocess.run(command, env=self.variables, capture_output=True, check=False)
            return False

        self.wait_until(is_started, f"job {job} has started again")

    def wait_until(self, is_true: Callable[[], bool], what: str) -> None:
        """Wait until something is true, or fail."""
        ends = time.monotonic() + _PATIENCE
        while not is_true():
            assert time.monotonic() < ends, f"Not after {_PATIENCE} s: {what}. {self.run('squeue')}"
            time.sleep(0.1)


def reason_without_slurm() -> str | None:
    """Return why no SLURM can be started here; `None` if it can."""
    missing = [program for program in _PROGRAMS if _path(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm)"
    return None if os.geteuid() == 0 else "slurmd needs root"


@contextmanager
def running_slurm() -> Generator[SlurmCluster]:
    """Start a SLURM for the length of a `with` block."""
    with TemporaryDirectory(prefix="slurm_") as text, ExitStack() as daemons:
        folder = Path(text)
        folder.chmod(0o755)
        controller, first, second = free_port(), free_port(), free_port()
        configuration = folder / "slurm.conf"
        configuration.write_text(
            _CONFIGURATION.format(
                host=socket.gethostname(), folder=folder, controller=controller, first=first, second=second
            )
        )
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        cluster = SlurmCluster(configuration)
        start = [("munged", "--force", "--foreground", f"--socket={folder}/munge", *files), ("slurmctld", "-D")]
        for command in [*start, ("slurmd", "-D", "-N", "n1"), ("slurmd", "-D", "-N", "n2")]:
            daemons.enter_context(_daemon(command, cluster.variables))
        _wait_for_nodes(cluster)
        yield cluster
        cluster.run("scancel", "--user=root")
        cluster.wait_until(lambda: not cluster.run("squeue", "--noheader").strip(), "all jobs have ended")


@contextmanager
def _daemon(command: Sequence[str], variables: dict[str, str]) -> Generator[None]:
    program = _path(command[0])
    assert program is not None
    process = subprocess.Popen(
        [program, *command[1:]], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_nodes(cluster: SlurmCluster) -> None:
    ends = time.monotonic() + _PATIENCE
    states = ""
    while states.split() != ["idle", "idle"]:
        assert time.monotonic() < ends, f"the nodes of SLURM are not ready: {states}"
        time.sleep(0.1)
        asked = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "low", "-o", "%t"],
            env=cluster.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        states = asked.stdout


def _path(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
