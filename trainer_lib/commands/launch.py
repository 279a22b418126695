"""The command `trainer-lib launch`: start a script on processes that form a world."""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_lib.commands.launch_options import launch_parser, parse
from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.missing_features import DEEPSPEED, SAGEMAKER, TPU, missing_function
from trainer_lib.launchers.launch_plan import LOCALHOST, Plan
from trainer_lib.options.accelerate_constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from trainer_lib.options.accelerate_constants import DYNAMO_BACKENDS as DYNAMO_BACKENDS
from trainer_lib.options.accelerate_constants import TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.precision_options import check_precision
from trainer_lib.processes.exit_codes import reason_of

_DEFAULT_PORT = 29500


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
    variables = _variables(options)
    program = _program(options, command)
    with environment.patch_environment(**variables):
        plan = _plan(options)
        threads = options.num_cpu_threads_per_process or environment.threads_requested() or _share(plan.num_processes)
        with environment.patch_environment(trainer_lib_world_size=plan.world_size, omp_num_threads=threads):
            return _watch(program, plan, options.quiet)


def _watch(program: Sequence[str], plan: Plan, quiet: bool) -> int:
    from trainer_lib.launchers.elastic import run_elastic
    from trainer_lib.launchers.process_failures import ProcessFailedError, signal_name

    try:
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


def _variables(options: argparse.Namespace) -> dict[str, str | int]:
    """Return the environment variables of the processes, besides rank and world size."""
    from trainer_lib.launchers.device_count import visible_devices

    asked: dict[str, str | int | None] = {
        "accelerate_use_cpu": 1 if options.cpu else None,
        "accelerate_mixed_precision": options.mixed_precision and check_precision(options.mixed_precision),
        "accelerate_gradient_accumulation_steps": options.gradient_accumulation_steps,
        "accelerate_debug_mode": 1 if options.debug else None,
        **_compilation(options),
        **({} if options.gpu_ids == "all" else visible_devices(options.gpu_ids)),
    }
    return {name: value for name, value in asked.items() if value is not None}


def _compilation(options: argparse.Namespace) -> dict[str, str | int | None]:
    asked: dict[str, str | int | None] = {
        "backend": options.dynamo_backend,
        "mode": options.dynamo_mode,
        "use_fullgraph": 1 if options.dynamo_use_fullgraph else None,
        "use_dynamic": 1 if options.dynamo_use_dynamic else None,
        "use_regional_compilation": 1 if options.dynamo_use_regional_compilation else None,
    }
    # Checked here, so that the error appears once. Without a backend, the script sets one.
    TorchDynamoPlugin(options.dynamo_backend or "inductor", options.dynamo_mode).check_backend()
    return {f"accelerate_dynamo_{name}": value for name, value in asked.items()}


def _program(options: argparse.Namespace, command: Sequence[str]) -> list[str]:
    if not command:
        raise ConfigurationError("No script was given. Name it after the options: trainer-lib launch [options] SCRIPT.")
    if options.no_python and options.module:
        raise ConfigurationError("--no_python and --module contradict each other. Leave out one of them.")
    script = command[0]
    if options.no_python:
        program = shutil.which(script)
        if program is None:
            raise ConfigurationError(f"There is no program {script!r} that can be run.")
        return [program, *command[1:]]
    if not options.module and not Path(script).is_file():
        what = "is a folder" if Path(script).is_dir() else f"is not there (in {Path.cwd()})"
        raise ConfigurationError(f"The script {script!r} {what}. Name a file, or a module after -m.")
    worker = Path(__file__).parent.parent / "launchers" / "bootstrap.py"
    return [sys.executable, str(worker), str(os.getpid()), *(["-m"] if options.module else []), *command]


def _plan(options: argparse.Namespace) -> Plan:
    from trainer_lib.launchers.device_count import check_enough, count_accelerators

    accelerators = count_accelerators()
    if options.multi_gpu and accelerators < 2:
        raise ConfigurationError(
            f"--multi_gpu needs two accelerators or more, and there {'is 1' if accelerators == 1 else 'are none'} "
            "to train on here. Leave it out."
        )
    num_processes = _processes_here(options, accelerators)
    check_enough(num_processes, accelerators)
    alone = options.num_machines == 1
    if not alone and options.main_process_ip is None:
        raise ConfigurationError(f"--num_machines {options.num_machines} needs --main_process_ip, machine 0's address.")
    port = options.main_process_port
    return Plan(
        num_processes=num_processes,
        num_machines=options.num_machines,
        machine_rank=options.machine_rank,
        main_process_ip=options.main_process_ip or LOCALHOST,
        main_process_port=(0 if alone else _DEFAULT_PORT) if port is None else port,
        rdzv_backend=options.rdzv_backend,
        rdzv_conf=_rendezvous_options(options.rdzv_conf),
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        shutdown_timeout=options.shutdown_timeout,
        log_dir=options.log_dir,
        tee=options.tee,
        role=options.role,
        verbose=options.debug,
        announce=_say_nothing if options.quiet else _say,
    )


def _processes_here(options: argparse.Namespace, accelerators: int) -> int:
    if options.num_processes is None:
        return max(1, accelerators)
    here, rest = divmod(options.num_processes, options.num_machines)
    if rest or not here:
        raise ConfigurationError(
            f"--num_processes counts the processes of all machines, and {options.num_processes} does not divide evenly "
            f"by {options.num_machines} machines. Use a multiple of {options.num_machines}."
        )
    return here


def _rendezvous_options(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for key, equals, _ in pairs:
        if not key.strip() or not equals:
            raise ConfigurationError(f"--rdzv_conf must be like timeout=900,join_timeout=60, got {text!r}.")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _share(num_processes: int) -> int:
    """Return how many cores of this machine each process gets."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def _say(message: str) -> None:
    print(f"{'─' * 80}\ntrainer-lib launch: {message}", file=sys.stderr, flush=True)


def _say_nothing(message: str) -> None:
    del message


# One launcher for all kinds of worlds, under Accelerate's names.
simple_launcher = multi_gpu_launcher = launch_command
deepspeed_launcher = missing_function("deepspeed_launcher", DEEPSPEED)
sagemaker_launcher = missing_function("sagemaker_launcher", SAGEMAKER)
tpu_launcher = missing_function("tpu_launcher", TPU)
tpu_pod_launcher = missing_function("tpu_pod_launcher", TPU)
