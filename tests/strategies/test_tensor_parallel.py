"""Tensor parallelism: the numbers of one process, whatever is split and on whatever mesh."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.strategies import split
from tests.strategies.split import (
    ATTENTION,
    LLAMA_SEQUENCES,
    PLAIN,
    SEQUENCES,
    VOCABULARY,
    WITH_LOGITS,
    WITH_VOCABULARY,
    Attends,
    Plain,
    Split,
    accelerator_for,
    adapted,
    bart,
    bert,
    data,
    distilbert,
    electra,
    gpt2,
    llama,
    mixtral,
    model_of,
    opt,
    parts_of,
    qwen,
    roberta,
    t5,
    vit,
)
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, ParallelismConfig, PreparationError, UnsupportedError
from trainer_lib.accelerator.construction import check_async_tp
from trainer_lib.modules.weights.state_dicts import module_state
from trainer_lib.state import AcceleratorState
from trainer_lib.strategies.tensor_parallel.async_messages import AsyncMessages
from trainer_lib.strategies.tensor_parallel.attention_heads import attributes_to_divide
from trainer_lib.strategies.tensor_parallel.tensor_parallel_plan import resolve
from trainer_lib.utils import (
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
    is_torch_version,
)

REPLICAS = {"dp_replicate_size": 2, "tp_size": 2}
SHARDS = {"dp_shard_size": 2, "tp_size": 2}


assert_as_one_process = partial(split.assert_as_one_process, holds_less_than=0.8)


@pytest.mark.parametrize(
    "case",
    [
        Split(plan=WITH_VOCABULARY, weighted=True),
        pytest.param(Split(plan=WITH_LOGITS), marks=pytest.mark.slow),
        Split(plan=SEQUENCES),
    ],
    ids=["vocabulary", "loss_parallel", "sequence_parallel"],
)
def test_a_plain_module_is_split_by_a_plan(case: Split) -> None:
    assert_as_one_process(case, 2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [REPLICAS, SHARDS], ids=["replicas", "shards"])
def test_replicas_and_shards_of_a_split_module(sizes: dict[str, Any]) -> None:
    assert_as_one_process(Split(plan=WITH_VOCABULARY, sizes=sizes, weighted=True), 4)


MODELS = {
    "llama": Split(kind=llama),
    "llama_sequences": Split(kind=llama, plan=LLAMA_SEQUENCES, weighted=True),
    "llama_loss_parallel": Split(kind=llama, loss_parallel=True),
    "qwen": Split(kind=qwen),
    "bart": Split(kind=bart),
    "bert": Split(kind=bert),
    "distilbert": Split(kind=distilbert),
    "electra": Split(kind=electra),
    "gpt2": Split(kind=gpt2),
    "opt": Split(kind=opt),
    "roberta": Split(kind=roberta),
    "t5": Split(kind=t5),
    "t5_gated": Split(kind=partial(t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "mt5": Split(kind=partial(t5, "MT5")),
    "umt5": Split(kind=partial(t5, "UMT5")),
    "vit": Split(kind=vit),
    "plain": Split(plan=PLAIN, weighted=True),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a linear layer with bias returns a view
@pytest.mark.parametrize(
    ("name", "sizes"),
    [  # shards and replicas take what is split as it is: sequences, tied weights, biases
        *((name, {"tp_size": 2}) for name in MODELS),
        *((name, SHARDS) for name in ("llama_sequences", "qwen", "gpt2")),
        *((name, REPLICAS) for name in ("llama_sequences", "gpt2")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_models_of_transformers(name: str, sizes: dict[str, Any]) -> None:
    assert_as_one_process(replace(MODELS[name], sizes=sizes), 2 * len(sizes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_an_update_after_each_batch() -> None:
    assert_as_one_process(Split(kind=gpt2, sizes=SHARDS, steps=1), 4)


@pytest.mark.parametrize("kind", [llama, gpt2])  # whose embedding is that of its head too
def test_gradients_are_split_as_their_weights_are(kind: Any) -> None:
    def body() -> list[str]:
        accelerator = accelerator_for(Split(kind=kind))
        model = accelerator.prepare(model_of(kind))
        accelerator.backward(model(**default_collate(data(2)))["loss"])
        return [name for name, weight in model.named_parameters() if _placed(weight) != _placed(weight.grad)]

    assert run_world(body, (), 2) == [[], []]


@pytest.mark.parametrize("kind", [qwen, bert])  # norms of heads, and biases of layers whose inputs are split
def test_weights_that_were_frozen_when_prepared_are_trained_later(kind: Any) -> None:
    def gradients() -> dict[str, Any]:
        accelerator = accelerator_for(Split(kind=kind))
        model = model_of(kind)
        weights = [weight for name, weight in model.named_parameters() if "layer" in name]
        for weight in weights:
            weight.requires_grad_(False)
        model = accelerator.prepare(model)
        accelerator.backward(model(**default_collate(data(2)))["loss"])
        assert any(weight.grad is None for weight in model.parameters())
        model.zero_grad()
        model.requires_grad_(True)
        accelerator.backward(model(**default_collate(data(2)))["loss"])
        bare = accelerator.unwrap_model(model)
        found: dict[str, Any] = {name: weight.grad for name, weight in bare.named_parameters()}
        return {name: getattr(gradient, "full_tensor", gradient.clone)() for name, gradient in found.items()}

    (expected,) = run_world(gradients, (), 1)
    for actual in run_world(gradients, (), 2):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def _placed(tensor: Any) -> Any:
    return getattr(tensor, "placements", None), tensor.shape, getattr(tensor, "_local_tensor", tensor).shape


_ALL = ["embed_tokens", "q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "lm_head"]
ADAPTERS = {
    "llama": Split(kind=partial(adapted, llama, _ALL)),
    "llama_sequences": Split(kind=partial(adapted, llama, lora_bias=True), plan=LLAMA_SEQUENCES, weighted=True),
    "llama_loss_parallel": Split(kind=partial(adapted, llama, _ALL), loss_parallel=True),
    "qwen": Split(kind=partial(adapted, qwen, bias="all")),
    "bert": Split(kind=partial(adapted, bert, ["query", "value", "dense"])),
    "gpt2": Split(kind=partial(adapted, gpt2, ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
    "head": Split(kind=partial(adapted, llama, ["q_proj"], modules_to_save=["lm_head", "embed_tokens"])),
    "plain": Split(kind=partial(adapted, Plain), plan=WITH_VOCABULARY),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"tp_size": 2}),
        *(pytest.param(name, {"tp_size": 2}, marks=pytest.mark.slow) for name in ADAPTERS if name != "llama"),
        *(pytest.param(name, SHARDS, marks=pytest.mark.slow) for name in ("llama_sequences", "head", "gpt2")),
        pytest.param("bert", REPLICAS, marks=pytest.mark.slow),
        pytest.param("llama", {"pp_size": 2, "tp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_adapters_of_lora_are_split_with_their_layers(name: str, sizes: dict[str, Any]) -> None:
    assert_as_one_process(replace(ADAPTERS[name], sizes=sizes), 2 * len(sizes))


def test_matrices_of_lora_are_split_along_what_their_layer_splits() -> None:
    styles = resolve(model_of(partial(adapted, llama, ["q_proj", "o_proj"])), TorchTensorParallelConfig(), 2)
    attention = "base_model.model.model.layers.0.self_attn."
    assert {name.removeprefix(attention): style for name, style in styles.items() if name.startswith(attention)} == {
        "k_proj": "colwise",
        "v_proj": "colwise",
        "q_proj.base_layer": "colwise",
        "q_proj.lora_B.default": "colwise",
        "o_proj.base_layer": "rowwise",
        "o_proj.lora_A.default": "rowwise",
    }


def test_a_plan_may_name_the_matrices_of_lora() -> None:
    plan = {"blocks.*.up": "colwise", "*.lora_B.default": "colwise_gather_output", "blocks.*.down": "rowwise"}
    model = model_of(partial(adapted, Plain, ["up", "down"]))
    styles = resolve(model, TorchTensorParallelConfig(plan=plan), 2)
    assert styles["base_model.model.blocks.0.up.base_layer"] == "colwise"
    assert styles["base_model.model.blocks.0.up.lora_B.default"] == "colwise_gather_output"


def test_adapters_that_cannot_be_split_are_an_error() -> None:
    model = model_of(partial(adapted, llama, ["q_proj"], use_dora=True))
    with pytest.raises(UnsupportedError, match=r"q_proj is a .*Linear with DoraLinearVariant, which tp_size cannot"):
        resolve(model, TorchTensorParallelConfig(), 2)
    model = model_of(partial(adapted, llama, ["q_proj"], trainable_token_indices={"embed_tokens": [1, 2]}))
    with pytest.raises(UnsupportedError, match=r"embed_tokens is a .*TrainableTokensWrapper, which tp_size cannot"):
        resolve(model, TorchTensorParallelConfig(), 2)


def test_a_plan_that_does_not_fit_names_layers_without_their_adapters() -> None:
    model = model_of(partial(adapted, Plain))
    with pytest.raises(ConfigurationError, match=r"Modules with a matrix: blocks\.\*\.up, blocks\.\*\.down\."):
        resolve(model, TorchTensorParallelConfig(plan={"blocks.*.upp": "colwise"}), 2)


@pytest.mark.parametrize("coefficient", [True, False], ids=["balanced", "plain"])
def test_experts_are_spread(coefficient: bool) -> None:
    assert_as_one_process(Split(kind=partial(mixtral, output_router_logits=coefficient), updates=3), 2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [REPLICAS, SHARDS], ids=["replicas", "shards"])
def test_experts_are_spread_in_replicas_and_shards(sizes: dict[str, Any]) -> None:
    # The part of the loss that balances experts is not a mean over sequences, so replicas compute another one.
    assert_as_one_process(Split(kind=partial(mixtral, output_router_logits=False), sizes=sizes), 4)


def test_a_rank_whose_experts_no_token_has_takes_part() -> None:
    def gradients() -> Any:
        accelerator = accelerator_for(Split(kind=mixtral))
        model = accelerator.prepare(model_of(partial(mixtral, num_experts_per_tok=1)))
        block: Any = accelerator.unwrap_model(model).get_submodule("model.layers.0.mlp")
        with torch.no_grad():
            block.gate.weight.fill_(-1.0)[0] = 1.0  # all tokens have expert 0
        hidden = torch.rand(1, 6, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        block(hidden).sum().backward()
        whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in block.parameters()]
        return [hidden.grad, *whole], block.experts.num_experts

    ((expected, count),) = run_world(gradients, (), 1)
    for actual, left in run_world(gradients, (), 2):
        torch.testing.assert_close(actual, expected)
        assert count == left == 4, "a forward leaves the module unchanged"


class LookedUp(nn.Module):
    """Experts that take each token's weights by its indices, all of which must exist."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return ((self.up[indices] @ hidden[:, None, :, None]).squeeze(-1) * weights[..., None]).sum(1)


