"""The command `trainer-lib launch`: start a script on processes that form a world."""

import argparse
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_lib.commands.launch.launch_environment import script_variables
from trainer_lib.commands.launch.launch_parser import launch_parser, parse
from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.public_names.missing_features import TPU_PODS, missing_function
from trainer_lib.launchers import launch_plan
from trainer_lib.launchers.launch_plan import LOCALHOST, Plan
from trainer_lib.launchers.machine_address import split_endpoint
from trainer_lib.launchers.settings.config_file import SageMakerConfig
from trainer_lib.launchers.settings.launch_options import SETTINGS
from trainer_lib.processes.exit_codes import reason_of

_DEFAULT_PORT = 29500
_DETECTED = "detected"


def run(arguments: Sequence[str]) -> int:
    """Start the script and return the exit code of the launch."""
    return _start(*parse(arguments))


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the launcher's options, of a script and of the script's arguments.

    Args:
        subparsers: What `add_subparsers` returned, to add the command `launch` to.
    """
    parser = launch_parser(subparsers)
    parser.add_argument("training_script", help="the script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Launch what a parser of `launch_command_parser` has parsed.

    Raises:
        SystemExit: If the launch fails, with its exit code.
    """
    code = _start(args, [args.training_script, *args.training_script_args])
    if code:
        raise SystemExit(code)


def main() -> None:
    """Launch what the command line of this program says.

    Raises:
        SystemExit: If the launch fails, with its exit code.
    """
    launch_command(launch_command_parser().parse_args())


def _start(options: argparse.Namespace, command: Sequence[str]) -> int:
    values = LaunchValues(options)
    if values.sagemaker is not None and not values["print_config"]:
        from trainer_lib.commands.sagemaker.start import launch_on_sagemaker

        return launch_on_sagemaker(values, command)
    program = [] if values["print_config"] else _program(values, command)
    _translate_names_of_torchrun(values)
    if values["use_deepspeed"]:
        from trainer_lib.commands.launch.host_launch import start_on_hosts, use_hostfile

        hosts = use_hostfile(values)
        if hosts is not None and not values["print_config"]:
            return start_on_hosts(values, hosts, command)
    variables = script_variables(values)
    with environment.patch_environment(**variables):
        variables |= _visible_devices(values)
        with environment.patch_environment(**variables):
            plan, accelerators = _plan(values)
            _check_arrangement(values, plan)
            variables |= _gpu_variables(values, plan, accelerators)
    variables |= {
        "TRAINER_LIB_WORLD_SIZE": str(plan.world_size),
        "OMP_NUM_THREADS": _threads(values, plan.num_processes),
    }
    if values["mpirun_hostfile"] and not values["print_config"]:
        return _start_by_mpi(values, plan, command, variables)
    if values["print_config"] or values["dry_run"]:
        from trainer_lib.commands.launch.launch_report import describe_start, describe_values

        print(describe_values(values) if values["print_config"] else describe_start(values, command, plan, variables))
        return 0
    if values.file is not None and not values["quiet"]:
        print(f"trainer-lib launch: settings from {values.file}", file=sys.stderr, flush=True)
    with environment.patch_environment(**variables):
        return _watch(program, plan, values["quiet"])


def _start_by_mpi(values: LaunchValues, plan: Plan, script: Sequence[str], variables: Mapping[str, str]) -> int:
    from trainer_lib.commands.launch.mpirun import describe_mpirun, mpirun_command, run_mpirun

    command, variables = mpirun_command(values, plan, script, variables)
    if values["dry_run"]:
        print(describe_mpirun(command, variables))
        return 0
    with environment.patch_environment(**variables):
        return run_mpirun(command, plan.shutdown_timeout)


def _watch(program: Sequence[str], plan: Plan, quiet: bool) -> int:
    from trainer_lib.launchers.process_failures import ProcessFailedError, signal_name

    try:
        if plan.is_local and plan.tee == "0":
            from trainer_lib.launchers.local.local_processes import run_local

            run_local(program, plan)
        else:
            from trainer_lib.launchers.elastic import run_elastic

            if isinstance(sys.stdout, io.TextIOWrapper):  # into a pipe, lines of `tee` would wait for the next 8 KB
                sys.stdout.reconfigure(line_buffering=True)
            run_elastic(program[0], program[1:], plan)
    except ProcessFailedError as error:
        if not quiet:
            _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as error:
        code = int(error.code or 0)
    else:
        return 0
    _say(f"Ended by {reason_of(code) or signal_name(code - 128)}, and all processes with it.")
    return code


