"""A checkpoint in the layout of Accelerate: the files of each part, and what has no counterpart there."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainer_lib.checkpointing.format.layout import (
    CUSTOM_STATE_NAME,
    ENGINE_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    numbered,
)
from trainer_lib.checkpointing.format.state_codec import encode
from trainer_lib.checkpointing.third_party.exported_state import accelerate_generators, numbered_state
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.options.accelerate_constants import FSDP_MODEL_NAME
from trainer_lib.tensor_files.file_contents import Content, Pickled, Tensors
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME, weights_ending, weights_stem

# What Accelerate does not save, by the kind of the part here.
NOT_SAVED = {
    SAMPLER_NAME: "Accelerate does not record the position in the data: skip batches after load_state "
    "(skip_first_batches)",
    ENGINE_NAME: "Accelerate does not save the gradients of an unfinished accumulation window: save after an update",
}


@frozen_dataclass(kw_only=True)
class AccelerateLayout:
    """How Accelerate names and writes the parts of a checkpoint.

    Args:
        whole_of_fsdp: Whether the files are those of FSDP with FULL_STATE_DICT.
        safe: Whether weights are safetensors; otherwise pickles.
        allow_pickle: Whether registered objects may have other values than tensors and plain ones.
        step: The backward passes that were made.
    """

    whole_of_fsdp: bool = False
    safe: bool = True
    allow_pickle: bool = False
    step: int = 0

    def files(self, kind: str, index: int, state: Any, rank: int = 0, device: int = 0) -> dict[str, Content]:
        """Return the files of a part; none for one that has no counterpart.

        Args:
            kind: The kind of the part.
            index: Its index among the parts of its kind.
            state: Its state.
            rank: The rank whose generators they are.
            device: The number of that rank's device on its machine.
        """
        if kind == SAFE_MODEL_NAME:
            return self._weights(index, state)
        if kind == OPTIMIZER_NAME:
            return {f"{numbered(kind, index)}.bin": Pickled(state if self.whole_of_fsdp else numbered_state(state))}
        if kind == SCHEDULER_NAME:
            return {f"{numbered(kind, index)}.bin": Pickled(state)}
        if kind == SCALER_NAME:
            return {"scaler.pt": Pickled(state)}
        if kind == CUSTOM_STATE_NAME:
            encode(state, self.allow_pickle, f"the state of {kind}_{index}")  # raises for what may not be pickled
            return {f"{kind}_{index}.pkl": Pickled(state)}
        if kind == RNG_STATE_NAME:
            return {f"{kind}_{rank}.pkl": Pickled(accelerate_generators(state, self.step, device))}
        return {}

    def _weights(self, index: int, state: Mapping[str, Any]) -> dict[str, Content]:
        if self.whole_of_fsdp:
            return {f"{numbered(FSDP_MODEL_NAME, index)}.bin": Pickled(dict(state))}
        name = f"{weights_stem(index, self.safe)}{weights_ending(self.safe)}"
        if not self.safe:
            return {name: Pickled(dict(state))}
        others = [name for name, value in state.items() if not isinstance(value, Tensor)]
        if others:
            raise UnsupportedError(
                f"The model has a state that is no tensor ({', '.join(others[:4])}), which Accelerate's safetensors "
                "cannot hold. Give safe_serialization=False."
            )
        return {name: Tensors(state)}


def fsdp_folder(kind: str, index: int) -> tuple[str, str]:
    """Return the folder of the shards of a model or an optimizer, and the key of the state in it."""
    return (f"{FSDP_MODEL_NAME}_{index}", "model") if kind == SAFE_MODEL_NAME else (f"{kind}_{index}", kind)
