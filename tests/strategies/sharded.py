"""The model and the loop of the sharding tests: a small stack of blocks, and a loop with many settings."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator import toy
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin, GradientAccumulationPlugin, ParallelismConfig
from trainer_lib.utils import DeepSpeedPlugin

SAMPLES = 24  # of the toy's: 3 batches of 8


class Block(nn.Module):
    """A layer; its sizes are odd, so shards are uneven."""

    def __init__(self, width: int = 10, hidden: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.dropout(self.outer(torch.tanh(self.inner(self.norm(inputs)))))


class Stack(nn.Module):
    """Blocks between two layers, a weight without dimensions, and a buffer that is not saved."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 10)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.last = nn.Linear(10, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("shift", torch.full((3,), 0.25), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden) * self.scale + self.shift


class Tied(Stack):
    """A stack whose first and last layer are one weight, and two of whose blocks share one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 10, bias=False)
        self.last = nn.Linear(8, 10, bias=False)
        self.last.weight = self.first.weight
        first, second, _ = self.blocks
        assert isinstance(first, Block)
        assert isinstance(second, Block)
        second.inner.weight = first.inner.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden @ self.last.weight)[:, :3] * self.scale + self.shift


class Twice(Stack):
    """A stack that runs each block twice, as ALBERT runs its layers."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(block(hidden))
        return self.last(hidden) * self.scale + self.shift


def give_values(module: nn.Module) -> None:
    """Give one module's own weights and buffers their values."""
    for parameter in module.parameters(recurse=False):
        generator = torch.Generator().manual_seed(parameter.numel())
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.1)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(0.25)


def stack(kind: Callable[[], nn.Module] = Stack) -> nn.Module:
    """Return the model, always with the same weights."""
    made = kind()
    with torch.no_grad():
        made.apply(give_values)
    return made


@dataclass
class Case:
    """One way to train; `plugin` and what else only sharding knows do not count in one process."""

    plugin: dict[str, Any] = field(default_factory=dict[str, Any])
    deepspeed: bool = False  # whether the plugin is DeepSpeed's
    replicas: int = 1
    parts: int | None = None
    kind: Callable[[], nn.Module] = Stack
    precision: str = "no"
    steps: int = 1
    sync_each_batch: bool = False
    weighted: bool = False
    clip: float | None = 0.5
    norm_type: float = 2.0
    clip_value: float | None = None
    order: str = "together"
    start: Callable[[nn.Module, int], nn.Module] | None = None  # what each process does to its model before
    interlude: str = ""  # a forward without a backward between backward and clip: "evaluating" or "recording"
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)


def train(case: Case, shards: bool, epochs: int = 2) -> dict[str, Any]:
    """Train a few passes; return what one process and several must agree on."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=case.precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=case.steps, sync_each_batch=case.sync_each_batch
        ),
        deepspeed_plugin=DeepSpeedPlugin(**case.plugin) if shards and case.deepspeed else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(**case.plugin) if shards and not case.deepspeed else None,
        parallelism_config=ParallelismConfig(case.replicas, case.parts) if shards and case.parts else None,
    )
    inputs, targets, weights = (tensor[:SAMPLES] for tensor in toy.data())
    loader = accelerator.prepare(
        DataLoader(TensorDataset(inputs, targets, weights), batch_size=8 // accelerator.num_processes)
    )
    network = stack(case.kind)
    if shards and case.start is not None:
        network = case.start(network, accelerator.process_index)
    network, optimizer = _prepared(accelerator, network, case)
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(epochs):
        for batch_inputs, batch_targets, batch_weights in loader:
            with accelerator.accumulate(network):
                each = toy.losses(network, batch_inputs, batch_targets)
                if case.weighted:
                    loss = (each * batch_weights).sum()
                    accelerator.backward(loss, weight=batch_weights.sum())
                else:
                    loss = each.mean()
                    accelerator.backward(loss)
                if case.interlude:
                    with torch.set_grad_enabled(case.interlude == "recording"):
                        network(batch_inputs)
                if case.clip_value is not None:
                    accelerator.clip_grad_value_(network.parameters(), case.clip_value)
                if case.clip is not None and accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(network.parameters(), case.clip, case.norm_type)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), reduction="sum" if case.weighted else "mean")))
    bare: Any = accelerator.unwrap_model(network)
    report = {
        "losses": losses,
        "norms": norms,
        "weights": accelerator.strategy.model_state(network),
        "optimizer": accelerator.strategy.optimizer_state(optimizer.optimizer, [network]),
        "names": sorted(name for name, _ in bare.named_parameters()),
        "shift": bare.shift.clone(),
    }
    accelerator.free_memory()
    return report


def _prepared(accelerator: Accelerator, network: nn.Module, case: Case) -> tuple[Any, Any]:
    if case.order == "afterwards":
        network = accelerator.prepare(network)
        return network, accelerator.prepare(case.optimizer(network.parameters()))
    optimizer = case.optimizer(network.parameters())
    if case.order == "optimizer before":
        optimizer = accelerator.prepare(optimizer)
        return accelerator.prepare(network), optimizer
    if case.order == "optimizer first":
        optimizer, network = accelerator.prepare(optimizer, network)
        return network, optimizer
    return accelerator.prepare(network, optimizer)
