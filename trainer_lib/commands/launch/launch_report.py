"""What `trainer-lib launch --print-config` and `--dry-run` print."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.launchers.launch_plan import Plan
from trainer_lib.launchers.settings.launch_options import GROUPS, SETTINGS

_OF_THE_COMMAND = "script"  # the group of options that are no settings of processes


def describe_values(values: LaunchValues) -> str:
    """Return a line for each setting, by group: its name, its value, and where it comes from."""
    groups = [
        [
            f"{title}:",
            *(_line(values, name) for name, setting in SETTINGS.items() if _is_shown(setting.group, group, name)),
        ]
        for group, title in GROUPS.items()
        if group != _OF_THE_COMMAND
    ]
    file = f"configuration file: {values.file or 'none'}"
    return "\n".join([file, *(line for lines in groups for line in lines)])


def describe_start(values: LaunchValues, command: Sequence[str], plan: Plan, variables: Mapping[str, str]) -> str:
    """Return the variables and the command of the processes, as one would type them."""
    first = plan.machine_rank * plan.num_processes
    ranks = ", ".join(str(first + local_rank) for local_rank in range(plan.num_processes))
    port = plan.main_process_port or "a free port"
    interpreter = [] if values["no_python"] else ["python", *(["-m"] if values["module"] else [])]
    world = {
        "RANK": ranks,
        "WORLD_SIZE": plan.world_size,
        "LOCAL_WORLD_SIZE": plan.num_processes,
        "MASTER_ADDR": plan.main_process_ip,
        "MASTER_PORT": port,
    }
    lines = [f"  {name}={value}" for name, value in sorted({**variables, **world}.items())]
    return "\n".join([
        f"Number of processes on machine {plan.machine_rank} of {plan.num_machines}: {plan.num_processes}",
        "Each has these variables:",
        *lines,
        "and this command:",
        f"  {shlex.join([*interpreter, *command])}",
        "Nothing was started.",
    ])  # fmt: skip


def _is_shown(group_of_setting: str, group: str, name: str) -> bool:
    return group_of_setting == group and SETTINGS[name].missing is None


def _line(values: LaunchValues, name: str) -> str:
    return f"  {name:40} {_shown(values[name]):24} {values.source(name)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in (None, "") else str(value)
