"""The plan of a device map, which prints what lies where before anything is moved."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

Device = int | str

_NAMES = 3  # modules that a row of the table lists; of more it shows the first and the last


class Misfit(NamedTuple):
    """A layer for which a device had too little memory left, so that the next device is filled.

    Args:
        name: The layer.
        size: The bytes that it needs there.
        device: The device.
        free: The bytes that were free.
    """

    name: str
    size: int
    device: Device
    free: int


class DeviceLoad(NamedTuple):
    """How full a device is.

    Args:
        device: The device.
        used: The bytes of the tensors that it holds.
        limit: The bytes that it may hold; `None` without a limit.
        reserved: The bytes that offloaded layers need on it while they run.
        modules: The layers that it holds.
    """

    device: Device
    used: int
    limit: int | None
    reserved: int
    modules: Sequence[str]


@frozen_dataclass
class DeviceMapPlan:
    """Where each layer of a model goes; `print` it to see a table.

    Args:
        placement: The device of each layer, in the order of the model.
        loads: How full each device is, in the order in which they are filled.
        misfits: The layers at which a device was full.
        too_large: What does not fit even while it runs; empty if all does.
    """

    placement: Mapping[str, Device]
    loads: Sequence[DeviceLoad]
    misfits: Sequence[Misfit] = field(default=())
    too_large: str = ""

    def __str__(self) -> str:
        header = ("device", "holds", "of", "reserved", "modules")
        rows = [header, *(_row(load) for load in self.loads if load.modules or load.device != "disk")]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines += [
            f"{misfit.name} ({convert_bytes(misfit.size)}) does not fit on {misfit.device}, "
            f"where {convert_bytes(max(misfit.free, 0))} are free."
            for misfit in self.misfits
        ]
        return "\n".join([line.rstrip() for line in lines] + ([self.too_large] if self.too_large else []))


def _row(load: DeviceLoad) -> tuple[str, str, str, str, str]:
    limit = "" if load.limit is None else convert_bytes(load.limit)
    reserved = convert_bytes(load.reserved) if load.reserved else ""
    return str(load.device), convert_bytes(load.used), limit, reserved, _listed(load.modules)


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _NAMES:
        return ", ".join(names) or "nothing"
    return f"{names[0]} … {names[-1]} ({len(names)} modules)"
