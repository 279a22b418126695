"""`MemoryKwargs`: the same training with fewer activations, on one rank and on two, whatever the strategy."""

from typing import Any

import pytest
import torch

from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    FullyShardedDataParallelPlugin,
    MemoryKwargs,
    ParallelismConfig,
    TorchDynamoPlugin,
)

LEVERS: dict[str, dict[str, Any]] = {
    "policy": {"gradient_checkpointing": True, "gradient_checkpointing_policy": "matmul"},
    "offload": {"activation_offload": True},
    "both": {"gradient_checkpointing": True, "gradient_checkpointing_every": 2, "activation_offload": True},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp_plugin": True, "mixed_precision": "bf16"},
    "tp": {"parallelism_config": {"tp_size": 2}},
    "cp": {"parallelism_config": {"cp_size": 2}},
    "sp": {"parallelism_config": {"sp_size": 2}},
    "pp": {"parallelism_config": {"pp_size": 2}},
}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=False, **shape)).train()


def _trained(strategy: dict[str, Any], lever: dict[str, Any]) -> list[float]:
    """Return the losses and gradient norms of two steps."""
    options = dict(strategy)
    if "fsdp_plugin" in options:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    if "parallelism_config" in options:
        options["parallelism_config"] = ParallelismConfig(**options["parallelism_config"])
    accelerator = Accelerator(cpu=True, kwargs_handlers=[MemoryKwargs(**lever)], **options)
    model = _llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    tokens = torch.arange(64).reshape(2, 32) % 31
    values: list[float] = []
    for _ in range(2):
        with accelerator.maybe_context_parallel([tokens], [1]):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
        values += [loss.item(), accelerator.clip_grad_norm_(model.parameters(), 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    return values


@pytest.mark.slow
def test_training_is_the_same_on_two_ranks() -> None:
    def body() -> list[tuple[str, str, bool]]:
        from trainer_lib.modules import activation_offload

        before, activation_offload._SMALLEST = activation_offload._SMALLEST, 0  # pyright: ignore[reportPrivateUsage]
        try:
            plain = {name: _trained(strategy, {}) for name, strategy in STRATEGIES.items()}
            return [
                (name, lever, _trained(strategy, LEVERS[lever]) == plain[name])
                for name, strategy in STRATEGIES.items()
                for lever in LEVERS
            ]
        finally:
            activation_offload._SMALLEST = before  # pyright: ignore[reportPrivateUsage]

    for results in run_world(body, (), 2, timeout=240):
        assert [result[:2] for result in results if not result[2]] == []


def test_the_engine_applies_the_options() -> None:
    plain = _trained({}, {})
    for lever in LEVERS.values():
        assert _trained({}, lever) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_checkpointing_every": 2}, "gradient_checkpointing_every=2 has no effect without"),
        ({"gradient_checkpointing_policy": "matmul"}, "gradient_checkpointing_policy='matmul' has no effect without"),
        ({"activation_offload": 1}, "activation_offload must be True or False, got 1"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_policy": "x"},
            "gradient_checkpointing_policy must be",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MemoryKwargs(**options)


def test_offload_needs_graphs_that_may_end() -> None:
    plugin = TorchDynamoPlugin(backend="eager", fullgraph=True)
    with pytest.raises(ConfigurationError, match="activation_offload=True does not work with fullgraph=True"):
        Accelerator(cpu=True, dynamo_plugin=plugin, kwargs_handlers=[MemoryKwargs(activation_offload=True)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_models_save_activations_too() -> None:
    plain = _trained({}, {})
    for lever in (LEVERS["policy"], LEVERS["both"]):
        values = _trained({"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager")}, lever)
        assert values == pytest.approx(plain, rel=1e-6)
    torch._dynamo.reset()
