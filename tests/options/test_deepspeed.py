"""DeepSpeed's JSON files and the plugin for them; DeepSpeed itself is not needed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.options import deepspeed_table
from trainer_lib import Accelerator, DeepSpeedPlugin
from trainer_lib.accelerator import construction
from trainer_lib.accelerator.deepspeed_config import apply_config
from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, UnsupportedError
from trainer_lib.options.deepspeed.auto_values import training_values
from trainer_lib.options.deepspeed.deepspeed_plugin import KEYS
from trainer_lib.utils.deepspeed import DummyOptim, DummyScheduler, HfDeepSpeedConfig

# zero_stage2_config.json of Accelerate's handbook.
HANDBOOK: dict[str, Any] = {
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {"stage": 2, "allgather_bucket_size": 2e8, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
TRAINING: dict[str, Any] = {
    "micro_batch_size": 4,
    "accumulation_steps": 1,
    "num_processes": 2,
    "gradient_clipping": 0.5,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "warmup_steps": 10,
    "total_steps": 100,
    "hidden_size": 64,
}


def test_every_auto_of_the_handbooks_file_is_filled_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "zero_stage2_config.json"
    path.write_text(json.dumps(HANDBOOK))
    plugin = DeepSpeedPlugin(str(path))
    plugin.deepspeed_config_process(**training_values(**TRAINING))
    assert plugin.filled == {
        "optimizer.params.lr": 1e-3,
        "optimizer.params.weight_decay": 0.01,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": 1e-3,
        "scheduler.params.warmup_num_steps": 10,
        "scheduler.params.total_num_steps": 100,
        "zero_optimization.reduce_bucket_size": 4096,
        "gradient_clipping": 0.5,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
    }
    assert training_values(warmup_steps=0) == {"scheduler.params.warmup_num_steps": 1}, "DeepSpeed refuses 0"
    assert '"auto"' not in json.dumps(plugin.deepspeed_config)
    assert plugin.deepspeed_config["optimizer"]["params"]["torch_adam"] is True
    assert (plugin.zero_stage, plugin.gradient_clipping) == (2, 0.5)
    assert json.loads(path.read_text()) == HANDBOOK


def test_an_auto_without_a_value_is_named_and_nothing_is_filled() -> None:
    plugin = DeepSpeedPlugin(HANDBOOK)
    values = training_values(**TRAINING | {"hidden_size": None, "total_steps": None})
    expected = r"no value is known: scheduler.params.total_num_steps, zero_optimization.reduce_bucket_size\. Write"
    with pytest.raises(ConfigurationError, match=expected):
        plugin.deepspeed_config_process(**values)
    assert plugin.is_auto("optimizer.params.lr")
    assert plugin.filled == {}


def test_conflicts_are_named_with_both_values() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^gradient_clipping is 1.0 in the DeepSpeed config and 0.5 in the arg"
    ):
        DeepSpeedPlugin({"gradient_clipping": 1.0}, gradient_clipping=0.5)
    plugin = DeepSpeedPlugin(HANDBOOK)
    values = training_values(**TRAINING | {"accumulation_steps": 4})
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps is 1 in the DeepSpeed config and 4 in"):
        plugin.deepspeed_config_process(**values)
    assert plugin.filled == {}
    mismatches: list[str] = []
    plugin.deepspeed_config_process(mismatches=mismatches, **values)
    assert len(mismatches) == 1
    DeepSpeedPlugin({"gradient_accumulation_steps": 1}).deepspeed_config_process(must_match=False, **values)


def test_a_size_in_the_file_stays_whatever_suits_the_model() -> None:
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}})
    plugin.deepspeed_config_process(**training_values(hidden_size=64))
    assert plugin.get_value("zero_optimization.reduce_bucket_size") == 5e8


def test_sizes_of_stage_3_follow_the_hidden_size() -> None:
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    auto = dict.fromkeys((*names, "stage3_gather_16bit_weights_on_model_save"), "auto")
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 3} | auto})
    plugin.deepspeed_config_process(**training_values(hidden_size=64))
    assert [plugin.get_value(f"zero_optimization.{name}") for name in names] == [4096, 3686, 640]
    assert plugin.zero3_save_16bit_model is False


def test_a_section_is_processed_alone() -> None:
    plugin = DeepSpeedPlugin(HANDBOOK)
    section = plugin.deepspeed_config["optimizer"]
    plugin.deepspeed_config_process(
        "optimizer.", config=section, **training_values(learning_rate=0.1, weight_decay=0.0)
    )
    assert plugin.filled == {"optimizer.params.lr": 0.1, "optimizer.params.weight_decay": 0.0}
    assert plugin.is_auto("gradient_clipping")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gradient_accumulation_steps", 3),
        ("gradient_clipping", 0.5),
        ("zero_stage", 3),
        ("offload_optimizer_device", "cpu"),
        ("offload_param_device", "cpu"),
        ("offload_optimizer_nvme_path", "/disk"),
        ("offload_param_nvme_path", "/disk"),
        ("zero3_save_16bit_model", True),
    ],
)
def test_each_field_is_a_value_of_the_file_and_read_from_it(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"zero_stage": 3, field: value}
    plugin = DeepSpeedPlugin(**fields)
    assert plugin.get_value(KEYS[field]) == value
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    config.set_value(KEYS[field], value)
    assert getattr(DeepSpeedPlugin(config), field) == value


def test_every_field_with_a_key_is_tested() -> None:
    marks: Any = test_each_field_is_a_value_of_the_file_and_read_from_it
    assert {field for field, _ in marks.pytestmark[0].args[1]} == set(KEYS)


def test_the_page_says_what_becomes_of_each_field() -> None:
    text = deepspeed_table.PAGE.read_text()
    assert text == deepspeed_table.with_tables(text), "Write it by: python -m tests.options.deepspeed_table"
    assert not set(deepspeed_table.MAPPED) & set(deepspeed_table.UNSUPPORTED)
    for name in deepspeed_table.UNSUPPORTED:
        fields: dict[str, Any] = {name: True}
        with pytest.raises(UnsupportedError, match=name):
            DeepSpeedPlugin(**fields)


def test_a_number_of_the_config_that_beats_a_dummys_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config: dict[str, Any] = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "weight_decay": "auto", "eps": 1e-6, "betas": [0.9, 0.95]},
        },
        "zero_optimization": {"stage": 0},
    }
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, []),
        ({"lr": 0.01, "weight_decay": 0.5, "betas": (0.9, 0.95)}, []),
        ({"lr": 0.001}, ["optimizer.params.lr is 0.01 in the DeepSpeed config and 0.001 in DummyOptim"]),
        ({"amsgrad": True}, ["DummyOptim(amsgrad=True) has no effect"]),
        ({"eps": 1e-8}, ["optimizer.params.eps is 1e-06 in the DeepSpeed config and 1e-08 in DummyOptim"]),
    ]
    for options, said in cases:
        caplog.clear()
        made = apply_config(DeepSpeedPlugin(config), [DummyOptim(nn.Linear(2, 1).parameters(), **options)], 1, 1)
        assert (made[0].defaults["lr"], made[0].defaults["eps"]) == (0.01, 1e-6)
        assert [message.split(":")[0] for message in caplog.messages] == said


def of_config(optimizer: Any, schedule: Any = None) -> dict[str, Any]:
    """Return a config with an optimizer and a schedule."""
    return {"zero_optimization": {"stage": 0}, "optimizer": optimizer, "scheduler": schedule}


ADAMW = {"type": "AdamW", "params": {"lr": "auto"}}
TYPE: dict[str, Any] = {"type": "AdamW"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (of_config(TYPE | {"parms": {"lr": 1e-5}}), "Unknown key of optimizer .* 'parms'.* Did you mean 'params'"),
        (of_config(ADAMW, {"type": "WarmupLR", "parms": {}}), "Unknown key of scheduler .* Did you mean 'params'"),
        (of_config(TYPE | {"params": {"bets": [0.9]}}), "key of optimizer.params .* 'bets'.* Did you mean 'betas'"),
        (of_config(TYPE | {"params": {"lr": "1e-5"}}), "optimizer.params in .* do not fit AdamW: .*'str'"),
        (of_config(TYPE | {"params": {"max_grad_norm": 1.0}}), "max_grad_norm .* Write .gradient_clipping. at the top"),
        ({"bf16": {"enabled": "true"}}, "bf16.enabled in the DeepSpeed config must be True or False, got 'true'"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "enables both fp16 and bf16"),
    ],
)
def test_what_an_optimizer_or_a_precision_does_not_take_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        apply_config(DeepSpeedPlugin(config), [DummyOptim(nn.Linear(2, 1).parameters())], 1, 1)


def test_an_optimizer_has_the_defaults_of_deepspeeds() -> None:
    for values, decay in (
        ({"type": "AdamW"}, 0.0),
        ({"type": "adamw", "params": {"lr": 0.1}}, 0.0),
        ({"type": "Adam", "params": {}}, 0.0),
        ({"type": "AdamW", "params": {"torch_adam": True}}, 0.01),
        ({"type": "AdamW", "params": {"weight_decay": 0.5}}, 0.5),
    ):
        made = apply_config(DeepSpeedPlugin(of_config(values)), [DummyOptim(nn.Linear(2, 1).parameters())], 1, 1)
        assert (type(made[0]), made[0].defaults["weight_decay"]) == (torch.optim.AdamW, decay)


def test_a_schedule_of_the_config_needs_its_dummy(caplog: pytest.LogCaptureFixture) -> None:
    plugin = DeepSpeedPlugin(of_config(ADAMW, {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}))
    model = nn.Linear(2, 1)
    dummy = DummyOptim(model.parameters(), lr=0.5)
    (optimizer,) = apply_config(plugin, [dummy], 1, 1)
    assert ["the learning rate stays the same" in message for message in caplog.messages] == [True]
    with pytest.raises(ConfigurationError, match=r"got a schedule, and .* a section `scheduler`\. Give DummyScheduler"):
        apply_config(plugin, [LambdaLR(optimizer, lambda step: 1.0)], 1, 1)
    with pytest.raises(ConfigurationError, match=r"follows a DummyOptim that prepare\(\) did not get with it"):
        apply_config(plugin, [DummyScheduler(dummy)], 1, 1)


def test_defaults_are_stage_2_without_a_file_and_deepspeeds_stage_with_one() -> None:
    assert DeepSpeedPlugin().zero_stage == 2
    assert DeepSpeedPlugin(zero_stage=0).zero_stage == 0
    texts: list[Any] = [DeepSpeedPlugin(zero_stage="3"), DeepSpeedPlugin({"zero_optimization": {"stage": " 3"}})]
    texts.append(DeepSpeedPlugin({"zero_optimization": {"stage": "3"}}, zero_stage=3.0))
    for plugin in texts:
        assert (plugin.zero_stage, type(plugin.zero_stage), plugin.is_zero3_init_enabled()) == (3, int, True)
        assert plugin.get_value("zero_optimization.stage") == 3
    assert DeepSpeedPlugin({"train_batch_size": 8}).zero_stage == 0
    assert DeepSpeedPlugin(zero_stage=3).is_zero3_init_enabled()
    assert DeepSpeedPlugin(transformer_moe_cls_names="A, B").transformer_moe_cls_names == ["A", "B"]
    assert DeepSpeedPlugin().micro_batch_size([4, 2]) == 2
    assert DeepSpeedPlugin(is_train_batch_min=False).micro_batch_size([4, 2]) == 4


def test_what_needs_stage_3_has_no_effect_below_it_and_a_note_says_so() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True)  # as `accelerate config` writes it
    assert not plugin.is_zero3_init_enabled()
    assert list(plugin.notes) == ["zero3_init_flag=True has no effect with zero_stage=2: it needs stage 3"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"zero_stage": 4}, r"zero_stage must be 0 \(nothing is sharded\), 1 .* or 3 \(weights too\), got 4"),
        ({"zero_stage": True}, "zero_stage must be 0 .* got True"),
        ({"zero_stage": 2.5}, "zero_stage must be 0 .* got 2.5"),
        ({"zero_stage": "two"}, "zero_stage must be 0 .* got 'two'"),
        ({"hf_ds_config": {"zero_optimization": {"stage": "auto"}}}, "zero_optimization.stage must be 0 .* got 'auto'"),
        ({"hf_ds_config": {"zero_optimization": {"stage": True}}}, "zero_optimization.stage must be 0 .* got True"),
        ({"transformer_moe_cls_names": nn.Linear}, "must be a list of names of classes, such as"),
        ({"transformer_moe_cls_names": [nn.Linear]}, "must be a list of names of classes, such as"),
        ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "needs zero_stage=1 or more .got 0"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "offload_param_device='cpu' needs zero_stage=3 .got 2"),
        ({"zero_stage": 2, "offload_optimizer_device": "nvme"}, "needs zero_stage=3 .got 2"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, "set offload_param_nvme_path"),
        ({"offload_param_device": "cup"}, "Did you mean 'cpu'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be a whole number"),
        ({"gradient_clipping": -1.0}, "gradient_clipping must be a finite number above 0"),
        ({"zero3_init_flag": "yes"}, "zero3_init_flag must be True or False"),
        ({"hf_ds_config": 3}, r"must be the path of a JSON file, a dict or an HfDeepSpeedConfig \(got int\)"),
        ({"hf_ds_config": "missing.json"}, "missing.json cannot be read: No such file"),
    ],
)
def test_bad_values_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        DeepSpeedPlugin(**fields)


def test_a_misspelt_section_is_refused_and_one_that_is_commented_out_is_not() -> None:
    with pytest.raises(ConfigurationError, match=r"has 'zero_optimizaton'\. Did you mean 'zero_optimization'\?"):
        DeepSpeedPlugin({"zero_optimizaton": {"stage": 3}})
    section = {"stage": 3}
    assert DeepSpeedPlugin({"_optimizer": {}, "bfloat16": {}, "zero_optimization": section}).zero_stage == 3


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"zero_optimization": True},
            r'zero_optimization in the DeepSpeed config must be .* as {"stage": 2} .got True',
        ),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, r'"device": "cpu"} .got \'cpu\''),
        ({"bf16": True}, r'bf16 in the DeepSpeed config must be an object with keys, such as {"enabled": true}'),
        ({"optimizer": "AdamW"}, r'optimizer in .* such as {"type": "AdamW"'),
        ({"bfloat16": {"enabled": True}}, "has 'bfloat16'. Did you mean 'bf16'"),
        (
            {"zero_optimization": {"stge": 2}},
            "zero_optimization in the DeepSpeed config has 'stge'. Did you mean 'stage'",
        ),
        ({"zero_optimization": {"zero_stage": 3}}, "has 'zero_stage'. Did you mean 'stage'"),
    ],
)
def test_a_section_that_would_have_no_effect_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        DeepSpeedPlugin(config)


def test_a_section_that_is_null_is_none() -> None:
    plugin = DeepSpeedPlugin(
        {"bf16": None, "zero_optimization": {"stage": 1, "offload_param": None}, "scheduler": None}
    )
    assert plugin.zero_stage == 1


def test_equal_configs_are_equal_and_shown_alike_on_all_ranks() -> None:
    first, second, other = (DeepSpeedPlugin(zero_stage=stage) for stage in (2, 2, 3))
    assert (first == second, first == other) == (True, False)
    assert repr(first) == repr(second)  # what ranks compare before a fit
    assert "'stage': 2" in repr(first)


@pytest.mark.parametrize(("text", "says"), [("{", "is no valid JSON"), ("[]", "must hold a JSON object .got list")])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        HfDeepSpeedConfig(path)


def test_the_scale_of_the_file_counts_when_fp16_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    config = {"fp16": {"enabled": "auto", "initial_scale_power": 5}, "train_micro_batch_size_per_gpu": 1}
    plugin = DeepSpeedPlugin(config, zero_stage=0)
    scaler: Any = Accelerator(cpu=True, deepspeed_plugin=plugin).scaler
    assert scaler.get_scale() == 32
    assert plugin.get_value("fp16.enabled") is True


def test_precision_comes_from_the_accelerator_unless_the_file_sets_it() -> None:
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16")
    assert (plugin.get_value("bf16.enabled"), plugin.get_value("fp16.enabled")) == (True, False)
    with pytest.raises(
        ConfigurationError, match=r"fp16.enabled is True in the DeepSpeed config and False by mixed_prec"
    ):
        DeepSpeedPlugin(HANDBOOK).set_mixed_precision("bf16")


def test_what_is_not_supported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="MS-AMP"):
        DeepSpeedPlugin(enable_msamp=True)
    monkeypatch.setattr(construction, "is_deepspeed_available", lambda: False)
    with pytest.raises(MissingPackageError, match=r"zero_stage=2\) needs DeepSpeed, which is not installed: `pip inst"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin())


def test_values_are_read_and_deleted_by_dotted_keys() -> None:
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "a": False})
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (False, True, True)
    assert (config.is_true("a"), config.is_false("a"), config.is_false("b")) == (False, True, False)
    assert config.get_value("a.b.c", 7) == 7
    config.del_config_sub_tree("zero_optimization.offload_param", must_exist=True)
    assert not config.is_offload()
    with pytest.raises(ConfigurationError, match=r"has no 'x.y' to delete"):
        config.del_config_sub_tree("x.y", must_exist=True)
