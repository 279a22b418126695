"""What one micro-batch takes on each rank of a pipeline: a forward and a backward of its part of the model."""

import copy
import dataclasses
import inspect
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.commands.plan.counted_messages import CountedMessages, Messages
from trainer_lib.commands.plan.host_activations import HostActivations
from trainer_lib.commands.plan.peak_storage import PeakStorage
from trainer_lib.commands.plan.simulated_world import DEVICE, SimulatedWorld, batch_without_values, without_values
from trainer_lib.commands.plan.training_job import TrainingJob, label_names
from trainer_lib.context_parallel import sequence_split
from trainer_lib.context_parallel.batch import BatchCut
from trainer_lib.context_parallel.context_parallel import ContextParallel
from trainer_lib.foundation.errors import TrainerLibError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.pytree import tensors
from trainer_lib.modules.training_memory import local_part
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.modules.weights.tied_parameters import first_names
from trainer_lib.precision.registry import choose_precision
from trainer_lib.process_group import LoneProcess
from trainer_lib.strategies.fsdp import materialize
from trainer_lib.strategies.pipeline_parallel.model_stages import StageEnd
from trainer_lib.strategies.pipeline_parallel.stage_gates import Cut, StageGates
from trainer_lib.strategies.tensor_parallel.tensor_parallel import MatrixSplitting
from trainer_lib.trainer.fit.accelerator_setup.build_accelerator import adapt_model

GATHERED_AS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # what FSDP2 gathers weights in


@dataclass
class ComputedStage:
    """A forward and a backward of one stage.

    Args:
        kept: The bytes that the forward keeps for the backward; `None`: the forward cannot be computed.
        temporary: The most bytes beside them, in the forward or in the backward.
        received: The bytes of the activations that it receives.
        passed_on: The bytes of the activations that it passes on.
        messages: The messages of its activations by dimension of the mesh.
        has_backward: Whether a backward could be computed.
        reason: Why not.
    """

    kept: int | None = None
    temporary: int = 0
    received: int = 0
    passed_on: int = 0
    messages: dict[str, Messages] = field(default_factory=dict)
    has_backward: bool = False
    reason: str = ""


@frozen_dataclass
class ComputedPart:
    """What a rank of a pipeline computes.

    Args:
        model: Its part of the model, in the type that weights are held in.
        weights: Its weights, by the first name that each has in the whole model.
        stages: Its stages, by number.
    """

    model: nn.Module
    weights: dict[str, Tensor]
    stages: dict[int, ComputedStage]


def computed_parts(job: TrainingJob, world: SimulatedWorld, is_sharded: bool) -> list[ComputedPart]:
    """Return what each rank of a pipeline computes; one part without a pipeline. Call it in the world.

    Args:
        job: The training.
        world: The world.
        is_sharded: Whether FSDP2 gathers the weights, in the type that the precision computes in.

    Raises:
        ConfigurationError: If the model or the batch does not fit the mesh.
    """
    options = world.config.pp_options
    ranks, turns = world.config.sizes["pp"], (options.stages_per_rank or 1) if world.config.pp_enabled else 1
    builts = [
        _Built(job, world, [rank + turn * ranks for turn in range(turns)], ranks * turns, is_sharded)
        for rank in range(ranks)
    ]
    first = {canonical_name(name): canonical_name(other) for name, other in first_names(job.model).items()}
    parts = [
        ComputedPart(built.model, {first[canonical_name(n)]: p for n, p in built.model.named_parameters()}, {})
        for built in builts
    ]
    received: Tensor | None = None
    for stage in range(ranks * turns):
        rank = stage % ranks
        computed, received = builts[rank].compute(stage, received)
        parts[rank].stages[stage] = computed
    return parts


