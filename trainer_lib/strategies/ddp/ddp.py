"""This file is replication (DDP): each process has the whole model, and gradients are averaged over all."""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.ddp_options import DistributedDataParallelKwargs
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.base import Joined, SingleProcess
from trainer_lib.strategies.ddp.comm_hooks import Travel, averaged, summed, travel_of
from trainer_lib.strategies.ddp.join import Joining, Leftovers
from trainer_lib.strategies.ddp.param_averaging import average, average_gradients
from trainer_lib.strategies.grad_norm import weight_dtype
from trainer_lib.strategies.validate import refuse_what_is_not_whole

# Sums in these types are good enough for counts; others would round them.
_EXACT = (torch.float32, torch.float64)


class Replicate(SingleProcess):
    """`torch.nn.parallel.DistributedDataParallel`, and a small cargo that travels with its first bucket."""

    def __init__(
        self, group: ProcessGroup, device: torch.device, options: DistributedDataParallelKwargs | None = None
    ) -> None:
        super().__init__(group, device, options)
        self._arguments: dict[str, Any] = {} if options is None else options.to_kwargs()
        self._new_travel = travel_of(options)
        self._cargo: Tensor | None = None
        self._joining: Joining | None = None
        self._without_hook: list[DistributedDataParallel] = []

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Wrap the model in DDP; one without anything to train needs none."""
        refuse_what_is_not_whole(model)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        device_ids = None if self.device.type == "cpu" else [self.device.index]
        with warnings.catch_warnings():
            # The option that is to replace it shares buffers at the start all the same.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            wrapped = DistributedDataParallel(model, device_ids=device_ids, **self._arguments)
        travel = self._new_travel()
        if travel is averaged:
            self._without_hook.append(wrapped)
        else:
            wrapped.register_comm_hook(_Route(self, ref(wrapped), travel), _send)
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside DDP."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def evaluated(self, model: nn.Module) -> nn.Module:
        """Return the model inside DDP, with the buffers (running statistics) that DDP's next forward would share."""
        if isinstance(model, DistributedDataParallel) and model._check_sync_bufs_pre_fwd():
            model._sync_buffers()
        return self.unwrap(model)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's `no_sync`; a static graph is learnt from a first backward that is shared."""
        if not isinstance(model, DistributedDataParallel) or _learns_its_graph(model):
            return super().no_sync(model)
        return model.no_sync()

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which the next `backward` reduces, whatever the forward was told."""
        if not isinstance(model, DistributedDataParallel):
            return super().force_sync(model)
        if self._joining is not None:
            raise ConfigurationError(
                "trigger_sync_in_backward cannot work inside join_uneven_inputs: at the forward, processes without "
                "data were told that its backward shares nothing. Run that forward outside of no_sync."
            )
        return _reducing(model)

    def carry(self, values: Sequence[float | Tensor]) -> None:
        """Send `values` along with the first bucket of the next `backward`."""
        # Only now: a loop that never weighs its losses keeps DDP's own reduction, which needs no Python.
        self._register_hooks()
        self._carried = ()
        self._cargo = _packed(values, self.device) if values else None

    def carried(self) -> Sequence[float | Tensor]:
        """Return the averages; by a message of their own if no bucket took them along."""
        if self._cargo is not None:
            cargo, self._cargo = self._cargo, None
            if self._joining is not None:
                raise ConfigurationError(
                    "Inside join_uneven_inputs, weight= travels with the gradients of a model that is named there, and "
                    "this backward shared none. Name the model, and register no communication hook on it yourself."
                )
            self._carried = _unpacked(self.group.all_reduce(cargo) / self.group.size)
        return super().carried()

    def check_apart(self) -> None:
        """Raise if DDP was told how gradients travel, or learns the graph from a backward that is shared."""
        given = [name for name in ("comm_hook", "static_graph") if _is_set(self.options, name)]
        if given:
            raise UnsupportedError(
                f"DistributedDataParallelKwargs({given[0]}=…) is about how DDP sends gradients, and where processes "
                'compute in parts of their own (the batch size is "auto") it does not. Leave one of the two out.'
            )

    def begin_apart(self, models: Sequence[nn.Module]) -> None:
        """Share the buffers, as DDP's forward would."""
        for model in models:
            if isinstance(model, DistributedDataParallel):
                if model._check_sync_bufs_pre_fwd():
                    model._sync_buffers()
                model.require_forward_param_sync = False

    def put_together(self, models: Sequence[nn.Module], values: Sequence[float | Tensor]) -> Sequence[float | Tensor]:
        """Average gradients and values in one message, or a few for large models."""
        replicas = [model for model in models if isinstance(model, DistributedDataParallel)]
        for model in replicas:
            model.require_forward_param_sync = True  # for the next window, and for an evaluation before it
        shared = [p for model in replicas for p in shared_parameters(model)]
        cargo = _packed(values, self.device)
        average_gradients(shared, cargo, self.group)
        return _unpacked(cargo)

    def join(
        self, joinables: Sequence[Any], leftovers: Callable[[], Leftovers] | None
    ) -> AbstractContextManager[Joined]:
        """Return the block of a loop whose data may end early on some processes; see `Joining`."""
        chosen = [joinable for joinable in joinables if isinstance(joinable, Joinable)]
        if self._joining is not None:
            raise ConfigurationError("join_uneven_inputs inside join_uneven_inputs. Name all models in the outer one.")
        for model in chosen:
            _check_can_join(model, leaves_gradients=leftovers is not None)
        return self._joined(chosen, leftovers or dict) if chosen else nullcontext(Joined())

    def stay_local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's `no_sync`."""
        if isinstance(model, DistributedDataParallel) and _learns_its_graph(model):
            raise UnsupportedError(
                "static_graph=True: DDP learns the graph from a first backward that is shared, and LocalSGD shares "
                "none. Leave static_graph out."
            )
        return self.no_sync(model)

    def average_weights(self, model: nn.Module) -> None:
        """Average what is trained, and the running statistics unless DDP was told to leave them alone."""
        tensors = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self._arguments.get("broadcast_buffers", True):
            tensors += [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        average(tensors, self.group)

    def release(self) -> None:
        """Let go of the models."""
        self._without_hook.clear()

    def _register_hooks(self) -> None:
        for model in self._without_hook:
            if not model._comm_hooks:  # else it has one of the user's own
                model.register_comm_hook(_Route(self, ref(model), averaged), _send)
        self._without_hook.clear()

    @contextmanager
    def _joined(self, joinables: Sequence[Joinable], leftovers: Callable[[], Leftovers]) -> Generator[Joined]:
        self._register_hooks()
        self._joining = Joining(self.group, self.device, joinables, leftovers)
        try:
            with self._joining as joining:
                yield joining
        finally:
            self._joining = None

    def _join_in(self, model: nn.Module, bucket: dist.GradBucket, joining: Joining) -> None:
        # What losses weigh goes ahead of each first bucket, also where none was given: processes without data cannot
        # know, and have to send as many messages.
        if bucket.index() == 0:
            weight, self._cargo = self._cargo, None
            self._carried = [joining.total_weight(model, weight)]
        joining.fill(model, bucket)


@dataclass(frozen=True)
class _Route:
    """How the buckets of one model travel; the model is not kept alive by it."""

    strategy: Replicate
    model: Callable[[], nn.Module | None]
    travel: Travel


def _send(route: _Route, bucket: dist.GradBucket) -> Future[Tensor]:
    strategy, model = route.strategy, route.model()
    if strategy._joining is not None and model is not None:
        strategy._join_in(model, bucket, strategy._joining)
    elif strategy._cargo is not None and route.travel is averaged:
        gradients = bucket.buffer()
        if not gradients.is_sparse and gradients.dtype in _EXACT:
            return _averaged_with_cargo(strategy, gradients, strategy._cargo, is_last=bucket.is_last())
    return route.travel(bucket)


def _averaged_with_cargo(strategy: Replicate, gradients: Tensor, cargo: Tensor, is_last: bool) -> Future[Tensor]:
    strategy._cargo = None
    # The first bucket is the small one, so the copy costs less than a second message.
    freight = torch.cat([gradients, cargo.to(gradients)])

    def unload(total: Tensor) -> Tensor:
        average = total.div_(strategy.group.size)
        strategy._carried = _unpacked(average[gradients.numel() :])
        return average[: gradients.numel()]

    if not is_last or not freight.is_cpu:
        return summed(freight).then(lambda future: unload(future.value()[0]))
    # There is nothing to do meanwhile, and having another thread call Python takes longer.
    dist.all_reduce(freight)
    arrived: Future[Tensor] = Future()
    arrived.set_result(unload(freight))
    return arrived


def _packed(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    if device.type == "cpu" and not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float64)
    return torch.stack([_on_device(value, device) for value in values])


def _unpacked(values: Tensor) -> Sequence[float | Tensor]:
    return values.tolist() if values.is_cpu else list(values)  # what is on the host waits for nothing


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    dtype = weight_dtype(device)
    if isinstance(value, Tensor):
        return value.to(device, dtype, non_blocking=True)
    return torch.full((), value, dtype=dtype, device=device)  # written there: nothing waits for a copy


def shared_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients DDP shares."""
    ignored: set[str] = set(getattr(model, "parameters_to_ignore", ()))
    named = model.module.named_parameters()
    return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]


def _is_set(options: Any, name: str) -> bool:
    return options is not None and name in options.to_kwargs()


def _learns_its_graph(model: DistributedDataParallel) -> bool:
    return model.static_graph and not model._static_graph_delay_allreduce_enqueued


def _check_can_join(model: Joinable, leaves_gradients: bool) -> None:
    if not isinstance(model, DistributedDataParallel):
        return
    if _learns_its_graph(model):
        raise UnsupportedError(
            "static_graph=True: DDP learns the graph from a first backward on each process, and one whose data ends "
            "early may have none. Leave static_graph out, or make the first update before join_uneven_inputs."
        )
    if leaves_gradients and any(hook is not _send for hook, _ in model._comm_hooks):
        raise UnsupportedError(
            "This model has a communication hook of its own, through which a process whose data ends within a window "
            "cannot hand over its gradients. Choose one by DistributedDataParallelKwargs(comm_hook=…)."
        )


@contextmanager
def _reducing(model: DistributedDataParallel) -> Generator[None]:
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    # The forward ran without preparing the reducer; an empty list says that all parameters will be used.
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
