"""`Pipeline`: train and evaluate a model whose layers are spread over the ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.block_split import find_blocks, split_evenly
from trainer_lib.options.base import check_count
from trainer_lib.options.parallel.pipeline_options import (
    V_SHAPED,
    check_micro_batches,
    check_schedule,
    schedule_name,
    stages_of_rank,
)
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.pipeline.stages import Stage, cut
from trainer_lib.pipeline.state import load_named_optimizer_state, merge_over_stages, named_optimizer_state
from trainer_lib.state import PartialState

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

_IGNORED = -100
_SPREAD = ("pp", "dp_replicate")


class Pipeline:
    """This rank's stages of a model, and the steps that all ranks run together.

    All ranks start from the weights of rank 0. All ranks of one pipeline give the same windows of micro-batches, and
    replicas (`dp_replicate_size`) give different ones of equal length.

    Args:
        model: The whole model. Its blocks are spread so that the largest stage has as few parameters as possible.
        loss_fn: `loss_fn(outputs, targets)`, which returns the **sum** over the items of a micro-batch, so that
            micro-batches and replicas with more items count more.
        config: A `ParallelismConfig` with `pp_size`, and `dp_replicate_size` for several replicas.
        schedule: "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B" or "InterleavedZeroBubble".
        stages_per_rank: How many stages each rank holds; by default 1, and 2 for schedules that need several.
        blocks: The modules between which the model may be cut, in the order they run: their names, or a pattern such
            as "encoder.layer.*". By default the children of an `nn.Sequential`, or the longest list of equal blocks.

    Raises:
        ConfigurationError: If the sizes, the schedule or the blocks do not fit the model.
    """

    config: ParallelismConfig
    loss_fn: "Callable[[Any, Any], Tensor]"
    dp_group: dist.ProcessGroup | None
    pp_group: dist.ProcessGroup | None

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        config: ParallelismConfig,
        schedule: str = "1F1B",
        stages_per_rank: int | None = None,
        blocks: str | Sequence[str] | None = None,
    ) -> None:
        self.schedule: str = schedule_name(schedule)
        self.stages_per_rank: int = stages_per_rank or (1 if self.schedule in ("GPipe", "1F1B") else 2)
        check_count("stages_per_rank", self.stages_per_rank)
        check_schedule(self.schedule, self.stages_per_rank)
        if self.schedule in V_SHAPED:
            raise ConfigurationError(
                f"A Pipeline cannot evaluate with the schedule {self.schedule}: torch runs no forward alone where a "
                "rank holds stages that follow each other. Choose 'InterleavedZeroBubble', or prepare the model with "
                "an Accelerator, which runs this schedule."
            )
        self.device: torch.device
        self.config, self.loss_fn, self.device = config, loss_fn, PartialState().device
        self.pp_group, self.dp_group = self._groups()
        names = find_blocks(model, blocks)
        bounds = split_evenly(model, names, self.num_stages)
        model = model.to(self.device)
        self._start_from_rank_0(model)
        self._names = list(model.state_dict())
        self._aliases = _aliases(model)
        pp_rank = self.pp_group.rank() if self.pp_group is not None else 0
        indices = stages_of_rank(self.schedule, pp_rank, config.sizes["pp"], self.stages_per_rank)
        self.stages: dict[int, Stage] = {index: cut(model, names, bounds, index) for index in indices}
        self._find_shared()
        self._built: dict[Any, Any] = {}
        self._is_training = True

    @property
    def num_stages(self) -> int:
        """How many stages the model has on all ranks."""
        return self.config.sizes["pp"] * self.stages_per_rank

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, which has the outputs."""
        return self.num_stages - 1 in self.stages

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by the names they have in the whole model, each once."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, weight in stage.model.named_parameters():
                if id(weight) not in seen:
                    seen.add(id(weight))
                    yield self._aliases.get(name, name), weight

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters, for an optimizer."""
        return (weight for _, weight in self.named_parameters())

    def step(
        self,
        window: Sequence[tuple[torch.Tensor, torch.Tensor]],
        num_items: float | None = None,
        **kwargs: torch.Tensor,
    ) -> torch.Tensor:
        """Run a window forward and backward, and return its mean loss over all items, on all ranks.

        Gradients are those of the mean loss, reduced over replicas and tied weights. The optimizer step is yours.

        Args:
            window: The micro-batches of the accumulation window, as pairs of inputs and targets of equal shapes.
            num_items: How many items of this replica the loss sums; by default the targets that are not -100.
            kwargs: Tensors for the forward of every stage, for the whole window, such as `attention_mask`.
        """
        self._check_window(window, kwargs)
        inputs, targets = (torch.cat(part).to(self.device) for part in zip(*window, strict=True))
        losses: list[torch.Tensor] = []
        self._mode(training=True)
        self._run("step", len(window), inputs, targets, kwargs, losses)
        loss = torch.stack(losses).sum().detach().double() if self.is_last else torch.zeros(()).double()
        items = float((targets != _IGNORED).sum()) if num_items is None else num_items
        totals = torch.tensor([loss.item(), items], dtype=torch.float64, device=self.device)
        if self.pp_group is not None:
            dist.all_reduce(totals[:1], group=self.pp_group)
        if self.dp_group is not None:
            dist.all_reduce(totals, group=self.dp_group)
        self._reduce_gradients(totals[1].item())
        return totals[0] / totals[1]

    @torch.no_grad()
    def forward(
        self, inputs: Sequence[torch.Tensor], broadcast: bool = False, **kwargs: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the outputs of micro-batches of equal shapes: on the rank of the last stage, or on all ranks."""
        _check_shapes(inputs)
        _refuse_labels(kwargs)
        check_micro_batches(self.schedule, len(inputs), self.config.sizes["pp"])
        self._mode(training=False)
        batch = torch.cat(list(inputs)).to(self.device)
        outputs = self._run("eval", len(inputs), batch, torch.zeros(len(batch), device=self.device), kwargs, [])
        outputs = outputs if self.is_last else None
        return self._broadcast(outputs) if broadcast and self.pp_group is not None else outputs

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of the gradients of all stages; a tied weight counts once."""
        gradients = [w.grad for name, w in self.named_parameters() if w.grad is not None and name not in self._counted]
        squares = [gradient.double().square().sum() for gradient in gradients]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.device)
        if self.pp_group is not None:
            dist.all_reduce(total, group=self.pp_group)
        return total.sqrt()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all stages down to a norm of at most `max_norm`, and return the norm before."""
        norm = self.gradient_norm()
        factor = min(1.0, max_norm / (norm.item() + 1e-6))
        for weight in self.parameters():
            if weight.grad is not None:
                weight.grad.mul_(factor)
        return norm

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's state on the CPU, by the author's names, on all ranks. All have to call."""
        part = {
            name: value.detach().cpu().clone()
            for stage in self.stages.values()
            for name, value in stage.model.state_dict().items()
        }
        whole = merge_over_stages(part, self.pp_group)
        return {name: whole[name] for name in self._names}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's part of a whole model's state.

        Raises:
            ConfigurationError: If names are missing or unknown.
        """
        missing, unknown = set(self._names) - set(state), set(state) - set(self._names)
        if missing or unknown:
            raise ConfigurationError(
                f"The state does not fit the model: missing {sorted(missing)[:5]}, unknown {sorted(unknown)[:5]}. Give "
                "the state of the whole model."
            )
        for stage in self.stages.values():
            stage.model.load_state_dict({name: state[name] for name in stage.model.state_dict()})

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer state of the whole model by parameter name, on all ranks. All have to call."""
        return merge_over_stages(named_optimizer_state(optimizer, self._names_by_id()), self.pp_group)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of what `optimizer_state_dict` returned, at any `pp_size`."""
        load_named_optimizer_state(optimizer, self._names_by_id(), state)

    def _groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        others = [name for name in self.config.active_mesh_dims if name not in _SPREAD]
        if others:
            raise ConfigurationError(
                f"A Pipeline combines pp_size with dp_replicate_size (got {', '.join(others)} above 1). Set the sizes "
                "of the others to 1."
            )
        self.config.check_world(PartialState().num_processes)
        mesh: DeviceMesh | None = self.config.get_device_mesh(self.device.type)
        pipeline, replicas = (
            mesh.get_group(name) if mesh is not None and name in self.config.active_mesh_dims else None
            for name in _SPREAD
        )
        return pipeline, replicas

    def _start_from_rank_0(self, model: nn.Module) -> None:
        if self.config.total_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def _find_shared(self) -> None:
        """Find the weights that several ranks hold, and those that count for the norm on an earlier rank."""
        self._shared: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._counted: set[str] = set()
        if self.pp_group is None:
            return
        parts: list[Any] = [None] * self.pp_group.size()
        specs = {name: (weight.shape, weight.dtype) for name, weight in self.named_parameters()}
        dist.all_gather_object(parts, specs, group=self.pp_group)
        for rank, part in enumerate(parts):
            for name, spec in part.items():
                if any(name in earlier for earlier in parts[:rank]):
                    self._shared[name] = spec
                    if rank == self.pp_group.rank():
                        self._counted.add(name)

    def _reduce_gradients(self, items: float) -> None:
        weights = dict(self.named_parameters())
        for name, (shape, dtype) in self._shared.items():
            gradient = weights[name].grad if name in weights else None
            gradient = torch.zeros(shape, dtype=dtype, device=self.device) if gradient is None else gradient
            dist.all_reduce(gradient, group=self.pp_group)
            if name in weights and weights[name].requires_grad:
                weights[name].grad = gradient
        for weight in weights.values():
            if not weight.requires_grad:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if self.dp_group is not None:
                dist.all_reduce(weight.grad, group=self.dp_group)
            weight.grad.div_(items)

    def _check_window(self, window: Sequence[tuple[torch.Tensor, torch.Tensor]], kwargs: Mapping[str, Any]) -> None:
        _refuse_labels(kwargs)
        _check_shapes([inputs for inputs, _ in window])
        check_micro_batches(self.schedule, len(window), self.config.sizes["pp"])
        if any(weight.grad is not None for weight in self.parameters()):
            raise ConfigurationError("step() got gradients of an earlier window. Call optimizer.zero_grad() before it.")

    def _run(
        self,
        method: str,
        count: int,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        kwargs: dict[str, torch.Tensor],
        losses: list[torch.Tensor],
    ) -> Any:
        if self.pp_group is None:
            return self._run_alone(count, inputs, targets, kwargs, losses)
        key = (method, count, inputs.shape, inputs.dtype, tuple(kwargs))
        if key not in self._built:
            self._built[key] = self._build(count)
        args = (inputs,) if 0 in self.stages else ()
        last = {"target": targets, "losses": losses} if self.is_last else {}
        return getattr(self._built[key], method)(*args, **last, **kwargs)

    def _run_alone(
        self,
        count: int,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        kwargs: dict[str, torch.Tensor],
        losses: list[torch.Tensor],
    ) -> torch.Tensor:
        """Run the stages one after the other, on one rank."""
        outputs = []
        names = list(kwargs)
        parts = zip(*(tensor.chunk(count) for tensor in (inputs, targets, *kwargs.values())), strict=True)
        for hidden, target, *extra in parts:
            for index in sorted(self.stages):
                hidden = self.stages[index](hidden, **dict(zip(names, extra, strict=True)))
            if self._is_training:
                losses.append(self.loss_fn(hidden, target))
                losses[-1].backward()
                losses[-1] = losses[-1].detach()
            outputs.append(hidden.detach())
        return torch.cat(outputs)

    def _build(self, count: int) -> Any:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        stages = [
            PipelineStage(stage, index, self.num_stages, self.device, group=self.pp_group)
            for index, stage in self.stages.items()
        ]
        schedule = cast(Callable[..., Any], get_schedule_class(self.schedule))
        held = stages[0] if self.stages_per_rank == 1 else stages
        return schedule(held, n_microbatches=count, loss_fn=self._loss, scale_grads=False)

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return self.loss_fn(outputs, targets) if self._is_training else torch.zeros((), device=self.device)

    def _mode(self, training: bool) -> None:
        self._is_training = training
        for stage in self.stages.values():
            stage.train(training)

    def _broadcast(self, outputs: torch.Tensor | None) -> torch.Tensor:
        group = self.pp_group
        parts: list[Any] = [None] * self.config.sizes["pp"]
        dist.all_gather_object(parts, None if outputs is None else outputs.cpu(), group=group)
        return next(part for part in parts if part is not None).to(self.device)

    def _names_by_id(self) -> dict[int, str]:
        return {id(weight): name for name, weight in self.named_parameters()}


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the first name of each further name of a tied parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(w), name) for name, w in model.named_parameters(remove_duplicate=False)}


def _check_shapes(inputs: Sequence[torch.Tensor]) -> None:
    shapes = [tuple(tensor.shape) for tensor in inputs]
    if len(set(shapes)) != 1:
        raise ConfigurationError(
            f"The micro-batches of a window need equal shapes (got {shapes}). Pad them, with targets of {_IGNORED}."
        )


def _refuse_labels(kwargs: Mapping[str, Any]) -> None:
    if "labels" in kwargs:
        raise ConfigurationError(
            "A pipeline computes the loss after the last stage, not in the model (got labels). Give shifted labels as "
            "the targets, and a loss_fn that returns the sum of the losses."
        )
