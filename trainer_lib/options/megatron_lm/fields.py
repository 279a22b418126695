"""What becomes of each field of `MegatronLMPlugin`: the option that does the same, or why it is refused."""

MAPPED = {
    "tp_degree": "`ParallelismConfig(tp_size=…)`",
    "pp_degree": "`ParallelismConfig(pp_size=…)`",
    "context_parallel_size": "`ParallelismConfig(cp_size=…)`",
    "expert_model_parallel_size": "must equal `tp_degree` (experts are distributed over these ranks), with "
    "`expert_tensor_parallel_size=1`",
    "expert_tensor_parallel_size": "must be 1: each expert is whole on its rank",
    "num_layers_per_virtual_pipeline_stage": "`TorchPipelineParallelConfig(schedule='Interleaved1F1B', "
    "blocks_per_stage=…)`: several stages on each rank",
    "num_micro_batches": "`gradient_accumulation_steps`; loops need `with accelerator.accumulate(model)`",
    "gradient_clipping": "the norm to which each optimizer step clips gradients; 0 does not clip",
    "use_distributed_optimizer": "FSDP2 over the data-parallel ranks (`reshard_after_forward=False`)",
    "use_custom_fsdp": "FSDP2 over the data-parallel ranks, which shards weights too",
    "optimizer_cpu_offload": "FSDP2's `cpu_offload`; needs `use_distributed_optimizer` or `use_custom_fsdp`",
    "recompute_activations": "activation checkpointing of all blocks",
    "recompute_granularity": "activation checkpointing of all blocks, for `full` and `selective`",
    "return_logits": "outputs always have their logits",
    "seq_length": "batches have their own lengths",
    "encoder_seq_length": "batches have their own lengths",
    "decoder_seq_length": "batches have their own lengths",
    "is_train_batch_min": "which of several loaders defines `global_batch_size`",
    "lr_decay_style": "the shape of `MegatronLMDummyScheduler`: linear, cosine, constant or inverse-square-root",
    "min_lr": "the final learning rate of `MegatronLMDummyScheduler`",
    "lr_decay_iters": "the end of the decay of `MegatronLMDummyScheduler`, in updates; by default `train_iters`",
    "lr_decay_samples": "the same in samples, which are divided by the samples per update",
    "lr_warmup_iters": "the warm-up of `MegatronLMDummyScheduler`, in updates",
    "lr_warmup_samples": "the same in samples",
    "lr_warmup_fraction": "the same as a share of the decay",
    "train_iters": "the `total_num_steps` of `MegatronLMDummyScheduler`; your loop decides when to end",
    "train_samples": "the same in samples",
    "eval_iters": "the samples requested from `custom_megatron_datasets_provider_function`",
    "eval_interval": "the samples requested from `custom_megatron_datasets_provider_function`",
    "weight_decay_incr_style": "how `MegatronLMDummyScheduler` changes the weight decay until `train_iters`: constant, "
    "linear or cosine",
    "start_weight_decay": "the weight decay at the start",
    "end_weight_decay": "the weight decay at the end",
    "sequence_parallelism": "`TorchTensorParallelConfig(sequence_parallel=True)`: in models like Llama, norms "
    "compute on parts of the sequence; no effect, with a warning, on other models and in pipelines",
    "recompute_method": "`uniform`: all blocks, each by itself; `block`: the first `recompute_num_layers` of them",
    "recompute_num_layers": "see `recompute_method`",
    "megatron_dataset_flag": "the model's call computes the micro-batches of an update; a "
    "`MegatronLMDummyDataLoader` sets it",
    "custom_train_step_class": "the model's call computes the micro-batches of an update with this step",
    "custom_train_step_kwargs": "the keywords of the step",
    "custom_get_batch_function": "how a train step reads a micro-batch",
    "custom_loss_function": "how a train step computes the loss of a micro-batch",
    "custom_megatron_datasets_provider_function": "the datasets behind `MegatronLMDummyDataLoader`",
    "calculate_per_token_loss": "the model's call computes the micro-batches of an update, weighted by their tokens",
    "eod_mask_loss": "the model's call computes the micro-batches of an update, and `GPTTrainStep` leaves out what "
    "follows an end of text",
}
"""The option of this library that each field stands for."""

MEMORY = {
    "overlap_cpu_optimizer_d2h_h2d": "FSDP2 decides when it copies",
}
"""Fields that change memory or speed alone, and have no effect here: setting them is a warning, with the reason."""

_MODEL = "it is a property of the model. Set it in the model's configuration"
_STEP = "Megatron-LM's models are not built. Give prepare() your model, and a train step with your loss"
_CHECKPOINT = "checkpoints always hold the optimizer's state, and load it. Use save_model and load_checkpoint_in_model"

REFUSED = {
    "decoder_last_pipeline_num_layers": "stages are cut so that the largest has as few weights as possible. Name other "
    "places in TorchPipelineParallelConfig(blocks=…)",
    "pipeline_model_parallel_split_rank": "a model with an encoder and a decoder is cut by tracing its forward. Give "
    "TorchPipelineParallelConfig(example_inputs=…)",
    "attention_backend": "it is the model's. Give from_pretrained(…, attn_implementation=…)",
    "attention_dropout": _MODEL,
    "hidden_dropout": _MODEL,
    "attention_softmax_in_fp32": _MODEL,
    "use_rotary_position_embeddings": _MODEL,
    "use_precision_aware_optimizer": "optimizer states have the type of their weights",
    "no_load_optim": _CHECKPOINT,
    "no_save_optim": _CHECKPOINT,
    "consumed_samples": "load_state restores the position in the data",
    "no_wd_decay_cond": "give prepare() an optimizer with groups of parameters",
    "scale_lr_cond": "give prepare() an optimizer with groups of parameters",
    "lr_mult": "give prepare() an optimizer with groups of parameters",
    "custom_model_provider_function": _STEP,
    "custom_prepare_model_function": _STEP,
    "tensorboard_dir": "give Accelerator(log_with='tensorboard', project_dir=…)",
    "set_all_logging_options": "give Accelerator(log_with=…)",
    "other_megatron_args": "Megatron-LM itself does not run",
}
"""Fields without a counterpart: setting one is an error, with what to do instead."""


def explanation(name: str) -> str:
    """Return what becomes of a field, in a line."""
    why = {**MAPPED, **REFUSED, **MEMORY}[name]
    return f"{'no effect: ' if name in MEMORY else ''}{why}".replace("`", "")
