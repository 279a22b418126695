"""Each mesh on plain torch, as its documentation and torchtitan would write it."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.parallelism.task import MAX_NORM, Mesh, Shape, batch, llama, optimizer_of


def by_hand(mesh: Mesh, shape: Shape) -> Callable[[], Tensor]:
    """Return the step of a mesh: it trains once, and returns the loss."""
    return _STEPS[mesh.name](shape)


def _tensor_parallel(shape: Shape) -> Callable[[], Tensor]:
    model = llama(shape)
    _split(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return _step_of(model, batch(shape))


def _sharded_and_split(shape: Shape) -> Callable[[], Tensor]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = llama(shape)
    _split(model, mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _step_of(model, batch(shape, mesh["dp"].get_local_rank()))


def _split(model: Any, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.model.layers)):
        layer = f"model.layers.{number}."
        plan |= {f"{layer}self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{layer}mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{layer}self_attn.o_proj": RowwiseParallel(), f"{layer}mlp.down_proj": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def _step_of(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    parameters = list(model.parameters())
    optimizer = optimizer_of(parameters)

    def step() -> Tensor:
        loss = model(**inputs).loss
        loss.backward()
        clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def clip(parameters: Iterable[Any]) -> Tensor:
    """Clip gradients of several layouts, which `clip_grad_norm_` refuses, to one norm."""
    groups: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            spec = getattr(parameter.grad, "_spec", None)
            groups.setdefault(None if spec is None else (spec.mesh, spec.placements), []).append(parameter)
    norms: list[Any] = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in groups.values()]
    norm = torch.stack([getattr(value, "full_tensor", lambda value=value: value)() for value in norms]).norm()
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, MAX_NORM, norm)
    return norm


# -- sequences ---------------------------------------------------------------------------------------------------------


class _Exchanged(torch.autograd.Function):
    """Sequences in parts for whole heads, or the other way round."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, split: int, joined: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.dims = joined, split
        sent = torch.stack(value.chunk(2, split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchanged.apply(gradient, *ctx.dims), None, None


def _context_parallel(shape: Shape) -> Callable[[], Tensor]:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention  # pyright: ignore[reportPrivateUsage]

    _teach_cpu_attention(_attention)
    _attention.set_rotate_method("allgather")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def cut(buffers: list[Tensor]) -> Any:
        return context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers))

    return _step_on_parts(
        shape, cut, lambda query, key, value: F.scaled_dot_product_attention(query, key, value, is_causal=True)
    )


def _sequence_parallel(shape: Shape) -> Callable[[], Tensor]:
    rank = dist.get_rank()

    @contextmanager
    def cut(buffers: list[Tensor]) -> Generator[None]:
        whole = [buffer.clone() for buffer in buffers]
        for buffer in buffers:
            buffer.set_(buffer.chunk(2, 1)[rank].clone())  # pyright: ignore[reportArgumentType]
        yield
        for buffer, before in zip(buffers, whole, strict=True):
            buffer.set_(before)  # pyright: ignore[reportArgumentType]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (_Exchanged.apply(part, 1, 2) for part in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return _Exchanged.apply(out, 2, 1)

    return _step_on_parts(shape, cut, attend)


def _step_on_parts(
    shape: Shape, cut: Callable[[list[Tensor]], Any], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[[], Tensor]:
    """Return a step on parts of the sequences of a batch; gradients are averaged by DDP."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        del module, mask, options
        return attend(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_ATTENTION, attention)
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)
    bare: Any = llama(shape)
    bare.set_attn_implementation(_ATTENTION)
    model = nn.parallel.DistributedDataParallel(bare)
    parameters = list(model.parameters())
    optimizer = optimizer_of(parameters)
    inputs = batch(shape)

    def step() -> Tensor:
        labels = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        positions = torch.arange(shape.length).repeat(shape.rows, 1)
        tokens = inputs["input_ids"].clone()
        with cut([tokens, labels, positions]):
            logits = model(input_ids=tokens, position_ids=positions).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss * (2 / (shape.rows * (shape.length - 1)))
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _teach_cpu_attention(module: Any) -> None:
    """Let torch's ring attention run torch's kernel for CPUs, which it does not know."""
    from torch.distributed.tensor import DTensor

    aten: Any = torch.ops.aten
    forward, backward = (
        aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward
    )  # fmt: skip

    def run_forward(op: Any, args: Any, kwargs: Any) -> Any:
        query, key, value = (part.to_local() for part in args[:3])
        mesh, placements = args[0].device_mesh, args[0].placements
        parts = module._templated_ring_attention(
            mesh.get_group(), 2, forward, query=query, key=key, value=value,
            is_causal=args[4], dropout_p=args[3], scale=kwargs.get("scale"),
        )  # fmt: skip
        return tuple(DTensor.from_local(part, mesh, placements, run_check=False) for part in parts[:2])

    def run_backward(op: Any, args: Any, kwargs: Any) -> Any:
        mesh, placements = args[1].device_mesh, args[1].placements
        local = [part.to_local() for part in args[:6]]
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        parts = module._templated_ring_attention_backward(
            mesh.get_group(), 2, backward.default, grad_out_name="grad_out", **dict(zip(names, local, strict=True)),
            dropout_p=args[6], is_causal=args[7], scale=kwargs.get("scale"),
        )  # fmt: skip
        return tuple(DTensor.from_local(part, mesh, placements, run_check=False) for part in parts[:3])

    module.custom_ops[forward.default] = run_forward
    module.custom_ops[backward.default] = run_backward


# -- stages ------------------------------------------------------------------------------------------------------------


class _Stage(nn.Module):
    """Half of a Llama."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        half = len(model.model.layers) // 2
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.layers = model.model.layers[:half] if rank == 0 else model.model.layers[half:]
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (None, None) if rank == 0 else (model.model.norm, model.lm_head)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        positions = self.rotary(hidden, torch.arange(hidden.shape[1]).unsqueeze(0))
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=positions)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def _pipeline(shape: Shape) -> Callable[[], Tensor]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, micro_batches = dist.get_rank(), 4
    module = _Stage(llama(shape), rank)
    parameters = list(module.parameters())
    optimizer = optimizer_of(parameters)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule: Any = Schedule1F1B(stage, micro_batches, loss_fn=_shifted_loss)
    inputs = {name: part.repeat(micro_batches, 1) for name, part in batch(shape).items()}

    def step() -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs["input_ids"])
        else:
            schedule.step(target=inputs["labels"], losses=losses, return_outputs=False)
        square = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


def _shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


_ATTENTION = "by_hand"
_STEPS: dict[str, Callable[[Shape], Callable[[], Tensor]]] = {
    "tp": _tensor_parallel,
    "cp": _context_parallel,
    "sp": _sequence_parallel,
    "pp": _pipeline,
    "fsdp_tp": _sharded_and_split,
}
