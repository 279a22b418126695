"""The options of a launch: number of processes, rendezvous, monitoring and output."""

from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.options.base import check_count, check_positive

LOCALHOST = "127.0.0.1"
_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_MOST_PROCESSES = 1024  # more are a slip, such as the number of a port, and fill the memory before any of them runs


def _ignore(message: str) -> None:
    del message


@frozen_dataclass(kw_only=True)
class Plan:
    """How processes are started and monitored.

    Args:
        num_processes: How many processes on this machine.
        num_machines: How many machines, each with its own launcher and the same number of processes.
        machine_rank: The number of this machine, from 0.
        main_process_ip: The address of the first machine.
        main_process_port: A port of it; on a single machine, 0 for a free one.
        rdzv_backend: The rendezvous backend: static, or another one of torch.
        rdzv_endpoint: The address of the rendezvous; by default the address and port above.
        rdzv_conf: Options of the backend.
        rdzv_id: The name of the rendezvous, the same on all machines.
        max_restarts: How often to start all processes again after one has failed.
        monitor_interval: Seconds between two checks for dead processes.
        shutdown_timeout: Seconds that processes get to save and end after a signal.
        log_dir: The folder for the output files of `tee`.
        tee: What is also written to files: 1 output, 2 errors, 3 both; or for some processes, `0:3,1:2`.
        role: The name of the processes in the lines that `tee` prints.
        log_line_prefix_template: The prefix of such a line.
        start_method: How the processes of a function are started: fork or spawn.
        verbose: Whether torch's messages are shown.
        announce: Called with a message at each restart.
    """

    num_processes: int
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str = LOCALHOST
    main_process_port: int = 0
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_conf: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rdzv_id: str = "none"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    shutdown_timeout: float = 30.0
    log_dir: str | None = None
    tee: str = "0"
    role: str = "default"
    log_line_prefix_template: str | None = None
    start_method: str = "fork"
    verbose: bool = False
    announce: Callable[[str], None] = _ignore

    def __post_init__(self) -> None:
        """Check the values."""
        check_count("num_processes", self.num_processes)
        if self.num_processes > _MOST_PROCESSES:
            raise ConfigurationError(
                f"num_processes must be at most {_MOST_PROCESSES} on a machine (got {self.num_processes}). Each needs "
                "a device, or a core, and some 300 MB of memory of its own."
            )
        check_count("num_machines", self.num_machines)
        check_count("machine_rank", self.machine_rank, at_least=0)
        check_count("max_restarts", self.max_restarts, at_least=0)
        check_positive("monitor_interval", self.monitor_interval)
        check_positive("shutdown_timeout", self.shutdown_timeout)
        if self.machine_rank >= self.num_machines:
            raise ConfigurationError(
                f"machine_rank must be less than num_machines={self.num_machines} (got {self.machine_rank})."
            )
        if not 0 <= self.main_process_port < 65536:
            raise ConfigurationError(f"main_process_port must be from 0 to 65535 (got {self.main_process_port}).")
        if self.log_dir is not None and Path(self.log_dir).is_file():
            raise ConfigurationError(f"log_dir must be a folder, and {self.log_dir} is a file.")
        if "/" in self.rdzv_id:
            raise ConfigurationError(f"rdzv_id must be a name without '/', as folders get it (got {self.rdzv_id!r}).")
        if self.rdzv_backend not in _BACKENDS:
            raise ConfigurationError(unknown("rdzv_backend", self.rdzv_backend, _BACKENDS))

    @property
    def world_size(self) -> int:
        """The processes on all machines."""
        return self.num_processes * self.num_machines

    @property
    def is_local(self) -> bool:
        """Whether the rendezvous needs only this machine."""
        return self.num_machines == 1 and self.rdzv_backend == "static" and not self.rdzv_endpoint

    @property
    def endpoint(self) -> str:
        """The address of the rendezvous."""
        return self.rdzv_endpoint or f"{self.main_process_ip}:{self.main_process_port}"
