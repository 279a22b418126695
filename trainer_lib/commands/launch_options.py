"""The options of `trainer-lib launch`, under Accelerate's names."""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, did_you_mean

_EPILOG = """\
examples:
  trainer-lib launch train.py --lr 1e-3                  on all accelerators, or one CPU process
  trainer-lib launch --cpu --num_processes 4 train.py    four CPU processes
  trainer-lib launch --num_processes 16 --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 train.py
                                                         on each of two machines, with its own rank

exit codes: 0 for success; 2 for a wrong option; 128 plus the signal's number if a signal ended it (143 for SIGTERM,
130 for Ctrl-C); 75 if a deadline did; otherwise that of the process that failed first.
Signals are forwarded, so that a Trainer saves; the launcher does not restart an interrupted run.
"""

# Accelerate's options for features that this version does not have; a name that ends in _ is a prefix.
_NOT_SUPPORTED = {
    "aws_": "SageMaker",
    "config_file": "a config file (give the options on the command line)",
    "deepspeed_": "DeepSpeed",
    "downcast_bf16": "TPUs",
    "enable_cpu_affinity": "binding processes to cores (use taskset or numactl)",
    "fp8_": "fp8",
    "fsdp_": "FSDP",
    "ipex": "IPEX",
    "main_training_function": "TPUs",
    "megatron_lm_": "Megatron-LM",
    "mpirun_": "MPI (processes start without it, on the CPU too)",
    "parallelism_config_": "a parallelism config",
    "same_network": "a choice of network (machines meet at --main_process_ip)",
    "tpu": "TPUs",
    "tpu_": "TPUs",
    "use_deepspeed": "DeepSpeed",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "Megatron-LM",
    "use_mps_device": "a switch for MPS (it is used where it is there)",
    "use_parallelism_config": "a parallelism config",
    "use_xpu": "a switch for XPUs (they are used where they are there)",
    "zero_stage": "DeepSpeed",
}

# Options of torchrun and of other launchers, and their equivalents.
_ELSEWHERE = {
    "nproc_per_node": "--num_processes N, which counts the processes of all machines",
    "nproc": "--num_processes N",
    "num_gpus": "--num_processes N",
    "devices": "--num_processes N",
    "nnodes": "--num_machines N",
    "num_nodes": "--num_machines N",
    "node_rank": "--machine_rank K",
    "master_addr": "--main_process_ip ADDRESS",
    "master_port": "--main_process_port PORT",
    "rdzv_endpoint": "--main_process_ip ADDRESS --main_process_port PORT",
    "standalone": "nothing: one machine is the default",
    "max_restart": "--max_restarts N",
    "include": "--gpu_ids 0,1",
}


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the launcher, and the script with its unchanged arguments.

    Raises:
        ConfigurationError: For an option that does not exist, lacks its value or has a wrong one.
        UnsupportedError: For an option of Accelerate's that this version does not have.
    """
    parser = launch_parser()
    launcher_arguments, command = _split(arguments, parser)
    return parser.parse_args(launcher_arguments), command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise an error of the library instead of ending the process."""
        raise ConfigurationError(f"{message}. `trainer-lib launch -h` lists the options.")


def launch_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the launcher's options; as the command `launch` of `subparsers`, if you give them."""
    make = functools.partial(_Parser, prog="trainer-lib launch") if subparsers is None else _as_command(subparsers)
    parser = make(
        usage="trainer-lib launch [options] SCRIPT [options of the script]",
        description="Start a script on one or several processes that form a world, on accelerators or the CPU.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36, width=110),
        allow_abbrev=False,
    )
    _add_processes(parser.add_argument_group("processes"))
    _add_training(parser.add_argument_group("training"))
    _add_compilation(parser.add_argument_group("torch.compile, if the script does not say it"))
    _add_machines(parser.add_argument_group("several machines"))
    _add_failures(parser.add_argument_group("failures and output"))
    _add_script(parser.add_argument_group("the script"))
    return parser


def _as_command(subparsers: Any) -> Callable[..., argparse.ArgumentParser]:
    return functools.partial(subparsers.add_parser, "launch")


def _add_processes(group: Any) -> None:
    group.add_argument(
        "--num_processes", type=_count, metavar="N", help="on all machines (default: one an accelerator, else 1)"
    )
    group.add_argument("--cpu", action="store_true", help="train on the CPU even if there are accelerators")
    group.add_argument("--multi_gpu", action="store_true", help="fail unless there are two accelerators or more")
    group.add_argument("--gpu_ids", default="all", metavar="IDS", help="which accelerators, as 0,1 (default: all)")
    group.add_argument(
        "--num_cpu_threads_per_process",
        type=_count,
        metavar="N",
        help="OMP_NUM_THREADS (default: what it is set to, else the cores shared out)",
    )


