"""`DDP`: each rank holds the whole model, and gradients are averaged over the ranks."""

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer_lib.foundation.compiler_import import compiler_defaults
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.base import JoinOutcome, Leftovers, Strategy
from trainer_lib.strategies.clip_grad_norm import weight_dtype
from trainer_lib.strategies.ddp.bucket_message import EXACT, DeviceMessage, HostMessage, Values
from trainer_lib.strategies.ddp.comm_hooks import CommHook, averaged, new_hook
from trainer_lib.strategies.ddp.join import Joining
from trainer_lib.strategies.ddp.param_averaging import average, average_gradients, trained_parameters
from trainer_lib.strategies.single_device import NO_CONTEXT
from trainer_lib.strategies.validate import check_has_whole_weights

_SHOWN = 5  # parameters without a gradient


class DDP(Strategy):
    """`torch.nn.parallel.DistributedDataParallel`, with a few extra values appended to its first bucket."""

    def __init__(
        self, group: ProcessGroup, device: torch.device, options: DistributedDataParallelKwargs | None = None
    ) -> None:
        super().__init__(group, device, options)
        self.options: DistributedDataParallelKwargs | None = options
        self._extra_values: Values | None = None
        self._host_message: HostMessage | None = None
        self._sent: HostMessage | DeviceMessage | None = None  # the message that took the values along
        self._joining: Joining | None = None
        self._without_hook: list[DistributedDataParallel] = []
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._wrapped: WeakSet[DistributedDataParallel] = WeakSet()

    def rebind_parameters(self, optimizer: Optimizer) -> None:
        """Remember an optimizer: `average_weights` averages what it holds."""
        self._optimizers.add(optimizer)

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Wrap the model in DDP, unless it has nothing to train."""
        check_has_whole_weights(model)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        device_ids = None if self.device.type == "cpu" else [self.device.index]
        arguments = {} if self.options is None else self.options.to_kwargs()
        with warnings.catch_warnings(), compiler_defaults():
            # Its announced replacement also broadcasts buffers at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            wrapped = DistributedDataParallel(model, device_ids=device_ids, **arguments)
        self._wrapped.add(wrapped)
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        if frozen:
            wrapped.register_forward_pre_hook(partial(_check_frozen, frozen))
        hook = new_hook(self.options)
        if hook is averaged:
            self._without_hook.append(wrapped)
        else:
            wrapped.register_comm_hook(_HookState(self, ref(wrapped), hook), _reduce_bucket)
        return wrapped

    def set_ddp_options(self, options: DistributedDataParallelKwargs | None) -> None:
        """Wrap the models that come next with these options."""
        self.options = options

    @contextmanager
    def weights_may_freeze(self) -> Generator[None]:
        """Return the context in which models are wrapped so that DDP does not wait for gradients of frozen weights.

        DDP then searches for them in each backward. Options that were given stay as they are.
        """
        options = self.options
        if options is None:
            self.options = DistributedDataParallelKwargs(find_unused_parameters=True)
        try:
            yield
        finally:
            self.options = options

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside DDP."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def evaluation_module(self, model: nn.Module) -> nn.Module:
        """Return the model inside DDP, after broadcasting buffers (running statistics) as DDP's next forward would."""
        if isinstance(model, DistributedDataParallel):
            _broadcast_buffers(model)
        return self.unwrap(model)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's `no_sync`; a static graph needs a first backward that is reduced, so until then do nothing."""
        if not isinstance(model, DistributedDataParallel) or _learns_its_graph(model):
            return NO_CONTEXT
        return model.no_sync()

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which the next `backward` reduces, even if its forward ran in `no_sync`."""
        if not isinstance(model, DistributedDataParallel):
            return NO_CONTEXT
        if self._joining is not None:
            raise ConfigurationError(
                "trigger_sync_in_backward does not work inside join_uneven_inputs: the forward in no_sync announced "
                "to ranks without data that its backward reduces nothing. Run that forward outside of no_sync."
            )
        return _reducing(model)

    def why_gradients_are_late(self) -> str:
        """Return that DDP reduces buckets, which stay in memory."""
        return (
            "DDP reduces gradients in buckets that stay in memory, so nothing would be freed. Shard the model instead "
            "(fsdp=True, or an fsdp_plugin)"
        )

    def send_with_gradients(self, values: Sequence[float | Tensor]) -> None:
        """Append `values` to the first bucket of the next `backward`."""
        # Hooks are registered only now: a loop without weighted losses keeps DDP's own reduction, without Python.
        if self._without_hook:
            self._register_hooks()
        self._averages, self._sent, self._extra_values = (), None, None
        if not values:  # after an error: the message may still be on its way
            self._host_message = None
        else:
            self._extra_values = values if self.device.type == "cpu" else _packed(values, self.device)

    def received_averages(self) -> Sequence[float | Tensor]:
        """Return the averages, after an all-reduce if no bucket took the values along."""
        if self._sent is not None:
            self._averages, self._sent = self._sent.values(), None
        elif self._extra_values is not None:
            values, self._extra_values = _packed(self._extra_values, self.device), None
            if self._joining is not None:
                raise ConfigurationError(
                    "backward(loss, weight=…) inside join_uneven_inputs reduced no gradients of a joined model, with "
                    "which the weight is sent. Name the model in join_uneven_inputs, and register no communication "
                    "hook on it yourself."
                )
            self._check_reduced()
            self._averages = _unpacked(self.group.all_reduce(values) / self.group.size)
        return super().received_averages()

    def _check_reduced(self) -> None:
        """Raise if a backward left out parameters: other ranks may wait where the gradients of all are reduced."""
        for model in self._wrapped:
            try:
                model._check_reducer_finalized()  # pyright: ignore[reportPrivateUsage] - the only way to ask
            except RuntimeError as error:
                raise unused_parameters_error(model, self.group.rank) from error

    def reduce_bucket(self, bucket: dist.GradBucket, model: nn.Module | None, hook: CommHook) -> Future[Tensor]:
        """Reduce a bucket of gradients in `backward`, the first one together with the values to send."""
        if self._joining is not None and model is not None:
            self._prepare_joined_bucket(model, bucket, self._joining)
        elif self._extra_values is not None and hook is averaged:
            gradients = bucket.buffer()
            if not gradients.is_sparse and gradients.dtype in EXACT:
                return self._averaged_with_values(gradients, self._extra_values, bucket.is_last())
        return hook(bucket)

    def check_local_backwards(self) -> None:
        """Raise if options set how DDP reduces gradients, or need a first backward that is reduced."""
        default = DistributedDataParallelKwargs()
        options = self.options or default
        names = ("comm_hook", "static_graph")
        conflicts = [name for name in names if getattr(options, name) != getattr(default, name)]
        if conflicts:
            raise UnsupportedError(
                f"DistributedDataParallelKwargs({conflicts[0]}=…) sets how DDP reduces gradients, and with the batch "
                'size "auto" DDP does not reduce them. Leave one of the two out.'
            )

    def begin_local_backwards(self, models: Sequence[nn.Module]) -> None:
        """Broadcast the buffers, as DDP's forward would."""
        for model in models:
            if isinstance(model, DistributedDataParallel):
                _broadcast_buffers(model)
                model.require_forward_param_sync = False

    def end_local_backwards(
        self, models: Sequence[nn.Module], values: Sequence[float | Tensor]
    ) -> Sequence[float | Tensor]:
        """Average gradients and values in one all-reduce, or in a few for large models."""
        replicas = [model for model in models if isinstance(model, DistributedDataParallel)]
        for model in replicas:
            model.require_forward_param_sync = True  # for the next window, and for an evaluation before it
        reduced = [p for model in replicas for p in reduced_parameters(model)]
        extra_values = _packed(values, self.device)
        average_gradients(reduced, extra_values, self.group)
        return _unpacked(extra_values)

    def join(
        self, joinables: Sequence[Any], leftovers: Callable[[], Leftovers] | None
    ) -> AbstractContextManager[JoinOutcome]:
        """Return the context of a loop in which some ranks may run out of data early; see `Joining`."""
        chosen = [joinable for joinable in joinables if isinstance(joinable, Joinable)]
        if self._joining is not None:
            raise ConfigurationError(
                "join_uneven_inputs was called inside join_uneven_inputs. Name all models in the outer call."
            )
        for model in chosen:
            _check_can_join(model, leaves_gradients=leftovers is not None)
        return self._joined(chosen, leftovers or dict) if chosen else nullcontext(JoinOutcome())

    def stay_local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's `no_sync`, in which the first forward broadcasts no buffers either."""
        if isinstance(model, DistributedDataParallel) and _learns_its_graph(model):
            raise UnsupportedError(
                "static_graph=True does not work with LocalSGD: DDP learns the graph from a first backward that is "
                "reduced, and LocalSGD reduces none. Leave static_graph out."
            )
        return self._without_messages(model)

    @contextmanager
    def _without_messages(self, model: nn.Module) -> Generator[None]:
        with self.no_sync(model):
            # The first forward would broadcast the running statistics, which a resume within a round has restored.
            if isinstance(model, DistributedDataParallel):
                model.require_forward_param_sync = False
            yield

    def average_weights(self, model: nn.Module) -> None:
        """Average trained parameters, and running statistics unless `broadcast_buffers` is off."""
        tensors: list[Tensor] = [*trained_parameters(model, self._optimizers).values()]
        if self.options is None or self.options.broadcast_buffers:
            tensors += [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        average(tensors, self.group)

    def release(self) -> None:
        """Release the models."""
        self._without_hook.clear()
        self._host_message = None

    def _register_hooks(self) -> None:
        for model in self._without_hook:
            if not _hooks(model):  # else the user registered a hook
                model.register_comm_hook(_HookState(self, ref(model), averaged), _reduce_bucket)
        self._without_hook.clear()

    @contextmanager
    def _joined(self, joinables: Sequence[Joinable], leftovers: Callable[[], Leftovers]) -> Generator[JoinOutcome]:
        self._register_hooks()
        self._joining = Joining(self.group, self.device, joinables, leftovers)
        try:
            with self._joining as joining:
                yield joining
        finally:
            self._joining = None

    def _prepare_joined_bucket(self, model: nn.Module, bucket: dist.GradBucket, joining: Joining) -> None:
        # The loss weight is reduced before each first bucket, even if the loss has none: ranks without data cannot
        # know whether it has, and must run the same collectives.
        if bucket.index() == 0:
            values, self._extra_values = self._extra_values, None
            weight = None if values is None else _packed(values, self.device)
            self._averages = [joining.total_weight(model, weight)]
        joining.fill(model, bucket)

    def _averaged_with_values(self, gradients: Tensor, values: Values, is_last: bool) -> Future[Tensor]:
        # The first bucket is small, so the copy costs less than a second all-reduce.
        self._extra_values = None
        if isinstance(values, Tensor):
            self._sent = message = DeviceMessage(self.group.size)
            return message.reduce(gradients, values)
        message = self._host_message
        if message is None or not message.fits(gradients, values):
            message = self._host_message = HostMessage(gradients, len(values), self.group.size)
        self._sent = message
        return message.reduce(gradients, values, is_last)


@frozen_dataclass(eq=False)
class _HookState:
    """The state of one model's communication hook; holds the model weakly."""

    strategy: DDP
    model: Callable[[], nn.Module | None]
    hook: CommHook


def _reduce_bucket(state: _HookState, bucket: dist.GradBucket) -> Future[Tensor]:
    return state.strategy.reduce_bucket(bucket, state.model(), state.hook)


# DDP has no public names for the next three.


def _broadcast_buffers(model: DistributedDataParallel) -> None:
    if model._check_sync_bufs_pre_fwd():  # pyright: ignore[reportPrivateUsage]
        model._sync_buffers()  # pyright: ignore[reportPrivateUsage]


def _hooks(model: DistributedDataParallel) -> list[tuple[Any, Any]]:
    return model._comm_hooks  # pyright: ignore[reportPrivateUsage]


def _learns_its_graph(model: DistributedDataParallel) -> bool:
    return model.static_graph and not model._static_graph_delay_allreduce_enqueued  # pyright: ignore[reportPrivateUsage]


def _packed(values: Values, device: torch.device) -> Tensor:
    if isinstance(values, Tensor):
        return values
    if device.type == "cpu" and not [value for value in values if isinstance(value, Tensor)]:
        return torch.tensor(values, dtype=torch.float64)
    return torch.stack([_on_device(value, device) for value in values])


def _unpacked(values: Tensor) -> Sequence[float | Tensor]:
    return values.tolist() if values.is_cpu else list(values)  # on a device, .tolist() would wait for it


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    dtype = weight_dtype(device)
    if isinstance(value, Tensor):
        return value.to(device, dtype, non_blocking=True)
    return torch.full((), value, dtype=dtype, device=device)  # filled on the device, without a copy to wait for


def reduced_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients DDP reduces."""
    ignored: set[str] = set(getattr(model, "parameters_to_ignore", ()))
    named = model.module.named_parameters()
    return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]


def unused_parameters_error(model: DistributedDataParallel, rank: int) -> ConfigurationError:
    """Return an error that names the parameters without a gradient on a rank."""
    trained = {name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    count = len(unused) or "Some"  # those had gradients in an earlier micro-batch
    names = f": {', '.join(unused[:_SHOWN])}{', …' if len(unused) > _SHOWN else ''}" if unused else ""
    return ConfigurationError(
        f"{count} of the {len(trained)} parameters of {type(model.module).__name__} got no gradient on rank {rank}"
        f"{names}. DDP waits for the gradients of all parameters. Freeze those that the loss does not depend on "
        "(requires_grad_(False)). If they change from batch to batch, as with layers that are dropped at random "
        "(layerdrop), give TrainingArguments(ddp=DistributedDataParallelKwargs(find_unused_parameters=True)), or the "
        "handler to Accelerator(kwargs_handlers=[…])."
    )


def _check_frozen(frozen: Mapping[str, nn.Parameter], model: DistributedDataParallel, inputs: Any) -> None:
    """Raise if parameters train that were frozen when the model was wrapped; DDP would not reduce their gradients."""
    del inputs
    if not (model.require_backward_grad_sync and torch.is_grad_enabled()):
        return
    trained = [name for name, parameter in frozen.items() if parameter.requires_grad]
    if trained:
        raise UnsupportedError(
            f"{trained[0]} was frozen when {type(model.module).__name__} was prepared, and is trained now"
            f"{f' (and {len(trained) - 1} more)' if len(trained) > 1 else ''}. DDP does not average its gradients, so "
            "the ranks would train different models. Freeze it after prepare instead, with "
            "DistributedDataParallelKwargs(find_unused_parameters=True); with a Trainer use Freeze, GradualUnfreezing "
            "or a callback of your own with freezes_weights = True."
        )


def _check_can_join(model: Joinable, leaves_gradients: bool) -> None:
    if not isinstance(model, DistributedDataParallel):
        return
    if _learns_its_graph(model):
        raise UnsupportedError(
            "static_graph=True does not work with join_uneven_inputs before the first update: DDP learns the graph "
            "from a first backward on each rank, and a rank whose data ends early may have none. Leave static_graph "
            "out, or make the first update before join_uneven_inputs."
        )
    if leaves_gradients and any(hook is not _reduce_bucket for hook, _ in _hooks(model)):
        raise UnsupportedError(
            "This model has a communication hook of your own, with which a rank whose data ends within an accumulation "
            "window cannot contribute its gradients. Choose a hook by DistributedDataParallelKwargs(comm_hook=…)."
        )


@contextmanager
def _reducing(model: DistributedDataParallel) -> Generator[None]:
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    # The forward did not prepare the reducer; an empty list means that the backward uses all parameters.
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
