"""Mixup and CutMix: training on mixed samples and targets."""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from trainer_lib.callbacks.batch_rng import generator_of_batch
from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import as_mapping, replaced, split, with_targets


class _Mixing(Modifier):
    """Mixes each training batch with itself, shifted by a random number of samples.

    Args:
        alpha: The strength: the share is drawn from `Beta(alpha, alpha)`.
        num_classes: The number of classes, if the targets are class indices; they become class probabilities.
    """

    changes_weights: ClassVar[bool] = False
    exclusive_group: ClassVar[str | None] = "mix the samples of a batch"

    def __init__(self, alpha: float, num_classes: int | None = None) -> None:
        name = type(self).__name__
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
            raise ConfigurationError(f"{name}(alpha) must be a number above 0, such as 0.2 (got {alpha!r}).")
        if num_classes is not None and (not isinstance(num_classes, int) or num_classes < 2):
            raise ConfigurationError(f"{name}(num_classes) must be at least 2 (got {num_classes!r}).")
        self.alpha: float = alpha
        self.num_classes: int | None = num_classes

    def on_fit_begin(self, run: Run) -> None:
        if run.trainer.loss_fn is None and not run.trainer.parts.loss.is_overridden:
            raise ConfigurationError(
                f"{type(self).__name__} turns targets into class probabilities, which the model's own loss does not "
                "take. Give Trainer(loss_fn=torch.nn.functional.cross_entropy)."
            )

    def on_micro_batch_begin(self, run: Run) -> None:
        self.mix(run, generator_of_batch(run, type(self).__name__))

    def mix(self, run: Run, generator: np.random.Generator) -> None:
        """Replace the current batch by a mixed one."""
        names = getattr(run.args, "label_names", None)
        inputs, targets = split(run.batch, names)
        count, share = len(targets), float(generator.beta(self.alpha, self.alpha))
        shift = int(generator.integers(1, count)) if count > 1 else 0
        mixed, share = self._inputs(inputs, shift, share, generator)
        soft = self._soft_targets(targets)
        run.batch = with_targets(_joined(run.batch, mixed), torch.lerp(soft.roll(shift, 0), soft, share), names)

    def combine(self, first: Tensor, second: Tensor, share: float, box: tuple[slice, ...] | None) -> Tensor:
        """Return the first samples mixed with the second."""
        raise NotImplementedError

    def region(self, inputs: Tensor, share: float, generator: np.random.Generator) -> tuple[float, Any]:
        """Return the share of a sample that stays, and the region to replace; `None` mixes all of it."""
        del inputs, generator
        return share, None

    def _inputs(self, inputs: Any, shift: int, share: float, generator: np.random.Generator) -> tuple[Any, float]:
        named = as_mapping(inputs)
        is_sequence = isinstance(inputs, (tuple, list)) and named is None
        values: dict[Any, Any] = (
            dict(named) if named is not None else dict(enumerate(inputs if is_sequence else [inputs]))
        )
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            if not value.is_floating_point():
                where = f" {name!r}" if named is not None else ""
                raise ConfigurationError(
                    f"{type(self).__name__} needs floating-point inputs, but the input{where} is {value.dtype}. Give "
                    "images as floating-point numbers; tokens cannot be mixed."
                )
        share, box = self.region(next(iter(tensors.values())), share, generator)
        mixed = {name: self.combine(value, value.roll(shift, 0), share, box) for name, value in tensors.items()}
        if named is not None:
            return {**values, **mixed}, share
        return (tuple({**values, **mixed}.values()) if is_sequence else mixed[0]), share

    def _soft_targets(self, targets: Any) -> Tensor:
        if not isinstance(targets, Tensor):
            raise ConfigurationError(
                f"{type(self).__name__} needs targets in one tensor (got a {type(targets).__name__})."
            )
        if targets.is_floating_point():
            return targets
        if self.num_classes is None or targets.ndim != 1:
            fix = "num_classes=…" if self.num_classes is None else "one class per sample"
            raise ConfigurationError(
                f"{type(self).__name__} cannot turn targets of type {targets.dtype} and shape {tuple(targets.shape)} "
                f"into class probabilities. Give {fix}."
            )
        try:
            return one_hot(targets, self.num_classes).float()
        except RuntimeError as error:  # only the CPU checks them
            raise ConfigurationError(
                f"{type(self).__name__}(num_classes={self.num_classes}) needs class indices from 0 to "
                f"{self.num_classes - 1} (got {int(targets.min())} to {int(targets.max())}). Give the number of "
                "classes of the data, without samples to ignore."
            ) from error