def _add_training(group: Any) -> None:
    group.add_argument(
        "--mixed_precision", metavar="NAME", help="no, fp16, bf16 or bf16-true, if the script does not say it"
    )
    group.add_argument("--gradient_accumulation_steps", type=_count, metavar="N", help="if the script does not say it")


def _add_compilation(group: Any) -> None:
    group.add_argument("--dynamo_backend", metavar="NAME", help="inductor, or eager and others to find faults")
    group.add_argument("--dynamo_mode", metavar="NAME", help="default, reduce-overhead, max-autotune, …")
    group.add_argument("--dynamo_use_fullgraph", action="store_true", help="fail where a model is not one graph")
    group.add_argument("--dynamo_use_dynamic", action="store_true", help="compile for inputs of any size")
    group.add_argument(
        "--dynamo_use_regional_compilation", action="store_true", help="compile the blocks that a model repeats"
    )


def _add_machines(group: Any) -> None:
    group.add_argument(
        "--num_machines", type=_count, default=1, metavar="N", help="run the launcher on each (default: 1)"
    )
    group.add_argument(
        "--machine_rank", type=_count_or_none, default=0, metavar="K", help="which of them this is, from 0"
    )
    group.add_argument("--main_process_ip", metavar="ADDRESS", help="the address of machine 0")
    group.add_argument(
        "--main_process_port",
        type=_count_or_none,
        metavar="PORT",
        help="a port of machine 0 (default: 29500; on one machine any that is free)",
    )
    group.add_argument("--rdzv_backend", default="static", metavar="NAME", help="static (default), c10d, etcd, etcd-v2")
    group.add_argument("--rdzv_conf", default="", metavar="K=V,…", help="options of the backend, such as timeout=900")


def _add_failures(group: Any) -> None:
    group.add_argument(
        "--max_restarts", type=_count_or_none, default=0, metavar="N", help="start all again, so often, after a failure"
    )
    group.add_argument(
        "--monitor_interval", type=float, default=0.1, metavar="SECONDS", help="between two looks (default: 0.1)"
    )
    group.add_argument(
        "--shutdown_timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for processes to save when a signal ends the launch (default: 30)",
    )
    group.add_argument("--log_dir", metavar="FOLDER", help="where --tee writes")
    group.add_argument(
        "--tee", default="0", metavar="WHAT", help="write to files too: 1 output, 2 errors, 3 both; or as in 0:3,1:2"
    )
    group.add_argument("--role", default="default", metavar="NAME", help="names the processes in lines of --tee")
    group.add_argument("--debug", action="store_true", help="check shapes in collectives, show torch's own messages")
    group.add_argument("--quiet", action="store_true", help="leave the report of a failure to the script")


def _add_script(group: Any) -> None:
    group.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    group.add_argument("--no_python", action="store_true", help="SCRIPT is a program to run without Python")


def _split(arguments: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Split before the script: everything after it belongs to the script."""
    options: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest.pop(0)
        if option == "--":
            break
        name, equals, value = option.partition("=")
        action = parser._option_string_actions.get(_underscored(name))
        if action is None:
            _refuse(name, parser)
        options.append(_underscored(name) + equals + value)
        if action.nargs != 0 and not equals:
            options += rest[:1]
            del rest[:1]
    return options, rest


def _refuse(name: str, parser: argparse.ArgumentParser) -> NoReturn:
    plain = _underscored(name).lstrip("-")
    for known, what in _NOT_SUPPORTED.items():
        if plain == known or (known.endswith("_") and plain.startswith(known)):
            raise UnsupportedError(f"{name} is not supported: this version does not have {what}. Leave it out.")
    if plain in _ELSEWHERE:
        raise ConfigurationError(f"Unknown option {name!r}. Give {_ELSEWHERE[plain]}.")
    near = did_you_mean(_underscored(name), parser._option_string_actions)
    raise ConfigurationError(f"Unknown option {name!r}.{near} `trainer-lib launch -h` lists the options.")


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name


def _count(text: str) -> int:
    return _whole(text, at_least=1)


def _count_or_none(text: str) -> int:
    return _whole(text, at_least=0)


def _whole(text: str, at_least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < at_least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {at_least}, got {text!r}")
    return int(text)
