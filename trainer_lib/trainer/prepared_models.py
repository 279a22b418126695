"""The models of a trainer, prepared once: placed on the device, distributed and compiled."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator


Models = nn.Module | Mapping[str, nn.Module]


class PreparedModels:
    """The prepared models.

    Attributes:
        named: The prepared models by name; a single one is called "". Empty before `prepare`.
    """

    def __init__(self) -> None:
        self.named: dict[str, nn.Module] = {}

    def prepare(self, models: Models, args: TrainingArguments, accelerator: "Accelerator") -> None:
        """Prepare the models of a trainer."""
        from trainer_lib.trainer.fit.build_accelerator import adapt_model

        named = {"": models} if isinstance(models, nn.Module) else dict(models)
        self.named = {
            name: accelerator.prepare_model(
                adapt_model(model, args, accelerator),
                evaluation_mode=not any(parameter.requires_grad for parameter in model.parameters()),
            )
            for name, model in named.items()
        }

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
