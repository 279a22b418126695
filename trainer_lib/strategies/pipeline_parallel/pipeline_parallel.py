"""`PipelineParallel`: each rank of a pipeline holds consecutive layers of a model, alone or in several replicas."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.modules.block_split import find_blocks
from trainer_lib.options.parallel.fsdp1_translation import WholeState
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.parallel.pipeline_options import (
    SPLIT_BACKWARD,
    TorchPipelineParallelConfig,
    ranks_of_stages,
    stages_per_rank_of,
)
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.align_generators import align_generators
from trainer_lib.strategies.base import Surroundings, no_surroundings
from trainer_lib.strategies.clip_grad_norm import norm_over_ranks, shrink, total_grad_norm
from trainer_lib.strategies.fsdp import sharded_state
from trainer_lib.strategies.fsdp.fsdp import FSDP
from trainer_lib.strategies.fsdp.fully_shard import ShardedModel, Splitting
from trainer_lib.strategies.optimizer_state_names import parameter_names
from trainer_lib.strategies.pipeline_parallel import stage_state
from trainer_lib.strategies.pipeline_parallel.model_stages import ModelStages
from trainer_lib.strategies.pipeline_parallel.pipelined_model import PipelinedModel
from trainer_lib.strategies.pipeline_parallel.schedule_runner import ScheduleRunner
from trainer_lib.strategies.pipeline_parallel.shared_weights import SharedWeights
from trainer_lib.strategies.pipeline_parallel.stage_exchange import StageExchange
from trainer_lib.strategies.pipeline_parallel.stage_gates import Cut, StageGates
from trainer_lib.strategies.pipeline_parallel.stage_state import WholeModel
from trainer_lib.strategies.pipeline_parallel.window_facts import WindowFacts

_OF_MODULES = ("dp_shard", "cp", "sp", "tp")  # dimensions that do not work with a traced model


class _Pipeline(NamedTuple):
    """A model that is cut.

    Args:
        module: The part that this rank holds.
        whole: The names of the whole model.
        gates: Where its stages begin and end.
    """

    module: nn.Module
    whole: WholeModel
    gates: ModelStages


class PipelineParallel(FSDP):
    """Spreads the layers of a model over the ranks of a pipeline, which read the same batches.

    Args:
        group: The process group of all ranks.
        device: The device of this rank.
        plugin: The options of sharding stages over the ranks that hold them; `None`: each of them holds whole weights.
        parallelism: The sizes of the mesh, and the options.
        mixed_precision: The precision to compute in.
        replicas: The ranks that hold the same stages.

    Raises:
        UnsupportedError: If another dimension of the mesh, or the precision, does not work with pipelines.
    """

    method = "pipeline parallelism"

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        plugin: FullyShardedDataParallelPlugin | None,
        parallelism: ParallelismConfig,
        mixed_precision: str,
        replicas: ProcessGroup,
    ) -> None:
        self._config = parallelism.pp_options
        self._matrix_config = parallelism.tp_options
        self._shards = plugin is not None
        _refuse_others(parallelism, self._config, mixed_precision)
        plugin = plugin or FullyShardedDataParallelPlugin()
        plugin.set_state_dict_type("FULL_STATE_DICT")  # stages are put together on rank 0
        super().__init__(group, device, plugin, parallelism, mixed_precision)
        self._replicas = replicas
        self._pipelines: list[_Pipeline] = []
        self._runners: dict[nn.Module, ScheduleRunner] = {}
        self._elsewhere: Any = WeakTensorKeyDictionary()  # weights that other ranks hold
        self._counted_elsewhere: set[Tensor] = set()
        mesh = parallelism.get_device_mesh(device.type)
        assert mesh is not None
        self._exchange = StageExchange(mesh.get_group("pp"), device)
        self._facts = WindowFacts(self._exchange)
        self._hold_stages(self._config.stages_per_rank or 1)

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Cut the model, and return one whose calls run all stages."""
        bare = self.bare(model)
        align_generators(self._exchange.group, self.device)
        if not any(True for _ in bare.parameters()):
            return model
        before = list(bare.parameters())
        super().distribute(model, evaluation_mode)
        pipeline, sharded, held = self._pipelines[-1], self._models[-1], set(bare.parameters())
        self._elsewhere.update({p: True for p in before if p not in held and p not in self._replacements})
        shared = SharedWeights(pipeline.whole.named(bare), self._exchange)
        self._counted_elsewhere |= shared.counted_elsewhere
        pipeline.gates.install(bare, self._stages)
        around = _Backward(sharded, shared)
        pipelined = PipelinedModel(model, self._ranks, pipeline.gates, self._exchange, around)
        self._runners[pipelined] = ScheduleRunner(pipelined, self._config.schedule)
        return pipelined

    def why_gradients_are_late(self) -> str:
        """Return that stages finish gradients after their backwards."""
        return (
            "a pipeline sums the gradients of shared weights after it, and adds up those of micro-batches. Leave "
            "pp_size at 1"
        )

    def takes_windows(self, model: nn.Module) -> bool:
        """Whether the options name a schedule."""
        return model in self._runners and self._config.schedule is not None

    def run_window(
        self,
        model: nn.Module,
        compute: Callable[[int], tuple[Tensor, Any]],
        shapes: Sequence[Hashable],
        around: Surroundings = no_surroundings,
    ) -> list[Any]:
        """Compute the gradients of a window in the schedule, and return the facts of its micro-batches."""
        if self._shards:  # ranks that hold shards of a stage run it together
            shapes = list(zip(*self._replicas.all_gather_objects(list(shapes)), strict=True))
        facts: list[Any] = [None] * len(shapes)

        def loss(index: int) -> Tensor:
            value, facts[index] = compute(index)
            return value

        self._runners[model].run(loss, shapes, around)
        return self._facts.share(facts, self._ranks[-1])

    def rebind_parameters(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was created before its model was cut train the weights of this rank."""
        for settings in optimizer.param_groups:
            settings["params"][:] = [p for p in settings["params"] if p not in self._elsewhere]
        vars(optimizer)["share_overflow"] = self._share_overflow  # which the scaler of fp16 asks for
        super().rebind_parameters(optimizer)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the part of the user's model that this rank holds."""
        return model.module if isinstance(model, PipelinedModel) else model

    def evaluation_module(self, model: nn.Module) -> nn.Module:
        """Return the model: all ranks of a pipeline compute together."""
        return model

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients of all stages to one total norm."""
        parameters = list(parameters)
        norm = self.grad_norm(parameters, norm_type)
        shrink(parameters, max_norm, norm)
        return norm

    def grad_norm(self, parameters: Iterable[Tensor], norm_type: float, *, in_double: bool = False) -> Tensor:
        """Return the norm over the gradients of all stages; a weight that several of them hold counts once."""
        counted = [parameter for parameter in parameters if parameter not in self._counted_elsewhere]
        norm = total_grad_norm(counted, norm_type, self.device, in_double)
        return norm_over_ranks(norm, norm_type, self._exchange.group)

    def model_state(self, model: nn.Module, *, whole: bool = True) -> dict[str, Any]:
        """Return the whole model's tensors on rank 0."""
        del whole
        part = sharded_state.model_state(self.bare(model), self._replicas, self.device, WholeState())
        if self._replicas.rank:
            return {}
        state = stage_state.merged(part, self._exchange)
        return self._pipeline(model).whole.with_all_names(state) if self.group.rank == 0 else {}

    def exported_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the whole model's tensors on rank 0."""
        return self.model_state(model)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole tensors of rank 0."""
        self._pipeline(model).whole.load(self.bare(model), state, self.group, self.device, strict)

    def optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, whole: bool = True
    ) -> dict[str, Any]:
        """Return the whole optimizer's state by parameter names on rank 0."""
        del whole
        bare = [self.bare(model) for model in models]
        part = sharded_state.optimizer_state(optimizer, bare, self._replicas, self.device, True)
        if self._replicas.rank:
            return {}
        state = stage_state.merged_optimizer_state(part, self._first_names(models), self._exchange)
        return state if self.group.rank == 0 else {}

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Load the whole state of rank 0."""
        bare, first = [self.bare(model) for model in models], self._first_names(models)
        names = parameter_names(bare)
        parameters = {first.get(names[id(p)], names[id(p)]): (names[id(p)], p) for m in bare for p in m.parameters()}
        stage_state.load_optimizer_state(optimizer, bare, parameters, state, self.group, self.device)

    def whole_shapes(self, model: nn.Module) -> nn.Module:
        """Return the whole model on the meta device."""
        return self._pipeline(model).whole.model if self._pipelines else model

    def whole_name(self, name: str) -> str:
        """Return the first name that a parameter has in the whole model: tied weights are on several stages."""
        return next((p.whole.first[name] for p in self._pipelines if name in p.whole.first), name)

    def names_of_all_parts(self, names: Iterable[str]) -> set[str]:
        """Return the names of all stages."""
        return {name for of_rank in self._exchange.gather_objects(list(names)) for name in of_rank}

    def with_other_parts(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values by name of all stages, on the first ranks of pipelines."""
        return stage_state.merged(values, self._exchange)

    def release(self) -> None:
        """Release the models and optimizers."""
        for optimizer, _ in self._step_hooks:
            vars(optimizer).pop("share_overflow", None)
        super().release()
        self._pipelines.clear()
        self._runners.clear()
        self._elsewhere.clear()
        self._counted_elsewhere.clear()

    def _share_overflow(self, flags: Mapping[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Return whether gradients of any stage overflowed, out of the flags for those of this rank's stages."""
        flag = torch.zeros((), device=self.device)
        for of_device in flags.values():
            flag = torch.maximum(flag, of_device.to(self.device))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._exchange.group)
        return {self.device: flag}

    def _splitting(self, model: nn.Module) -> Splitting:
        gates = self._gates(model)
        self._pipelines.append(_Pipeline(model, WholeModel(model), gates))
        splitting = _StageSplitting(self._replicas, gates, self._stages, self._matrix_splitting(model))
        splitting.shards = self._shards
        return splitting

    def _hold_stages(self, per_rank: int) -> None:
        self._ranks = ranks_of_stages(self._config.schedule, self._exchange.size, per_rank)  # of each stage
        self._stages = [stage for stage, rank in enumerate(self._ranks) if rank == self._exchange.rank]

    def _gates(self, model: nn.Module) -> ModelStages:
        if not self._config.traces:
            return StageGates(self._cut(model))
        from trainer_lib.strategies.pipeline_parallel.traced_stages import TracedStages

        return TracedStages(model, self._config, len(self._ranks), self.device)

    def _cut(self, model: nn.Module) -> Cut:
        size = self._config.blocks_per_stage
        if size is None:
            return Cut.of(model, self._config.blocks, len(self._ranks))
        blocks = find_blocks(model, self._config.blocks)
        per_rank = stages_per_rank_of(self._config, len(blocks), self._exchange.size)
        if self._pipelines and per_rank != len(self._stages):
            raise UnsupportedError(
                f"blocks_per_stage={size} makes {per_rank} stages on a rank for this {type(model).__name__}, and the "
                f"model before it has {len(self._stages)}. Give stages_per_rank instead."
            )
        self._hold_stages(per_rank)
        return Cut.of(model, self._config.blocks, len(self._ranks), blocks[size::size])

    def _matrix_splitting(self, model: nn.Module) -> Splitting:
        """Return how the matrices of the whole model are split over the ranks of `tp`."""
        if not self._parallelism.tp_enabled:
            return Splitting(self._replicas)
        from trainer_lib.strategies.tensor_parallel.tensor_parallel import MatrixSplitting

        device = self.device.type
        mesh = self._parallelism.get_weight_mesh(device) if self._shards else self._parallelism.get_device_mesh(device)
        assert mesh is not None
        splitting = MatrixSplitting(model, self._matrix_config, mesh["tp"], self._replicas)
        splitting.shards = self._shards
        if "colwise_loss_parallel" in splitting.styles.values():
            raise UnsupportedError(
                f"The loss from split logits does not work with pp_size={self._parallelism.pp_size}: the outputs of "
                "the last stage travel whole. Leave loss_parallel=True and the style 'colwise_loss_parallel' out."
            )
        return splitting

    def _refuse_mixed(self, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        if self._parallelism.tp_enabled:
            from trainer_lib.strategies.tensor_parallel.tensor_parallel import update_one_by_one

            update_one_by_one(optimizer, settings)
        else:
            super()._refuse_mixed(optimizer, settings)

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() if self._shards else {}

    def _pipeline(self, model: nn.Module) -> _Pipeline:
        bare = self.bare(model)
        return next(pipeline for pipeline in self._pipelines if pipeline.module is bare)

    def _first_names(self, models: Sequence[nn.Module]) -> dict[str, str]:
        """Return the first name of each parameter in the whole models, by the names that optimizers know."""
        prefixes = [f"{index}." if len(models) > 1 else "" for index in range(len(models))]
        return {
            prefix + name: prefix + first
            for prefix, model in zip(prefixes, models, strict=True)
            for name, first in self._pipeline(model).whole.first.items()
        }


class _StageSplitting(Splitting):
    """Removes the modules of other stages.

    Args:
        replicas: The ranks that hold the same stages.
        gates: Where stages begin and end.
        held: The stages of this rank.
        matrices: What is done to the modules that remain.
    """

    def __init__(self, replicas: ProcessGroup, gates: ModelStages, held: Sequence[int], matrices: Splitting) -> None:
        super().__init__(replicas=replicas, runs_whole_model=False)
        self._gates, self._held, self._matrices = gates, held, matrices

    def apply(self, model: nn.Module) -> None:
        """Remove modules from the emptied model, and split the matrices of the others."""
        self._gates.remove_others(model, self._held)
        self._matrices.apply(model)

    def finish(self, model: nn.Module) -> None:
        """Do what needs the parameters that are trained."""
        self._matrices.finish(model)


class _Backward:
    """Computes the gradients of this rank's stages, sums those of shared weights, and averages over the replicas.

    Args:
        sharded: The part of the model that this rank holds.
        shared: The weights that other ranks of the pipeline hold too.
    """

    def __init__(self, sharded: ShardedModel, shared: SharedWeights) -> None:
        self._replicas, self._shared = sharded.replicas, shared

    def __call__(self, backward: Callable[[], None]) -> None:
        """Call the function that computes the gradients."""
        synchronizes, self._replicas.synchronizes = self._replicas.synchronizes, False
        try:
            self._shared.around_backward(backward)
        finally:
            self._replicas.synchronizes = synchronizes
        if synchronizes:
            self._replicas.average()


def _refuse_others(parallelism: ParallelismConfig, config: TorchPipelineParallelConfig, mixed_precision: str) -> None:
    parts = [f"{name}_size={parallelism.sizes[name]}" for name in ("dp_shard", "tp") if parallelism.sizes[name] > 1]
    if parts and config.schedule in SPLIT_BACKWARD:
        raise UnsupportedError(
            f"The schedule {config.schedule!r} computes gradients of inputs before those of weights, and torch does "
            f"so for whole weights only (got {', '.join(parts)}). Choose 'Interleaved1F1B'."
        )
    others = [f"{name}_size={parallelism.sizes[name]}" for name in _OF_MODULES if parallelism.sizes[name] > 1]
    if config.traces and others:
        raise UnsupportedError(
            f"A model that is cut by tracing (example_inputs of TorchPipelineParallelConfig) is a row of operations, "
            f"and {', '.join(others)} splits modules. Set dp_replicate_size for more ranks, or leave example_inputs "
            "out."
        )
    if mixed_precision == "fp8":
        raise UnsupportedError(
            f"mixed_precision='fp8' does not work with pp_size={parallelism.pp_size} in this version. Use 'bf16' or "
            "'no'."
        )
