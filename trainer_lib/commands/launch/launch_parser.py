"""The options of `trainer-lib launch`, under Accelerate's names and torchrun's: read, and explained by topic."""

import argparse
import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from trainer_lib.commands.help_lines import option_lines
from trainer_lib.commands.subcommands import Parser
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean, unknown
from trainer_lib.foundation.public_names.missing_features import refusal
from trainer_lib.launchers.settings.launch_options import GROUPS, MISSING_GROUPS, NOT_NEEDED, SETTINGS
from trainer_lib.launchers.settings.setting import Setting

_USAGE = "trainer-lib launch [options] SCRIPT [options of the script]"
_DESCRIPTION = "Start a script on one or several processes that form a world, on accelerators or the CPU."
_EPILOG = """\
examples:
  trainer-lib launch train.py --lr 1e-3                  on all accelerators, or one CPU process
  trainer-lib launch --cpu --num_processes 4 train.py    four CPU processes
  trainer-lib launch --num_processes 16 --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 train.py
                                                         on each of two machines, with its own rank
Options override the configuration file, and hyphens count as underscores.\
"""
_EXIT_CODES = """\
exit codes: 0 for success; 2 for a wrong option; 128 plus the signal's number if a signal ended it (143 for SIGTERM,
130 for Ctrl-C); 75 if a deadline did; otherwise the highest of the processes that failed.
Signals are forwarded, so that a Trainer saves; the launcher does not restart an interrupted run.\
"""
_FIRST_PAGE = ("processes", "training", "script")
_ALL = "all"
_WIDTH, _COLUMN = 120, 50

# Options of other launchers, and their equivalents.
_ELSEWHERE = {
    **NOT_NEEDED,
    "include": "Give --gpu_ids 0,1.",
    "local_addr": "Give --main_process_ip ADDRESS, the address of machine 0.",
    "max_restart": "Give --max_restarts N.",
    "redirects": "Give --tee, which writes to files and to the terminal.",
    "start_method": "Processes run a script: leave it out.",
}
_BY_NAME = {name: setting for setting in SETTINGS.values() for name in (setting.name, *setting.aliases)}
_BY_SHORT_NAME = {setting.short: setting for setting in SETTINGS.values() if setting.short}


def parse(arguments: Sequence[str], more: Mapping[str, Setting] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the launcher (`None`: not given), and the script with its unchanged arguments.

    Args:
        arguments: The words of the command line.
        more: Options of another command, which stand among them.

    Raises:
        ConfigurationError: For an option that does not exist, lacks its value, has a wrong one or contradicts another.
        UnsupportedError: For an option of Accelerate's that this version does not have.
        SystemExit: If help was asked for, and printed.
    """
    others = more or {}
    given: dict[str, Any] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest.pop(0)
        if option == "--":
            break
        if option in ("-h", "--help"):
            print(help_text(rest[0] if rest else ""))
            raise SystemExit(0)
        setting, value = _setting_and_value(option, rest, others)
        given[setting.name] = value
    _check_together(given)
    return argparse.Namespace(**dict.fromkeys([*SETTINGS, *others]) | given), rest


def _setting_and_value(option: str, rest: list[str], others: Mapping[str, Setting]) -> tuple[Setting, Any]:
    """Return the setting of an option and its value, which is the next word of `rest` unless it follows a `=`."""
    name, equals, text = option.partition("=")
    setting = _known(name, others) or _refuse(name, others)
    if setting.is_switch and not equals:
        value = True
    else:
        text = text if equals else _value(name, setting, rest, others)
        value = setting.kind.check(name, text)
    if setting.missing is not None and value != setting.default:
        raise refusal(name if value is True else f"{name} {text}", setting.missing)
    return setting, value


def launch_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return argparse's parser of the launcher's options; as the command `launch` of `subparsers`, if you give them."""
    make: Callable[..., argparse.ArgumentParser] = (
        functools.partial(Parser, prog="trainer-lib launch")
        if subparsers is None
        else functools.partial(subparsers.add_parser, "launch")
    )
    parser = make(usage=_USAGE, description=_DESCRIPTION, epilog=_EXIT_CODES, allow_abbrev=False)
    for topic, title in GROUPS.items():
        group = parser.add_argument_group(title)
        for setting in _settings_of(topic):
            _add(group, setting)
    return parser


def _add(group: Any, setting: Setting) -> None:
    names = [f"-{setting.short}"] if setting.short else []
    for name in (setting.name, *setting.aliases):
        names += dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    options: dict[str, Any] = {"dest": setting.name, "default": None, "help": setting.help}
    if setting.is_switch:
        group.add_argument(*names, action="store_true", **options)
    else:
        check = functools.partial(setting.kind.check, f"--{setting.name}")
        group.add_argument(*names, type=check, metavar=setting.kind.metavar, **options)


def help_text(topic: str = "") -> str:
    """Return the help on a topic; without one, the options that most launches need and the list of topics.

    Raises:
        ConfigurationError: If there is no such topic.
    """
    if topic in MISSING_GROUPS:
        return _missing_topic(topic)
    if topic == _ALL:
        return "\n\n".join(_topic(name) for name in GROUPS) + f"\n\n{_EXIT_CODES}"
    if topic in GROUPS:
        return _topic(topic) + (f"\n\n{_EXIT_CODES}" if topic == "failures" else "")
    if topic and not topic.startswith("-") and "." not in topic:
        raise ConfigurationError(unknown("topic", topic, [*GROUPS, *MISSING_GROUPS, _ALL]))
    pages = "\n\n".join(_topic(name) for name in _FIRST_PAGE)
    others = [f"  {name:14}{title}" for name, title in GROUPS.items() if name not in _FIRST_PAGE]
    missing = f"  {', '.join(MISSING_GROUPS)}: options of Accelerate's that this version refuses, and why"
    topics = "\n".join(["more options: trainer-lib launch --help TOPIC, or --help all", *others, missing])
    return "\n\n".join([f"usage: {_USAGE}", _DESCRIPTION, pages, topics, _EPILOG])


def _topic(topic: str) -> str:
    return "\n".join([f"{GROUPS[topic]}:", *(option_line(setting) for setting in _settings_of(topic))])


def option_line(setting: Setting) -> str:
    """Return the line of an option in a help text."""
    short = f"-{setting.short}, " if setting.short else ""
    value = "" if setting.is_switch else f" {setting.kind.metavar}"
    default = setting.default not in (None, False, "") and f" (default: {_text(setting.default)})"
    return "\n".join(option_lines(f"  {short}--{setting.name}{value}", f"{setting.help}{default or ''}", _COLUMN))


def _missing_topic(topic: str) -> str:
    settings = [setting for setting in SETTINGS.values() if setting.group == topic]
    names = ", ".join(f"--{setting.name}" for setting in settings)
    features = {setting.missing.instead for setting in settings if setting.missing}
    lines = [f"{MISSING_GROUPS[topic]}: {' '.join(sorted(features))}", f"A launch refuses {names}."]
    return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent="  ") for line in lines)


