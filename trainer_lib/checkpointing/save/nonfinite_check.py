"""The NaN and infinities in a checkpoint: which tensors have them, found by the thread that writes the files."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.checkpointing.format.layout import is_optimizer_state, is_weights
from trainer_lib.checkpointing.format.manifest import NONFINITE
from trainer_lib.tensor_files.file_contents import Content


@dataclass
class FiniteCheck:
    """Looks at the files of one save.

    NaN in the state of an optimizer makes the weights NaN at the next update. An infinity does not (Adam divides by it,
    so that a weight stands still), and an optimizer may hold some by design: those are only reported.

    Args:
        infinite_buffers: The buffers that may hold infinities, such as masks.

    Attributes:
        nonfinite: What makes the checkpoint not finite, by the file: weights and buffers with a NaN or an infinity, and
            optimizer states with a NaN.
        infinite_states: The optimizer states with an infinity.
    """

    infinite_buffers: Collection[str] = ()
    nonfinite: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    infinite_states: list[str] = field(default_factory=list[str])

    def check(self, file: str, content: Content) -> None:
        """Look at all numbers of a file that holds weights or the state of an optimizer."""
        if is_weights(file):
            faults = content.nonfinite()
            self._note(file, [name for name in faults if faults[name] == "nan" or name not in self.infinite_buffers])
        elif is_optimizer_state(file):
            faults = {_shown(file, name): fault for name, fault in content.nonfinite().items()}
            self._note(file, [name for name in faults if faults[name] == "nan"])
            self.infinite_states += [name for name in faults if faults[name] == "inf"]

    def merge(self, ranks: Iterable["FiniteCheck"]) -> None:
        """Take in what all ranks found."""
        found = list(ranks)
        self.nonfinite = {file: names for rank in found for file, names in rank.nonfinite.items()}
        self.infinite_states = [name for rank in found for name in rank.infinite_states]

    def facts(self, file: str) -> dict[str, Any]:
        """Return what the manifest says of a file besides its size and checksum."""
        return {NONFINITE: self.nonfinite[file]} if file in self.nonfinite else {}

    @property
    def names(self) -> list[str]:
        """The tensors that make the checkpoint not finite."""
        return list(dict.fromkeys(name for names in self.nonfinite.values() for name in names))

    def _note(self, file: str, names: list[str]) -> None:
        if names:
            self.nonfinite[file] = names


def _shown(file: str, name: str) -> str:
    """Return the name of a tensor of an optimizer: `optimizer.0.weight.exp_avg`."""
    return f"{file.partition('.')[0]}.{name.removeprefix('state.')}"
