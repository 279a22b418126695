"""`ModelStages`: where a model is cut into stages, and how one of them runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, nn

Activations = tuple[Tensor, ...]


class StageEnd(Exception):  # noqa: N818  (no error: it ends the forward of a model at a cut)
    """Carries the activations of a stage out of the model's forward."""

    def __init__(self, activations: Activations) -> None:
        super().__init__("the end of a stage")
        self.activations = activations


class ModelStages(ABC):
    """Lets a forward of a model begin and end at the cuts of a stage.

    Attributes:
        stage: The stage whose forward runs; `None` between forwards.
        received: The activations that the stage got from the one before.
        traces: Whether `prepare_call` has something to do.
    """

    traces: bool = False

    def __init__(self) -> None:
        self.stage: int | None = None
        self.received: Activations = ()
        self._has_ended = False

    @property
    @abstractmethod
    def num_stages(self) -> int:
        """How many stages there are."""

    @abstractmethod
    def remove_others(self, model: nn.Module, held: Sequence[int]) -> None:
        """Remove what only stages that this rank does not hold need."""

    @abstractmethod
    def install(self, model: nn.Module, held: Sequence[int]) -> None:
        """Let the forward of the model run one stage."""

    @abstractmethod
    def parameters_of(self, model: nn.Module, stage: int) -> Iterator[nn.Parameter]:
        """Yield the parameters of a stage of this rank."""

    def prepare_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: B027  (most have nothing to do)
        """Raise on all ranks, before one waits for another, if the model cannot be called with these inputs."""

    def run(self, model: nn.Module, stage: int, received: Activations, args: Any, kwargs: Any) -> Any:
        """Return the outputs of the model on its last stage.

        Raises:
            StageEnd: On the other stages, with the activations.
        """
        self.stage, self.received, self._has_ended = stage, received, False
        try:
            outputs = model(*args, **kwargs)
        finally:
            self.stage, self.received = None, ()
        if self._has_ended:
            raise StageEnd(outputs)
        self._check_end(model, stage)
        return outputs

    def _check_end(self, model: nn.Module, stage: int) -> None:  # noqa: B027  (by default it may)
        """Raise if a forward without the end of a stage may not return on this stage."""

    def _returning(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that returns the activations of its stage, so that hooks of the model see them."""

        @wraps(forward)
        def returning(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except StageEnd as end:
                self._has_ended = True
                return end.activations

        return returning
