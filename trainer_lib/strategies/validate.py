"""Check that a model can be distributed: no lazy parameters, no shards."""

from torch import nn
from torch.nn.parameter import is_lazy

from trainer_lib.foundation.errors import PreparationError


def check_has_whole_weights(model: nn.Module) -> None:
    """Raise for a model with lazy parameters, or with weights that are sharded already.

    Raises:
        PreparationError: With the name of the first such weight.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PreparationError(
                f"{name} has no shape yet (a lazy module). Call the model once with a batch before prepare()."
            )
        if hasattr(parameter, "_local_tensor"):
            raise PreparationError(
                f"{name} is sharded already (a DTensor), by fully_shard or by an earlier prepare(). Give prepare() a "
                "model with whole weights."
            )