class Mixup(_Mixing):
    """Trains on weighted sums of two samples and of their targets: `share * first + (1 - share) * second`.

    Class targets become class probabilities, which `cross_entropy` takes. Evaluation data is not mixed. The random
    numbers depend on the run's seed and the batch's position, so a resumed run draws the same ones.

    Args:
        alpha: The strength; 0.2 leaves most samples nearly unchanged, 1.0 draws the share uniformly.
        num_classes: The number of classes, if the targets are class indices.

    Example:
        >>> mixup = Mixup(0.2, num_classes=10)
    """

    def __init__(self, alpha: float = 0.2, num_classes: int | None = None) -> None:
        super().__init__(alpha, num_classes)

    def combine(self, first: Tensor, second: Tensor, share: float, box: Any) -> Tensor:
        del box
        return torch.lerp(second, first, share)


class CutMix(_Mixing):
    """Trains on images with a box pasted from another image, with targets weighted by area.

    Args:
        alpha: The distribution of the box size; 1.0 draws the area uniformly.
        num_classes: The number of classes, if the targets are class indices.

    Example:
        >>> cutmix = CutMix(1.0, num_classes=10)
    """

    def __init__(self, alpha: float = 1.0, num_classes: int | None = None) -> None:
        super().__init__(alpha, num_classes)

    def region(self, inputs: Tensor, share: float, generator: np.random.Generator) -> tuple[float, Any]:
        if inputs.ndim < 3:
            raise ConfigurationError(f"CutMix needs images of shape (…, height, width) (got {tuple(inputs.shape)}).")
        height, width = inputs.shape[-2:]
        side = math.sqrt(1 - share)
        rows, columns = (_cut(size, side, generator) for size in (height, width))
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        return 1 - area / (height * width), (..., rows, columns)

    def combine(self, first: Tensor, second: Tensor, share: float, box: Any) -> Tensor:
        del share
        mixed = first.clone()
        mixed[box] = second[box]
        return mixed


class MixupOrCutMix(Modifier):
    """Applies mixup or CutMix to each batch, chosen at random.

    Args:
        mixup: The mixup callback.
        cutmix: The CutMix callback.
        share: The probability of mixup.

    Example:
        >>> either = MixupOrCutMix(Mixup(0.2, num_classes=10), CutMix(1.0, num_classes=10))
    """

    cutmix: "CutMix"
    mixup: "Mixup"
    share: float

    changes_weights: ClassVar[bool] = False
    exclusive_group: ClassVar[str | None] = _Mixing.exclusive_group

    def __init__(self, mixup: Mixup, cutmix: CutMix, share: float = 0.5) -> None:
        if not 0 < share < 1:
            raise ConfigurationError(f"MixupOrCutMix(share) must be between 0 and 1 (got {share!r}).")
        self.mixup, self.cutmix, self.share = mixup, cutmix, share

    def on_fit_begin(self, run: Run) -> None:
        self.mixup.on_fit_begin(run)

    def on_micro_batch_begin(self, run: Run) -> None:
        generator = generator_of_batch(run, "MixupOrCutMix")
        chosen = self.mixup if generator.random() < self.share else self.cutmix
        chosen.mix(run, generator)


def _cut(size: int, side: float, generator: np.random.Generator) -> slice:
    """Return the range of a box along one dimension, clipped to the image."""
    length, middle = int(size * side), int(generator.integers(size))
    return slice(max(0, middle - length // 2), min(size, middle + (length + 1) // 2))


def _joined(batch: Any, inputs: Any) -> Any:
    """Return a batch with replaced inputs."""
    if as_mapping(batch) is not None:
        return replaced(batch, inputs)
    return type(batch)([*(inputs if isinstance(inputs, tuple) else [inputs]), batch[-1]])
