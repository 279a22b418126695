"""Arguments of Hugging Face's Trainer: the errors that give ours, and the conversion."""

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.optim import SGD

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.checks.foreign_names import ALWAYS, NONE_HERE, RENAMED
from trainer_lib.trainer.huggingface.argument_conversion import is_foreign
from trainer_lib.trainer.huggingface.argument_forms import OTHER_FORM
from trainer_lib.trainer.optim.schedules import build_schedule

OURS = {field.name for field in dataclasses.fields(TrainingArguments)}
PAGE = Path(__file__).parents[3] / "docs" / "arguments.md"
LOGGER = "trainer_lib.trainer.arguments.training_arguments"


class HuggingFace(transformers.TrainingArguments):
    """Hugging Face's arguments as given: what their constructor does besides needs accelerate."""

    def __post_init__(self) -> None:
        """Leave them as they are."""


def refusal(**options: Any) -> str:
    """Return what is said about Hugging Face's arguments."""
    with pytest.raises(ConfigurationError) as refused:
        TrainingArguments(**options)
    return str(refused.value)


def convert(caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[TrainingArguments, str]:
    """Return what Hugging Face's arguments become, and what is said about those that become nothing."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, LOGGER):
        options_of_transformers: dict[str, Any] = {"remove_unused_columns": False, **options}
        ours = TrainingArguments.from_transformers(HuggingFace(**options_of_transformers))
    return ours, caplog.text


# -- the tables --------------------------------------------------------------------------------------------------


def test_the_page_has_them_all() -> None:
    _, _, rows = PAGE.read_text().partition("## Coming from Hugging Face")
    names = set(re.findall(r"`(\w+)`", rows))
    fields = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    assert fields - names == set()
    for name in fields & set(NONE_HERE):
        assert re.search(rf"`{name}`[^|]*\| none: {re.escape(NONE_HERE[name])} \|", rows), name


@pytest.mark.parametrize("kind", [transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments])
def test_each_field_has_the_same_name_another_form_or_a_reason(kind: Any) -> None:
    for field in dataclasses.fields(kind):
        assert (field.name in OURS) != is_foreign(field.name) or field.name in {
            # The same name, and values that have another form here.
            "max_steps",
            "num_train_epochs",
            "eval_delay",
            "max_grad_norm",
            "lr_scheduler_kwargs",
            "gradient_checkpointing",
            "greater_is_better",
            "report_to",
            "fsdp",
        }, field.name


def test_nothing_is_in_two_tables() -> None:
    converted = [name for names in OTHER_FORM for name in names]
    assert len(converted) == len(set(converted))
    assert not set(converted) & set(NONE_HERE)
    assert not set(NONE_HERE) & OURS
    assert not set(RENAMED) & (OURS | set(converted) | set(NONE_HERE))
    assert set(RENAMED.values()) <= OURS
    assert set(ALWAYS) <= set(NONE_HERE)


def test_every_field_that_has_no_place_is_refused_with_a_reason() -> None:
    for name, reason in NONE_HERE.items():
        assert (
            refusal(**{name: 7})
            == f"{name}=7 of Hugging Face's Trainer has no equivalent here: {reason}. Leave it out."
        )


# -- errors that give ours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"save_steps": 500}, 'save_every="500 steps"'),
        ({"save_steps": 1.0}, 'save_every="1 step"'),
        ({"save_strategy": "epoch", "save_steps": 500}, 'save_every="1 epoch"'),
        ({"save_steps": 0.1}, 'save_every="0.3 epochs"'),
        ({"save_steps": 0.5, "num_train_epochs": 2}, 'save_every="1 epoch"'),
        ({"logging_steps": 0.3, "max_steps": 11}, 'log_every="4 steps"'),
        ({"save_strategy": "steps"}, 'save_every="500 steps"'),
        ({"save_strategy": "no"}, 'save_every="never", keep_best=0'),
        ({"save_strategy": "best"}, 'save_every="never", keep_best=1'),
        ({"eval_strategy": "epoch"}, 'eval_every="1 epoch"'),
        ({"evaluation_strategy": "steps", "eval_steps": 20}, 'eval_every="20 steps"'),
        ({"eval_steps": 20}, 'eval_every="20 steps"'),
        ({"eval_strategy": "steps", "eval_steps": None}, 'eval_every="500 steps"'),
        ({"eval_strategy": "no"}, 'eval_every="never"'),
        ({"logging_steps": 10}, 'log_every="10 steps"'),
        ({"logging_strategy": "epoch"}, 'log_every="1 epoch"'),
        ({"save_total_limit": 2}, "keep_last=2"),
        ({"save_total_limit": 0}, "keep_last=None"),
        ({"warmup_steps": 100}, 'warmup="100 steps"'),
        ({"warmup_steps": 0.1}, "warmup=0.1"),
        ({"warmup_ratio": 0.05}, "warmup=0.05"),
        ({"warmup_ratio": 0.05, "warmup_steps": 3}, 'warmup="3 steps"'),
        ({"warmup_steps": 0}, "warmup=None"),
        ({"lr_scheduler_type": "cosine"}, 'lr_scheduler="cosine"'),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, 'lr_scheduler="plateau"'),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            "lr_scheduler=\"cosine\", lr_scheduler_kwargs={'min_ratio': 0.1}",
        ),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 1e-5, "num_cycles": 0.5},
                "learning_rate": 1e-4,
            },
            "lr_scheduler=\"cosine\", lr_scheduler_kwargs={'num_cycles': 0.5, 'min_ratio': 0.1}",
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 9}},
            "lr_scheduler=\"wsd\", lr_scheduler_kwargs={'decay_steps': 9, 'decay': 'cosine'}",
        ),
        ({"bf16": True}, 'mixed_precision="bf16"'),
        ({"fp16": True, "bf16": False}, 'mixed_precision="fp16"'),
        ({"fp16": False}, "mixed_precision=None"),
        ({"optim": "adamw_torch_fused"}, 'optimizer="adamw"'),
        ({"optim": "paged_adamw_8bit"}, 'optimizer="paged_adamw_8bit"'),
        ({"adam_beta2": 0.95}, "optimizer_kwargs={'betas': [0.9, 0.95]}"),
        (
            {"adam_beta1": 0.8, "adam_epsilon": 1e-6, "optim": "adamw_torch"},
            "optimizer=\"adamw\", optimizer_kwargs={'betas': [0.8, 0.999], 'eps': 1e-06}",
        ),
        (
            {"adafactor": True},
            "optimizer=\"transformers.Adafactor\", optimizer_kwargs={'scale_parameter': False, 'relative_step': False}",
        ),
        ({"optim": "lion_32bit"}, "optimizer=\"lion_32bit\", optimizer_kwargs={'betas': [0.9, 0.999]}"),
        ({"optim": "ademamix"}, 'optimizer="ademamix"'),
        ({"optim": "lomo"}, 'optimizer="lomo", max_grad_norm=None'),
        (
            {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=True"},
            "optimizer_kwargs={'momentum': 0.9, 'nesterov': True}",
        ),
        (
            {"optim": "schedule_free_sgd", "lr_scheduler_type": "constant"},
            'optimizer="schedule_free_sgd".\nlr_scheduler_type="constant" of Hugging Face\'s Trainer is given here as '
            'lr_scheduler="constant"',
        ),
        (
            {"optim": "ademamix_8bit", "adam_beta1": 0.8},
            "optimizer=\"ademamix_8bit\", optimizer_kwargs={'betas': [0.8, 0.999, 0.9999]}",
        ),
        ({"load_best_model_at_end": True}, "load_best_at_end=True"),
        ({"metric_for_best_model": "f1"}, 'metric_for_best="eval_f1"'),
        ({"metric_for_best_model": "eval_f1"}, 'metric_for_best="eval_f1"'),
        ({"resume_from_checkpoint": True}, 'resume="auto"'),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, 'resume="out/checkpoint-5"'),
        ({"resume_from_checkpoint": None}, 'resume="never"'),
        ({"disable_tqdm": True}, "progress_bar=False"),
        ({"dataloader_num_workers": 4}, "num_workers=4"),
        ({"dataloader_pin_memory": False}, "pin_memory=False"),
        ({"dataloader_drop_last": True}, "drop_last=True"),
        ({"no_cuda": True}, "use_cpu=True"),
        ({"full_determinism": True}, "deterministic=True"),
        ({"per_gpu_train_batch_size": 4}, "per_device_train_batch_size=4"),
        ({"torch_compile": True}, "compile=True"),
        ({"torch_compile_backend": "eager"}, 'compile="eager"'),
        (
            {"torch_compile_mode": "max-autotune"},
            "compile=TorchDynamoPlugin(backend='inductor', mode='max-autotune')",
        ),
        ({"activation_checkpointing": True}, "gradient_checkpointing=True"),
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length=True"),
        ({"train_sampling_strategy": "sequential"}, "shuffle=False"),
        ({"length_column_name": "words"}, 'length_column="words"'),
        (
            {"ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 10},
            "ddp=DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=10)",
        ),
        (
            {"fsdp": "full_shard offload", "fsdp_config": {"fsdp_min_num_params": 1000, "xla": False}},
            "fsdp=FullyShardedDataParallelPlugin(reshard_after_forward=True, cpu_offload=True, min_num_params=1000)",
        ),
        (
            {"fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp": "full_shard"},
            "fsdp=FullyShardedDataParallelPlugin(reshard_after_forward=True, transformer_cls_names_to_wrap='Block')",
        ),
        ({"parallelism_config": ParallelismConfig(dp_shard_size=2)}, "parallelism=ParallelismConfig(dp_shard_size=2)"),
        ({"generation_max_length": 9}, "generation_kwargs={'max_length': 9}, predict_with_generate=True"),
        (
            {"generation_config": "model"},
            "generation_kwargs={'generation_config': 'model'}, predict_with_generate=True",
        ),
    ],
)
def test_the_error_gives_ours_with_the_value(options: dict[str, Any], ours: str) -> None:
    assert refusal(**options).endswith(f" of Hugging Face's Trainer is given here as {ours}.")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optim": "grokadamw"}, "there is no name for 'grokadamw'; give an optimizer object"),
        ({"optim": "galore_adamw"}, 'optimizer="galore_adamw" trains all matrices of hidden layers here'),
        ({"optim": "schedule_free_sgd"}, 'give optimizer="schedule_free_sgd" with lr_scheduler="constant"'),
        ({"optim": "adamw_8bit", "optim_args": "alpha=2"}, "give optimizer_kwargs={…}, by the optimizer's own"),
        ({"lr_scheduler_type": "greedy"}, "there is no schedule 'greedy'; give a schedule object"),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 5},
            'it has no effect with lr_scheduler_type="constant" there',
        ),
        ({"train_sampling_strategy": "batch_rebalance"}, "there is no sampling 'batch_rebalance'"),
        ({"fsdp_config": "fsdp.json"}, "files such as 'fsdp.json' are not supported"),
        ({"fsdp_config": {}, "fsdp": "sharp"}, "there is no sharding mode 'sharp'"),
        ({"metric_for_best_model": None}, "it has no effect without metric_for_best_model"),
    ],
)
def test_what_has_no_place_here_is_told_with_a_reason(options: dict[str, Any], text: str) -> None:
    message = refusal(**options)
    assert f" of Hugging Face's Trainer has no equivalent here: {text}" in message
    assert ". Leave it out." in message


def test_what_is_so_here_anyway() -> None:
    assert refusal(adam_beta1=0.9) == ("adam_beta1=0.9 of Hugging Face's Trainer is so here by default. Leave it out.")
    assert refusal(save_safetensors=True) == (
        "save_safetensors=True of Hugging Face's Trainer is always so here. Leave it out."
    )


def test_what_is_told_together_is_one_line() -> None:
    lines = refusal(eval_steps=5, save_steps=10, eval_strategy="steps", learning_rate=0.1).splitlines()
    assert [line.partition(" of Hugging")[0] for line in lines] == [
        'eval_steps=5, eval_strategy="steps"',
        "save_steps=10",
    ]


# -- the conversion ----------------------------------------------------------------------------------------------


def test_defaults_become_defaults(caplog: pytest.LogCaptureFixture) -> None:
    assert convert(caplog) == (TrainingArguments(), "")
    assert convert(caplog, remove_unused_columns=True) == (TrainingArguments(remove_unused_columns=True), "")


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("polynomial", {"power": 2.0}),
        ("cosine_with_min_lr", {"min_lr": 0.05}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.05}),
        ("cosine_warmup_with_min_lr", {"min_lr": 0.05, "warmup_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "min_lr_ratio": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "warmup_type": "cosine", "num_cycles": 1.5}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "num_stable_steps": 20}),
    ],
)
def test_a_converted_schedule_has_the_rates_of_transformers(
    caplog: pytest.LogCaptureFixture, name: str, options: dict[str, Any], warmup: int
) -> None:
    kind = transformers.SchedulerType(name)
    ours, _ = convert(
        caplog, lr_scheduler_type=kind, lr_scheduler_kwargs=options, learning_rate=0.5, warmup_steps=warmup
    )
    optimizers = [SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5) for _ in range(2)]
    reference: Any = transformers.get_scheduler(kind, optimizers[0], warmup, 40, scheduler_specific_kwargs=options)
    own: Any = build_schedule(
        ours.lr_scheduler,
        optimizers[1],
        warmup_steps=warmup if ours.warmup else 0,
        total_steps=40,
        **ours.lr_scheduler_kwargs,
    )
    for _ in range(40):
        assert own.get_last_lr() == pytest.approx(reference.get_last_lr(), rel=1e-12, abs=1e-15)
        for optimizer, schedule in zip(optimizers, (reference, own), strict=True):
            optimizer.step()
            schedule.step()


def test_a_plateau_has_no_warmup_there(caplog: pytest.LogCaptureFixture) -> None:
    kind = transformers.SchedulerType.REDUCE_ON_PLATEAU
    optimizers = [SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5) for _ in range(2)]
    reference: Any = transformers.get_scheduler(kind, optimizers[0], 7, 40)
    ours, text = convert(caplog, lr_scheduler_type=kind, warmup_steps=7)
    own = build_schedule(ours.lr_scheduler, optimizers[1], warmup_steps=ours.warmup_steps_for(40), total_steps=40)
    assert own.get_last_lr() == reference.get_last_lr() == [0.5]
    assert 'it has no effect with lr_scheduler_type="reduce_lr_on_plateau" there' in text


def test_what_differs_is_converted(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {
        "output_dir": "out",
        "run_name": "first",
        "seed": 7,
        "data_seed": 8,
        "num_train_epochs": 5.0,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "lr_scheduler_type": transformers.SchedulerType.COSINE,
        "warmup_steps": 100,
        "max_grad_norm": 0.0,
        "bf16": True,
        "activation_checkpointing": True,
        "tf32": False,
        "use_cpu": True,
        "logging_steps": 10,
        "eval_strategy": transformers.IntervalStrategy.STEPS,
        "eval_steps": 20,
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "joy",
        "greater_is_better": True,
        "dataloader_num_workers": 2,
        "dataloader_prefetch_factor": 4,
        "train_sampling_strategy": "group_by_length",
        "label_names": ["labels"],
        "disable_tqdm": True,
        "torch_compile": True,
        "torch_compile_mode": "reduce-overhead",
        "ddp_static_graph": True,
        "parallelism_config": ParallelismConfig(dp_replicate_size=2),
        "do_train": True,
        "remove_unused_columns": False,
    }
    ours, warnings = convert(caplog, **settings)
    assert warnings == ""
    assert ours == TrainingArguments(
        output_dir="out",
        run_name="first",
        seed=7,
        data_seed=8,
        num_train_epochs=5.0,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        weight_decay=0.1,
        optimizer="adamw",
        optimizer_kwargs={"betas": [0.9, 0.95]},
        lr_scheduler="cosine",
        warmup="100 steps",
        max_grad_norm=None,
        mixed_precision="bf16",
        gradient_checkpointing=True,
        tf32=False,
        use_cpu=True,
        log_every="10 steps",
        eval_every="20 steps",
        save_every="1 epoch",
        keep_last=1,
        load_best_at_end=True,
        metric_for_best="eval_joy",
        greater_is_better=True,
        num_workers=2,
        prefetch_factor=4,
        group_by_length=True,
        label_names=["labels"],
        progress_bar=False,
        compile=TorchDynamoPlugin(backend="inductor", mode="reduce-overhead"),
        ddp=DistributedDataParallelKwargs(static_graph=True),
        parallelism=ParallelismConfig(dp_replicate_size=2),
    )


def test_sharding_is_converted(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"], "cpu_offload": True, "min_num_params": 0},
    }
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"], cpu_offload=True)
    assert convert(caplog, **settings) == (TrainingArguments(fsdp=plugin), "")
    assert convert(caplog, fsdp=True) == (TrainingArguments(fsdp=True), "")


def test_what_is_lost_is_told_by_name_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    ours, warnings = convert(
        caplog, learning_rate=1e-3, neftune_noise_alpha=5.0, push_to_hub=True, torch_empty_cache_steps=3
    )
    assert ours == TrainingArguments(learning_rate=1e-3)
    assert len(caplog.records) == 1
    messages = [line.split(":")[0] for line in warnings.splitlines()[1:]]
    assert messages == [
        "  neftune_noise_alpha",
        "  torch_empty_cache_steps",
        "  push_to_hub",
    ]


def test_a_delay_of_evaluations_is_converted(caplog: pytest.LogCaptureFixture) -> None:
    ours, warnings = convert(caplog, eval_strategy="epoch", eval_delay=2)
    assert (ours.eval_every, ours.eval_delay, warnings) == ("1 epoch", "2 epochs", "")
    ours, warnings = convert(caplog, eval_strategy="steps", eval_steps=5, eval_delay=20)
    assert (ours.eval_every, ours.eval_delay, warnings) == ("5 steps", "20 steps", "")


def test_steps_overrule_epochs_as_they_do_there(caplog: pytest.LogCaptureFixture) -> None:
    assert convert(caplog, max_steps=50, num_train_epochs=9.0) == (TrainingArguments(max_steps=50), "")


def test_without_a_strategy_steps_of_evaluation_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert convert(caplog, eval_steps=50) == (TrainingArguments(eval_every="never"), "")


@pytest.mark.parametrize("generates", [False, True])
def test_options_of_generation_do_not_ask_for_it(caplog: pytest.LogCaptureFixture, generates: bool) -> None:
    class Sequences(transformers.Seq2SeqTrainingArguments):
        def __post_init__(self) -> None:
            """Leave them as they are."""

    options: dict[str, Any] = {"generation_max_length": 9, "remove_unused_columns": False}
    with caplog.at_level(logging.WARNING, LOGGER):
        ours = TrainingArguments.from_transformers(Sequences(predict_with_generate=generates, **options))
    assert (ours.predict_with_generate, ours.generation_kwargs) == (generates, {"max_length": 9} if generates else {})
    assert ("no effect with predict_with_generate=False" in caplog.text) is not generates


def test_arguments_of_subclasses_are_told(caplog: pytest.LogCaptureFixture) -> None:
    @dataclasses.dataclass
    class Own(HuggingFace):
        temperature: float = 1.0

    with caplog.at_level(logging.WARNING, LOGGER):
        assert TrainingArguments.from_transformers(Own(temperature=2.0, seed=3)).seed == 3
    assert "temperature: there is no such argument here" in caplog.text


def test_only_arguments_of_transformers_are_taken() -> None:
    with pytest.raises(ConfigurationError, match=r"takes a transformers\.TrainingArguments, got a dict"):
        TrainingArguments.from_transformers({"save_steps": 5})


def test_what_the_constructor_there_fills_in_is_not_taken_for_given(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("accelerate")
    # The constructor there has no progress bar where warnings are not shown.
    with caplog.at_level(logging.WARNING, LOGGER), caplog.at_level(logging.WARNING, "transformers"):
        arguments = transformers.TrainingArguments(
            use_cpu=True, eval_strategy="steps", load_best_model_at_end=True, torch_compile=True
        )
        ours = TrainingArguments.from_transformers(arguments)
    assert [record for record in caplog.records if record.name == LOGGER] == []
    assert ours == TrainingArguments(
        output_dir="trainer_output",
        remove_unused_columns=True,
        use_cpu=True,
        pin_memory=False,
        eval_every="500 steps",
        load_best_at_end=True,
        metric_for_best="eval_loss",
        greater_is_better=False,
        compile=True,
    )
