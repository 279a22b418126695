"""A warning where ranks hold different weights, although DDP averages gradients alone."""

import json
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from trainer_lib.logging import get_logger
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.modules.weights.tensor_digests import digests
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies import Strategy
from trainer_lib.strategies.ddp.ddp import DDP

_logger = get_logger(__name__)


def warn_of_different_replicas(
    models: Mapping[str, nn.Module], strategy: Strategy, group: ProcessGroup, fit: int
) -> None:
    """Warn if the trained weights of this rank are not those of another one; it waits for no rank.

    DDP sends rank 0's weights when a model is prepared. A layer that initializes itself from its first batch does so
    later, on each rank with other samples.

    Args:
        models: The prepared models by name.
        strategy: The strategy; only DDP's ranks hold the same weights.
        group: The ranks.
        fit: The number of the fit, which is the same on all ranks.
    """
    if not isinstance(strategy, DDP):
        return
    weights = _weights(models)
    mine = digests(list(weights.values()))
    # Without waiting for other ranks: the first rank to get here leaves its digests for the others.
    left = group.store("replicas").compare_set(f"{fit}", "", json.dumps([group.rank, mine]))
    rank, others = json.loads(left)
    different = [name for name, ours, theirs in zip(weights, mine, others, strict=False) if ours != theirs]
    if different:
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        _logger.warning(
            "Before the first update, rank %d and rank %d hold different values of the weight %s%s. Gradients are "
            "averaged but weights are not, so the ranks train different models. If a layer initializes itself from its "
            "first batch, call the model with a batch before you give it to the Trainer.",
            *(group.rank, rank, different[0], more),
            main_process_only=False,
        )


def _weights(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the trained weights by name, but for those that DDP is asked to leave alone."""
    weights: dict[str, Tensor] = {}
    for prefix, model in models.items():
        bare = getattr(model, "module", model)
        ignored: Sequence[str] = getattr(bare, "_ddp_params_and_buffers_to_ignore", ())
        for name, parameter in bare.named_parameters():
            weight = parameter.detach()
            if parameter.requires_grad and name not in ignored and type(weight) is Tensor:  # not a quantized one
                weights[canonical_name(f"{prefix}.{name}" if prefix else name)] = weight
    return weights
