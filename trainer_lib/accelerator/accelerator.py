"""`Accelerator`: prepare models and data, accumulate, backward, clip, gather, save and load."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.accelerator import construction
from trainer_lib.accelerator.engine import Engine
from trainer_lib.accelerator.methods.checkpoint_methods import CheckpointMethods
from trainer_lib.accelerator.methods.prepare_methods import PrepareMethods
from trainer_lib.accelerator.methods.sequence_methods import SequenceMethods
from trainer_lib.accelerator.methods.tracking_methods import TrackingMethods, checked_trackers
from trainer_lib.accelerator.prepared import Prepared
from trainer_lib.accelerator.weighted_backward import WeightedBackward, WeightedLoss
from trainer_lib.context_parallel import sequence_split
from trainer_lib.foundation.compiler_import import defer_compiler_import
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.logging import get_logger
from trainer_lib.modules.compilation import undo_compilation
from trainer_lib.optimizer import AcceleratedOptimizer
from trainer_lib.options.accumulation_options import GradientAccumulationPlugin, accumulation_plugin
from trainer_lib.options.base import KwargsHandler, check_count, check_flags
from trainer_lib.options.compile_options import Backend, TorchDynamoPlugin, compilation_plugin
from trainer_lib.options.data_options import DataLoaderConfiguration
from trainer_lib.options.enums import DynamoBackend, FP8BackendType, PrecisionType
from trainer_lib.options.memory_options import MemoryKwargs
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs, InitProcessGroupKwargs
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelPlugin
from trainer_lib.options.precision_options import AutocastKwargs, GradScalerKwargs
from trainer_lib.options.profiler_options import ProfileKwargs
from trainer_lib.options.project_options import ProjectConfiguration, project_configuration
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.precision import choose_precision
from trainer_lib.profiling import Profiling
from trainer_lib.state.accelerator_state import AcceleratorState
from trainer_lib.state.accumulation_window import GradientWindow
from trainer_lib.state.gradient_state import GradientState
from trainer_lib.strategies import Strategy, choose_strategy
from trainer_lib.strategies.base import Surroundings, no_surroundings

if TYPE_CHECKING:
    from torch.profiler import profile

    from trainer_lib.context_parallel.sequence_split import SequenceSplit
    from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin
    from trainer_lib.options.fp8_options import FP8Recipe
    from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin
    from trainer_lib.precision.base import FullPrecision
    from trainer_lib.tracking.base import GeneralTracker

defer_compiler_import()

_logger = get_logger(__name__)


class Accelerator(PrepareMethods, SequenceMethods, TrackingMethods, CheckpointMethods):
    """Device placement, mixed precision, gradient accumulation, clipping and distributed training in one object.

    Args:
        device_placement: Move prepared models and batches to this rank's device.
        split_batches: Like `DataLoaderConfiguration(split_batches=…)`.
        mixed_precision: "no", "fp16", "bf16", "fp8", or "bf16-true" for bf16 weights; by default the launcher's.
        gradient_accumulation_steps: How many micro-batches `accumulate` adds up for one update.
        cpu: Use the CPU even if the machine has an accelerator.
        dataloader_config: The options of data loading.
        deepspeed_plugin: How DeepSpeed shards models, or several plugins by name; needs the extra `deepspeed`.
        fsdp_plugin: How to shard models; by default the launcher's setting, or no sharding.
        torch_tp_plugin: How many ranks split each matrix, like `ParallelismConfig(tp_size=…)`.
        megatron_lm_plugin: Options of Megatron-LM, which are translated to those of this library.
        rng_types: Random generators to synchronize across ranks at the start of each pass over a prepared loader.
        log_with: The trackers: names, "all" for those installed and configured, objects, or a list of these.
        project_dir: The folder for checkpoints and logs.
        project_config: Options of that folder: automatic naming, how many checkpoints to keep.
        gradient_accumulation_plugin: The options of accumulation.
        step_scheduler_with_optimizer: Whether schedules step only when their optimizer steps; else each `step` moves
            them.
        kwargs_handlers: Option objects for autocast, the loss scaler, fp8, memory (`MemoryKwargs`), the process group,
            DDP and the profiler.
        dynamo_backend: The `torch.compile` backend for prepared models; by default the launcher's setting.
        dynamo_plugin: All options of compilation, instead of `dynamo_backend`.
        deepspeed_plugins: The same as `deepspeed_plugin`.
        parallelism_config: How many ranks replicate a model (DDP), share one copy (FSDP2), split each matrix (tensor
            parallelism), and hold some of its layers (pipeline parallelism).
        scheduler_steps_per_process: Step schedules once for each rank instead of once an update, as Accelerate does.
        **older_arguments: Argument names of earlier versions of Accelerate.

    Attributes:
        prepared: The prepared models, optimizers, schedules and loaders, and the objects registered for checkpoints.
        window: The accumulation window: the micro-batches of the current update, and the weights of their losses.
        checkpoints: What saving and loading share: the project's folder, the hooks, the save in the background.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(4, 2)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accelerator.backward(model(torch.ones(3, 4)).square().mean())
        >>> optimizer.step()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: "MegatronLMPlugin | None" = None,
        rng_types: list[str] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | Backend | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        scheduler_steps_per_process: bool = False,
        **older_arguments: Any,
    ) -> None:
        from trainer_lib.accelerator.checkpoints.checkpoints import Checkpoints

        construction.check_names(older_arguments, Accelerator.__init__)
        if split_batches is not None:
            older_arguments["split_batches"] = split_batches
        check_flags(
            device_placement=device_placement,
            cpu=cpu,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            scheduler_steps_per_process=scheduler_steps_per_process,
        )
        construction.check_generators(rng_types)
        handlers = construction.Handlers([] if kwargs_handlers is None else kwargs_handlers)
        self.dataloader_config: DataLoaderConfiguration = construction.data_configuration(
            dataloader_config, older_arguments
        )
        project = project_configuration(project_dir, project_config, older_arguments.get("logging_dir"))
        self.log_with: list[str | GeneralTracker] = checked_trackers(log_with, project)
        self._handlers = handlers
        group_options = self.init_handler or InitProcessGroupKwargs()
        engines = construction.engine_plugins(deepspeed_plugin, deepspeed_plugins, megatron_lm_plugin)
        precision = engines.agreed_precision(construction.precision_name(mixed_precision, older_arguments))
        if gradient_accumulation_plugin is None:
            gradient_accumulation_steps = engines.agreed_accumulation(gradient_accumulation_steps)
        plugin = accumulation_plugin(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.state: AcceleratorState = AcceleratorState(
            precision,
            cpu,
            dynamo_plugin=compilation_plugin(dynamo_backend, dynamo_plugin),
            deepspeed_plugin=engines.deepspeed,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=engines.megatron_lm,
            parallelism_config=parallelism_config,
            _from_accelerator=True,
            **group_options.to_kwargs(),
        )
        construction.warn_of_fsdp1(self.state.fsdp_notes)
        self.gradient_state: GradientState = GradientState(plugin)
        self.precision: FullPrecision = choose_precision(
            self.state.mixed_precision,
            self.device.type,
            handlers.get(AutocastKwargs),
            self.scaler_handler or construction.scaler_of_deepspeed(engines.deepspeed, self.state.mixed_precision),
            handlers.fp8_recipe(),
        )
        construction.check_compilation(
            self.state.dynamo_plugin,
            handlers.get(DistributedDataParallelKwargs),
            self.state.fsdp_plugin,
            self.state.parallelism_config,
        )
        construction.check_async_tp(self.state.dynamo_plugin, self.state.parallelism_config, self.device.type)
        self.strategy: Strategy = choose_strategy(
            self.distributed_type,
            self.group,
            self.device,
            handlers.get(DistributedDataParallelKwargs),
            self.state.fsdp_plugin,
            self.state.parallelism_config,
            self.state.mixed_precision,
            handlers.strategy(),
            self.data_group,
            self.state.deepspeed_plugins,
        )
        construction.warn_of_fp8_gather(self.precision, self.state.fsdp_plugin)
        self.sequence_split: SequenceSplit = sequence_split(self.state.parallelism_config, self.device.type)
        self.profile_handler: ProfileKwargs | None = handlers.get(ProfileKwargs)
        self._profiling = Profiling(self.group)
        self.memory_options: MemoryKwargs = handlers.get(MemoryKwargs) or MemoryKwargs()
        construction.check_memory(self.memory_options, self.state)
        self.device_placement = device_placement
        self.rng_types = rng_types
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.scheduler_steps_per_process = scheduler_steps_per_process
        self.window: GradientWindow = GradientWindow(self.gradient_state, self.num_processes)
        self.prepared: Prepared = Prepared(self.strategy)
        construction.keep_gradients_of_graphs(self.window, self.prepared, self.state)
        self.engine: Engine = Engine(self.state, self.prepared, self.strategy, self.precision, self.window)
        self.checkpoints: Checkpoints = Checkpoints(self.engine, project)
        self._weighted = WeightedBackward(self.engine, self.sequence_split.ranks is None)
        self._unprepared: Any = None  # the watch for optimizers that were not prepared

    # -- settings ------------------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """The precision: "no", "fp16", "bf16", "fp8" or "bf16-true"."""
        return self.precision.name

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The package that computes in fp8, "AO" or "TE", else "NO"."""
        return self.precision.fp8_backend or FP8BackendType.NO

    @property
    def scaler(self) -> Any:
        """The loss scaler of fp16, else `None`. It cannot be replaced: give its options as `GradScalerKwargs`."""
        return self.precision.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        construction.check_scaler(scaler, self.precision)

    @property
    def native_amp(self) -> bool:
        """Whether models prepared from now on run under autocast; with `False`, their own code sets dtypes."""
        return self.precision.uses_autocast

    @native_amp.setter
    def native_amp(self, uses_autocast: bool) -> None:
        construction.check_native_amp(uses_autocast, self.precision, self.prepared)
        self.precision.uses_autocast = uses_autocast

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The options of DDP for models prepared from now on; `None` uses torch's defaults."""
        options = self.strategy.options
        return options if isinstance(options, DistributedDataParallelKwargs) else None

    @ddp_handler.setter
    def ddp_handler(self, options: DistributedDataParallelKwargs | None) -> None:
        construction.check_ddp(options)
        construction.check_compilation(self.state.dynamo_plugin, options, self.state.fsdp_plugin)
        self.strategy.set_ddp_options(options)

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The options of `autocast`, and of models prepared from now on; `None` uses torch's defaults."""
        return self._handlers.get(AutocastKwargs)

    @autocast_handler.setter
    def autocast_handler(self, options: AutocastKwargs | None) -> None:
        self._handlers.set(AutocastKwargs, options, "autocast_handler")
        self.precision.set_autocast(options or AutocastKwargs())

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The options of the loss scaler in `kwargs_handlers`, if you gave them."""
        return self._handlers.get(GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The options of the process group in `kwargs_handlers`, if you gave them."""
        return self._handlers.get(InitProcessGroupKwargs)

    @property
    def fp8_enabled(self) -> bool:
        """Whether prepared models compute in fp8."""
        return self.precision.fp8_backend is not None

    @property
    def fp8_recipe_handler(self) -> "FP8Recipe | None":
        """The options of fp8 in `kwargs_handlers`, if you gave them."""
        return self._handlers.fp8_recipe()

    @property
    def has_fp8_handler(self) -> bool:
        """Whether `kwargs_handlers` has options of fp8."""
        return self.fp8_recipe_handler is not None

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether an optimizer of lomo_optim is prepared, with which `backward` takes a `learning_rate`."""
        from trainer_lib.accelerator.lomo_backward import is_lomo

        return any(map(is_lomo, self.prepared.optimizers))

    @property
    def deepspeed_plugin(self) -> "DeepSpeedPlugin | None":
        """The active plugin of DeepSpeed; `None` if models are trained without it."""
        return self.state.deepspeed_plugin

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes its accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def step(self) -> int:
        """The micro-batches of `accumulate` so far: `step % gradient_accumulation_steps` are in the current window.

        It starts at 0 again where the end of the data cuts a window short. A value that you set moves the end of the
        current window; gradients stay as they are.

        Example:
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
            >>> accelerator.step = 3
            >>> with accelerator.accumulate():
            ...     print(accelerator.step, accelerator.sync_gradients)
            4 True
        """
        return self.window.step

    @step.setter
    def step(self, step: int) -> None:
        self.window.step = step

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many micro-batches make one update."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        check_count("gradient_accumulation_steps", steps)
        self.gradient_state.plugin.num_steps = steps

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because a gradient overflowed (fp16)."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)

    # -- one update ----------------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> "AccumulationContext":
        """Return the context of a micro-batch: reductions and steps wait until the accumulation window is complete.

        You can enter the same context again for the next micro-batch.

        Args:
            *models: The prepared models that you train on it; all, by default.

        Example:
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> for _ in range(2):
            ...     with accelerator.accumulate():
            ...         print(accelerator.sync_gradients)
            False
            True
        """
        return AccumulationContext(self, models or tuple(self.prepared.models))

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Generator[None]:
        """Do not reduce gradients across ranks in a `backward` inside the block; `accumulate` does this by itself.

        Args:
            model: The prepared model; all, by default.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(4, 2))
            >>> with accelerator.no_sync(model):
            ...     accelerator.backward(model(torch.ones(3, 4)).mean())  # stays on this rank
            >>> accelerator.backward(model(torch.ones(3, 4)).mean())  # reduces the sum of both
        """
        with ExitStack() as contexts:
            for prepared in self.prepared.models if model is None else [model]:
                contexts.enter_context(self.strategy.no_sync(prepared))
            yield

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` reduces the gradients of a forward that ran in `no_sync`."""
        return self.strategy.force_sync(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of a training loop in which some ranks run out of data before others.

        Updates still divide gradients by the number of all ranks; a rank without data adds zeros. A weighted loss
        (`backward(loss, weight=)`) is the mean over the items of the ranks that have data. A rank whose data ends
        within an accumulation window contributes the gradients that it has. After the block all ranks have the
        weights, buffers, prepared optimizers and schedules of a rank that made every update. Inside, run no other
        collectives: no `gather`, no `reduce`. Several models take turns: forward and backward of one model, then of
        the next, in the order of `joinables`.

        Args:
            joinables: The prepared models that you train; models in evaluation mode need not be prepared.
            even_batches: The setting of prepared loaders inside the block.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = torch.nn.Linear(4, 2)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     for batch in torch.ones(2, 3, 4):
            ...         accelerator.backward(model(batch).square().mean())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        from trainer_lib.accelerator.uneven_inputs import joined

        return joined(self.engine, joinables, even_batches)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context for mixed precision outside of a prepared model's forward, which runs in it by itself.

        Args:
            autocast_handler: Other options for this block, such as `AutocastKwargs(enabled=False)`.

        Example:
            >>> accelerator = Accelerator(cpu=True, mixed_precision="bf16")
            >>> with accelerator.autocast():
            ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            torch.bfloat16
        """
        return self.precision.autocast(autocast_handler)

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        optimizer: AcceleratedOptimizer | Sequence[AcceleratedOptimizer] | None = None,
        is_mean: bool = False,
        **kwargs: Any,
    ) -> None:
        """Compute gradients.

        Without `weight`, `loss` is a mean, and all micro-batches count equally. With it, `loss` is a sum over `weight`
        items (tokens, samples), and the update uses the mean over all items of the accumulation window on all ranks,
        however the items are distributed.

        Args:
            loss: The loss of this micro-batch: a mean, or with `weight` a sum.
            weight: How many items the loss sums over; a number, or a tensor with one value.
            optimizer: The optimizer of these gradients; required with `weight` if several are prepared.
            is_mean: Whether the loss is the mean over `weight` items instead of their sum.
            **kwargs: Passed on to `torch.Tensor.backward`; with `learning_rate`, see `lomo_backward`.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = torch.nn.Linear(4, 2)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> losses = model(torch.ones(3, 4)).square().sum(dim=1)
            >>> accelerator.backward(losses.sum(), weight=len(losses))
        """
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            if isinstance(loss, Tensor) and self._computed_with_loss():
                return
            raise _nothing_to_differentiate(loss)
        if kwargs and "learning_rate" in kwargs:
            self.lomo_backward(loss, **kwargs)
            return
        window = self.window
        if weight is not None:
            self._weighted.run(loss, weight, optimizer, is_mean, kwargs)
            return
        if len(self.prepared.optimizers) == 1 and window.has_weights(self.prepared.optimizers[0]):
            raise ConfigurationError(
                "backward got a loss without weight= in an update that has weighted losses. Give weight= with all "
                "losses of an update, or with none."
            )
        if not self.prepared.optimizers and self._unprepared is None:
            from trainer_lib.accelerator.unprepared_optimizers import watch_unprepared

            self._unprepared = watch_unprepared(self.engine)
        window.begin_backward()
        self.precision.backward(loss, window.is_fresh, window.steps, **kwargs)

    def takes_windows(self, model: nn.Module) -> bool:
        """Whether `backward_window` computes the micro-batches of this model in the schedule of a pipeline."""
        return self.strategy.takes_windows(model)

    def backward_window(
        self,
        model: nn.Module,
        compute: Callable[[Any], WeightedLoss],
        batches: Sequence[Any],
        around: Surroundings = no_surroundings,
    ) -> list[WeightedLoss]:
        """Compute the gradients of all micro-batches of an accumulation window at once, in the schedule of a pipeline.

        Call it with the last micro-batch of the window, within `accumulate`. Without a pipeline, call `backward` for
        each micro-batch instead.

        Args:
            model: The prepared model, which `takes_windows`.
            compute: Returns the summed loss of a micro-batch and its weight. It calls the model once; on ranks without
                the last stage, it does not get beyond that call.
            batches: The micro-batches, the same on all ranks of a pipeline.
            around: Returns the context in which forward and backward of a micro-batch run, by its number.

        Returns:
            The losses and weights of the micro-batches, on all ranks.
        """
        if not self.takes_windows(model):
            raise ConfigurationError(
                "backward_window needs a prepared model of pp_size above 1, with a schedule. Call backward for each "
                "micro-batch."
            )
        return self._weighted.run_window(model, compute, batches, around)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Compute gradients and update each weight as soon as its gradient is computed, with a prepared `Lomo`.

        Call neither `step` nor `zero_grad`. `backward(loss, learning_rate=…)` does the same.

        Args:
            loss: The loss of the batch.
            learning_rate: The learning rate of this update.
        """
        from trainer_lib.accelerator.lomo_backward import lomo_backward

        lomo_backward(
            self.prepared.optimizers, loss, learning_rate, self.use_distributed, self.gradient_accumulation_steps
        )

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Unscale gradients now (fp16), and divide them by the weight of their accumulation window.

        Clipping by the `Accelerator` and `optimizer.step()` do this by themselves: call it before you read or change
        gradients by other means. Before the last micro-batch of a window it does nothing.

        Args:
            optimizer: The optimizer, or several, of these gradients; all, by default.
        """
        if self.gradient_state.sync_gradients:
            chosen = None if optimizer is None else _listed(optimizer)
            for prepared in self.prepared.optimizers:
                if chosen is None or any(optimizer in (prepared, prepared.optimizer) for optimizer in chosen):
                    prepared.finalize_gradients()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients of `parameters` to a norm of at most `max_norm`, and return the norm before clipping.

        Before the last micro-batch of a window nothing is clipped, and the norm is that of the unreduced gradients: the
        guard `if accelerator.sync_gradients` is not needed.

        Args:
            parameters: The parameters of a prepared model, `model.parameters()`.
            max_norm: The largest norm.
            norm_type: The order of the norm; `float("inf")` is the largest element.

        Example:
            >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 2)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> accelerator.backward(model(torch.ones(3, 4)).sum())
            >>> accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            tensor(9.4868)
        """
        _check_limit("max_norm", max_norm)
        parameters = self.strategy.current_parameters(_parameters_of(parameters))
        if not self.gradient_state.sync_gradients:
            return self.strategy.grad_norm(parameters, norm_type)
        self.prepared.finalize_gradients_of(parameters)
        return self.strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp the gradients of `parameters` to ±`clip_value`; before the last micro-batch of a window, do nothing."""
        _check_limit("clip_value", clip_value)
        if self.gradient_state.sync_gradients:
            parameters = self.strategy.current_parameters(_parameters_of(parameters))
            self.prepared.finalize_gradients_of(parameters)
            self.strategy.clip_grad_value(parameters, clip_value)

    # -- looking at a step ---------------------------------------------------------------------------------------

    def profile(self, profile_handler: ProfileKwargs | None = None) -> "AbstractContextManager[profile]":
        """Return the context that profiles a block, with torch's profiler as its value.

        With `output_trace_dir` each rank writes a trace of the block, or of each cycle of its schedule.

        Args:
            profile_handler: What to record; by default the `ProfileKwargs` in `kwargs_handlers`.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
            ...     _ = torch.ones(8, 8) @ torch.ones(8, 8)
            >>> "aten::matmul" in profiler.key_averages().table()
            True
        """
        return self._profiling.block(profile_handler or self.profile_handler or ProfileKwargs())

    # -- the end -------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release all prepared objects, and return a `None` for each of `objects` to overwrite it with.

        Afterwards you may create an `Accelerator` with other settings.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(2, 2))
            >>> (model,) = accelerator.free_memory(model)
        """
        from trainer_lib.memory import release_memory

        self.release()
        return release_memory(*objects)

    def _computed_with_loss(self) -> bool:
        """Whether the call of a model that computes its gradients itself, as with Megatron-LM, returned the loss."""
        if self.state.megatron_lm_plugin is None:
            return False
        from trainer_lib.accelerator.megatron_lm.megatron_engine import computes_gradients

        return any(map(computes_gradients, self.prepared.models))

    def release(self) -> None:
        """Release all prepared objects and the settings, without collecting garbage."""
        self.checkpoints.background.release()
        if self._unprepared is not None:
            self._unprepared.remove()
            self._unprepared = None
        if self.state.megatron_lm_plugin is not None:
            from trainer_lib.accelerator.megatron_lm.megatron_engine import undo_engine

            for model in self.prepared.models:
                undo_engine(model)
        for model in self.prepared.models:
            undo_compilation(model)
            self.precision.unwrap_forward(self.strategy.unwrap(model))
        self.prepared.clear()
        self.window.reset()
        self.gradient_state.sync_gradients = True
        self.strategy.release()
        self.state.release()

    def clear(self, *objects: Any) -> list[Any]:
        """Call `free_memory`."""
        return self.free_memory(*objects)

    def __getstate__(self) -> Any:
        """Refuse pickles: an Accelerator holds threads, a process group and the prepared objects."""
        raise UnsupportedError(
            f"An object of {type(self).__name__} cannot be pickled, so a dataset or function that is sent to data "
            "workers or launched processes must not hold it. Give them the values they need, such as "
            f"accelerator.process_index, or create the {type(self).__name__} in the launched function."
        )

    def __copy__(self) -> Self:
        """Return the `Accelerator` itself, as `copy.deepcopy` does."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the `Accelerator` itself: a copy of a model that holds it trains with the same one."""
        return self

    def end_training(self) -> None:
        """Finish the trackers and destroy the process group; the last call of a script.

        Raises:
            CheckpointError: If a checkpoint could not be written in the background.
        """
        try:
            self.wait_for_save()
        finally:
            self._finish_trackers()
            self.state.destroy_process_group()


class AccumulationContext:
    """The context of one micro-batch."""

    __slots__ = ("_accelerator", "_local", "_models")

    def __init__(self, accelerator: Accelerator, models: tuple[nn.Module, ...]) -> None:
        self._accelerator = accelerator
        self._models = models
        self._local: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        accelerator = self._accelerator
        accelerator.window.begin_micro_batch(self._models)
        state = accelerator.gradient_state
        if not state.sync_gradients and not state.plugin.sync_each_batch:
            for model in self._models:
                local = accelerator.strategy.no_sync(model)
                local.__enter__()
                self._local.append(local)

    def __exit__(self, *error: Any) -> None:
        if self._local:
            for local in self._local:
                local.__exit__(*error)
            self._local.clear()
        self._accelerator.window.end_micro_batch()


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, (Tensor, Optimizer)) else list(value)


def _parameters_of(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        raise ConfigurationError(f"Clipping takes parameters (got a {type(value).__name__}). Give model.parameters().")
    return _listed(value)


def _check_limit(name: str, limit: Any) -> None:
    if isinstance(limit, (int, float)) and not limit >= 0:
        raise ConfigurationError(f"{name} must be a number of at least 0 (got {limit!r}).")


def _nothing_to_differentiate(loss: Any) -> ConfigurationError:
    if not isinstance(loss, Tensor):
        return ConfigurationError(
            f"backward takes the loss as a tensor (got a {type(loss).__name__}). Pass the loss itself, not "
            "loss.item() or float(loss)."
        )
    return ConfigurationError(
        "This loss does not require gradients: the forward ran under torch.no_grad(), the loss was detached, or all "
        "parameters are frozen."
    )
