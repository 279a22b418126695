"""The rank of this process, its world and its device."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trainer_lib import process_group
from trainer_lib.foundation import environment, xla
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean, unknown
from trainer_lib.options.enums import DistributedType
from trainer_lib.options.parallel.ddp_options import InitProcessGroupKwargs
from trainer_lib.process_group import LoneProcess, ProcessGroup
from trainer_lib.state.devices import choose_device, use_device
from trainer_lib.state.rank_control import ProcessControl

_SCRIPT = "a process group of the script"


class PartialState(ProcessControl):
    """The rank of this process, its world and its device. All instances share one state.

    A launcher's variables always form a real process group, also on the CPU.

    Args:
        cpu: Use the CPU even if there is an accelerator.
        **kwargs: The fields of `InitProcessGroupKwargs`: `backend`, `init_method`, `timeout`.

    Attributes:
        launcher: The program that started this rank, such as "srun"; `None` without one.

    Example:
        >>> state = PartialState()
        >>> state.num_processes, state.is_main_process
        (1, True)
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    debug: bool
    fork_launched: bool
    group: ProcessGroup
    data_group: ProcessGroup
    first_readers: range
    _cpu: bool
    _parts: list[range]
    has_left: bool
    launcher: str | None

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self._start(cpu, _process_group_options(kwargs))
        elif cpu or kwargs:
            self._check_same(cpu, _process_group_options(kwargs))

    @property
    def initialized(self) -> bool:
        """Whether the world has formed."""
        return "group" in self._shared_state

    @property
    def default_device(self) -> torch.device:
        """The device that a single rank on this machine would use."""
        return choose_device(cpu=False, world=None)

    def set_device(self) -> None:
        """Make this rank's device the current device of its type."""
        use_device(self.device)

    def form_group(self) -> None:
        """Form a real process group of size 1, unless there is a group already."""
        if isinstance(self.group, LoneProcess):
            self.group = self.data_group = process_group.form_alone(self.device, self._options)
            self.backend = self.group.backend

    def share_batches(self, ranks: int, stages: int = 1) -> None:
        """Let this many ranks read the same batches, as parts of one replica of a model. All ranks call it.

        `data_group` is then the group of the ranks that read different batches and have the same place in a replica,
        and `first_readers` are the first ranks of the replicas.

        Args:
            ranks: The ranks of a replica. They are neighbors, except those of different stages.
            stages: How many of them hold different stages. All ranks of the first stage come before those of the next.
        """
        of_stage, neighbors = self.group.size // stages, ranks // stages
        parts = [
            range(first, stage + of_stage, neighbors)
            for stage in range(0, self.group.size, of_stage)
            for first in range(stage, stage + neighbors)
        ]
        self.first_readers = parts[0]
        if ranks == 1:
            self.data_group = self.group
        elif self._parts != parts:
            self.data_group = self.group.parts(parts)
        self._parts = parts

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the world (or only `group`)."""
        if group is not None:
            torch.distributed.destroy_process_group(group)
        elif self.initialized:
            self.group.destroy()
            self.group = self.data_group = LoneProcess()
            self.has_left = True

    def join_again(self, cpu: bool = False, **kwargs: Any) -> None:
        """Form the world again after leaving it; all its ranks have to.

        Args:
            cpu: Use the CPU even if there is an accelerator.
            **kwargs: The fields of `InitProcessGroupKwargs`.
        """
        self._start(cpu or self.device.type == "cpu", _process_group_options(kwargs))

    if not TYPE_CHECKING:  # type checkers would accept every misspelled name

        def __getattr__(self, name: str) -> Any:
            """Raise an error that says so where the state was reset."""
            if hasattr(type(self), name):  # a property that raised an AttributeError: that of what it lacks
                return object.__getattribute__(self, name)
            if self.initialized or name.startswith("__"):
                hint = did_you_mean(name, dir(self))
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{hint}")
            raise AttributeError(
                f"`PartialState` object has no attribute {name!r}. This happens if `PartialState._reset_state()` was "
                "called after the state was made. Call `PartialState()`, or make a new `Accelerator`."
            )

    def __repr__(self) -> str:
        """Return rank, world, backend and device."""
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @staticmethod
    def exists() -> bool:
        """Whether there is a `PartialState`, without making one."""
        return bool(PartialState._shared_state)

    @staticmethod
    def reset() -> None:
        """Forget everything, as if the process had just started; for tests and forked processes."""
        PartialState._shared_state.clear()

    _reset_state = reset  # its name in Accelerate

    def _start(self, cpu: bool, options: InitProcessGroupKwargs) -> None:
        world = process_group.requested_world()
        launcher = _SCRIPT if process_group.exists() else environment.launcher_name(world)
        on_xla = xla.is_requested(cpu)
        if on_xla:
            from trainer_lib.xla_process_group import form_on_xla

            group: ProcessGroup = form_on_xla(world, options)  # first: it says which device is this rank's
            device = xla.device()
            xla.seed(torch.initial_seed() % 2**32)  # torch's own seeds do not reach it
        else:
            device = choose_device(cpu, world)
            use_device(device)
            adopted = process_group.adopted() if world is None else None
            if adopted is not None:
                group = adopted
            else:
                group = LoneProcess() if world is None else process_group.form(world, device, options)
        self._cpu = cpu or environment.cpu_requested()  # the name that scripts read
        self.debug = environment.debug_mode()
        self.fork_launched = environment.launched_by_fork()
        self.launcher = launcher
        self.device = device
        self.has_left = False
        self.num_processes: int = group.size
        self.process_index: int = group.rank
        self.local_process_index: int = process_group.rank_on_machine(group) if world is None else world.local_rank
        self.backend = group.backend
        alone = isinstance(group, LoneProcess)
        if on_xla:
            self.distributed_type = DistributedType.XLA  # a single device needs its strategy too
        else:
            self.distributed_type = DistributedType.NO if alone else DistributedType.of_device(device.type)
        self._options = options
        self.group = self.data_group = group
        self._parts, self.first_readers = [], range(group.size)

    def _check_same(self, cpu: bool, options: InitProcessGroupKwargs) -> None:
        if cpu and self.device.type != "cpu":
            raise ConfigurationError(
                f"cpu=True came too late: this rank already uses {self.device}. "
                "Pass it to the first PartialState or Accelerator of the script."
            )
        changed = {key: value for key, value in options.to_kwargs().items() if getattr(self._options, key) != value}
        if changed and not isinstance(self.group, LoneProcess):
            raise ConfigurationError(
                f"{', '.join(f'{key}={value!r}' for key, value in changed.items())} came too late: the process group "
                "exists already. Pass it to the first PartialState or Accelerator of the script."
            )


def wait_for_everyone() -> None:
    """Wait until all ranks have called this."""
    PartialState().wait_for_everyone()


def is_initialized() -> bool:
    """Whether a `PartialState` exists, without making one."""
    return PartialState.exists()


def _process_group_options(kwargs: dict[str, Any]) -> InitProcessGroupKwargs:
    known = InitProcessGroupKwargs.__dataclass_fields__
    for name in kwargs:
        if name not in known:
            raise ConfigurationError(unknown("argument", name, known))
    return InitProcessGroupKwargs(**kwargs)
