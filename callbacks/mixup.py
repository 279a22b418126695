"""This file is batches whose samples are mixed with one another, and their targets alike: mixup and CutMix."""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from trainer_lib.callbacks.batch_rng import generator_of_batch
from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.batch_fields import as_mapping, replaced, split, with_targets
from trainer_lib.foundation.errors import ConfigurationError


class _Mixing(Modifier):
    """Mixes each batch of training with itself, shifted by some samples.

    Args:
        alpha: How much is mixed: the shares are drawn from a beta distribution of `alpha` twice.
        num_classes: The number of classes, where targets are classes; they become their shares.
    """

    exclusive_group: ClassVar[str | None] = "mix the samples of a batch"

    def __init__(self, alpha: float, num_classes: int | None = None) -> None:
        name = type(self).__name__
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
            raise ConfigurationError(f"{name}(alpha={alpha!r}): give a number above 0, such as 0.2.")
        if num_classes is not None and (not isinstance(num_classes, int) or num_classes < 2):
            raise ConfigurationError(f"{name}(num_classes={num_classes!r}): give the number of classes, 2 or more.")
        self.alpha, self.num_classes = alpha, num_classes

    def on_fit_begin(self, run: Run) -> None:
        if run.trainer.loss_fn is None and run.trainer.loses_by_default:
            raise ConfigurationError(
                f"{type(self).__name__} makes shares of classes out of targets, and the loss of a model itself takes "
                "classes. Give Trainer(loss_fn=torch.nn.functional.cross_entropy)."
            )

    def on_micro_batch_begin(self, run: Run) -> None:
        self.mix(run, generator_of_batch(run, type(self).__name__))

    def mix(self, run: Run, draws: np.random.Generator) -> None:
        """Replace the batch in hand by a mixed one."""
        names = getattr(run.args, "label_names", None)
        inputs, targets = split(run.batch, names)
        count, share = len(targets), float(draws.beta(self.alpha, self.alpha))
        shift = int(draws.integers(1, count)) if count > 1 else 0
        mixed, share = self._inputs(inputs, shift, share, draws)
        soft = self._soft(targets)
        run.batch = with_targets(_joined(run.batch, mixed), torch.lerp(soft.roll(shift, 0), soft, share), names)

    def combine(self, one: Tensor, other: Tensor, share: float, box: tuple[slice, ...] | None) -> Tensor:
        """Return samples mixed with others."""
        raise NotImplementedError

    def region(self, inputs: Tensor, share: float, draws: np.random.Generator) -> tuple[float, Any]:
        """Return how much of a sample stays, and what of it is replaced; `None`: all is mixed."""
        del inputs, draws
        return share, None

    def _inputs(self, inputs: Any, shift: int, share: float, draws: np.random.Generator) -> tuple[Any, float]:
        named = as_mapping(inputs)
        several = isinstance(inputs, (tuple, list)) and named is None
        values: dict[Any, Any] = dict(named) if named is not None else dict(enumerate(inputs if several else [inputs]))
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            if not value.is_floating_point():
                where = f" {name!r}" if named is not None else ""
                raise ConfigurationError(
                    f"{type(self).__name__} mixes numbers, and the input{where} is {value.dtype}. Give images as "
                    "floating-point numbers; tokens cannot be mixed."
                )
        share, box = self.region(next(iter(tensors.values())), share, draws)
        mixed = {name: self.combine(one, one.roll(shift, 0), share, box) for name, one in tensors.items()}
        if named is not None:
            return {**values, **mixed}, share
        return (tuple({**values, **mixed}.values()) if several else mixed[0]), share

    def _soft(self, targets: Any) -> Tensor:
        if not isinstance(targets, Tensor):
            raise ConfigurationError(
                f"{type(self).__name__} needs targets in one tensor, got a {type(targets).__name__}."
            )
        if targets.is_floating_point():
            return targets
        if self.num_classes is None or targets.ndim != 1:
            wanted = "num_classes=…" if self.num_classes is None else "one class for each sample"
            raise ConfigurationError(
                f"{type(self).__name__} makes shares of classes, and the targets are {targets.dtype} of shape "
                f"{tuple(targets.shape)}: give {wanted}."
            )
        return one_hot(targets, self.num_classes).float()