def test_experts_that_skip_no_index_are_spread() -> None:
    def gradients() -> Any:
        accelerator = accelerator_for(Split(plan={"experts": "experts"}))
        model = accelerator.prepare(model_of(lambda: nn.ModuleDict({"experts": LookedUp()})))
        experts: Any = accelerator.unwrap_model(model).get_submodule("experts")
        generator = torch.Generator().manual_seed(2)
        hidden = torch.rand(6, 8, generator=generator).requires_grad_()
        weights = torch.rand(6, 2, generator=generator).requires_grad_()
        output = experts(hidden, torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1], [2, 3]]), weights)
        output.square().sum().backward()
        whole = getattr(experts.up.grad, "full_tensor", lambda: experts.up.grad)()
        return [output.detach(), hidden.grad, weights.grad, whole]

    (expected,) = run_world(gradients, (), 1)
    for actual in run_world(gradients, (), 2):
        torch.testing.assert_close(actual, expected)


@pytest.mark.slow
def test_half_precision_on_several_meshes_skips_and_scales_alike() -> None:
    """Weights of a replica are on a mesh of two dimensions, norms on one; the scaler takes them one after the other."""

    def scales() -> Any:
        case = Split(plan=PLAIN, sizes=SHARDS, precision="fp16")
        accelerator = accelerator_for(case)
        model = model_of(Plain)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        batch = torch.utils.data.default_collate(data(4))
        outcomes: list[Any] = []
        for factor in (1.0, 1e30, 1.0):
            accelerator.backward(model(**batch)["loss"] * factor)
            optimizer.step()
            optimizer.zero_grad()
            outcomes.append((accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()))
        return outcomes

    first, *others = run_world(scales, (), 4)
    assert [skipped for skipped, _ in first] == [False, True, False]
    assert others == [first] * 3


