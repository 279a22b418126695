"""Loads weights into a model module by module: each to the device that a device map names."""

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.checkpointing.load.weight_files import WeightFiles
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, StateError
from trainer_lib.modules.device_placement import Device, check_device_map, device_of, set_module_tensor_to_device
from trainer_lib.modules.quantized_layers import is_quantized, on_meta, quantize, release_statistics, weight_of
from trainer_lib.modules.weights.names import is_listed
from trainer_lib.modules.weights.tensor_slots import parameter_slots
from trainer_lib.modules.weights.tied_parameters import (
    find_tied_parameters,
    first_names,
    retie_by_device,
    retie_parameters,
)
from trainer_lib.tensor_files.offloaded_weights import (
    Index,
    OffloadedWeightsLoader,
    offload_weight,
    remove_offloaded_weights,
    save_offload_index,
)

_SHOWN = 8  # names in a message


def load_by_device_map(
    model: nn.Module,
    checkpoint: Path,
    device_map: Mapping[str, Device],
    offload_folder: str | Path | None = None,
    dtype: torch.dtype | None = None,
    keep_in_fp32: Iterable[str] = (),
    offload_buffers: bool = False,
) -> tuple[list[str], set[str], Index]:
    """Load weights, one file at a time; those on the disk stay in their safetensors files, and the model's are emptied.

    Args:
        model: The model, which may be on the meta device.
        checkpoint: The local file, index or folder of the weights.
        device_map: The device of each module.
        offload_folder: The folder for weights on the disk that are in other files, and for the index of all.
        dtype: The type of the weights; by default that of the model.
        keep_in_fp32: Names of modules whose weights are loaded in fp32.
        offload_buffers: Whether buffers of modules on the disk stay there too; otherwise they are loaded.

    Returns:
        The names that the files do not have, those that the model does not have, and the index of weights on the disk.

    Raises:
        StateError: If a weight has another shape than the model's.
        CheckpointError: If weights cannot be written to the disk. Nothing has been loaded then.
    """
    check_device_map(model, device_map)
    ties, state = find_tied_parameters(model), model.state_dict(keep_vars=True)
    files = WeightFiles(checkpoint, state)
    wanted = {name for name in files.shapes if name in state and not files.is_statistics(name)}
    _check_shapes(state, files, wanted, checkpoint)
    placed = _Placed(model, files, device_map, offload_folder)
    kinds = {name: _dtype(name, state[name], dtype, keep_in_fp32) for name in files.shapes if name in wanted}
    on_disk = {
        name
        for name in wanted
        if device_of(name, device_map) == "disk" and (offload_buffers or isinstance(state[name], nn.Parameter))
    }
    # First what a full disk can stop, so that nothing has been loaded then.
    placed.keep_on_disk({path: _those(kinds, on_disk.intersection(names)) for path, names in files.by_file()})
    _empty(model, on_disk, ties)
    for path, names in files.by_file():
        of_file = _those(kinds, wanted.intersection(names))
        placed.load(path, _those(kinds, of_file.keys() - on_disk))
        if path.suffix == ".safetensors":
            placed.entries |= {name: _entry(path, files.name_in_file(name), kind) for name, kind in of_file.items()}
    loaded = wanted | _load_tied(model, ties, device_map, wanted, placed)
    placed.save_index()
    missing = [name for name in state if name not in loaded and weight_of(name) not in state]
    unexpected = {name for name in files.shapes if name not in state and not files.is_statistics(name)}
    return missing, unexpected, placed.index


