"""Activation offload: what blocks keep for the backward waits in host memory, and comes back before it is needed.

torch.compile skips this file (`modules/compilation.py`): its graphs end here, and begin again in the block.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import StateError

# Copies of smaller tensors take longer to start than to make.
_SMALLEST = 16 * 1024
# How many blocks may wait for their copies, with their activations still on the device, while the forward continues.
_BLOCKS_IN_FLIGHT = 1
# What autograd records for views and for copies in another type, such as the 16-bit weights of autocast.
_VIEWS_AND_CASTS = frozenset(
    f"{name}Backward0"
    for name in ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")
)


class Transfers(Protocol):
    """Moves tensors between a device and host memory."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor in host memory, perhaps before its values are there."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device, perhaps before its values are there."""
        ...

    def end_block(self) -> None:
        """Let what was given to `to_host` be freed once it is copied."""

    def mark(self) -> Any:
        """Return what `wait` waits for: all copies up to now."""

    def wait(self, mark: Any) -> None:
        """Let the device wait for copies."""


class HostMemory:
    """The transfers of a model on the CPU: its activations are in host memory already."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def end_block(self) -> None:
        """Do nothing."""

    def mark(self) -> None:
        """Return `None`."""

    def wait(self, mark: Any) -> None:
        """Do nothing."""


class PinnedCopies:
    """Copies to pinned host memory and back, on a stream of their own, which overlap with the computation.

    Args:
        device: The accelerator device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._sources: list[tuple[Tensor, int]] = []  # of the block that runs, and their versions
        self._in_flight: deque[tuple[Any, list[tuple[Tensor, int]]]] = deque()

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start a copy to pinned memory."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            host.copy_(tensor, non_blocking=True)
        # Its memory must not be used again, or changed, before it is copied.
        self._sources.append((tensor, tensor._version))  # pyright: ignore[reportPrivateUsage]
        return host

    def to_device(self, tensor: Tensor) -> Tensor:
        """Start a copy to memory that belongs to the stream that computes."""
        self._free(0)
        copy = torch.empty_like(tensor, device=self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            copy.copy_(tensor, non_blocking=True)
        copy.record_stream(self._stream)  # in case it is freed unused
        return copy

    def end_block(self) -> None:
        """Free the activations of the block before, once the device has copied them."""
        self._in_flight.append((self._stream.record_event(), self._sources))
        self._sources = []
        self._free(_BLOCKS_IN_FLIGHT)

    def mark(self) -> Any:
        """Return an event."""
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Let the stream that computes wait for an event."""
        torch.accelerator.current_stream(self._device).wait_event(mark)

    def _free(self, but: int) -> None:
        while len(self._in_flight) > but:
            event, sources = self._in_flight.popleft()
            for tensor, version in sources:
                _check_version(tensor, version)
            self.wait(event)  # so what computes next may use the memory


