"""The shapes of a task: how batches look, and who computes the loss."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

_VOCABULARY, _WIDTH, _LENGTH = 64, 32, 16  # of the language model


class Shape:
    """Tuples as batches, and torch's `cross_entropy` as the loss."""

    loss_fn: Any = staticmethod(cross_entropy)  # what a trainer is given; `None`: the model computes the loss
    has_tuples = True

    def model(self, perceptron: nn.Module) -> nn.Module:
        """Return the model of this shape."""
        return perceptron

    def dataset(self, inputs: Tensor, labels: Tensor) -> Dataset[Any]:
        """Return the samples."""
        return TensorDataset(inputs, labels)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, as written by hand."""
        inputs, labels = batch
        return self.loss_fn(model(inputs), labels)


class Callable(Shape):
    """Tuples as batches, and a method of the user as the loss."""

    def __init__(self) -> None:
        self.loss_fn = self._own_loss

    def _own_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, labels)


class Dicts(Callable):
    """Dicts as batches, whose inputs the model takes by name, and a method of the user as the loss."""

    has_tuples = False

    def model(self, perceptron: nn.Module) -> nn.Module:
        """Return the model of this shape."""
        return _ByName(perceptron)

    def dataset(self, inputs: Tensor, labels: Tensor) -> Dataset[Any]:
        """Return the samples."""
        return _NamedRows({"inputs": inputs, "labels": labels})

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, as written by hand."""
        return self.loss_fn(model(inputs=batch["inputs"]), batch["labels"])


class ModelLoss(Dicts):
    """Dicts as batches, and a model that returns its loss."""

    loss_fn = None

    def __init__(self) -> None: ...

    def model(self, perceptron: nn.Module) -> nn.Module:
        """Return the model of this shape."""
        return _WithLoss(perceptron)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, as written by hand."""
        return model(**batch)["loss"]


class LanguageModel(ModelLoss):
    """Token batches, and a Llama of transformers, whose loss is divided by `num_items_in_batch`."""

    def model(self, perceptron: nn.Module) -> nn.Module:
        """Return the model of this shape."""
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {"vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "intermediate_size": 2 * _WIDTH}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2))

    def dataset(self, inputs: Tensor, labels: Tensor) -> Dataset[Any]:
        """Return the samples."""
        tokens = (inputs[:, :_LENGTH].abs() * 16).long() % _VOCABULARY
        return _NamedRows({"input_ids": tokens, "labels": tokens})

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, as written by hand."""
        items = (batch["labels"][..., 1:] != -100).sum()
        return model(**batch, num_items_in_batch=items).loss


class _ByName(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


class _WithLoss(_ByName):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.inner(inputs)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class _NamedRows(Dataset[Any]):
    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


TUPLES, CALLABLE, DICTS, MODEL_LOSS, LANGUAGE_MODEL = Shape(), Callable(), Dicts(), ModelLoss(), LanguageModel()
SHAPES: Sequence[Shape] = (TUPLES, CALLABLE, DICTS, MODEL_LOSS, LANGUAGE_MODEL)