# -- plans ------------------------------------------------------------------------------------------------------


def resolved(model: nn.Module, size: int = 2, **options: Any) -> dict[str, str]:
    return resolve(model, TorchTensorParallelConfig(**options), size)


def test_experts_divide_by_the_ranks() -> None:
    assert resolved(mixtral())["model.layers.0.mlp.experts"] == "experts"
    with pytest.raises(ConfigurationError, match=r"tp_size=2 does not divide the 3 experts of model.layers.0.mlp.exp"):
        resolved(mixtral(num_local_experts=3))


def test_the_first_pattern_that_matches_counts() -> None:
    plan = {"blocks.1.up": "colwise_gather_output", "*.up": "colwise"}
    assert resolved(Plain(), plan=plan) == {"blocks.1.up": "colwise_gather_output", "blocks.0.up": "colwise"}


@pytest.mark.parametrize(
    ("plan", "size", "message"),
    [
        ({"*.upp": "colwise"}, 2, r"'\*.upp' of the plan matches none of .* modules. Modules .*: blocks.\*.up"),
        ({"*.up": "column"}, 2, "Unknown style of tensor parallelism 'column'. .*colwise"),
        ({"*.norm": "colwise"}, 2, "gives blocks.0.norm the style 'colwise', and a LayerNorm has no matrix to split"),
        ({"head": "embedding_rowwise"}, 2, "head the style 'embedding_rowwise', and it is a Linear. Use 'rowwise'"),
        (PLAIN, 5, "tp_size=5 does not divide the 24 outputs of blocks.0.up .nor 3 other.* that fits this model is 4;"),
        ({"*.up": "experts"}, 2, "blocks.0.up the style 'experts', and a Linear has no experts to spread"),
        (None, 2, r"Plain has no plan of tensor parallelism. Give one: .* Modules with a matrix: embed, blocks.\*.up"),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error(plan: Any, size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolved(Plain(), size, plan=plan)


def test_the_loss_needs_a_head() -> None:
    with pytest.raises(ConfigurationError, match="needs to know which module computes the logits"):
        resolved(Plain(), plan=PLAIN, loss_parallel=True)


@pytest.mark.parametrize("knows_size", [False, True])
def test_attention_arranges_as_many_heads_as_a_rank_computes(knows_size: bool) -> None:
    assert_as_one_process(Split(kind=partial(Attends, knows_size), plan=ATTENTION), 2)


@pytest.mark.parametrize(
    ("plan", "divided", "counts"),
    [
        (ATTENTION, 1, (2, 1)),
        (ATTENTION, 2, (2, 1)),  # by the script
        ({"q_proj": "colwise"}, 1, (2, 2)),
        ({"*[qkv]_proj": "colwise_gather_output"}, 1, (4, 2)),
    ],
)
def test_heads_are_divided_where_their_projections_are(
    plan: dict[str, str], divided: int, counts: tuple[int, int]
) -> None:
    def body() -> tuple[int, int]:
        model: Any = Attends(knows_size=True)
        model.n_heads, model.n_kv_heads = model.n_heads // divided, model.n_kv_heads // divided
        model = accelerator_for(Split(plan=plan)).prepare(model)
        return model.n_heads, model.n_kv_heads

    assert run_world(body, (), 2) == [counts] * 2


def test_heads_that_a_script_has_divided_are_left_wherever_the_module_is() -> None:
    attention = Attends(knows_size=True)
    modules = dict(nn.ModuleDict({"kv_block": attention}).named_modules())
    split = {f"kv_block.{part}_proj" for part in "qkv"}
    assert [key for _, key, _ in attributes_to_divide(modules, split, 2)] == ["n_heads", "n_kv_heads"]
    attention.n_heads, attention.n_kv_heads = 2, 1
    assert list(attributes_to_divide(modules, split, 2)) == []


@pytest.mark.parametrize("size", ["head_dim", "key_value_proj_dim", "dim_per_head"])
@pytest.mark.parametrize(("divided", "left"), [(1, ["n_heads", "n_kv_heads"]), (2, [])])
def test_the_size_of_a_head_tells_whether_a_script_has_divided_heads(size: str, divided: int, left: list[str]) -> None:
    attention: Any = Attends()
    setattr(attention, size, 4)
    attention.n_heads, attention.n_kv_heads = 4 // divided, 2 // divided
    modules = dict(attention.named_modules())
    assert [key for _, key, _ in attributes_to_divide(modules, {f"{part}_proj" for part in "qkv"}, 2)] == left


def test_heads_are_divided_where_those_of_values_have_another_size() -> None:
    attention: Any = Attends(knows_size=True)
    attention.n_kv_heads, attention.k_proj, attention.v_proj = 4, nn.Linear(16, 16), nn.Linear(16, 24)
    modules = dict(attention.named_modules())
    assert [key for _, key, _ in attributes_to_divide(modules, {f"{part}_proj" for part in "qkv"}, 2)] == ["n_heads"]


def test_one_head_a_rank_that_a_script_has_divided_is_split() -> None:
    attention: Any = Attends(knows_size=True)
    attention.n_heads = attention.n_kv_heads = 4 // 4
    attention.k_proj, attention.v_proj = nn.Linear(16, 16), nn.Linear(16, 16)
    assert resolve(attention, TorchTensorParallelConfig(plan=ATTENTION), 4)["q_proj"] == "colwise"


@pytest.mark.slow
def test_heads_and_vocabularies_that_do_not_divide() -> None:
    with pytest.raises(ConfigurationError, match=r"tp_size=4 does not divide the 2 num_key.*it fits 1, 2\."):
        resolved(model_of(llama), 4)
    with pytest.raises(ConfigurationError, match="tp_size=2 does not divide the 63 vocab_size"):
        resolved(model_of(gpt2), 2, loss_parallel=True)
    assert resolved(model_of(gpt2))["transformer.h.1.attn.c_attn"] == "colwise_gather_output"


class Attention(nn.Module):
    """Attention of a plain module, with fewer heads of keys and values."""

    def __init__(self, heads: int, key_heads: int, head_size: int = 4) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = heads, key_heads
        self.q_proj = nn.Linear(24, heads * head_size)
        self.k_proj, self.v_proj = (nn.Linear(24, key_heads * head_size) for _ in range(2))
        self.o_proj = nn.Linear(heads * head_size, 24)
        self.feed = nn.Linear(24, 48)


HEADS = {"*.[qkv]_proj": "colwise", "*.o_proj": "rowwise"}


def test_heads_of_plain_modules_that_do_not_divide() -> None:
    # 3 heads of 4: two ranks would hold 6 columns of queries each, one and a half heads.
    with pytest.raises(
        ConfigurationError, match=r"tp_size=2 does not divide the 3 0\.n_heads\. .* this model is 1; it fits 1, 3\."
    ):
        resolved(nn.Sequential(Attention(3, 3)), plan=HEADS)
    with pytest.raises(
        ConfigurationError, match=r"tp_size=4 does not divide the 2 0\.n_kv_heads\..* is 2; it fits 1, 2"
    ):
        resolved(nn.Sequential(Attention(8, 2)), 4, plan=HEADS)
    assert len(resolved(nn.Sequential(Attention(4, 2)), 2, plan=HEADS)) == 4
    assert resolved(nn.Sequential(Attention(8, 2)), 4, plan={"*.q_proj": "colwise"}), "keys stay whole"
    whole = {"*.[qkv]_proj": "colwise_gather_output"}
    assert len(resolved(nn.Sequential(Attention(3, 3)), 2, plan=whole)) == 3, "each rank has all heads"
    assert resolved(nn.Sequential(Attention(3, 3)), 2, plan={"*.feed": "colwise", "*.o_proj": "rowwise"})


def _async_tp() -> tuple[list[str], list[bool]]:
    from torch._inductor import config
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    accelerator = accelerator_for(Split(plan=PLAIN))
    mesh = accelerator.torch_device_mesh
    assert mesh is not None
    group, messages, texts = mesh["tp"].get_group(), AsyncMessages(), list[str]()
    with pytest.raises(ConfigurationError) as caught:
        messages.begin(group, PLAIN.values())
    texts.append(str(caught.value))
    states = [config._micro_pipeline_tp, is_symm_mem_enabled_for_group(group.group_name)]
    messages.begin(group, SEQUENCES.values())
    states += [config._micro_pipeline_tp, is_symm_mem_enabled_for_group(group.group_name)]
    messages.end()
    states.append(config._micro_pipeline_tp)
    AcceleratorState._reset_state()
    options = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(enable_async_tp=True))
    with pytest.raises(UnsupportedError) as refused:
        Accelerator(cpu=True, parallelism_config=options, dynamo_backend="inductor")
    return [*texts, str(refused.value)], states


def test_async_tensor_parallelism_is_switched_on_for_plans_of_sequences() -> None:
    texts, states = run_world(_async_tp)[0]
    has_to_ask = is_torch_version("<", "2.15.0")  # later it is there wherever a device has it, which a CPU has not
    assert states == [False, False, True, has_to_ask, False]
    assert "this plan only sums whole activations. Give TorchTensorParallelConfig(sequence_parallel=True)" in texts[0]
    assert "enable_async_tp=True does not work on this device (cpu)" in texts[1]


def test_async_tensor_parallelism_needs_inductor() -> None:
    config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(enable_async_tp=True))
    with pytest.raises(UnsupportedError, match=r"graphs of inductor .*Give dynamo_backend='inductor'"):
        check_async_tp(TorchDynamoPlugin(backend="aot_eager"), config, "cuda")
    check_async_tp(TorchDynamoPlugin(backend="inductor"), config, "cuda")


def _errors() -> list[str]:
    texts: list[str] = []

    def attempt(model: nn.Module, plan: Mapping[str, str] = PLAIN, **options: Any) -> None:
        accelerator = accelerator_for(Split(plan=plan))
        try:
            prepared = accelerator.prepare(model)
            options.get("then", lambda *both: None)(accelerator, prepared)
        except (ConfigurationError, PreparationError) as error:
            texts.append(str(error))
        accelerator.free_memory()

    tied = Plain()
    tied.head = nn.Linear(16, VOCABULARY, bias=False)
    tied.head.weight = tied.embed.weight
    attempt(tied, {"embed": "rowwise"})
    attempt(tied, {"embed": "rowwise", "head": "rowwise_split_input"})
    attempt(Plain(), then=lambda engine, model: engine.prepare(torch.optim.Adafactor(model.parameters(), foreach=True)))
    odd = torch.zeros(2, 7, dtype=torch.long)
    attempt(Plain(), SEQUENCES | {"embed": "rowwise"} | {"blocks.0": "scatter_sequence"}, then=lambda _, m: m(odd, odd))
    return texts


def test_errors_on_ranks_say_what_to_change() -> None:
    for texts in run_world(_errors):
        assert [text[:60] for text in texts] == [
            "head.weight is tied to a weight that the plan splits, and th",
            "head.weight is tied to a weight that the plan splits along a",
            "Adafactor(foreach=True) cannot update weights that tensor pa",
            "A sequence of 7 tokens cannot be split over tp_size=2 ranks.",
        ]


# -- options ----------------------------------------------------------------------------------------------------


def _older_option() -> Any:
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    config, plugin = accelerator.parallelism_config, accelerator.state.torch_tp_plugin
    assert config is not None
    loss = accelerator.prepare(nn.CrossEntropyLoss())  # without parameters there is nothing to split
    assert type(loss) is nn.CrossEntropyLoss
    return config.sizes, plugin, accelerator.tensor_parallel_rank


def test_the_older_option_replicates_over_the_other_ranks() -> None:
    sizes = {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "sp": 1, "tp": 2}
    assert run_world(_older_option, (), 4) == [(sizes, TorchTensorParallelPlugin(2), rank % 2) for rank in range(4)]
    with pytest.raises(ConfigurationError, match="both say how ranks are arranged"):
        Accelerator(
            cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(), parallelism_config=ParallelismConfig(tp_size=1)
        )


def _launched() -> Any:
    accelerator = Accelerator()
    model = accelerator.prepare(model_of(llama))
    return parts_of(model), accelerator.data_group.size


@pytest.mark.slow
def test_the_launcher_splits_a_model_of_transformers() -> None:
    sizes = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    assert run_world(_launched, (), 2, timeout=60, **sizes) == [(pytest.approx(0.504, abs=1e-3), 1)] * 2


def test_ranks_of_a_replica_draw_the_same_numbers() -> None:
    first, second, third, fourth = run_world(_seeded_by_rank, (), 4)
    assert first == second != third == fourth


def _seeded_by_rank() -> Any:
    from trainer_lib.state import PartialState

    torch.manual_seed(PartialState(cpu=True).process_index)
    accelerator_for(Split(plan=PLAIN, sizes=REPLICAS)).prepare(Plain())
    return torch.rand(3).tolist()


# -- models that come in parts ----------------------------------------------------------------------------------


def _generated(folder: str, loads_parts: bool) -> Any:
    from transformers import AutoModelForCausalLM

    accelerator = accelerator_for(Split(kind=llama))
    if accelerator.num_processes == 1 or not loads_parts:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=accelerator.torch_device_mesh)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.utils.data.default_collate(data(4))
    bare: Any = accelerator.unwrap_model(model)
    tokens = bare.generate(batch["input_ids"][:, :4], max_new_tokens=6, do_sample=False)
    losses: list[float] = []
    for _ in range(3):
        loss = model(**batch).loss
        accelerator.backward(loss)
        losses += [float(loss.detach()), float(accelerator.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return tokens.tolist(), losses, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("loads_parts", [False, True])
def test_generation_and_models_loaded_in_parts(loads_parts: bool, tmp_path: Any) -> None:
    model: Any = model_of(llama)
    model.save_pretrained(tmp_path)
    (expected,) = run_world(_generated, (str(tmp_path), loads_parts), 1, timeout=90)
    for rank, actual in enumerate(run_world(_generated, (str(tmp_path), loads_parts), 2, timeout=90)):
        assert actual[0] == expected[0]
        assert actual[1] == pytest.approx(expected[1], rel=1e-6)
        if rank == 0:
            torch.testing.assert_close(actual[2], expected[2], rtol=1e-5, atol=1e-6)


def _saved(folder: str) -> Any:
    accelerator = accelerator_for(Split(plan=WITH_VOCABULARY))
    model = accelerator.prepare(model_of(Plain))
    accelerator.save_model(model, folder)


def test_a_saved_model_has_the_files_of_the_plain_one(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    run_world(_saved, (str(tmp_path),))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), module_state(model_of(Plain)), rtol=0, atol=0)
