"""Infers a device map: accelerators are filled first, then the host's memory, and the rest stays on the disk."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib.device_map.device_map_plan import Device, DeviceLoad, DeviceMapPlan, Misfit
from trainer_lib.device_map.units import Classes, Unit, units_of
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.memory import get_max_memory
from trainer_lib.modules.device_placement import clean_device_map
from trainer_lib.modules.weights.tied_parameters import check_tied_parameters_in_config, find_tied_parameters

_logger = get_logger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, float | str] | None = None,
    no_split_module_classes: Classes = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """Return a device map: accelerators are filled in their order, then the host's memory ("cpu"), then the disk.

    See `plan_device_map`, which also says how full each device is and what did not fit.

    Args:
        model: The model, which may be on the meta device.
        max_memory: How much of each device to use, such as `{0: "10GiB", "cpu": "30GiB"}`; by default what is free.
        no_split_module_classes: Classes, or their names, whose modules stay on one device, such as blocks with a
            residual connection.
        dtype: The type that weights are loaded in; by default their own.
        special_dtypes: The types of single tensors, by name.
        verbose: Whether to print the plan.
        clean_result: Whether modules that lie on one device get one entry; otherwise each layer has its own.
        offload_buffers: Whether buffers of offloaded layers are offloaded too; otherwise they stay where those run.
        fallback_allocation: Whether a device on which the next layer does not fit gets a later one that does.

    Example:
        >>> model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
        >>> infer_auto_device_map(model, {0: 500, 1: 500})
        {'0': 0, '1': 1}
    """
    plan = plan_device_map(
        model, max_memory, no_split_module_classes, dtype, special_dtypes, offload_buffers, fallback_allocation
    )
    if verbose:
        print(plan)  # noqa: T201
    if plan.too_large:
        _logger.warning("%s", plan.too_large)
    return clean_device_map(dict(plan.placement)) if clean_result else dict(plan.placement)


def plan_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, float | str] | None = None,
    no_split_module_classes: Classes = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> DeviceMapPlan:
    """Plan where each layer of a model goes, before anything is moved; see `infer_auto_device_map`.

    Example:
        >>> print(plan_device_map(nn.Linear(10, 10), {"cpu": 1000}))
        device  holds      of         reserved  modules
        cpu     440 bytes  1000 bytes           weight, bias
    """
    memory = memory_limits(max_memory)
    if check_tied_parameters_in_config(model) and not find_tied_parameters(model):
        _logger.warning("The model's weights are not tied yet. Call model.tie_weights() before you plan a device map.")
    units = units_of(model, no_split_module_classes, dtype, special_dtypes)
    return place(units, memory, offload_buffers, fallback_allocation)


def memory_limits(max_memory: Mapping[int | str, float | str] | None) -> dict[Device, int | None]:
    """Return the bytes to use of each device, in order; the disk comes last and has no limit unless one is given.

    Raises:
        ConfigurationError: For a device or size that cannot be read.
    """
    memory: dict[Device, int | None] = dict(get_max_memory(max_memory))
    for device in memory:
        if isinstance(device, bool) or not isinstance(device, (int, str)):
            raise ConfigurationError(
                f"max_memory names the device {shown(device)}. Use the index of an accelerator, 'cpu' or 'disk'."
            )
        if isinstance(device, str) and device != "disk":
            try:
                torch.device(device)
            except RuntimeError as error:
                raise ConfigurationError(
                    f"max_memory names the device {device!r}, which torch does not know. Use the index of an "
                    "accelerator, 'cpu' or 'disk'."
                ) from error
    return {**memory, "disk": memory.get("disk")}


def place(
    units: Iterable[Unit],
    memory: Mapping[Device, int | None],
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> DeviceMapPlan:
    """Place units on devices in order, and leave room on the first for the layers that are loaded there to run.

    Two layers are in that room at a time: the one that runs and the next, which is being fetched.
    """
    everything = list(units)
    reserved = 0
    while True:
        attempt = _Attempt(everything, memory, reserved, offload_buffers, fallback_allocation)
        attempt.run()
        needed = attempt.room_needed()
        if needed <= reserved:
            return attempt.plan()
        reserved = needed


def fits(units: Iterable[Unit], memory: Mapping[Device, int]) -> bool:
    """Whether devices have room for all units, so that nothing stays on the disk."""
    attempt = _Attempt(list(units), {**memory, "disk": None}, 0, offload_buffers=True, fallback=False)
    attempt.run()
    return not attempt.used("disk")


class _Attempt:
    """Places units with a given room reserved on the device that runs offloaded layers."""

    def __init__(
        self,
        units: list[Unit],
        memory: Mapping[Device, int | None],
        reserved: int,
        offload_buffers: bool,
        fallback: bool,
    ) -> None:
        self._units, self._memory, self._reserved = units, memory, reserved
        self._offload_buffers, self._fallback = offload_buffers, fallback
        self._devices = list(memory)
        # The device that runs offloaded layers: the first that may be used.
        self._main = next((device for device, limit in memory.items() if limit != 0), self._devices[0])
        has_accelerator = self._main not in ("cpu", "disk")
        self._offloading = {"disk", "cpu"} if has_accelerator else {"disk"}
        self._used: dict[Device, int] = dict.fromkeys(memory, 0)
        self._held: dict[Device, set[int]] = {device: set() for device in memory}
        self._placed: dict[str, Device] = {}
        self._misfits: list[Misfit] = []
        self._sharing = _sharing(units)

    def run(self) -> None:
        """Place all units."""
        index = 0
        for position, unit in enumerate(self._units):
            while unit.name not in self._placed:
                device = self._devices[index]
                if self._fits([unit], device):
                    self._place(unit, device)
                    continue
                if self._fallback and not self._used[device]:
                    self._place_first_that_fits(self._units[position + 1 :], device)
                self._misfits.append(Misfit(unit.name, self._cost([unit], device), device, self._free(device) or 0))
                index += 1
                if index == len(self._devices):
                    raise ConfigurationError(
                        f"max_memory has no room for {unit.name} ({unit.size} bytes), on the disk either. "
                        "Raise a limit, or leave 'disk' out of max_memory: then it has none."
                    )

    def used(self, device: Device) -> int:
        """Return the bytes that a device holds."""
        return self._used[device]

    def room_needed(self) -> int:
        """Return the room that offloaded layers need where they run: two layers, and their buffers if they stay."""
        offloaded = self._offloaded()
        sizes = [unit.size if self._offload_buffers else sum(unit.parameters.values()) for unit in offloaded]
        staying = {} if self._offload_buffers else {key: n for unit in offloaded for key, n in unit.buffers.items()}
        in_turn = zip(sizes, [*sizes[1:], 0], strict=False)
        return max(map(sum, in_turn), default=0) + sum(staying.values())

    def plan(self) -> DeviceMapPlan:
        """Return the result."""
        room = self.room_needed()
        limit = self._memory[self._main]
        too_large = ""
        if limit is not None and room > limit:
            largest = max(self._offloaded(), key=lambda unit: unit.size)
            too_large = (
                f"Offloaded layers need {room} bytes on {self._main} while they run, and max_memory allows {limit}. "
                f"The largest one is {largest.name} ({largest.size} bytes)."
            )
        loads = [
            DeviceLoad(
                device,
                self._used[device],
                self._memory[device],
                room if device == self._main else 0,
                [name for name, at in self._placed.items() if at == device],
            )
            for device in self._devices
        ]
        order = {unit.name: self._placed[unit.name] for unit in self._units}
        return DeviceMapPlan(order, loads, self._misfits, too_large)

    def _offloaded(self) -> list[Unit]:
        return [unit for unit in self._units if self._placed[unit.name] in self._offloading]

    def _place(self, unit: Unit, device: Device) -> None:
        together = [unit, *(other for other in self._sharing.get(unit.name, ()) if other.name not in self._placed)]
        for part in together if self._fits(together, device) else [unit]:
            self._used[device] += self._cost([part], device)
            self._held[device] |= part.parameters.keys() | part.buffers.keys()
            self._placed[part.name] = device

    def _place_first_that_fits(self, units: list[Unit], device: Device) -> None:
        for unit in units:
            if unit.name not in self._placed and self._fits([unit], device):
                self._place(unit, device)
                return

    def _fits(self, units: list[Unit], device: Device) -> bool:
        free = self._free(device)
        return free is None or self._cost(units, device) <= free

    def _free(self, device: Device) -> int | None:
        limit = self._memory[device]
        if limit is None:
            return None
        return limit - self._used[device] - (self._reserved if device == self._main else 0)

    def _cost(self, units: list[Unit], device: Device) -> int:
        """Return the bytes that units add to a device: a tied parameter that it holds already costs nothing."""
        tensors: dict[int, int] = {}
        for unit in units:
            tensors |= unit.parameters
            if device not in self._offloading or self._offload_buffers:
                tensors |= unit.buffers
        return sum(size for key, size in tensors.items() if key not in self._held[device])


def _sharing(units: Iterable[Unit]) -> dict[str, list[Unit]]:
    """Return for each unit the other ones that share a parameter with it."""
    owners: dict[int, list[Unit]] = {}
    for unit in units:
        for key in unit.parameters:
            owners.setdefault(key, []).append(unit)
    sharing: dict[str, dict[str, Unit]] = {}
    for group in owners.values():
        if len(group) > 1:
            for unit in group:
                sharing.setdefault(unit.name, {}).update({other.name: other for other in group if other is not unit})
    return {name: list(others.values()) for name, others in sharing.items()}


def lists_accelerators(memory: Mapping[Device, Any]) -> list[Device]:
    """Return the accelerators among devices, in order."""
    return [device for device in memory if device not in ("cpu", "disk")]
