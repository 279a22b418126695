"""Options of Megatron-LM, under Accelerate's names, translated to this library's own."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.base import Options, check_choice, check_count, check_flag, is_at_least_zero
from trainer_lib.options.megatron_lm.fields import MEMORY, REFUSED
from trainer_lib.options.megatron_lm.megatron_lm_launcher_values import fill_from_launcher
from trainer_lib.options.megatron_lm.schedule_steps import ScheduleSteps, check_schedule, schedule_steps
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.parallel.pipeline_options import TorchPipelineParallelConfig
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelConfig

_COUNTS = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size", "num_micro_batches")
_FLAGS = (
    "sequence_parallelism",
    "recompute_activations",
    "use_distributed_optimizer",
    "use_custom_fsdp",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
)
_DEFAULTS = {**dict.fromkeys(_COUNTS, 1), **dict.fromkeys(_FLAGS, False), "gradient_clipping": 1.0}
_FLAGS_WITHOUT_DEFAULT = "eod_mask_loss", "calculate_per_token_loss"
_OTHER_FLAGS = "is_train_batch_min", "megatron_dataset_flag", "return_logits"
_LENGTHS = "seq_length", "encoder_seq_length", "decoder_seq_length"
_GRANULARITIES = ("selective", "full")
_METHODS = ("uniform", "block")


@dataclass
class MegatronLMPlugin(Options):
    """Megatron-LM's options, for scripts that have them: each becomes the option of this library that does the same.

    Megatron-LM itself is not needed and does not run. A field without a counterpart is refused when it is set. Fields
    that are left out have the launcher's values (`launch --use_megatron_lm`), or Accelerate's defaults.

    Args:
        tp_degree: How many ranks split each matrix.
        pp_degree: How many ranks hold consecutive layers each.
        use_custom_fsdp: Shard weights, gradients and optimizer states over the ranks that would replicate a model.
        overlap_cpu_optimizer_d2h_h2d: No effect.
        no_load_optim: Refused.
        eod_mask_loss: `GPTTrainStep` leaves out the loss of what follows an end of text.
        no_save_optim: Refused.
        optimizer_cpu_offload: Keep the shards and the optimizer's state in CPU memory.
        use_precision_aware_optimizer: Refused.
        decoder_last_pipeline_num_layers: Refused.
        recompute_granularity: "selective" or "full": recompute the activations of all blocks in the backward.
        recompute_method: "uniform" or "block": which blocks `recompute_granularity="full"` recomputes.
        recompute_num_layers: How many blocks `recompute_method="block"` recomputes.
        attention_backend: Refused.
        expert_model_parallel_size: How many ranks share the experts of a layer: 1, or `tp_degree`.
        context_parallel_size: How many ranks hold parts of the same sequences.
        attention_dropout: Refused.
        hidden_dropout: Refused.
        attention_softmax_in_fp32: Refused.
        expert_tensor_parallel_size: How many ranks split each expert: 1.
        calculate_per_token_loss: Train steps weigh micro-batches by their tokens.
        use_rotary_position_embeddings: Refused.
        num_micro_batches: The micro-batches of an accumulation window.
        gradient_clipping: The norm to which each optimizer step clips gradients (1.0); 0: none.
        sequence_parallelism: Norms of Llama's kind of models compute parts of the sequence.
        recompute_activations: Recompute the activations of all blocks in the backward.
        use_distributed_optimizer: Shard gradients and optimizer states over the ranks that would replicate a model.
        pipeline_model_parallel_split_rank: Refused.
        num_layers_per_virtual_pipeline_stage: The blocks of a stage; each rank holds several stages.
        is_train_batch_min: Whether `global_batch_size` counts the smallest batches of several loaders.
        train_iters: The updates of the training, for schedules and datasets.
        train_samples: The same in samples.
        weight_decay_incr_style: "constant", "linear" or "cosine": how a `MegatronLMDummyScheduler` changes it.
        start_weight_decay: The weight decay at the start.
        end_weight_decay: The weight decay at the end.
        lr_decay_style: "linear", "cosine", "constant" or "inverse-square-root": a `MegatronLMDummyScheduler`'s shape.
        lr_decay_iters: The updates after which its decay is at its end.
        lr_decay_samples: The same in samples.
        lr_warmup_iters: The updates of its warm-up.
        lr_warmup_samples: The same in samples.
        lr_warmup_fraction: The same as a share of the decay.
        min_lr: The learning rate at which a `MegatronLMDummyScheduler` ends.
        consumed_samples: Refused.
        no_wd_decay_cond: Refused.
        scale_lr_cond: Refused.
        lr_mult: Refused.
        megatron_dataset_flag: Batches are those of Megatron-LM's datasets; a `MegatronLMDummyDataLoader` sets it.
        seq_length: Batches have their own lengths.
        encoder_seq_length: Batches have their own lengths.
        decoder_seq_length: Batches have their own lengths.
        tensorboard_dir: Refused.
        set_all_logging_options: Refused.
        eval_iters: The batches of a validation, for datasets.
        eval_interval: The updates between two validations, for datasets.
        return_logits: Outputs always have their logits.
        custom_train_step_class: The train step with which the model's call computes the micro-batches of an update.
        custom_train_step_kwargs: Its keywords.
        custom_model_provider_function: Refused.
        custom_prepare_model_function: Refused.
        custom_megatron_datasets_provider_function: Returns the datasets behind a `MegatronLMDummyDataLoader`.
        custom_get_batch_function: How a train step reads a micro-batch.
        custom_loss_function: How a train step computes the loss of a micro-batch.
        other_megatron_args: Refused.

    Attributes:
        global_batch_size: The samples of an update on all ranks, once a loader is prepared.
        micro_batch_size: The samples of a micro-batch, once a loader is prepared.
        grad_norm: The norm of the gradients of the last update before clipping; `None` without clipping.

    Example:
        >>> plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4)
        >>> plugin.mesh_sizes(num_processes=8)["dp_replicate_size"]
        2
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: str | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Take up the launcher's values, check all of them, and refuse those without a counterpart."""
        fill_from_launcher(self)
        self._refuse()
        for name, value in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self._check_values()
        self.global_batch_size: int | None = None
        self.micro_batch_size: int | None = None
        self.grad_norm: Any = None

    @property
    def notes(self) -> list[str]:
        """Which fields have no effect, and why."""
        idle = {name: why for name, why in MEMORY.items() if getattr(self, name)}
        if self.sequence_parallelism and self.matrix_splitting is None:
            idle["sequence_parallelism"] = "norms stay whole without tp_degree above 1, and in pipelines"
        return [f"{name} has no effect ({why})" for name, why in idle.items()]

    @property
    def recomputes(self) -> bool:
        """Whether blocks recompute their activations in the backward."""
        return bool(self.recompute_activations or self.recompute_granularity)

    @property
    def shards(self) -> bool:
        """Whether the ranks that would replicate a model share it."""
        return bool(self.use_distributed_optimizer or self.use_custom_fsdp)

    @property
    def computes_windows(self) -> bool:
        """Whether the call of a model computes the micro-batches of an update, with a train step."""
        functions = self.custom_train_step_class, self.custom_get_batch_function, self.custom_loss_function
        flags = self.megatron_dataset_flag, self.calculate_per_token_loss, self.eod_mask_loss
        return any(flags) or any(value is not None for value in functions)

    @property
    def recomputed_blocks(self) -> int | None:
        """How many blocks recompute their activations, from the first on; `None`: all."""
        return self.recompute_num_layers if self.recompute_method == "block" else None

    def schedule_steps(self, total: int | None, warmup: int) -> ScheduleSteps:
        """Return the updates of a schedule, from this plugin or else from a stand-in for a schedule."""
        return schedule_steps(self, total, warmup)

    def samples_of_datasets(self, micro_batch_size: int, replicas: int) -> list[int]:
        """Return the samples that the training, validations and tests need."""
        if self.train_iters is None:
            raise ConfigurationError(
                "custom_megatron_datasets_provider_function is asked for a number of samples: give train_iters=…, the "
                "updates of the training."
            )
        size = micro_batch_size * replicas * (self.num_micro_batches or 1)
        validations = self.train_iters // self.eval_interval + 1
        return [self.train_iters * size, validations * self.eval_iters * size, self.eval_iters * size]

    def mesh_sizes(self, num_processes: int) -> dict[str, Any]:
        """Return the sizes of a `ParallelismConfig`: ranks that the degrees leave replicate the model, or shard it.

        Raises:
            ConfigurationError: If the degrees do not divide the number of processes.
        """
        sizes = {
            "tp_size": self.tp_degree or 1,
            "pp_size": self.pp_degree or 1,
            "cp_size": self.context_parallel_size or 1,
        }
        used = math.prod(sizes.values())
        if num_processes % used:
            raise ConfigurationError(
                f"tp_degree={self.tp_degree} × pp_degree={self.pp_degree} × context_parallel_size="
                f"{self.context_parallel_size} must divide the number of processes ({num_processes}). Start "
                f"{-(-num_processes // used) * used} processes, or choose smaller degrees."
            )
        replicas, parts = (1, num_processes // used) if self.shards else (num_processes // used, 1)
        return {"dp_replicate_size": replicas, "dp_shard_size": parts, **sizes}

    @property
    def pipeline(self) -> TorchPipelineParallelConfig | None:
        """How the model is cut into stages; `None`: one stage on each rank."""
        size = self.num_layers_per_virtual_pipeline_stage
        return None if size is None else TorchPipelineParallelConfig(schedule="Interleaved1F1B", blocks_per_stage=size)

    @property
    def spreads_experts(self) -> bool:
        """Whether a model has to have experts, which ranks share."""
        return (self.expert_model_parallel_size or 1) > 1

    @property
    def matrix_splitting(self) -> TorchTensorParallelConfig | None:
        """How matrices are split; `None`: as usual."""
        splits = self.sequence_parallelism and (self.tp_degree or 1) > 1 and self.pp_degree == 1
        return TorchTensorParallelConfig(sequence_parallel=True) if splits else None

    def sharding(self, num_processes: int) -> FullyShardedDataParallelPlugin | None:
        """Return how the ranks that would replicate a model share it, or `None`."""
        sizes = self.mesh_sizes(num_processes)
        if not self.shards or sizes["dp_shard_size"] * sizes["cp_size"] == 1:
            return None
        return FullyShardedDataParallelPlugin(
            reshard_after_forward=bool(self.use_custom_fsdp), cpu_offload=bool(self.optimizer_cpu_offload)
        )

    def agreed_accumulation(self, steps: int | None) -> int:
        """Return the micro-batches of a window, and raise if an argument says another number."""
        if steps not in (None, 1, self.num_micro_batches):
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps}, and MegatronLMPlugin(num_micro_batches={self.num_micro_batches}"
                "). Both count the micro-batches of an update: leave one of them out."
            )
        return self.num_micro_batches or 1

    def count_batches(self, batch_size: int, replicas: int) -> None:
        """Take note of a loader: its batches of each replica are micro-batches."""
        size = batch_size * replicas * (self.num_micro_batches or 1)
        choose = min if self.is_train_batch_min else max
        known = self.micro_batch_size
        self.micro_batch_size = batch_size if known is None else choose(batch_size, known)
        self.global_batch_size = size if self.global_batch_size is None else choose(size, self.global_batch_size)

    def _refuse(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, why in REFUSED.items():
            value = getattr(self, name)
            if value is not False and value != defaults[name]:
                raise UnsupportedError(f"MegatronLMPlugin({name}={shown(value)}) has no counterpart: {why}.")

    def _check_experts(self) -> None:
        """Raise unless experts are spread over the ranks that split the other matrices."""
        size, split = self.expert_model_parallel_size, self.expert_tensor_parallel_size
        if split is not None:
            check_count("expert_tensor_parallel_size", split)
        if size == 1 and split in (None, 1):  # Megatron-LM's defaults ask for nothing
            return
        if size != self.tp_degree or split != 1:
            raise UnsupportedError(
                f"MegatronLMPlugin(expert_model_parallel_size={size}, expert_tensor_parallel_size={split}) with "
                f"tp_degree={self.tp_degree} has no counterpart: whole experts are spread over the ranks of tp_degree, "
                "which read the same batches. Give all three: tp_degree=N, expert_model_parallel_size=N, "
                "expert_tensor_parallel_size=1. (Megatron-LM's own expert_tensor_parallel_size is tp_degree.)"
            )

    def _check_values(self) -> None:
        for name in _COUNTS:
            check_count(name, getattr(self, name))
        for name in (*_FLAGS, *_OTHER_FLAGS, *self._given(_FLAGS_WITHOUT_DEFAULT)):
            check_flag(name, getattr(self, name))
        for name in self._given(_LENGTHS):
            check_count(name, getattr(self, name))
        check_count("eval_iters", self.eval_iters, at_least=0)
        check_count("eval_interval", self.eval_interval)
        if not is_at_least_zero(self.gradient_clipping):
            raise ConfigurationError(
                f"gradient_clipping must be a norm, or 0 for none (got {shown(self.gradient_clipping)})."
            )
        if self.recompute_granularity is not None:
            check_choice("recompute_granularity", self.recompute_granularity, _GRANULARITIES)
        if self.custom_train_step_kwargs and self.custom_train_step_class is None:
            raise ConfigurationError(
                f"custom_train_step_kwargs={shown(self.custom_train_step_kwargs)} need custom_train_step_class=…, the "
                "step that takes them."
            )
        check_schedule(self)
        self._check_experts()
        self._check_recomputation()
        if self.num_layers_per_virtual_pipeline_stage is not None:
            check_count("num_layers_per_virtual_pipeline_stage", self.num_layers_per_virtual_pipeline_stage)
            if self.pp_degree == 1:
                raise ConfigurationError(
                    f"num_layers_per_virtual_pipeline_stage={self.num_layers_per_virtual_pipeline_stage} cuts the "
                    "stages of a pipeline, and pp_degree is 1. Give pp_degree=…, or leave it out."
                )
        if self.optimizer_cpu_offload and not self.shards:
            raise ConfigurationError(
                "optimizer_cpu_offload=True needs use_distributed_optimizer=True or use_custom_fsdp=True (got neither)."
            )

    def _given(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]

    def _check_recomputation(self) -> None:
        method, count = self.recompute_method, self.recompute_num_layers
        if method is None and count is None:
            return
        if self.recompute_granularity != "full" or method is None:
            raise ConfigurationError(
                "recompute_method and recompute_num_layers belong to recompute_granularity='full' (got "
                f"{self.recompute_granularity!r}, {method!r} and {count!r}). Give all three."
            )
        check_choice("recompute_method", method, _METHODS)
        check_count("recompute_num_layers", 1 if method == "uniform" and count is None else count)
        if method == "block" and self.pp_degree != 1:
            raise ConfigurationError(
                f"recompute_method='block' counts the layers of each stage, which are not known yet (pp_degree="
                f"{self.pp_degree}). Give recompute_method='uniform', which recomputes all."
            )