class _Placed:
    """Weights that have been loaded, and the index of those that stay on the disk."""

    def __init__(
        self, model: nn.Module, files: WeightFiles, device_map: Mapping[str, Device], folder: str | Path | None
    ) -> None:
        self._files, self._device_map, self._folder = files, device_map, folder
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._first_names = first_names(model)
        self._names: dict[int, str] = {}  # the first name of the weight that uses the memory at an address
        self.index: Index = {}
        self._written: list[str] = []  # names of weights that have a file in the folder
        self.entries: dict[str, dict[str, Any]] = {}  # of weights in safetensors files

    def load(self, path: Path, kinds: Mapping[str, torch.dtype]) -> None:
        """Load weights of a file in these types, each to its device."""
        as_they_are = {name for name, kind in kinds.items() if self._is_used_as_it_is(name, kind)}
        values = self._files.map(path, as_they_are) | self._files.read(path, kinds.keys() - as_they_are)
        while values:  # one after the other, so that a converted one does not stay in memory twice
            name, value = values.popitem()
            device: Any = device_of(name, self._device_map)
            if self._is_used_as_it_is(name, kinds[name]):
                value = self._owned(name, value)
            self._put(name, "cpu" if device == "disk" else device, value, kinds[name])
            del value

    def _is_used_as_it_is(self, name: str, kind: torch.dtype) -> bool:
        """Whether a weight is used on the CPU in the type that it has in its file."""
        device: Any = device_of(name, self._device_map)
        is_on_host = device == "disk" or torch.device(device).type == "cpu"
        return is_on_host and self._files.kinds[name][0] == kind and not is_quantized(self._slot(name))

    def _owned(self, name: str, value: Tensor) -> Tensor:
        """Return a value that shares its memory with no other weight, unless the model ties them."""
        first = self._first_names[name]
        return value if self._names.setdefault(value.data_ptr(), first) == first else value.clone()

    def keep_on_disk(self, kinds_of: Mapping[Path, Mapping[str, torch.dtype]]) -> None:
        """Keep weights of files on the disk, in these types, and write the index; if that fails, remove the files."""
        try:
            for path, kinds in kinds_of.items():
                self._keep_on_disk(path, kinds)
            self.save_index()
        except CheckpointError:
            if self._folder is not None:
                remove_offloaded_weights(self._folder, self._written)
            raise

    def keep_tied_on_disk(self, name: str, source: str) -> None:
        """Keep a weight that the files leave out on the disk: it is tied to one that they have."""
        if source in self.entries:
            self.index[name] = self.entries[source]
        else:
            self._write(name, self.value(source))

    def value(self, name: str) -> Tensor:
        """Return a weight that has been loaded, or is on the disk."""
        value = self._slot(name)
        return OffloadedWeightsLoader(save_folder=self._folder, index=self.index)[name] if value.is_meta else value

    def save_index(self) -> None:
        """Write the index of the weights on the disk into the folder, if there is one."""
        if self.index and self._folder is not None:
            save_offload_index(self.index, self._folder)

    def _keep_on_disk(self, path: Path, kinds: Mapping[str, torch.dtype]) -> None:
        """Refer to weights of a safetensors file; write others, and those that are quantized now, into the folder."""
        is_safe = path.suffix == ".safetensors"
        to_write: list[str] = []
        for name, kind in kinds.items():
            if is_safe and not is_quantized(self._slot(name)):
                self.index[name] = _entry(path, self._files.name_in_file(name), kind)
            else:
                to_write.append(name)
        for name, value in self._files.read(path, to_write).items() if to_write else ():
            if is_quantized(self._slot(name)):
                self._quantize_to_disk(name, value, kinds[name])
            else:
                self._write(name, value.to(kinds[name]))

    def _quantize_to_disk(self, name: str, value: Tensor, kind: torch.dtype) -> None:
        self._put(name, "cpu", value, kind)
        layer = self._modules[name.rpartition(".")[0]]
        prefix = name.removesuffix("weight")
        for part, tensor in layer.state_dict(prefix=prefix).items():
            if part == name or weight_of(part) == name:
                self._write(part, tensor)
        parameter_slots(layer)["weight"] = on_meta(layer.weight)
        release_statistics(layer)

    def _put(self, name: str, device: Any, value: Tensor, kind: torch.dtype) -> None:
        owner, _, last = name.rpartition(".")
        layer, current = self._modules[owner], self._slot(name)
        if is_quantized(current):
            whole = value.to(kind) if value.is_floating_point() else value
            parameter_slots(layer)[last] = quantize(layer, current, whole, device, self._files.statistics(name))
        else:
            set_module_tensor_to_device(layer, last, device, value, kind)

    def _slot(self, name: str) -> Any:
        owner, _, last = name.rpartition(".")
        return parameter_slots(self._modules[owner]).get(last)

    def _write(self, name: str, value: Tensor) -> None:
        if self._folder is None:
            raise ConfigurationError(
                f"device_map puts {name} on the disk, and it cannot be read in place from its file: that is not in the "
                "safetensors format, or the weight is quantized now. Give offload_folder, a folder for such weights."
            )
        self._written.append(name)
        self.index = offload_weight(value, name, self._folder, self.index)


def _load_tied(
    model: nn.Module, ties: Iterable[Sequence[str]], device_map: Mapping[str, Device], loaded: set[str], placed: _Placed
) -> set[str]:
    """Give names of tied weights that a checkpoint leaves out the value of the name that it has."""
    named: set[str] = set()
    on_disk: set[str] = set()
    for names in ties:
        source = next((name for name in names if name in loaded), None)
        if source is None:
            continue
        for name in names:
            device: Any = device_of(name, device_map)
            if name not in loaded and device == "disk":
                placed.keep_tied_on_disk(name, source)
                on_disk.add(name)
            elif name not in loaded:
                set_module_tensor_to_device(model, name, device, placed.value(source))
            named.add(name)
    _empty(model, on_disk, ties)
    retie_by_device(model, ties)
    return named


def _empty(model: nn.Module, names: set[str], ties: Iterable[Sequence[str]]) -> None:
    """Drop the model's values of weights on the disk, with which it would compute; names that are tied stay tied."""
    for name in names:
        set_module_tensor_to_device(model, name, "meta")
    tied = [[name for name in group if name in names] for group in ties]
    retie_parameters(model, [group for group in tied if group])


def _those(kinds: Mapping[str, torch.dtype], names: Container[str]) -> dict[str, torch.dtype]:
    return {name: kind for name, kind in kinds.items() if name in names}


def _entry(path: Path, name: str, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "safetensors_file": str(path.absolute()),
        "weight_name": name,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _check_shapes(state: Mapping[str, Any], files: WeightFiles, names: Iterable[str], checkpoint: Path) -> None:
    quantized = [name for name in names if files.has_statistics(name) and state[name].is_floating_point()]
    whole = [name for name in quantized if not is_quantized(state[name])]
    if whole:
        raise StateError(
            f"Weights in {checkpoint} were quantized by bitsandbytes, and the model has whole ones: "
            f"{', '.join(sorted(whole)[:_SHOWN])}. Load them with load_and_quantize_model."
        )
    shapes = files.shapes_for(state)
    wrong = [
        f"{name} is {tuple(shapes[name])} and the model has {tuple(state[name].shape)}"
        for name in names
        if shapes[name] != state[name].shape
    ]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise StateError(f"Weights in {checkpoint} do not fit the model: {'; '.join(sorted(wrong)[:_SHOWN])}{more}.")


def _dtype(name: str, current: Tensor, dtype: torch.dtype | None, kept: Iterable[str]) -> torch.dtype:
    if not current.is_floating_point() or dtype is None:
        return current.dtype
    return torch.float32 if is_listed(name, kept) else dtype
