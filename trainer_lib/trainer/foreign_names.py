"""This file is the names that arguments have elsewhere, and that mean nothing here.

Those of Hugging Face's Trainer, of transformers 4 too, and a few of other libraries.
"""

from typing import Any

_TRACKING = (
    "it is for the callback of a tracker: Trainer(…, callbacks=[TrackioCallback(…)]) and others take their options"
)
_HUB = "call push_to_hub(repo_id) when the model is trained; nothing is sent before"
_OF_SCRIPTS = "it is for scripts and the Trainer there does not read it either; call fit, evaluate or predict"
_LOADER = "give a DataLoader made with it"
_LAUNCHER = (
    "it belongs to the launcher, or to Trainer(…, accelerator=Accelerator(kwargs_handlers=[InitProcessGroupKwargs(…)]))"
)
_LEVELS = "levels are set by the logging module, or by ACCELERATE_LOG_LEVEL"
_NOT_YET = "this version does not have it"
_GATHERED = "outputs are taken to the CPU batch by batch, and only where they are asked for"
_SMOOTHING = "give Trainer(…, callbacks=[LabelSmoothing(share)]), which leaves evaluations as they are"
_GONE = "it is gone from Hugging Face's Trainer too"

NONE_HERE: dict[str, str] = {
    "optim_args": "give optimizer_kwargs={…}, by the names that the optimizer has for them",
    "optim_target_modules": "give parameter_groups=[ParameterGroup(pattern, …)], or the optimizer itself",
    "average_tokens_across_devices": "losses are averaged over all items of all processes, always",
    "label_smoothing_factor": _SMOOTHING,
    "bf16_full_eval": "evaluation computes as training does; for weights in bf16 evaluate model.to(torch.bfloat16)",
    "fp16_full_eval": "evaluation computes as training does; for weights in fp16 evaluate model.to(torch.float16)",
    "activation_checkpointing_kwargs": "call model.gradient_checkpointing_enable(…) with them, before the Trainer",
    "gradient_checkpointing_kwargs": "call model.gradient_checkpointing_enable(…) with them, before the Trainer",
    "use_liger_kernel": "apply Liger's kernels to the model, before the Trainer",
    "liger_kernel_config": "apply Liger's kernels to the model, before the Trainer",
    "use_cache": "set model.config.use_cache",
    "neftune_noise_alpha": "give Trainer(…, callbacks=[NEFTune(alpha)])",
    "torch_empty_cache_steps": f"{_NOT_YET}; a callback can call clear_device_cache",
    "auto_find_batch_size": 'give per_device_train_batch_size="auto", which keeps updates as they are',
    "logging_first_step": f'{_NOT_YET}; log_every="1 step" logs it, and all others',
    "log_on_each_node": "logs come from the main process, once",
    "logging_nan_inf_filter": "nothing is filtered: a loss that is no number is shown as such",
    "include_num_input_tokens_seen": f"{_NOT_YET}; a callback can count them, and log them by run.log",
    "include_tokens_per_second": f"{_NOT_YET}; the callback Throughput tells samples and steps per second",
    "log_level": _LEVELS,
    "log_level_replica": _LEVELS,
    "logging_dir": _TRACKING,
    "project": _TRACKING,
    "trackio_space_id": _TRACKING,
    "trackio_bucket_id": _TRACKING,
    "trackio_static_space_id": _TRACKING,
    "eval_delay": f"{_NOT_YET}; evaluation begins after the first eval_every",
    "prediction_loss_only": "outputs are kept only where metrics or predict ask for them",
    "eval_do_concat_batches": "metrics are fed batch by batch; predict returns rows",
    "eval_use_gather_object": "objects of any kind are gathered",
    "eval_accumulation_steps": _GATHERED,
    "include_for_metrics": "override evaluation_step to hand more to the metrics",
    "include_inputs_for_metrics": "override evaluation_step to hand more to the metrics",
    "batch_eval_metrics": "metrics with update and compute are always fed batch by batch",
    "save_only_model": "checkpoints are whole, so that a run can go on; save_model writes the model alone",
    "save_safetensors": "weights are always written as safetensors",
    "save_on_each_node": "all processes write into one folder, which they share",
    "enable_jit_checkpoint": "a run saves at SIGTERM and others by itself; stop_signals chooses them",
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "push_to_hub_model_id": _HUB,
    "push_to_hub_organization": _HUB,
    "push_to_hub_token": _HUB,
    "overwrite_output_dir": "each run has a folder of its own inside output_dir, and none is overwritten",
    "ignore_data_skip": "a resumed run goes on in the data where it was, without reading what it has seen",
    "restore_callback_states_from_checkpoint": "states of callbacks are always restored",
    "accelerator_config": "give the engine: Trainer(…, accelerator=Accelerator(dataloader_config=…))",
    "split_batches": "give the engine: Trainer(…, accelerator=Accelerator(dataloader_config=…))",
    "dispatch_batches": "give the engine: Trainer(…, accelerator=Accelerator(dataloader_config=…))",
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _LOADER,
    "remove_unused_columns": "nothing is dropped from a batch; leave columns out of the dataset, or in collate_fn",
    "ddp_backend": _LAUNCHER,
    "ddp_timeout": _LAUNCHER,
    "local_rank": "the launcher says it",
    "deepspeed": f"{_NOT_YET}; fsdp=FullyShardedDataParallelPlugin(…) shards weights, gradients and optimizer",
    "debug": f"{_NOT_YET}; detect_anomaly=True finds the operation whose gradient is no number",
    "skip_memory_metrics": "PeakMemory measures what a block of code needs",
    "do_train": _OF_SCRIPTS,
    "do_eval": _OF_SCRIPTS,
    "do_predict": _OF_SCRIPTS,
    "use_mps_device": "an accelerator that is there is used; use_cpu=True stays on the CPU",
    "use_ipex": _GONE,
    "fp16_opt_level": _GONE,
    "tpu_num_cores": _GONE,
    "tpu_metrics_debug": _GONE,
    "past_index": _GONE,
    "jit_mode_eval": _GONE,
    "ray_scope": _GONE,
    "sharded_ddp": "give fsdp=True",
    "mp_parameters": _GONE,
    "use_legacy_prediction_loop": _GONE,
}

# Of these, what is always so here, so that nothing is lost by it.
ALWAYS: dict[str, Any] = {
    "average_tokens_across_devices": True,
    "log_on_each_node": False,
    "logging_nan_inf_filter": False,
    "batch_eval_metrics": True,
    "save_safetensors": True,
    "restore_callback_states_from_checkpoint": True,
    "remove_unused_columns": False,
}

# What other libraries, and people in a hurry, call ours.
RENAMED: dict[str, str] = {
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "max_epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "lr": "learning_rate",
    "scheduler": "lr_scheduler",
    "gradient_clip_val": "max_grad_norm",
    "precision": "mixed_precision",
    "sync_batch_norm": "sync_batchnorm",
    "fast_dev_run": "dry_run",
    "limit_val_batches": "limit_eval_batches",
    "log_every_n_steps": "log_every",
    "check_val_every_n_epoch": "eval_every",
    "enable_progress_bar": "progress_bar",
    "logger": "report_to",
    "monitor": "metric_for_best",
    "default_root_dir": "output_dir",
    "project_dir": "output_dir",
}
