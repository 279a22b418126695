"""Where two checkpoints of the same step differ, in the words of what they hold."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.tensor_files.safetensors import open_safetensors

# What the files and folders of a checkpoint hold, by the beginnings of their names.
_PARTS = {
    "model": "weights",
    "adapter_model": "weights",
    "optimizer": "optimizer state",
    "scheduler": "learning-rate schedule",
    "scaler": "gradient scaler",
    "sampler": "position in the data",
    "dataloader": "position in the data",
    "engine": "accumulation window",
    "random_states": "random generators",
    "custom_checkpoint": "state of the run and its callbacks",
}
# Facts of one run that say nothing about its training.
_TIMES = frozenset(
    {"run_id", "seconds", "save_seconds", "checkpoints", "status", "reason", "max_steps", "owed", "seconds_waited"}
)
_RATES = ("_per_second", "data_wait")
_ROUNDING = 1e-3  # up to here a relative difference may come from kernels that are not deterministic


@frozen_dataclass
class Difference:
    """A part of a checkpoint that differs.

    Attributes:
        part: What it is, such as "weights".
        name: The first value that differs.
        largest: The largest relative difference of numbers; infinite where the values cannot be compared.
    """

    part: str
    name: str
    largest: float

    @property
    def may_be_rounding(self) -> bool:
        """Whether numbers differ by no more than kernels that are not deterministic may cause."""
        return self.part in ("weights", "optimizer state") and self.largest <= _ROUNDING

    def __str__(self) -> str:
        """Return it in a few words."""
        by = f" by {self.largest:.1e} relative" if math.isfinite(self.largest) else ""
        return f"{self.part} ({self.name}{by})"


def parts_of(checkpoint: Path) -> list[str]:
    """Return what a checkpoint holds, in words."""
    held = {_part(path, checkpoint) for path in checkpoint.rglob("*") if path.is_file()}
    return [part for part in dict.fromkeys(_PARTS.values()) if part in held]


def differences(expected: Path, actual: Path) -> list[Difference]:
    """Return the parts in which a checkpoint differs from the expected one, the first difference of each file."""
    found: dict[str, Difference] = {}
    for path in sorted(path for path in expected.rglob("*") if path.is_file()):
        part, other = _part(path, expected), actual / path.relative_to(expected)
        if part is None:
            continue
        if not other.is_file():
            found.setdefault(part, Difference(part, f"{path.name} is missing", math.inf))
        elif path.read_bytes() != other.read_bytes():
            _keep(found, part, list(_COMPARISONS.get(path.suffix, _bytes)(path, other)))
    return list(found.values())


def _part(path: Path, checkpoint: Path) -> str | None:
    """Return what a file holds, by its name or that of its folder; `None` for a file that training does not need."""
    name = path.relative_to(checkpoint).parts[0]
    known = next((part for start, part in _PARTS.items() if name.startswith(start)), None)
    return known or (path.name if path.suffix == ".safetensors" else None)


def _keep(found: dict[str, Difference], part: str, pairs: list[tuple[str, float]]) -> None:
    if pairs:
        name, largest = pairs[0][0], max(by for _, by in pairs)
        earlier = found.get(part)
        found[part] = Difference(
            part, earlier.name if earlier else name, max(largest, earlier.largest if earlier else 0)
        )


def _tensors(expected: Path, actual: Path) -> Iterator[tuple[str, float]]:
    with open_safetensors(expected) as first, open_safetensors(actual) as second:
        names = set(second.keys())
        for name in first.keys():  # noqa: SIM118 - a file, no mapping
            if name not in names:
                yield name, math.inf
                continue
            one, other = first.get_tensor(name), second.get_tensor(name)
            if one.shape != other.shape or one.dtype != other.dtype:
                yield name, math.inf
            elif not torch.equal(one, other):
                yield name, _relative(one.double(), other.double()) if not one.is_complex() else math.inf


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    scale = float(one.abs().max()) or 1.0
    by = float((one - other).abs().max()) / scale
    return by if math.isfinite(by) else math.inf


def _json(expected: Path, actual: Path) -> Iterator[tuple[str, float]]:
    return _values(json.loads(expected.read_text()), json.loads(actual.read_text()), "")


def _bytes(expected: Path, actual: Path) -> Iterator[tuple[str, float]]:
    del actual
    yield expected.name, math.inf


_COMPARISONS = {".safetensors": _tensors, ".json": _json}


def _values(one: Any, other: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield the names of values that differ, and by how much, without those that tell the time."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            if key not in _TIMES and not str(key).endswith(_RATES):
                yield from _values(one.get(key), other.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from _values(first, second, f"{name}[{index}]")
    elif isinstance(one, (int, float)) and isinstance(other, (int, float)):
        if one != other and not (math.isnan(one) and math.isnan(other)):
            yield name, abs(one - other) / (abs(one) or 1.0)
    elif one != other:
        yield name, math.inf
