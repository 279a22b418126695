"""The `Accelerator`'s methods that prepare models, optimizers, schedules and loaders."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainer_lib.accelerator.methods.collective_methods import CollectiveMethods
from trainer_lib.accelerator.prepared import Prepared, list_of
from trainer_lib.context_parallel import SequenceSplit
from trainer_lib.foundation.errors import ConfigurationError, PreparationError
from trainer_lib.logging import get_logger
from trainer_lib.modules.compilation import compile_model
from trainer_lib.modules.device_placement import has_offloaded_params
from trainer_lib.modules.quantized_layers import keep_unpacked
from trainer_lib.modules.unwrapping import extract_model_from_parallel
from trainer_lib.optimizer import AcceleratedOptimizer, DeepSpeedOptimizerWrapper
from trainer_lib.options.data_options import DataLoaderConfiguration
from trainer_lib.options.memory_options import MemoryKwargs
from trainer_lib.precision import FullPrecision
from trainer_lib.scheduler import AcceleratedScheduler
from trainer_lib.state.accumulation_window import GradientWindow
from trainer_lib.strategies import Strategy

_logger = get_logger(__name__)


class PrepareMethods(CollectiveMethods):
    """Methods of an `Accelerator` that prepare objects, and the settings that they follow."""

    device_placement: bool
    dataloader_config: DataLoaderConfiguration
    rng_types: list[str] | None
    step_scheduler_with_optimizer: bool
    scheduler_steps_per_process: bool
    prepared: Prepared
    strategy: Strategy
    sequence_split: SequenceSplit
    precision: FullPrecision
    window: GradientWindow
    memory_options: MemoryKwargs

    # Scripts written for Accelerate read these lists.
    _models, _optimizers, _schedulers = list_of("models"), list_of("optimizers"), list_of("schedulers")
    _dataloaders, _custom_objects = list_of("dataloaders"), list_of("custom_objects")

    # -- settings ------------------------------------------------------------------------------------------------

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size counts the samples of all ranks together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads the data and sends the other ranks their batches."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last round of batches is filled, so that all ranks get equally many."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of shuffled loaders is drawn from seed + epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders are instances of torchdata's `StatefulDataLoader`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """Whether copies of batches to the device are asynchronous."""
        return self.dataloader_config.non_blocking

    # -- prepare -------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedules, and return them in the order given.

        Other objects come back unchanged, and so do those that `prepare` returned before.

        Args:
            *args: The objects to prepare, in any number and order, the same on all ranks.
            device_placement: For each object, whether to move it to the device.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = torch.nn.Linear(4, 2)
            >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            >>> scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
            >>> loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
            >>> model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        """
        from trainer_lib.accelerator.deepspeed_config import apply_config, is_schedule
        from trainer_lib.options.megatron_lm.dummy_data_loader import MegatronLMDummyScheduler

        if device_placement is None:
            device_placement = [None] * len(args)
        elif not isinstance(device_placement, Sequence) or len(device_placement) != len(args):
            raise ConfigurationError(
                f"device_placement must be a list with one value for each of the {len(args)} objects "
                f"(got {device_placement!r})."
            )
        steps, has_model = self.window.state.num_steps, bool(self.prepared.models)
        args = tuple(apply_config(self.state.deepspeed_plugin, args, steps, self.data_group.size, has_model=has_model))
        megatron_lm = self.state.megatron_lm_plugin
        if megatron_lm is not None:
            from trainer_lib.accelerator.megatron_lm.loaders import with_datasets

            args = with_datasets(args, megatron_lm, self.data_group.size, self.prepare_data_loader)
        self.prepared.check_new(map(self.prepared.user_object, args))
        # Schedules come last: each one follows a prepared optimizer.
        prepared = [self._prepare_object(value, place) for value, place in zip(args, device_placement, strict=True)]
        if any(isinstance(value, MegatronLMDummyScheduler) for value in prepared):
            from trainer_lib.accelerator.megatron_lm.schedule import schedule_of

            prepared = [schedule_of(v, megatron_lm) if isinstance(v, MegatronLMDummyScheduler) else v for v in prepared]
        prepared = [
            self.prepare_scheduler(v) if isinstance(v, (LRScheduler, AcceleratedScheduler)) or is_schedule(v) else v
            for v in prepared
        ]
        # In a world of one, a few foreign parameters are fine; with more ranks their gradients would not be reduced.
        optimizers = [value for value in prepared if isinstance(value, AcceleratedOptimizer)]
        self.prepared.check_models_of(optimizers, all_parameters=self.use_distributed)
        if megatron_lm is not None and megatron_lm.computes_windows:
            from trainer_lib.accelerator.megatron_lm.megatron_engine import let_models_compute_windows

            let_models_compute_windows(cast(Any, self), prepared)
        if self.state.deepspeed_plugin is not None and self.sequence_split.ranks is not None:
            from trainer_lib.context_parallel.part_loader import with_parts

            models = [self.strategy.bare(value) for value in prepared if isinstance(value, nn.Module)]
            prepared = with_parts(prepared, models, self.sequence_split)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model to the device, run its forward in the chosen precision, and reduce its gradients across ranks.

        Args:
            model: The model.
            device_placement: Whether to move it to the device; by default the `Accelerator`'s setting.
            evaluation_mode: Whether you only evaluate the model; its gradients are then not reduced.
        """
        if self.prepared.holds(model):
            return model
        model = self.prepared.user_object(model)
        self.prepared.check_new([model])
        is_spread = self.verify_device_map(model) or any(map(has_offloaded_params, model.modules()))
        if is_spread and self.use_distributed:
            raise PreparationError(
                "This model is spread over several devices (device_map), and with several ranks each rank needs a "
                "copy on its own device. Load the model without device_map, or start a single process."
            )
        keep_unpacked(model)
        self.precision.check(model)
        self.precision.cast(model)
        if (self.device_placement if device_placement is None else device_placement) and not is_spread:
            model = self.strategy.place(model)
        if self.state.megatron_lm_plugin is not None and self.state.megatron_lm_plugin.recomputes:
            from trainer_lib.modules.activation_checkpointing import checkpoint_activations

            checkpoint_activations(
                model, first=self.state.megatron_lm_plugin.recomputed_blocks, option="recompute_activations"
            )
        if self.memory_options.saves_activations and not evaluation_mode:
            from trainer_lib.modules.activation_checkpointing import save_activation_memory

            save_activation_memory(model, self.memory_options)
        if self.state.megatron_lm_plugin is not None and self.state.megatron_lm_plugin.spreads_experts:
            from trainer_lib.strategies.tensor_parallel.tensor_parallel_plan import require_experts

            size = self.state.megatron_lm_plugin.expert_model_parallel_size or 1
            require_experts(model, size, f"expert_model_parallel_size={size}")
        self.sequence_split.attach(model)
        self.precision.wrap_forward(model)
        model = self.strategy.distribute(model, evaluation_mode)
        for optimizer in self.prepared.optimizers:
            self.strategy.rebind_parameters(optimizer.optimizer)
            optimizer.attach()
        # Compile the user's model inside DDP: torch splits its graph at DDP's buckets there too, and DDP's own
        # Python, which does not compile, stays out of the graph.
        compile_model(self.strategy.unwrap(model), self.state.dynamo_plugin)
        self.prepared.add_model(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap an optimizer so that it steps once per accumulation window.

        Call `step` and `zero_grad` for each micro-batch: before the last one of a window they do nothing.

        Args:
            optimizer: The optimizer, made before or after its model is prepared.
            device_placement: Whether to move its state to the device; by default the `Accelerator`'s setting.
        """
        if isinstance(optimizer, AcceleratedOptimizer) and self.prepared.holds(optimizer):
            return optimizer
        users = self.prepared.user_object(optimizer)
        self.prepared.check_new([users])
        if isinstance(optimizer, AcceleratedOptimizer):  # one that was released
            optimizer.detach()
            optimizer.restart_window()
        place = self.device_placement if device_placement is None else device_placement
        optimizer = self.strategy.wrap_optimizer(users)
        self.strategy.rebind_parameters(optimizer)
        kind: Callable[..., AcceleratedOptimizer] = AcceleratedOptimizer
        if self.state.deepspeed_plugin is not None:
            from trainer_lib.accelerator.clipped_optimizer import ClippedOptimizer
            from trainer_lib.strategies.deepspeed.zero_optimizer import ZeroOptimizer

            limit = self.state.deepspeed_plugin.gradient_clipping
            if isinstance(optimizer, ZeroOptimizer):
                kind = DeepSpeedOptimizerWrapper
            elif isinstance(limit, (int, float)) and limit > 0:  # stage 0, with DDP
                kind = partial(ClippedOptimizer, strategy=self.strategy, max_norm=limit)
        if self.state.megatron_lm_plugin is not None:
            from trainer_lib.accelerator.megatron_lm.optimizer_step import MegatronLMOptimizer

            kind = partial(MegatronLMOptimizer, plugin=self.state.megatron_lm_plugin, strategy=self.strategy)
        if self.memory_options.optimizer_in_backward:
            from trainer_lib.accelerator.optimizer_in_backward import OptimizerInBackward

            kind = partial(OptimizerInBackward, strategy=self.strategy)
        prepared: AcceleratedOptimizer = kind(optimizer, place, precision=self.precision, window=self.window)
        self.prepared.add_optimizer(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler | AcceleratedScheduler) -> AcceleratedScheduler:
        """Wrap a schedule so that it steps with its optimizer: once for each update, on any number of ranks.

        Args:
            scheduler: A schedule of an optimizer; call its `step` after each `optimizer.step()`.
        """
        # With split_batches, Accelerate steps them once an update as well.
        differs = self.use_distributed and self.step_scheduler_with_optimizer and not self.split_batches
        if differs and not self.scheduler_steps_per_process:
            _logger.warning_once(
                "Schedules step once per update, whatever the number of ranks. If your script multiplies warm-up and "
                "total steps by the number of processes, as Accelerate requires, remove that factor, or give "
                "Accelerator(scheduler_steps_per_process=True)."
            )
        return self.wrap_scheduler(scheduler)

    def wrap_scheduler(self, scheduler: LRScheduler | AcceleratedScheduler) -> AcceleratedScheduler:
        """Wrap a schedule like `prepare_scheduler`, without its warning for scripts written for Accelerate."""
        if isinstance(scheduler, AcceleratedScheduler) and self.prepared.holds(scheduler):
            return scheduler
        scheduler = self.prepared.user_object(scheduler)
        self.prepared.check_new([scheduler])
        prepared = AcceleratedScheduler(
            scheduler,
            self.prepared.optimizers_of(scheduler),
            self.step_scheduler_with_optimizer,
            self.split_batches,
            once_per_process=self.scheduler_steps_per_process,
        )
        self.prepared.add_scheduler(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Wrap a loader so that this rank reads its share of the data, in an order that all ranks agree on.

        Args:
            data_loader: The loader, the same on all ranks and not split yet: without a `DistributedSampler`.
            device_placement: Whether to move batches to the device; by default the `Accelerator`'s setting.
            slice_fn_for_dispatch: With `dispatch_batches` and `split_batches`, the function that cuts the slice of a
                rank from a batch of rank 0.
        """
        from trainer_lib.data_loader import prepare_data_loader

        if self.prepared.holds(data_loader):
            return data_loader
        released, data_loader = data_loader, self.prepared.user_object(data_loader)
        self.prepared.check_new([data_loader])
        config, megatron_lm = self.dataloader_config, self.state.megatron_lm_plugin
        whole = data_loader
        if megatron_lm is not None:
            from trainer_lib.accelerator.megatron_lm.loaders import of_windows

            whole = of_windows(data_loader, megatron_lm)
        prepared = prepare_data_loader(
            whole,
            self.device,
            num_processes=self.data_group.size,
            process_index=self.data_group.rank,
            split_batches=config.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            seed_each_sample=config.seed_each_sample,
            low_memory_shuffle=config.low_memory_shuffle,
        )
        if released is not data_loader:
            prepared.continue_from(cast(Any, released), keep_seed=config.data_seed is None)
        self.prepared.add_dataloader(prepared, data_loader)
        if megatron_lm is not None and data_loader.batch_size is not None:
            replicas = 1 if config.split_batches else self.data_group.size
            megatron_lm.count_batches(data_loader.batch_size, replicas)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader whose next epoch skips the first `num_batches` batches; later epochs are whole.

        After `load_state` this is not needed: the loader resumes at its position.

        Args:
            dataloader: The loader, prepared or not.
            num_batches: How many batches of this rank to skip.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(6), batch_size=2))
            >>> next(iter(accelerator.skip_first_batches(loader, 2)))
            tensor([4, 5])
        """
        from trainer_lib.data_loader import skip_first_batches

        if self.sequence_split.ranks is not None:
            from trainer_lib.context_parallel.part_loader import PartLoader

            if isinstance(dataloader, PartLoader):
                return dataloader.around(skip_first_batches(cast(Any, dataloader.loader), num_batches))
        return skip_first_batches(dataloader, num_batches)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model is spread over several devices."""
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's model inside a prepared one.

        Args:
            model: The prepared model.
            keep_fp32_wrapper: Keep its forward in mixed precision.
            keep_torch_compile: Keep it compiled; else return a view that runs eagerly, with the same weights and
                modes, while the prepared model stays compiled.

        Example:
            >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 2)
            >>> accelerator.unwrap_model(accelerator.prepare(model)) is model
            True
        """
        return extract_model_from_parallel(self.strategy.unwrap(model), keep_fp32_wrapper, keep_torch_compile)

    def _prepare_object(self, value: Any, device_placement: bool | None) -> Any:
        if isinstance(value, DataLoader):
            return self.prepare_data_loader(value, device_placement)
        if isinstance(value, nn.Module):
            return self.prepare_model(value, device_placement)
        if isinstance(value, Optimizer):
            return self.prepare_optimizer(value, device_placement)
        return value
