"""DeepSpeed's hostfile: the machines of a launch, how many processes each runs, and filters of both."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_lib.foundation.errors import ConfigurationError, unknown

_LINE = re.compile(r"(\S+)\s+slots=(\d+)\s*(?:#.*)?")
_FORMAT = "lines like `worker-1 slots=4`"

Hosts = dict[str, list[int]]
"""For each machine, by its name, the numbers of the devices to use."""


def read_hostfile(path: str) -> Hosts:
    """Return the machines of a hostfile, in its order.

    Raises:
        ConfigurationError: If there is no such file, or a line is wrong.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigurationError(f"The hostfile {str(file)!r} is not there. Write a file with {_FORMAT}.")
    hosts: Hosts = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ConfigurationError(f"Line {number} of the hostfile {file} is {line!r}. It has {_FORMAT}.")
        name, slots = found[1], int(found[2])
        if name in hosts:
            raise ConfigurationError(f"The hostfile {file} has two lines for {name}. Leave out one of them.")
        hosts[name] = list(range(slots))
    if not hosts:
        raise ConfigurationError(f"The hostfile {file} names no machine. It has {_FORMAT}.")
    return hosts


def selected(hosts: Mapping[str, Sequence[int]], included: str | None, excluded: str | None) -> Hosts:
    """Return the machines and devices that a filter leaves, in the order of the hostfile.

    Args:
        hosts: All of them.
        included: What to keep: NAME or NAME:SLOT,SLOT, with @ between them.
        excluded: What to leave out, written alike.

    Raises:
        ConfigurationError: If both filters are given, or one names what is not there, or nothing is left.

    Example:
        >>> selected({"a": [0, 1], "b": [0, 1, 2]}, None, "a@b:1")
        {'b': [0, 2]}
    """
    if included and excluded:
        raise ConfigurationError(
            f"--deepspeed_inclusion_filter {included} and --deepspeed_exclusion_filter {excluded} are both given. Give "
            "one of them."
        )
    named = _named(hosts, included or excluded or "")
    kept: Hosts = {}
    for name, slots in hosts.items():
        chosen = named.get(name, [])
        slots = [slot for slot in slots if (slot in chosen) != bool(excluded)] if named else list(slots)
        if slots:
            kept[name] = slots
    if not kept:
        raise ConfigurationError(f"--deepspeed_exclusion_filter {excluded} leaves no machine. Leave out less.")
    return kept


def _named(hosts: Mapping[str, Sequence[int]], text: str) -> Hosts:
    named: Hosts = {}
    for part in filter(None, text.split("@")):
        name, colon, numbers = part.partition(":")
        if name not in hosts:
            raise ConfigurationError(unknown("machine of the hostfile", name, hosts))
        try:
            slots = [int(number) for number in numbers.split(",")] if colon else list(hosts[name])
        except ValueError:
            raise ConfigurationError(f"A filter is like {name}:0,2 or {name} (got {part!r}).") from None
        missing = [slot for slot in slots if slot not in hosts[name]]
        if missing:
            raise ConfigurationError(
                f"{name} has no slot {missing[0]} in the hostfile, which gives it {len(hosts[name])} of them, from 0."
            )
        named[name] = [*named.get(name, []), *slots]
    return named