class ActivationOffload:
    """Keeps what the blocks of a model save for the backward in host memory.

    While the backward of a block runs, the activations of the block before it are copied back. Weights, and views and
    16-bit copies of them, stay where they are.

    Args:
        transfers: Moves tensors; by default, what the device of a block needs.
        smallest: The size in bytes from which a tensor is moved.
    """

    def __init__(self, transfers: Transfers | None = None, smallest: int | None = None) -> None:
        self.smallest: int = _SMALLEST if smallest is None else smallest
        self._transfers = transfers
        self._latest: Callable[[], BlockActivations | None] = lambda: None

    def around_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a block that moves what it saves."""

        @functools.wraps(forward)
        def moving(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.run(module, forward, module, *args, **kwargs)

        return moving

    def around_checkpoint(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that recomputes a block, and moves what the recomputation starts from."""
        return functools.partial(self.run, None, checkpoint)

    def run(self, block: nn.Module | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and move what it saves for the backward, except the weights of the block."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        activations = BlockActivations(self, block, self._latest)
        self._latest = weakref.ref(activations)
        try:
            with torch.autograd.graph.saved_tensors_hooks(activations.pack, activations.unpack):
                return function(*args, **kwargs)
        finally:
            activations.end_block()

    def transfers_of(self, device: torch.device) -> Transfers:
        """Return what moves tensors of a device."""
        if self._transfers is None:
            self._transfers = HostMemory() if device.type == "cpu" else PinnedCopies(device)
        return self._transfers


class BlockActivations:
    """What one run of a block saved for the backward.

    Args:
        offload: Moves the tensors.
        block: The block, whose weights stay.
        before: Returns the activations of the block that ran before, unless they are gone.
    """

    def __init__(
        self, offload: ActivationOffload, block: nn.Module | None, before: "Callable[[], BlockActivations | None]"
    ) -> None:
        self._offload, self._before = offload, before
        tensors = () if block is None else (*block.parameters(), *block.buffers())
        self._weights = {_storage(tensor) for tensor in tensors}
        self._saved: dict[Any, SavedActivation] = {}  # by where its values are, so that each is copied once
        self._all: list[weakref.ref[SavedActivation]] = []
        self._transfers: Transfers = HostMemory()
        self._mark: Any = None
        self._is_fetched = self._is_here = False

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps instead of a tensor."""
        local = _local(tensor)
        if not self._moves(tensor, local):
            return tensor.detach()  # with its history, an output would keep its own graph alive
        key = (_storage(tensor), local.storage_offset(), local.shape, local.stride(), local.dtype)
        saved = self._saved.get(key)
        if saved is None:
            self._transfers = self._offload.transfers_of(local.device)
            saved = self._saved[key] = SavedActivation(tensor, local, self._transfers)
            self._all.append(weakref.ref(saved))
        return saved

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor on its device."""
        if not isinstance(packed, SavedActivation):
            return packed
        if not self._is_here:
            self._is_here = True
            self.fetch()
            self._transfers.wait(self._mark)
            before = self._before()
            if before is not None:
                before.fetch()
        if not packed.is_here:  # saved after a backward that the forward of the block runs itself
            packed.fetch(self._transfers)
            self._transfers.wait(self._transfers.mark())
        return packed.restored()

    def fetch(self) -> None:
        """Start to copy what is still needed back to the device."""
        if self._is_fetched or not self._all:
            return
        self._is_fetched = True
        for reference in self._all:
            saved = reference()
            if saved is not None:
                saved.fetch(self._transfers)
        self._mark = self._transfers.mark()

    def end_block(self) -> None:
        """The block has run: its activations may leave the device."""
        for saved in self._saved.values():
            saved.leave()
        self._saved.clear()
        self._transfers.end_block()

    def _moves(self, tensor: Tensor, local: Tensor) -> bool:
        if type(local) not in (Tensor, nn.Parameter) or local.layout is not torch.strided or local.is_meta:
            return False
        storage = local.untyped_storage()
        if not self._offload.smallest <= local.nbytes <= storage.nbytes():  # expanded ones take more than they are
            return False
        return _storage(tensor) not in self._weights and not _is_of_weight(tensor)


class SavedActivation:
    """A tensor that was saved for the backward.

    Args:
        tensor: The tensor; distributed, if tensor parallelism splits it.
        local: Its values on this rank.
        transfers: Moves it.
    """

    def __init__(self, tensor: Tensor, local: Tensor, transfers: Transfers) -> None:
        self._rebuild = _rebuilt(tensor, local)
        self._source: Tensor | None = local.detach()
        self._version = local._version  # pyright: ignore[reportPrivateUsage] - autograd checks it without hooks
        self._host = transfers.to_host(self._source)
        self._here: Tensor | None = None
        self._stays = self._host is self._source

    @property
    def is_here(self) -> bool:
        """Whether it is on the device, or on its way."""
        return self._here is not None

    def leave(self) -> None:
        """Let the device's memory be freed."""
        self._check()
        if not self._stays:
            self._source = None

    def fetch(self, transfers: Transfers) -> None:
        """Start to copy it back."""
        self._here = transfers.to_device(self._host)

    def restored(self) -> Tensor:
        """Return the tensor on its device."""
        self._check()
        assert self._here is not None
        return self._rebuild(self._here)

    def _check(self) -> None:
        if self._source is not None:
            _check_version(self._source, self._version)


def _check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:  # pyright: ignore[reportPrivateUsage] - autograd checks it without hooks
        raise StateError(
            f"A tensor of shape {list(tensor.shape)} that is needed for the backward was changed in place. Change a "
            "copy instead, for example x = x + 1 instead of x += 1."
        )


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _storage(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _rebuilt(tensor: Tensor, local: Tensor) -> Callable[[Tensor], Tensor]:
    if tensor is local:
        return lambda values: values
    from torch.distributed.tensor import DTensor

    distributed: Any = tensor
    return functools.partial(
        DTensor.from_local,
        device_mesh=distributed.device_mesh,
        placements=distributed.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _is_of_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a view or a copy in another type of a weight that is trained."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS_AND_CASTS:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)
