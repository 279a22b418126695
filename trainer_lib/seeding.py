"""Seed random generators, and synchronize them across ranks."""

import operator
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from trainer_lib.collectives import broadcast_object_list
from trainer_lib.foundation import environment, xla
from trainer_lib.foundation.device_types import generator_state, generator_type, set_generator_state
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.logging import get_logger
from trainer_lib.options.enums import DistributedType, RNGType
from trainer_lib.state.partial_state import PartialState

_logger = get_logger(__name__)
_SEEDS = 2**32  # numpy's limit


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, numpy and torch, on the CPU and on every accelerator device.

    Args:
        seed: The seed, from 0 to 4294967295.
        device_specific: Give each rank its own seed: `seed` plus its rank.
        deterministic: Make torch use deterministic algorithms, and raise for operations without one. Call it before
            the first computation on an accelerator device.

    Example:
        >>> set_seed(7)
        >>> first = torch.rand(1)
        >>> set_seed(7)
        >>> bool(torch.rand(1) == first)
        True
    """
    seed = _checked(seed, "seed")
    if device_specific:
        seed = _checked(seed + PartialState().data_group.rank, "seed plus the rank")
    if deterministic:
        environment.make_cublas_deterministic()
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False  # its choice among algorithms depends on timing
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # the CPU's generator and those of all accelerators
    if PartialState.exists() and PartialState().distributed_type == DistributedType.XLA:
        xla.seed(seed)  # which torch's does not reach; a state that is made later takes torch's


def synchronize_rng_states(rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None) -> None:
    """Copy the states of rank 0's generators to all ranks.

    Args:
        rng_types: Kinds of `RNGType`: "torch" (the CPU's), "cuda", "xpu", … and "generator" for `generator`.
        generator: The generator that "generator" stands for.

    Example:
        >>> synchronize_rng_states(["torch"])
    """
    for kind in rng_types:
        if _is_absent(kind):
            _logger.warning_once("rng_types: %r is left out, since this machine has no such device.", str(kind))
        else:
            synchronize_rng_state(kind, generator)


def synchronize_rng_state(rng_type: str | RNGType | None = None, generator: torch.Generator | None = None) -> None:
    """Copy the state of one of rank 0's generators to all ranks.

    Args:
        rng_type: See `synchronize_rng_states`; by default "generator" if you give one, else "torch".
        generator: The generator that "generator" stands for.
    """
    chosen = _generator_of(rng_type or (RNGType.TORCH if generator is None else RNGType.GENERATOR), generator)
    state = broadcast_object_list([chosen.get_state()])[0]
    if PartialState().process_index != 0:
        chosen.set_state(state)


def _checked(seed: Any, name: str) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number < _SEEDS:
        raise ConfigurationError(f"{name} must be a whole number from 0 to {_SEEDS - 1} (got {seed!r}).")
    return number


def _is_absent(rng_type: str | RNGType) -> bool:
    kind = RNGType.read("generator", rng_type)
    return kind not in (RNGType.TORCH, RNGType.GENERATOR) and generator_type() != str(kind)


def _generator_of(rng_type: str | RNGType, generator: torch.Generator | None) -> Any:
    kind = RNGType.read("generator", rng_type)
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise ConfigurationError(
                "rng_types has 'generator', but generator= is missing. Give generator=torch.Generator()."
            )
        return generator
    if kind is RNGType.TORCH:
        return torch.default_generator
    present = generator_type()
    if present is None or _is_absent(kind):
        raise UnsupportedError(
            f"rng_types has {str(kind)!r}, and this machine has no {kind} device. "
            f"Available: torch, generator{'' if present is None else f', {present}'}."
        )
    return _AcceleratorGenerator(present)


class _AcceleratorGenerator:
    """The generator of this rank's accelerator device."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def get_state(self) -> torch.Tensor:
        return generator_state(self._device_type)

    def set_state(self, state: torch.Tensor) -> None:
        set_generator_state(self._device_type, state)
