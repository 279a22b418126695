"""`XLA`: each rank holds the whole model on a device of torch_xla, such as a TPU, and gradients are averaged."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainer_lib.foundation import xla
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.foundation.tensors.pytree import map_tensors
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.strategies.base import JoinOutcome, Leftovers, Strategy
from trainer_lib.strategies.clip_grad_norm import weight_dtype
from trainer_lib.strategies.ddp.param_averaging import average, trained_parameters
from trainer_lib.strategies.fsdp.replicated_params import ReplicatedParameters
from trainer_lib.strategies.validate import check_has_whole_weights


class XLA(Strategy):
    """Data parallelism over torch_xla, which records operations and computes them at the end of each part of a step.

    These are the ends: the backward of a micro-batch that does not update, the all-reduce of the gradients, the
    optimizer's step, and the forward of an evaluation. It was never run on a TPU.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._gradients: WeakKeyDictionary[nn.Module, ReplicatedParameters] = WeakKeyDictionary()
        self._forward_hooks: list[RemovableHandle] = []
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._values: Sequence[float | Tensor] = ()

    # -- the model -----------------------------------------------------------------------------------------------

    def place(self, model: nn.Module) -> nn.Module:
        """Move the model to this rank's device; its parameters stay the same objects, for optimizers and ties."""
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return super().place(model)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Start from rank 0's weights and buffers, and average gradients from now on."""
        check_has_whole_weights(model)
        for tensor in (*model.parameters(), *model.buffers()):
            self.group.broadcast(tensor)
        if not evaluation_mode:
            self._gradients[model] = gradients = ReplicatedParameters(model.parameters(), self.group)
            self._forward_hooks.append(model.register_forward_hook(_AfterForward(gradients)))
        return model

    def rebind_parameters(self, optimizer: Optimizer) -> None:
        """End a step after each update."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            optimizer.register_step_post_hook(_end_step)

    def release(self) -> None:
        """Release the models and pending values."""
        super().release()
        for gradients in self._gradients.values():
            gradients.release()
        for hook in self._forward_hooks:
            hook.remove()
        self._gradients.clear()
        self._forward_hooks.clear()
        self._values = ()

    # -- gradients -----------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which a backward does not average, and that ends with what it recorded."""
        return self._averaging(model, False)

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which a backward averages."""
        return self._averaging(model, True)

    def send_with_gradients(self, values: Sequence[float | Tensor]) -> None:
        """Keep the values until the backward has averaged the gradients."""
        self._values = values

    def received_averages(self) -> Sequence[float | Tensor]:
        """Average the values over the ranks."""
        values, self._values = self._values, ()
        if not values:
            return values
        dtype = weight_dtype(self.device)
        stacked = torch.stack([torch.as_tensor(value, dtype=dtype, device=self.device) for value in values])
        return list(self.group.all_reduce(stacked) / self.group.size)

    def join(
        self, joinables: Sequence[Any], leftovers: Callable[[], Leftovers] | None
    ) -> AbstractContextManager[JoinOutcome]:
        """Raise: ranks run the same graphs, so a rank without data cannot stop."""
        raise UnsupportedError(
            "join_uneven_inputs does not work on devices of torch_xla: all ranks run the same collectives. Read "
            "equally many batches on all ranks: leave even_batches on, or give the loader drop_last=True."
        )

    def stay_local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which each rank trains its own model."""
        return self.no_sync(model)

    def average_weights(self, model: nn.Module) -> None:
        """Average trained parameters and running statistics."""
        tensors = trained_parameters(model, self._optimizers).values()
        average([*tensors, *(buffer for buffer in model.buffers() if buffer.is_floating_point())], self.group)

    # -- states --------------------------------------------------------------------------------------------------

    def model_state(self, model: nn.Module, *, whole: bool = True) -> dict[str, Any]:
        """Return the model's tensors on the CPU, where files are written from."""
        state = super().model_state(model, whole=whole)
        held = self.bare(model).state_dict(keep_vars=True)
        first: dict[int, str] = {}
        same = {canonical_name(name): first.setdefault(id(value), canonical_name(name)) for name, value in held.items()}
        copies = self._on_cpu({name: value for name, value in state.items() if same.get(name, name) == name})
        return {name: copies[same.get(name, name)] for name in state}  # a tied weight is one tensor in files too

    def optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, whole: bool = True
    ) -> dict[str, Any]:
        """Return the optimizer's state on the CPU."""
        return self._on_cpu(super().optimizer_state(optimizer, models, whole=whole))

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Load a state that `optimizer_state` returned."""
        super().load_optimizer_state(optimizer, models, state)
        xla.sync()

    # ------------------------------------------------------------------------------------------------------------

    def _on_cpu(self, state: dict[str, Any]) -> dict[str, Any]:
        xla.sync()
        return map_tensors(lambda tensor: tensor.detach().cpu(), state)

    @contextmanager
    def _averaging(self, model: nn.Module, averages: bool) -> Generator[None]:
        gradients = self._gradients.get(model)
        if gradients is None:
            yield
            return
        before, gradients.synchronizes = gradients.synchronizes, averages
        try:
            yield
        finally:
            gradients.synchronizes = before
            xla.sync()


class _AfterForward:
    """Watches the outputs of a forward for their backward, or ends the recording where none follows."""

    def __init__(self, gradients: ReplicatedParameters) -> None:
        self._gradients = gradients

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        del module, inputs
        if torch.is_grad_enabled():
            self._gradients.watch(outputs)
        else:
            xla.sync()


def _end_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del optimizer, args, kwargs
    xla.sync()