class Mixup(_Mixing):
    """Trains on sums of two samples, and of their targets: `share * one + (1 - share) * other`.

    Classes as targets become shares, which `cross_entropy` takes. Evaluations see the data as it is. What is drawn
    goes by the run's seed and the place in the data, so that a resumed run draws the same.

    Args:
        alpha: How much is mixed; 0.2 leaves most samples nearly alone, 1.0 mixes by any share.
        num_classes: The number of classes, where targets are classes.

    Example:
        >>> mixup = Mixup(0.2, num_classes=10)
    """

    def __init__(self, alpha: float = 0.2, num_classes: int | None = None) -> None:
        super().__init__(alpha, num_classes)

    def combine(self, one: Tensor, other: Tensor, share: float, box: Any) -> Tensor:
        del box
        return torch.lerp(other, one, share)


class CutMix(_Mixing):
    """Trains on images with a box out of another one in them, and on both targets by their areas.

    Args:
        alpha: How large boxes are; 1.0 takes any size alike.
        num_classes: The number of classes, where targets are classes.

    Example:
        >>> cutmix = CutMix(1.0, num_classes=10)
    """

    def __init__(self, alpha: float = 1.0, num_classes: int | None = None) -> None:
        super().__init__(alpha, num_classes)

    def region(self, inputs: Tensor, share: float, draws: np.random.Generator) -> tuple[float, Any]:
        if inputs.ndim < 3:
            raise ConfigurationError(
                f"CutMix cuts boxes out of images (…, height, width), and the input is {tuple(inputs.shape)}."
            )
        height, width = inputs.shape[-2:]
        side = math.sqrt(1 - share)
        rows, columns = (_cut(size, side, draws) for size in (height, width))
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        return 1 - area / (height * width), (..., rows, columns)

    def combine(self, one: Tensor, other: Tensor, share: float, box: Any) -> Tensor:
        del share
        mixed = one.clone()
        mixed[box] = other[box]
        return mixed


class MixupOrCutMix(Modifier):
    """Draws for each batch which of two it is mixed by.

    Args:
        mixup: The one.
        cutmix: The other.
        share: The share of batches that get the first.

    Example:
        >>> either = MixupOrCutMix(Mixup(0.2, num_classes=10), CutMix(1.0, num_classes=10))
    """

    exclusive_group: ClassVar[str | None] = _Mixing.exclusive_group

    def __init__(self, mixup: Mixup, cutmix: CutMix, share: float = 0.5) -> None:
        if not 0 < share < 1:
            raise ConfigurationError(f"MixupOrCutMix(share={share!r}): give a number between 0 and 1.")
        self.mixup, self.cutmix, self.share = mixup, cutmix, share

    def on_fit_begin(self, run: Run) -> None:
        self.mixup.on_fit_begin(run)

    def on_micro_batch_begin(self, run: Run) -> None:
        draws = generator_of_batch(run, "MixupOrCutMix")
        chosen = self.mixup if draws.random() < self.share else self.cutmix
        chosen.mix(run, draws)


def _cut(size: int, side: float, draws: np.random.Generator) -> slice:
    """Return where a box lies along one dimension; what would stand out of the image is cut off."""
    length, middle = int(size * side), int(draws.integers(size))
    return slice(max(0, middle - length // 2), min(size, middle + (length + 1) // 2))


def _joined(batch: Any, inputs: Any) -> Any:
    """Return a batch with other inputs."""
    if as_mapping(batch) is not None:
        return replaced(batch, inputs)
    return type(batch)([*(inputs if isinstance(inputs, tuple) else [inputs]), batch[-1]])