def _program(values: LaunchValues, command: Sequence[str]) -> list[str]:
    if not command:
        raise ConfigurationError("No script was given. Name it after the options: trainer-lib launch [options] SCRIPT.")
    script = command[0]
    if values["no_python"]:
        program = shutil.which(script)
        if program is None:
            raise ConfigurationError(f"There is no program {script!r} that can be run.")
        return [program, *command[1:]]
    if not values["module"] and not Path(script).is_file():
        what = "is a folder" if Path(script).is_dir() else f"is not there (in {Path.cwd()})"
        raise ConfigurationError(f"The script {script!r} {what}. Name a file, or a module after -m.")
    worker = Path(launch_plan.__file__).with_name("bootstrap.py")
    return [sys.executable, str(worker), str(os.getpid()), *(["-m"] if values["module"] else []), *command]


def _translate_names_of_torchrun(values: LaunchValues) -> None:
    """Set what `--nproc_per_node` and `--rdzv_endpoint` say under this launcher's names."""
    here, endpoint = values["nproc_per_node"], values["rdzv_endpoint"]
    if here == "cpu":
        values.set("cpu", True, "--nproc_per_node")
        here = os.cpu_count()
    if here is not None:
        number = here * values["num_machines"] if isinstance(here, int) else None
        values.set("num_processes", number, "--nproc_per_node")
    if endpoint is not None:
        host, port = split_endpoint(endpoint)
        values.set("main_process_ip", host, "--rdzv_endpoint")
        if port:
            check = SETTINGS["main_process_port"].kind.check
            values.set("main_process_port", check("The port of --rdzv_endpoint", port), "--rdzv_endpoint")


def _visible_devices(values: LaunchValues) -> dict[str, str]:
    from trainer_lib.launchers.device_count import visible_devices

    source = values.source("gpu_ids")
    is_of_file = source != "--gpu_ids"
    if values["gpu_ids"] == "all" or (is_of_file and environment.cpu_requested()):
        return {}
    return visible_devices(values["gpu_ids"], f"{source}: `gpu_ids`" if is_of_file else source)


def _gpu_variables(values: LaunchValues, plan: Plan, accelerators: int) -> dict[str, str]:
    if not accelerators:
        return {}
    from trainer_lib.launchers.gpu_selection import free_gpus, peer_settings

    chosen = free_gpus(plan.num_processes, accelerators) if values["gpu_ids"] == "all" else {}
    variables = chosen | peer_settings(plan.num_processes, accelerators)
    if variables and not values["quiet"]:
        reason = "the GPUs with the most free memory" if chosen else "these GPUs cannot copy to each other directly"
        settings = " ".join(f"{name}={value}" for name, value in variables.items())
        print(f"trainer-lib launch: {settings} ({reason})", file=sys.stderr, flush=True)
    return variables


def _plan(values: LaunchValues) -> tuple[Plan, int]:
    """Return the plan, and the accelerators of this machine."""
    from trainer_lib.launchers.device_count import check_enough, count_accelerators

    accelerators = count_accelerators()
    if values["multi_gpu"] and accelerators < 2:
        asks = "--multi_gpu" if values.source("multi_gpu") == "--multi_gpu" else f"{values.file}"
        raise ConfigurationError(
            f"{asks} needs two accelerators or more, and there {'is 1' if accelerators == 1 else 'are none'} "
            "to train on here. Leave it out, or give --cpu for processes on the CPU."
        )
    if values["tpu"]:
        _check_tpu(values)
    num_processes = _processes_here(values, accelerators)
    check_enough(num_processes, accelerators)
    alone = values["num_machines"] == 1
    if not alone and values["main_process_ip"] is None and not values["mpirun_hostfile"]:
        raise ConfigurationError(
            f"--num_machines {values['num_machines']} needs --main_process_ip, machine 0's address."
        )
    if values["main_process_port"] is None:
        values.set("main_process_port", 0 if alone else _DEFAULT_PORT, "any that is free" if alone else "default")
    plan = Plan(
        num_processes=num_processes,
        main_process_ip=values["main_process_ip"] or LOCALHOST,
        rdzv_conf=_rendezvous_options(values["rdzv_conf"]),
        verbose=values["debug"],
        announce=_say_nothing if values["quiet"] else _say,
        **{name: values[name] for name in _OF_THE_PLAN},
    )
    return plan, accelerators


