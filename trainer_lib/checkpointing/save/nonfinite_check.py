"""NaN and Inf in a checkpoint: the tensors that have them, found while the files are written."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.checkpointing.format.layout import CUSTOM_STATE_NAME, is_optimizer_state, is_weights
from trainer_lib.checkpointing.format.manifest import NONFINITE
from trainer_lib.foundation.light_dataclasses import LightDataclass
from trainer_lib.tensor_files.file_contents import Content


@dataclass(repr=False, eq=False)
class FiniteCheck(LightDataclass):
    """Checks the files of a save.

    NaN in the state of an optimizer makes the weights NaN at the next update. An infinity does not (Adam divides by it,
    so the weight no longer changes), and some optimizers hold infinities by design: those are only reported.

    Args:
        infinite_buffers: The buffers that may hold infinities, such as masks.
        prefix_of_buffers: What the names of buffers begin with in the state of registered objects; "": it has none.

    Attributes:
        nonfinite: The tensors that make the checkpoint not finite, by file: weights and buffers with a NaN or an
            infinity, and optimizer states with a NaN.
        infinite_states: The optimizer states with an infinity.
    """

    infinite_buffers: Collection[str] = ()
    prefix_of_buffers: str = ""
    nonfinite: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    infinite_states: list[str] = field(default_factory=list[str])

    def check(self, file: str, content: Content) -> None:
        """Check all numbers of a file that holds weights or the state of an optimizer."""
        if is_weights(file):
            faults = content.nonfinite()
            self._add(file, [name for name in faults if faults[name] == "nan" or name not in self.infinite_buffers])
        elif is_optimizer_state(file):
            faults = {_full_name(file, name): fault for name, fault in content.nonfinite().items()}
            self._add(file, [name for name in faults if faults[name] == "nan"])
            self.infinite_states += [name for name in faults if faults[name] == "inf"]

        elif self.prefix_of_buffers and file.startswith(CUSTOM_STATE_NAME):
            self._check_buffers_of_objects(file, content)

    def merge(self, ranks: Iterable["FiniteCheck"]) -> None:
        """Replace the findings of this rank with those of all ranks."""
        checks = list(ranks)
        self.nonfinite = {file: names for check in checks for file, names in check.nonfinite.items()}
        self.infinite_states = [name for check in checks for name in check.infinite_states]

    def facts(self, file: str) -> dict[str, Any]:
        """Return the entry of a file in the manifest, besides its size and checksum."""
        return {NONFINITE: self.nonfinite[file]} if file in self.nonfinite else {}

    @property
    def names(self) -> list[str]:
        """The tensors that make the checkpoint not finite."""
        return list(dict.fromkeys(name for names in self.nonfinite.values() for name in names))

    def _check_buffers_of_objects(self, file: str, content: Content) -> None:
        found = {
            name.removeprefix(self.prefix_of_buffers): fault
            for name, fault in content.nonfinite().items()
            if name.startswith(self.prefix_of_buffers)
        }
        self._add(file, [name for name in found if found[name] == "nan" or name not in self.infinite_buffers])

    def _add(self, file: str, names: list[str]) -> None:
        if names:
            self.nonfinite[file] = names


def _full_name(file: str, name: str) -> str:
    """Return the full name of an optimizer's tensor: `optimizer.0.weight.exp_avg`."""
    return f"{file.partition('.')[0]}.{name.removeprefix('state.')}"
