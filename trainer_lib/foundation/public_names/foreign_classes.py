"""Classes of other libraries that people import from here by habit, with what to use instead."""

_CALLBACKS = "trainer_lib.callbacks."
_SCHEDULE = "TrainingArguments(lr_scheduler=…), or Trainer(scheduler=…)"

# Of Keras, Lightning, fastai, Composer, skorch and Hugging Face's Trainer.
INSTEAD: dict[str, str] = {
    "ModelCheckpoint": f"TrainingArguments(output_dir=…, save_every=…, keep_best=…), or {_CALLBACKS}Checkpoint",
    "SaveModelCallback": f"TrainingArguments(output_dir=…, save_every=…, keep_best=…), or {_CALLBACKS}Checkpoint",
    "BackupAndRestore": 'TrainingArguments(output_dir=…, save_every=…, resume="auto")',
    "EarlyStoppingCallback": f"{_CALLBACKS}EarlyStopping",
    "EarlyStopper": f"{_CALLBACKS}EarlyStopping",
    "ReduceLROnPlateau": 'TrainingArguments(lr_scheduler="plateau")',
    "LearningRateScheduler": _SCHEDULE,
    "LRScheduler": _SCHEDULE,
    "LearningRateFinder": "trainer.find_learning_rate()",
    "LRFinder": "trainer.find_learning_rate()",
    "BatchSizeFinder": "trainer.find_batch_size()",
    "LRMonitor": f"{_CALLBACKS}LearningRateMonitor",
    "CSVLogger": f"{_CALLBACKS}CsvLog",
    "TensorBoard": f'TrainingArguments(report_to="tensorboard"), or {_CALLBACKS}TensorBoardCallback',
    "TensorBoardLogger": f'TrainingArguments(report_to="tensorboard"), or {_CALLBACKS}TensorBoardCallback',
    "WandbLogger": f'TrainingArguments(report_to="wandb"), or {_CALLBACKS}WandbCallback',
    "MLFlowLogger": f'TrainingArguments(report_to="mlflow"), or {_CALLBACKS}MLflowCallback',
    "TerminateOnNaN": 'TrainingArguments(on_nonfinite="raise"), the default',
    "History": "fit().history",
    "ProgbarLogger": f"{_CALLBACKS}ProgressBar",
    "TQDMProgressBar": f"{_CALLBACKS}ProgressBar",
    "RichProgressBar": f"{_CALLBACKS}ProgressBar",
    "DeviceStatsMonitor": f"{_CALLBACKS}SystemMonitor",
    "MemoryMonitor": f"{_CALLBACKS}SystemMonitor",
    "SpeedMonitor": f"{_CALLBACKS}Throughput",
    "OptimizerMonitor": f"{_CALLBACKS}GradientNorms",
    "StochasticWeightAveraging": f"{_CALLBACKS}SWA",
    "ModelEMA": f"{_CALLBACKS}EMA",
    "EMAWeightAveraging": f"{_CALLBACKS}EMA",
    "SwapEMAWeights": f"{_CALLBACKS}EMA",
    "GradientAccumulationScheduler": f"{_CALLBACKS}AccumulationSchedule",
    "BackboneFinetuning": f"{_CALLBACKS}Freeze, or {_CALLBACKS}GradualUnfreezing",
    "MixUp": f"{_CALLBACKS}Mixup",
    "MixedPrecision": "TrainingArguments(mixed_precision=…)",
    "GradientClip": "TrainingArguments(max_grad_norm=…)",
    "BaseFinetuning": f"{_CALLBACKS}Freeze, or {_CALLBACKS}GradualUnfreezing",
    "BasePredictionWriter": "trainer.predict(dataset, folder), or on_predict_batch_end of a Callback",
    "OnExceptionCheckpoint": 'TrainingArguments(on_exception="save"), the default',
    "RichModelSummary": f"{_CALLBACKS}ModelSummary",
    "SpikeDetection": "TrainingArguments(loss_spike=20)",
    "ThroughputMonitor": f"{_CALLBACKS}Throughput",
    "WeightAveraging": f"{_CALLBACKS}EMA, or {_CALLBACKS}SWA",
    "SimpleProfiler": f"{_CALLBACKS}Timer",
    "AdvancedProfiler": f"{_CALLBACKS}Profile",
    "PyTorchProfiler": f"{_CALLBACKS}Profile",
    "Tuner": "trainer.find_learning_rate(), and trainer.find_batch_size()",
    "CombinedLoader": "trainer_lib.MixedDataset, or one dataset whose samples have a part of each",
    "LightningDataModule": "Trainer(model, args, …) with train_dataset and eval_dataset, which may be DataLoaders",
    "LightningCLI": "TrainingArguments.from_cli()",
    "Fabric": "trainer_lib.Accelerator",
    "DDPStrategy": "TrainingArguments(ddp=…)",
    "FSDPStrategy": "TrainingArguments(fsdp=True)",
    "DeepSpeedStrategy": "TrainingArguments(deepspeed=…)",
    "seed_everything": "TrainingArguments(seed=…), or set_seed",
    "Learner": "trainer_lib.Trainer",
    "LightningModule": "torch.nn.Module: the model is a plain one, and loss and optimizer go to trainer_lib.Trainer",
    "NeuralNetClassifier": "trainer_lib.TrainerClassifier",
    "NeuralNetRegressor": "trainer_lib.TrainerRegressor",
}

# Callbacks that have the same name here.
_SAME = ("Checkpoint", "EarlyStopping", "LambdaCallback", "LearningRateMonitor", "ModelSummary", "ProgressBar", "Timer")


def instead_of_callback(name: str) -> str:
    """Return ` Use …, or` for the class of another library's callback; an empty string for other classes."""
    ours = f"{_CALLBACKS}{name}" if name in _SAME else INSTEAD.get(name)
    return "" if ours is None else f" Use {ours}."