def _check_tpu(values: LaunchValues) -> None:
    """Raise if processes could not use TPUs, or nobody says how many chips there are."""
    from trainer_lib.foundation import xla
    from trainer_lib.foundation.errors import MissingPackageError

    if values["cpu"]:
        raise ConfigurationError(
            f"tpu ({values.source('tpu')}) and cpu ({values.source('cpu')}) contradict each other. Leave out one of "
            "them."
        )
    if values["num_processes"] is None:
        raise ConfigurationError(
            "--tpu needs --num_processes, the number of chips: counting them would take them from the processes."
        )
    try:
        xla.load()
    except MissingPackageError as error:
        raise ConfigurationError(str(error)) from error


_OF_THE_PLAN = (
    "num_machines", "machine_rank", "main_process_port", "rdzv_backend", "rdzv_id", "max_restarts", "monitor_interval",
    "shutdown_timeout", "log_dir", "tee", "role",
)  # fmt: skip


def _check_arrangement(values: LaunchValues, plan: Plan) -> None:
    """Raise for options of FSDP or DeepSpeed, and sizes of replication and sharding, that no process could use."""
    if values["use_fsdp"]:
        from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin

        FullyShardedDataParallelPlugin()
    if values["use_deepspeed"]:
        from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin

        DeepSpeedPlugin()
    if values["use_parallelism_config"]:
        from trainer_lib.parallelism_config import ParallelismConfig

        ParallelismConfig().check_world(plan.world_size)


def _processes_here(values: LaunchValues, accelerators: int) -> int:
    machines = values["num_machines"]
    if values["num_processes"] is None:
        values.set("num_processes", max(1, accelerators) * machines, _DETECTED)
    here, rest = divmod(values["num_processes"], machines)
    if rest or not here:
        raise ConfigurationError(
            f"--num_processes counts the processes of all machines, and {values['num_processes']} does not divide "
            f"evenly by {machines} machines. Use a multiple of {machines}."
        )
    return here


def _rendezvous_options(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for key, equals, _ in pairs:
        if not key.strip() or not equals:
            raise ConfigurationError(f"--rdzv_conf must be like timeout=900,join_timeout=60, got {text!r}.")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _threads(values: LaunchValues, num_processes: int) -> str:
    """Return OMP_NUM_THREADS: the value asked for, else that of the environment, else a share of the cores."""
    share = max(1, len(os.sched_getaffinity(0)) // num_processes)
    return str(values["num_cpu_threads_per_process"] or environment.threads_requested() or share)


def _say(message: str) -> None:
    rule = "─" if str(getattr(sys.stderr, "encoding", "")).lower().startswith("utf") else "-"
    try:
        print(f"{rule * 80}\ntrainer-lib launch: {message}", file=sys.stderr, flush=True)
    except OSError:  # the terminal or the pipe is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _say_nothing(message: str) -> None:
    del message


# One launcher for all kinds of worlds, under Accelerate's names.
simple_launcher: Callable[[argparse.Namespace], None] = launch_command
multi_gpu_launcher: Callable[[argparse.Namespace], None] = launch_command
deepspeed_launcher: Callable[[argparse.Namespace], None] = launch_command
tpu_launcher: Callable[[argparse.Namespace], None] = launch_command


def sagemaker_launcher(sagemaker_config: SageMakerConfig, args: argparse.Namespace) -> None:
    """Launch a script on SageMaker.

    Args:
        sagemaker_config: The configuration.
        args: What a parser of `launch_command_parser` has parsed.

    Raises:
        SystemExit: If the launch fails, with its exit code.
    """
    from trainer_lib.commands.sagemaker.start import launch_on_sagemaker

    values = LaunchValues(args, sagemaker_config.to_dict())
    code = launch_on_sagemaker(values, [args.training_script, *args.training_script_args])
    if code:
        raise SystemExit(code)


tpu_pod_launcher: Callable[..., Any] = missing_function("tpu_pod_launcher", TPU_PODS)