def _settings_of(topic: str) -> list[Setting]:
    return [setting for setting in SETTINGS.values() if setting.group == topic and setting.missing is None]


def _text(value: object) -> str:
    return "yes" if value is True else str(value)


def _known(name: str, others: Mapping[str, Setting]) -> Setting | None:
    """Return the option of this name, as `--num_processes` or `-m`; `None` if it does not exist."""
    plain = name.lstrip("-").replace("-", "_")
    if name.startswith("--"):
        return others.get(plain) or _BY_NAME.get(plain)
    return _BY_SHORT_NAME.get(plain) if name.startswith("-") else None


def _value(name: str, setting: Setting, rest: list[str], others: Mapping[str, Setting]) -> str:
    """Take the value of an option from the words after it."""
    is_missing = not rest or _known(rest[0].partition("=")[0], others) is not None
    if is_missing:
        next_word = f" (got the option {rest[0]}; {name}={rest[0]} gives it as a value)" if rest else ""
        raise ConfigurationError(f"{name} needs a value: {setting.kind.allowed}{next_word}.")
    return rest.pop(0)


def _refuse(name: str, others: Mapping[str, Setting]) -> NoReturn:
    """Raise for an option that does not exist."""
    plain = name.lstrip("-").replace("-", "_")
    if plain in _ELSEWHERE:
        raise ConfigurationError(f"Unknown option {name!r}. {_ELSEWHERE[plain]}")
    near = did_you_mean(f"--{plain}", [f"--{known}" for known in [*_BY_NAME, *others]])
    raise ConfigurationError(f"Unknown option {name!r}.{near} `trainer-lib launch -h` lists the options.")


def _check_together(given: dict[str, Any]) -> None:
    """Raise for options that contradict each other."""
    pairs = [
        ("no_python", "module"), ("num_processes", "nproc_per_node"), ("multi_gpu", "cpu"),
        ("rdzv_endpoint", "main_process_ip"), ("rdzv_endpoint", "main_process_port"), ("standalone", "rdzv_endpoint"),
    ]  # fmt: skip
    for first, second in pairs:
        if given.get(first) not in (None, False) and given.get(second) not in (None, False):
            raise ConfigurationError(f"--{first} and --{second} contradict each other. Leave out one of them.")
    if given.get("standalone") and given.get("num_machines", 1) > 1:
        raise ConfigurationError(
            f"--standalone is one machine, and --num_machines {given['num_machines']} was given. Leave out one of them."
        )
