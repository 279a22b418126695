"""The Accelerator that training arguments ask for."""

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib.accelerator import Accelerator
from trainer_lib.foundation.device_types import can_pin_memory
from trainer_lib.foundation.environment import (
    deepspeed_requested,
    make_cublas_deterministic,
    megatron_lm_requested,
    mixed_precision_requested,
    uses_parallelism_config,
)
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.data_options import DataLoaderConfiguration
from trainer_lib.options.memory_options import MemoryKwargs
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.state import PartialState
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.fit.accelerator_setup.dispatched_models import dispatch

_ARGUMENTS = {
    "dynamo_plugin": "compile",
    "fsdp_plugin": "fsdp",
    "parallelism_config": "parallelism",
    "torch_tp_plugin": "parallelism",
    "deepspeed_plugins": "deepspeed",
}
_OTHER_WAYS = (
    "pass that Accelerator (accelerator=…), delete the last reference to that Trainer, or call "
    "trainer.accelerator.free_memory() on it."
)


def build_accelerator(args: TrainingArguments) -> Accelerator:
    """Return the engine."""
    options: dict[str, Any] = {}
    if isinstance(args.compile, TorchDynamoPlugin):
        options["dynamo_plugin"] = args.compile
    elif args.compile:
        options["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor" if args.compile is True else args.compile)
    if args.fsdp:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin() if args.fsdp is True else args.fsdp
    precision = args.mixed_precision
    if args.deepspeed is not None or deepspeed_requested():
        from trainer_lib.trainer.fit.accelerator_setup.deepspeed_arguments import deepspeed_plugin

        plugin = deepspeed_plugin(args, _ranks_with_own_data(args))
        options["deepspeed_plugins"] = plugin
        precision = plugin.agreed_precision(precision)
    if megatron_lm_requested():
        from trainer_lib.trainer.fit.accelerator_setup.megatron_lm_arguments import megatron_lm_plugin

        options["megatron_lm_plugin"] = megatron_lm_plugin(args)
    if args.parallelism is not None:
        options["parallelism_config"] = args.parallelism
    memory = MemoryKwargs(optimizer_in_backward=True) if args.steps_in_backward else None
    options["kwargs_handlers"] = [handler for handler in (args.ddp, args.fp8, memory) if handler is not None]
    made = Accelerator(
        mixed_precision=precision,
        cpu=args.use_cpu,
        dataloader_config=loader_options(args),
        **options,
    )
    meant = precision or mixed_precision_requested()
    if made.mixed_precision != meant:
        raise ConfigurationError(
            f"mixed_precision={args.mixed_precision!r} means {meant!r}, and an Accelerator or Trainer in this process "
            f"already uses {made.mixed_precision!r}. Give "
            f"mixed_precision={made.mixed_precision!r}, {_OTHER_WAYS}"
        )
    _refuse_inherited(args, made, options)
    return made


def _refuse_inherited(args: TrainingArguments, made: Accelerator, options: Mapping[str, Any]) -> None:
    """Refuse settings of a living Accelerator or Trainer that these arguments leave out."""
    asked = made.state.asked_plugins
    for option, argument in _ARGUMENTS.items():
        if option not in options and asked[option] is not None:
            raise ConfigurationError(
                f"{argument}={getattr(args, argument)!r}, and an Accelerator or Trainer in this process was made with "
                f"{argument} already. Give the same {argument}, {_OTHER_WAYS}"
            )


def loader_options(args: TrainingArguments) -> DataLoaderConfiguration:
    """Return the options of the engine's loaders."""
    return DataLoaderConfiguration(
        data_seed=args.seed if args.data_seed is None else args.data_seed,
        non_blocking=can_pin_memory() if args.pin_memory is None else args.pin_memory,
        seed_each_sample=args.seed_each_sample,
        low_memory_shuffle=args.low_memory_shuffle,
    )


def accumulation_steps(args: TrainingArguments, num_processes: int) -> int:
    """Return how many batches make an update.

    Raises:
        ConfigurationError: If `global_batch_size` cannot be made from them.
    """
    if args.global_batch_size is None:
        return args.gradient_accumulation_steps or 1
    of_process = args.train_batch_size_for(num_processes)
    of_round = of_process * num_processes
    steps, rest = divmod(args.global_batch_size, of_round)
    if rest or not steps:
        raise ConfigurationError(
            f"global_batch_size={args.global_batch_size} is not a multiple of per_device_train_batch_size="
            f"{of_process} × {num_processes} processes = {of_round}. Give "
            f"{of_round * max(steps, 1)} or another multiple of it, or another per_device_train_batch_size."
        )
    return steps


def _ranks_with_own_data(args: TrainingArguments) -> int:
    """Return the world size, or less where ranks share sequences."""
    config = args.parallelism or (ParallelismConfig() if uses_parallelism_config() else None)
    world_size = PartialState(args.use_cpu).num_processes
    return world_size if config is None else world_size // config.non_data_parallel_size


def adapt_model(model: nn.Module, args: TrainingArguments, accelerator: Accelerator) -> nn.Module:
    """Do what arguments ask of a model before it is prepared."""
    dispatch(model, args)
    if args.gradient_checkpointing or args.activation_offload:
        from trainer_lib.modules.activation_checkpointing import save_activation_memory

        save_activation_memory(model, args)
    if args.use_liger_kernel:
        from trainer_lib.trainer.losses.liger_kernels import apply_liger_kernels

        apply_liger_kernels(model, accelerator.device.type)
    if args.chunked_cross_entropy:
        from trainer_lib.trainer.losses.chunked_loss import chunk_loss

        chunk_loss(model, accelerator.mixed_precision)
    if args.sync_batchnorm and accelerator.use_distributed:
        if accelerator.device.type == "cpu":
            raise UnsupportedError(
                "sync_batchnorm=True: torch synchronizes BatchNorm on accelerators only, not on CPUs."
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


@contextlib.contextmanager
def numerics(args: TrainingArguments) -> Generator[None]:
    """Set torch to what arguments ask for, and back: TF32, determinism, the search for anomalies."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    deterministic = _determinism()
    if args.tf32 is not None:
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    if args.deterministic:
        make_cublas_deterministic()
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False  # it may choose another algorithm each time
    try:
        with torch.autograd.set_detect_anomaly(True) if args.detect_anomaly else contextlib.nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        if _determinism() != deterministic:  # it imports torch's compiler, which takes as long as a run of a few steps
            mode, warn_only = deterministic
            torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
