"""This file is what a model has to be before it is spread over processes: whole, and complete."""

from torch import nn
from torch.nn.parameter import is_lazy

from trainer_lib.foundation.errors import PreparationError


def refuse_what_is_not_whole(model: nn.Module) -> None:
    """Raise for a model whose weights are shards already, or wait for a first batch to tell their shape.

    Raises:
        PreparationError: With the name of the first such weight.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PreparationError(
                f"{name} has no shape before a first batch tells it (a lazy module). Call the model once with one "
                "before prepare()."
            )
        if hasattr(parameter, "_local_tensor"):
            raise PreparationError(
                f"{name} is sharded already (a DTensor). Give prepare() the model as it was before fully_shard."
            )
