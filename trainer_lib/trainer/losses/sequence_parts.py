"""Training steps on this rank's part of each sequence, for context and sequence parallelism."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainer_lib.context_parallel.batch import BatchCut, BatchPart, first_positions
from trainer_lib.context_parallel.context_parallel import ContextParallel
from trainer_lib.context_parallel.model_inputs import separates_documents, takes_positions
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.modules.unwrapping import without_adapter
from trainer_lib.strategies.base import Surroundings
from trainer_lib.trainer.arguments.value_checks import AUTO
from trainer_lib.trainer.losses.label_shift import probing
from trainer_lib.trainer.losses.loss_result import LossResult, ignored_label
from trainer_lib.trainer.losses.objectives import without_cache
from trainer_lib.trainer.trainer_interface import TrainerInterface

_FEW = 32  # positions that the first batch is checked with, at least
_TOLERANCE = 1e-5
_TOLERANCE_OF_LOW_PRECISION = 2e-2


def sequence_parts(trainer: TrainerInterface) -> "SequenceParts":
    """Return what cuts the batches of a trainer, whose ranks share sequences.

    Raises:
        UnsupportedError: If something else that is asked for needs whole sequences.
    """
    split = trainer.accelerator.sequence_split
    assert isinstance(split, ContextParallel)  # else no ranks share sequences
    if trainer.args.per_device_train_batch_size == AUTO:
        raise UnsupportedError(
            'per_device_train_batch_size="auto" splits batches on a rank that runs out of memory, and with cp_size or '
            "sp_size the others would wait for it. Give a number."
        )
    if not isinstance(trainer.model, nn.Module):
        raise UnsupportedError(
            f"cp_size and sp_size cut the batches of one model, and the trainer has {len(trainer.model)}. Set them to "
            "1, or train the models one by one."
        )
    return SequenceParts(trainer, split)


class SequenceParts:
    """Cuts batches along the sequence, for `training_step`.

    The first batch shows whether the model's loss is the same on parts: a few of its positions are computed whole and
    in parts. That finds attention that does not go over ranks, positions that a model counts itself, layers that mix
    positions otherwise, and labels that it shifts.

    Args:
        trainer: The trainer, whose step it is.
        parallel: How sequences are shared.
    """

    def __init__(self, trainer: TrainerInterface, parallel: ContextParallel) -> None:
        self._trainer, self._loss, self._parallel = trainer, trainer.parts.loss, parallel
        self._label_names = trainer.args.label_names
        self._cut: BatchCut | None = None

    def training_step(self, model: Any, batch: Any) -> LossResult | None:
        """Compute the gradients of this rank's part of a batch, while attention runs over ranks."""
        cut = self._cut or self._checked_cut(model, batch)
        with self._parallel.batch(cut, batch) as part:
            return self._trainer.training_step(model, part)

    def of_window(self, model: Any, batches: Sequence[Any]) -> tuple[Sequence[Any], Surroundings]:
        """Return this rank's parts of the micro-batches of a window, and the contexts to compute them in."""
        parts: list[BatchPart] = []
        for batch in batches:
            cut = self._cut or self._checked_cut(model, batch)
            parts.append(cut.part(batch))
        return [part.batch for part in parts], lambda index: self._parallel.computing(parts[index])

    def _checked_cut(self, model: Any, batch: Any) -> BatchCut:
        bare = self._trainer.unwrapped_model
        positions = max(_FEW, 8 * self._parallel.ranks.layout.multiple)
        short = first_positions(batch, self._label_names, positions)
        cut = self._cut_for(bare, batch, shifts=self._trainer.label_shift(short))
        cut.part(short)  # an error about the batch comes before one about the loss
        if not self._loss.has_own_step:  # whose loss is not known here
            with probing(bare):
                self._compare(self._trainer.accelerator.strategy.evaluation_module(model), short, cut)
        self._cut = cut
        return cut

    def _cut_for(self, bare: nn.Module, batch: Any, shifts: bool) -> BatchCut:
        loss_fn = self._trainer.loss_fn
        if shifts and loss_fn is None and not hasattr(without_adapter(bare), "loss_function"):
            raise ConfigurationError(
                f"{type(bare).__name__} shifts labels itself, which it cannot do on a part of a sequence. Give "
                "Trainer(loss_fn=torch.nn.functional.cross_entropy) with labels that the dataset has shifted already "
                "(the target of position i is token i + 1), or set cp_size and sp_size to 1."
            )
        options = {} if self._loss.is_overridden else without_cache(bare)  # of the Trainer's own calls
        return BatchCut(
            self._parallel.ranks.layout,
            self._label_names,
            ignored_label(loss_fn),
            shifts_labels=shifts and loss_fn is None,
            takes_positions=takes_positions(bare),
            separates_documents=separates_documents(bare, options or batch),
        )

    def _compare(self, model: Any, batch: Any, cut: BatchCut) -> None:
        """Raise if the loss of a batch differs in parts."""
        whole = self._loss.computed(model, batch)
        with self._parallel.batch(cut, batch) as part:
            mine = self._loss.computed(model, part)
        sums = torch.tensor([float(mine.loss), float(mine.weight or 0.0)], dtype=torch.float32)
        loss, weight = self._parallel.ranks.total(sums.to(self._trainer.accelerator.device)).tolist()
        expected = (float(whole.loss), float(whole.weight or 0.0))
        tolerance = _TOLERANCE_OF_LOW_PRECISION if self._is_imprecise() else _TOLERANCE
        if weight != expected[1] or not abs(loss - expected[0]) <= tolerance * max(1.0, abs(expected[0])):
            raise ConfigurationError(_difference(expected, (loss, weight), self._trainer.unwrapped_model))

    def _is_imprecise(self) -> bool:
        """Whether products are computed with fewer bits than single precision has."""
        parameter = next(self._trainer.unwrapped_model.parameters(), None)
        is_single = parameter is None or parameter.dtype in (torch.float32, torch.float64)
        is_whole = torch.get_float32_matmul_precision() == "highest"
        return not (is_single and is_whole and self._trainer.accelerator.mixed_precision == "no")


def _difference(whole: tuple[float, float], parts: tuple[float, float], model: nn.Module) -> str:
    first, second = (f"{loss:.6g} over {weight:g} items" for loss, weight in (whole, parts))
    return (
        f"The loss of {type(model).__name__} changes when its sequences are cut: {first} on the first positions of the "
        f"first batch, and {second} in parts. Context parallelism needs attention by "
        "F.scaled_dot_product_attention (is_causal=True or no mask) or a model of transformers with "
        "attn_implementation='sdpa', positions from position_ids instead of counted in the model, no other layer that "
        "mixes positions, and a loss that is a mean or sum over positions. Change the model, or set cp_size and "
        "sp_size to 1."
    )