class _Built:
    """The part of a model that one rank computes with, built as a run builds it.

    Args:
        job: The training.
        world: The world.
        held: The stages of the rank.
        num_stages: The stages of all ranks.
        is_sharded: Whether FSDP2 gathers the weights.
    """

    def __init__(
        self, job: TrainingJob, world: SimulatedWorld, held: Sequence[int], num_stages: int, is_sharded: bool
    ) -> None:
        self._job, self._groups, self._num_stages = job, world.groups, num_stages
        self._is_sharded = is_sharded
        shared = [*job.model.parameters(), *job.model.buffers()]
        self.model = model = copy.deepcopy(job.model, {id(tensor): tensor for tensor in shared})
        without_values(model)
        name = job.args.mixed_precision or "no"
        engine: Any = SimpleNamespace(device=DEVICE, mixed_precision=name, num_processes=1)
        args = job.args
        self._host: HostActivations | None = None
        if args.activation_offload:
            self._host = HostActivations()
            args = dataclasses.replace(args, activation_offload=False)
        self.model = model = adapt_model(model, args, engine)
        precision = choose_precision(name, DEVICE.type)
        precision.cast(model)
        self._gathered_as = GATHERED_AS.get(name)
        self._sequences = sequence_split(world.config, DEVICE.type)
        self._sequences.attach(model)
        precision.wrap_forward(model)
        options = world.config.pp_options
        self._gates = None if num_stages == 1 else StageGates(Cut.of(model, options.blocks, num_stages))
        matrices = _matrix_splitting(model, world)
        if self._gates is not None:
            self._gates.remove_others(model, held)
        if matrices is not None:
            matrices.shards = is_sharded
            matrices.apply(model)
            matrices.finish(model)
        self._splits_logits = matrices is not None and "colwise_loss_parallel" in matrices.styles.values()
        if self._gates is not None:
            self._gates.install(model, held)
        if self._host is not None:
            self._host.install(model)

    def compute(self, stage: int, received: Tensor | None) -> tuple[ComputedStage, Tensor | None]:
        """Return a forward and a backward of a stage, and what it passes on."""
        result = ComputedStage(received=0 if received is None else _bytes(received))
        if self._num_stages > 1 and stage and received is None:
            return result, None  # the stage before could not be computed
        held = list(self.model.parameters())
        if self._is_sharded and self._gathered_as is not None:
            gathered = {p: nn.Parameter(p.detach().to(self._gathered_as), p.requires_grad) for p in held}
            materialize.replace(self.model, {p: g for p, g in gathered.items() if p.is_floating_point()})
        try:
            passed_on = self._run(stage, received, result)
        finally:
            now = dict(zip(self.model.parameters(), held, strict=True))
            materialize.replace(self.model, {new: old for new, old in now.items() if new is not old})
        return result, passed_on

    def _run(self, stage: int, received: Tensor | None, result: ComputedStage) -> Tensor | None:
        """Fill in what a stage takes, and return what it passes on."""
        batch = batch_without_values(self._job.batch)
        tracker, counter = PeakStorage(), CountedMessages(self._groups)
        for tensor in (*self.model.parameters(), *self.model.buffers(), *tensors([batch, received])):
            tracker.ignore(local_part(tensor))
        passed_on: Tensor | None = None
        with ExitStack() as contexts:
            contexts.enter_context(_dropped_gradients(self.model))
            contexts.enter_context(tracker)
            contexts.enter_context(counter)
            contexts.enter_context(self._loss_context())
            batch = contexts.enter_context(self._part_of(batch))
            try:
                outputs = self._outputs(stage, received, batch)
                result.kept = tracker.alive
                if stage < self._num_stages - 1:
                    result.passed_on = _bytes(outputs)
                    passed_on = torch.empty(outputs.shape, dtype=outputs.dtype, requires_grad=outputs.requires_grad)
                if outputs.requires_grad:
                    outputs.backward(torch.empty_like(outputs))
                result.has_backward = True
            except TrainerLibError:
                raise
            except Exception as error:  # noqa: BLE001 - any model may be given, and not every operation works
                result.reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        result.temporary = max(0, tracker.peak - (result.kept or 0)) + (self._host.on_device if self._host else 0)
        result.messages = counter.messages
        return passed_on

    def _outputs(self, stage: int, received: Tensor | None, batch: Any) -> Tensor:
        """Return the loss of a micro-batch, or what a stage passes on."""
        self.model.train()
        if self._gates is None:
            return _scalar(self._job.loss(self.model, batch))
        try:
            return _scalar(self._job.loss(_StageCall(self.model, self._gates, stage, received), batch))
        except StageEnd as end:
            return end.activations[0]

    def _part_of(self, batch: Any) -> AbstractContextManager[Any]:
        """Return the context with this rank's part of a batch, where ranks share sequences."""
        if not isinstance(self._sequences, ContextParallel):
            return nullcontext(batch)
        cut = BatchCut(
            self._sequences.ranks.layout,
            label_names(self._job),
            shifts_labels=self._job.shifts_labels,
            takes_positions="position_ids" in inspect.signature(self._job.model.forward).parameters,
        )
        return self._sequences.batch(cut, batch)

    def _loss_context(self) -> AbstractContextManager[Any]:
        """Return the context in which a loss is computed from split logits, if a plan keeps them split."""
        if not self._splits_logits:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()


def _matrix_splitting(model: nn.Module, world: SimulatedWorld) -> MatrixSplitting | None:
    if not world.config.tp_enabled:
        return None
    mesh = world.mesh
    assert mesh is not None  # since tp_size is above 1
    options = world.config.tp_options
    return MatrixSplitting(model, options, mesh if mesh.ndim == 1 else mesh["tp"], LoneProcess())


class _StageCall(nn.Module):
    """Runs one stage where a loss calls the model.

    Args:
        module: The modules of the rank.
        gates: Where stages begin and end.
        stage: The stage.
        received: The activations that it receives.
    """

    def __init__(self, module: nn.Module, gates: StageGates, stage: int, received: Tensor | None) -> None:
        super().__init__()
        self.module, self._gates, self._stage, self._received = module, gates, stage, received

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the last stage; the others raise `StageEnd`."""
        if "use_cache" in inspect.signature(self.module.forward).parameters:
            kwargs.setdefault("use_cache", False)
        received = () if self._received is None else (self._received,)
        return self._gates.run(self.module, self._stage, received, args, kwargs)


@contextmanager
def _dropped_gradients(model: nn.Module) -> Generator[None]:
    """Drop each gradient at once: they count by themselves, with the weights."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(drop) for parameter in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _scalar(outputs: Any) -> Tensor:
    """Return one number that depends on all outputs, or the loss."""
    found = [tensor for tensor in tensors(outputs) if tensor.is_floating_point()]
    return found[0] if len(found) == 1 and not found[0].dim() else sum(tensor.sum() for tensor in found)  # type: ignore[return-value]


def _bytes(tensor: Tensor) -> int:
    part = local_part(tensor)
    return part.numel() * part.element_size()
