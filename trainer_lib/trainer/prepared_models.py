"""The models of a trainer, prepared once: placed on the device, distributed and compiled."""

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_lib.logging import get_logger
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator


Models = nn.Module | Mapping[str, nn.Module]

_logger = get_logger(__name__)


class PreparedModels:
    """The prepared models.

    Attributes:
        named: The prepared models by name; a single one is called "". Empty before `prepare`.
    """

    def __init__(self) -> None:
        self.named: dict[str, nn.Module] = {}
        self._frozen: list[nn.Parameter] = []

    def prepare(self, models: Models, args: TrainingArguments, accelerator: "Accelerator") -> None:
        """Prepare the models of a trainer."""
        from trainer_lib.trainer.fit.accelerator_setup.build_accelerator import adapt_model

        named = {"": models} if isinstance(models, nn.Module) else dict(models)
        if args.parameter_groups:
            from trainer_lib.trainer.optim.parameter_groups import freeze

            # Before they are prepared: DDP must know which gradients to expect.
            self._frozen = [frozen for model in named.values() for frozen in freeze(model, args.parameter_groups)]
        self.named = {
            name: accelerator.prepare_model(
                adapt_model(model, args, accelerator),
                evaluation_mode=not any(parameter.requires_grad for parameter in model.parameters()),
            )
            for name, model in named.items()
        }
        for model in named.values():
            _expect_reductions(model, accelerator)

    def unfreeze(self) -> None:
        """Let the parameters train that `parameter_groups` froze: the next call freezes those that it names then."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)

    @property
    def are_prepared(self) -> bool:
        """Whether the models are prepared."""
        return bool(self.named)

    @property
    def listed(self) -> list[nn.Module]:
        """The prepared models."""
        return list(self.named.values())

    @property
    def model_or_models(self) -> Models:
        """The prepared model, or the prepared models by name, as the trainer was given them."""
        return self.named[""] if list(self.named) == [""] else self.named


def begin_training(model: nn.Module, bare: nn.Module) -> None:
    """Call `model.train()`, which a model may override, but leave frozen parts in the evaluation mode they are in.

    These are parts that were set to it within a model in training mode, and have no submodules (a BatchNorm, a Dropout)
    or nothing to train; and a model with nothing to train. Other models and parts in evaluation mode come from
    `from_pretrained`, and so does the base of prompt tuning, which PEFT freezes.

    Args:
        model: The prepared model.
        bare: The user's model in it.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.BatchNorm1d(2))
        >>> for part in model:
        ...     _ = part.eval()
        >>> begin_training(model, model)
        >>> [part.training for part in model]
        [True, False]
    """
    frozen = [part for part in _outermost_evaluating(bare) if _is_frozen(part, part is bare)]
    modes = [(module, module.training) for part in frozen for module in part.modules()]
    model.train()
    for module, training in modes:
        module.training = training


def _expect_reductions(model: nn.Module, accelerator: "Accelerator") -> None:
    """Let all ranks make as many forwards if those of a model communicate, and warn of its loss."""
    if accelerator.group.size == 1 or "transformers" not in sys.modules:
        return
    from trainer_lib.trainer.losses.model_labels import reduces_counts

    if reduces_counts(model):
        accelerator.strategy.needs_lockstep = True
        _logger.warning_once(
            f"{type(model).__name__} divides its loss by a number of boxes or masks that transformers reduces over the "
            "ranks, so losses depend on the number of ranks, and an update with accumulation differs from that of one "
            "big batch. Most models do so only because transformers.TrainingArguments was made, which sets up "
            "Accelerate: give trainer_lib.TrainingArguments alone."
        )


def _outermost_evaluating(module: nn.Module) -> Iterator[nn.Module]:
    if not module.training:
        yield module
        return
    base: Any = module.get_base_model() if hasattr(module, "get_base_model") else None  # type: ignore[operator]  # of PEFT
    loaded = set() if base is None or base.training else set(base.modules())
    for part in module.children():
        if part not in loaded:
            yield from _outermost_evaluating(part)


def _is_frozen(part: nn.Module, is_whole: bool) -> bool:
    is_trained = any(parameter.requires_grad for parameter in part.parameters())
    return not is_trained or not (is_whole or any(True for _ in part.children()))
