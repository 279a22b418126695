"""The options of sharding: FSDP1's words in FSDP2's, what the launcher says, and every value that is refused."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from trainer_lib import ConfigurationError, FullyShardedDataParallelPlugin
from trainer_lib.foundation.environment import patch_environment
from trainer_lib.options.parallel.fsdp1_translation import Offload, WholeState

Plugin: Any = FullyShardedDataParallelPlugin


def test_the_defaults_are_those_of_fsdp2() -> None:
    plugin = Plugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.state_dict_type) == (
        2,
        True,
        "SHARDED_STATE_DICT",
    )
    assert plugin.writes_shards
    assert plugin.sync_module_states
    assert plugin.offload == Offload(False)
    assert not plugin.is_hybrid
    assert plugin.auto_wrap_policy is None
    assert plugin.mixed_precision_policy is None


def test_what_means_nothing_else_in_fsdp2_is_taken() -> None:
    from torch.distributed.fsdp import BackwardPrefetch, FullStateDictConfig, ShardedOptimStateDictConfig

    Plugin(fsdp_version=2, use_orig_params=True, limit_all_gathers=True, backward_prefetch="backward_pre")
    Plugin(backward_prefetch=BackwardPrefetch.BACKWARD_PRE)
    Plugin(
        state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        optim_state_dict_config=ShardedOptimStateDictConfig(offload_to_cpu=True),
    )


@pytest.mark.parametrize(
    ("options", "reshard", "hybrid"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, True, False),
        ({"sharding_strategy": "full_shard"}, True, False),
        ({"sharding_strategy": 1}, True, False),
        ({"sharding_strategy": "2"}, False, False),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, False, False),
        ({"sharding_strategy": "HYBRID_SHARD"}, True, True),
        ({"sharding_strategy": 5}, False, True),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}, True, False),
        ({"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": 4}, 4, True),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, False, False),
        ({"reshard_after_forward": "false"}, False, False),
        ({"reshard_after_forward": "TRUE"}, True, False),
        ({"reshard_after_forward": "no"}, False, False),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, False, True),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, False, True),
        ({"reshard_after_forward": 2}, 2, False),
    ],
)
def test_what_is_sharded_in_either_word(options: dict[str, Any], reshard: Any, hybrid: bool) -> None:
    plugin = Plugin(**options)
    assert plugin.reshard_after_forward == reshard
    assert type(plugin.reshard_after_forward) is type(reshard)
    assert plugin.is_hybrid is hybrid


def test_members_of_torchs_enumerations() -> None:
    from torch.distributed.fsdp import ShardingStrategy, StateDictType

    assert Plugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP).reshard_after_forward is False
    assert Plugin(reshard_after_forward=ShardingStrategy.FULL_SHARD).reshard_after_forward is True
    assert Plugin(state_dict_type=StateDictType.FULL_STATE_DICT).state_dict_type == "FULL_STATE_DICT"


def test_offloading_in_any_form() -> None:
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    assert Plugin(cpu_offload=True).offload == Offload(True, True)
    assert Plugin(cpu_offload=CPUOffloadPolicy(pin_memory=False)).offload == Offload(True, False)
    assert Plugin(cpu_offload=OffloadPolicy()).offload == Offload(False)
    assert Plugin(cpu_offload=CPUOffload(offload_params=True)).offload == Offload(True)
    assert Plugin(cpu_offload=CPUOffload(offload_params=False)).offload == Offload(False)


def test_number_formats_in_any_form() -> None:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    policy = MixedPrecisionPolicy(param_dtype=bf16, cast_forward_inputs=False)
    for value, expected in (
        (policy, policy),
        ("bf16", MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)),
        (fp16, MixedPrecisionPolicy(param_dtype=fp16, reduce_dtype=fp32)),
        ({"param_dtype": "BF16", "output_dtype": fp32}, MixedPrecisionPolicy(param_dtype=bf16, output_dtype=fp32)),
        ({"param_dtype": "bf16", "cast_forward_inputs": False}, policy),
        (MixedPrecision(param_dtype=bf16, cast_root_forward_inputs=False), policy),
        (MixedPrecision(param_dtype=bf16), MixedPrecisionPolicy(param_dtype=bf16)),
    ):
        assert Plugin(mixed_precision_policy=value).mixed_precision_policy == expected
    plugin = Plugin(mixed_precision_policy="bf16")
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy.param_dtype is bf16, "it was chosen"
    plugin.set_mixed_precision("fp16", override=True)
    assert plugin.mixed_precision_policy.param_dtype is fp16
    plugin.set_state_dict_type("full_state_dict")
    assert not plugin.writes_shards


def test_policies_of_wrapping() -> None:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

    bound = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    by_class = ModuleWrapPolicy({nn.Linear})
    for setting, policy in (
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "transformer_based_wrap"),
        ({"auto_wrap_policy": transformer_auto_wrap_policy}, "transformer_based_wrap"),
        ({"auto_wrap_policy": "NO_WRAP"}, "no_wrap"),
        ({"transformer_cls_names_to_wrap": ["Block"]}, "transformer_based_wrap"),
        ({"min_num_params": 10}, "size_based_wrap"),
        ({"auto_wrap_policy": nn.Linear}, [nn.Linear]),
        ({"auto_wrap_policy": {"Block"}}, ["Block"]),
        ({"auto_wrap_policy": bound}, bound),
        ({"auto_wrap_policy": by_class}, by_class),
        ({"auto_wrap_policy": size_based_auto_wrap_policy}, size_based_auto_wrap_policy),
    ):
        assert Plugin(**setting).auto_wrap_policy == policy
    assert Plugin(transformer_cls_names_to_wrap="Block, Other").transformer_cls_names_to_wrap == ["Block", "Other"]
    assert Plugin(auto_wrap_policy="size_based_wrap").min_num_params == 100_000_000


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sharding_strategy": "FULL_SHRAD"}, "Unknown sharding_strategy 'FULL_SHRAD'. Known: FULL_SHARD, HYBRID_SHARD,"),
    ({"sharding_strategy": True}, "Unknown sharding_strategy True."),
    ({"reshard_after_forward": 1}, "reshard_after_forward must be True, False or a number of ranks of at least 2"),
    ({"reshard_after_forward": "perhaps"}, "Unknown sharding_strategy 'perhaps'."),
    ({"fsdp_version": 3}, "fsdp_version must be 1 or 2 (got 3). Both start FSDP2."),
    (
        {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
        "sharding_strategy=FULL_SHARD and reshard_after_forward=False contradict each other.",
    ),
    (
        {"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": "FULL_SHARD"},
        "sharding_strategy=HYBRID_SHARD and reshard_after_forward=FULL_SHARD contradict each other.",
    ),
    ({"backward_prefetch": "always"}, "Unknown backward_prefetch 'always'."),
    ({"cpu_offload": "gpu"}, "cpu_offload must be True, False or a CPUOffloadPolicy, got 'gpu'."),
    ({"state_dict_type": "half"}, "Unknown state_dict_type 'half'. Known: FULL_STATE_DICT,"),
    ({"state_dict_config": {}}, "state_dict_config must be one of torch.distributed.fsdp's StateDictConfig, got {}."),
    (
        {"mixed_precision_policy": "bf61"},
        "Unknown mixed_precision_policy 'bf61'. Known: bf16, fp16, fp32. Did you mean",
    ),
    ({"mixed_precision_policy": {"param_type": "bf16"}}, "Unknown field of mixed_precision_policy 'param_type'."),
    ({"mixed_precision_policy": {"param_dtype": "b"}}, "Unknown param_dtype 'b'. Known: bf16, fp16, fp32."),
    ({"mixed_precision_policy": 16}, "mixed_precision_policy must be a MixedPrecisionPolicy, its fields in a dict"),
    ({"auto_wrap_policy": "transformer"}, "Unknown auto_wrap_policy 'transformer'. Known: no_wrap, size_based_wrap,"),
    ({"auto_wrap_policy": 3}, "auto_wrap_policy must be one of transformer_based_wrap, size_based_wrap, no_wrap,"),
    ({"auto_wrap_policy": [3]}, "auto_wrap_policy must be one of transformer_based_wrap"),
    (
        {"auto_wrap_policy": "no_wrap", "min_num_params": 3},
        "min_num_params=3 needs auto_wrap_policy='size_based_wrap' (got 'no_wrap').",
    ),
    (
        {"auto_wrap_policy": "size_based_wrap", "transformer_cls_names_to_wrap": ["Block"]},
        "transformer_cls_names_to_wrap=['Block'] needs auto_wrap_policy='transformer_based_wrap'",
    ),
    ({"min_num_params": -1}, "min_num_params must be a whole number of at least 0, got -1."),
    ({"forward_prefetch": 1}, "forward_prefetch must be True or False, got 1."),
    ({"activation_checkpointing": "x"}, "activation_checkpointing must be True or False, got 'x'."),
    (
        {"activation_checkpointing_offload": True},
        "activation_checkpointing_offload=True needs activation_checkpointing=True (got False).",
    ),
    (
        {"sharding_strategy": "NO_SHARD", "mixed_precision_policy": "bf16"},
        "sharding_strategy='NO_SHARD' trains with DDP, which has no mixed_precision_policy (got MixedPrecisionPolicy(",
    ),
    ({"param_init_fn": "zeros"}, "param_init_fn must be a function of a module, got 'zeros'."),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_refused_is_named_with_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Plugin(**options)
    assert str(caught.value).startswith(message)


def test_a_policy_of_fsdp1_without_an_equivalent_is_refused() -> None:
    from torch.distributed.fsdp.wrap import CustomPolicy

    with pytest.raises(ConfigurationError, match="a function of"):
        Plugin(auto_wrap_policy=CustomPolicy(lambda module: True))


def _low_precision() -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecision

    return {"mixed_precision_policy": MixedPrecision(buffer_dtype=torch.bfloat16, keep_low_precision_grads=True)}


_WITHIN = "and ParallelismConfig(dp_replicate_size=MACHINES, dp_shard_size=RANKS_PER_MACHINE)"
TRANSLATED: list[tuple[dict[str, Any], list[str], dict[str, Any]]] = [
    ({"fsdp_version": 1}, ["fsdp_version=1 is fsdp_version=2"], {"fsdp_version": 2}),
    (
        {"sharding_strategy": 2},
        ["sharding_strategy='SHARD_GRAD_OP' is reshard_after_forward=False"],
        {"reshard_after_forward": False, "shards": True},
    ),
    (
        {"sharding_strategy": "NO_SHARD", "cpu_offload": True, "activation_checkpointing": True},
        [
            "sharding_strategy='NO_SHARD' is DDP: leave the plugin out",
            "cpu_offload=True is left out (DDP has no such option)",
            "activation_checkpointing=True is left out (DDP has no such option)",
        ],
        {"shards": False},
    ),
    (
        {"sharding_strategy": "HYBRID_SHARD"},
        [f"sharding_strategy='HYBRID_SHARD' is reshard_after_forward=True {_WITHIN}"],
        {"reshard_after_forward": True, "is_hybrid": True},
    ),
    (
        {"reshard_after_forward": "HYBRID_SHARD_ZERO2"},
        [f"sharding_strategy='HYBRID_SHARD_ZERO2' is reshard_after_forward=False {_WITHIN}"],
        {"reshard_after_forward": False, "is_hybrid": True},
    ),
    ({"backward_prefetch": "no_prefetch"}, [], {"backward_prefetch": "NO_PREFETCH"}),
    (
        {"backward_prefetch": 2},
        [
            "backward_prefetch='BACKWARD_POST' is backward_prefetch='NO_PREFETCH' (FSDP2 gathers the next block's "
            "weights either before a block's backward or when they are needed)"
        ],
        {"backward_prefetch": "NO_PREFETCH"},
    ),
    (
        {"use_orig_params": False, "limit_all_gathers": False},
        [
            "use_orig_params=False is use_orig_params=True (FSDP2 always keeps the model's own parameters)",
            "limit_all_gathers=False is left out (FSDP2 needs no such limit)",
        ],
        {},
    ),
    (
        {"cpu_ram_efficient_loading": True, "sync_module_states": False},
        ["sync_module_states=False is sync_module_states=True (cpu_ram_efficient_loading needs it)"],
        {"sync_module_states": True},
    ),
    (
        {"state_dict_type": "LOCAL_STATE_DICT"},
        ["state_dict_type='LOCAL_STATE_DICT' is state_dict_type='SHARDED_STATE_DICT'"],
        {"writes_shards": True},
    ),
    ({"min_num_params": 0}, ["min_num_params=0 is auto_wrap_policy='no_wrap'"], {"auto_wrap_policy": "no_wrap"}),
    (
        {"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "bf16", "buffer_dtype": "bf16"}},
        ["buffer_dtype=torch.bfloat16 is left out (FSDP2 keeps buffers in their own type)"],
        {},
    ),
    (
        _low_precision(),
        [
            "buffer_dtype=torch.bfloat16 is left out (FSDP2 keeps buffers in their own type)",
            "MixedPrecision(keep_low_precision_grads=True) is MixedPrecisionPolicy() (FSDP2 keeps gradients in the "
            "type of the weights)",
        ],
        {},
    ),
    ({"sharding_strategy": "FULL_SHARD", "backward_prefetch": "BACKWARD_PRE"}, [], {"reshard_after_forward": True}),
    ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": False}, [], {"reshard_after_forward": False}),
]


@pytest.mark.parametrize(("options", "notes", "values"), TRANSLATED, ids=lambda value: str(value)[:50])
def test_options_of_fsdp1_become_those_of_fsdp2(
    options: dict[str, Any], notes: list[str], values: dict[str, Any]
) -> None:
    plugin = Plugin(**options)
    assert list(plugin.notes) == notes
    assert {name: getattr(plugin, name) for name in values} == values


def test_the_config_of_a_state_dict_says_its_type_and_who_gets_it() -> None:
    from torch.distributed.fsdp import FullStateDictConfig, LocalStateDictConfig, ShardedStateDictConfig, StateDictType

    everywhere = Plugin(state_dict_config=FullStateDictConfig(offload_to_cpu=False, rank0_only=False))
    assert everywhere.state_dict_type == StateDictType.FULL_STATE_DICT
    assert everywhere.state_dict_type != StateDictType.SHARDED_STATE_DICT
    assert everywhere.whole_state == WholeState(on_all_ranks=True, on_cpu=False)
    on_main = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert Plugin(state_dict_config=on_main, state_dict_type="SHARDED_STATE_DICT").writes_shards, "the type comes first"
    assert Plugin(state_dict_config=on_main).whole_state == Plugin().whole_state == WholeState()
    assert Plugin(state_dict_config=ShardedStateDictConfig()).state_dict_type == "SHARDED_STATE_DICT"
    assert Plugin(state_dict_config=LocalStateDictConfig()).state_dict_type == "SHARDED_STATE_DICT"


def test_methods_of_the_plugin() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    plugin = Plugin(cpu_offload=True)
    plugin.set_cpu_offload()
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.offload.to_cpu
    plugin.cpu_offload = False
    plugin.set_cpu_offload()
    assert type(plugin.cpu_offload) is OffloadPolicy
    plugin.validate_cpu_offload()
    plugin.cpu_offload = "disk"
    with pytest.raises(ConfigurationError, match="cpu_offload must be True, False"):
        plugin.validate_cpu_offload()
    plugin.mixed_precision_policy = "bf61"
    with pytest.raises(ConfigurationError, match="Unknown mixed_precision_policy 'bf61'"):
        plugin.validate_mixed_precision_policy()
    plugin.set_mixed_precision("bf16", buffer_autocast=True, override=True)
    plugin.validate_mixed_precision_policy()
    assert Plugin(mixed_precision_policy="bf16").mixed_precision_policy == plugin.mixed_precision_policy


def test_classes_to_wrap_are_taken_from_the_model() -> None:
    model: Any = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
    model._no_split_modules = ["LayerNorm", "Conv2d"]
    plugin = Plugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    plugin.set_auto_wrap_policy(model)
    assert plugin.transformer_cls_names_to_wrap == ["LayerNorm"]
    model._no_split_modules = ["Linear"]
    plugin.set_auto_wrap_policy(model)
    assert plugin.transformer_cls_names_to_wrap == ["LayerNorm"], "classes that are set stay"
    unset = Plugin()
    unset.set_auto_wrap_policy(model)
    assert unset.transformer_cls_names_to_wrap is None
    wrong = Plugin(transformer_cls_names_to_wrap=["Liner"])
    with pytest.raises(ConfigurationError, match=r"no module of the class 'Liner'\. Did you mean 'Linear'"):
        wrong.set_auto_wrap_policy(model)


# What Accelerate's launcher sets for `--use_fsdp` alone.
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ({}, {}, {"reshard_after_forward": True, "notes": (), "min_num_params": None}),
        ({"FSDP_SHARDING_STRATEGY": "2"}, {}, {"reshard_after_forward": False, "sharding_strategy": "SHARD_GRAD_OP"}),
        ({"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {}, {"shards": False}),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, {}, {"reshard_after_forward": False}),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_VERSION": "2"}, {}, {"reshard_after_forward": False}),
        ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_VERSION": "2"}, {}, {"reshard_after_forward": True}),
        ({}, {"reshard_after_forward": False}, {"reshard_after_forward": False, "notes": ()}),
        ({}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
        (
            {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"},
            {},
            {"min_num_params": 100_000_000, "transformer_cls_names_to_wrap": None},
        ),
        (
            {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
            {"transformer_cls_names_to_wrap": ["Block"]},
            {"auto_wrap_policy": "transformer_based_wrap", "min_num_params": None},
        ),
        (
            {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"},
            {"min_num_params": 3},
            {"auto_wrap_policy": "size_based_wrap", "transformer_cls_names_to_wrap": None},
        ),
        ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}, {}, {"auto_wrap_policy": "transformer_based_wrap"}),
        ({"FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT"}, {}, {"writes_shards": True}),
        ({"FSDP_BACKWARD_PREFETCH": "NO_PREFETCH"}, {}, {"backward_prefetch": "NO_PREFETCH"}),
        (
            {"FSDP_ACTIVATION_CHECKPOINTING": "true", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
            {},
            {"activation_checkpointing_offload": True},
        ),
    ],
    ids=str,
)
def test_what_accelerates_launcher_says(
    variables: dict[str, str], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    with patch_environment(**{**LAUNCHED, **variables}):
        plugin = Plugin(**options)
    assert {name: getattr(plugin, name) for name in expected} == expected


def test_the_type_of_a_state_dict_in_the_script_comes_before_the_launchers() -> None:
    from torch.distributed.fsdp import FullStateDictConfig

    with patch_environment(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
        assert not Plugin(state_dict_config=FullStateDictConfig()).writes_shards


def test_what_the_launcher_says() -> None:
    variables = {
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Other",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
        "FSDP_FORWARD_PREFETCH": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_IGNORED_MODULES": "head",
    }
    with patch_environment(**variables):
        plugin = Plugin()
        assert Plugin(reshard_after_forward=True).reshard_after_forward is True, "the script has the last word"
    assert plugin.reshard_after_forward is False
    assert plugin.auto_wrap_policy == "transformer_based_wrap"
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Other"]
    assert plugin.min_num_params is None, "the number is for another policy"
    assert plugin.offload.to_cpu
    assert not plugin.writes_shards
    assert plugin.cpu_ram_efficient_loading
    assert plugin.activation_checkpointing
    assert plugin.forward_prefetch
    assert plugin.ignored_modules == "head"
    with patch_environment(
        FSDP_SHARDING_STRATEGY="2", FSDP_AUTO_WRAP_POLICY="SIZE_BASED_WRAP", FSDP_MIN_NUM_PARAMS="7"
    ):
        plugin = Plugin()
    assert (plugin.reshard_after_forward, plugin.min_num_params) == (False, 7)
    with patch_environment(FSDP_SYNC_MODULE_STATES="false"):
        assert Plugin().sync_module_states is False
