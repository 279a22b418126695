"""Models of transformers on shards: tied weights, buffers that are not saved, and what such models do themselves."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin
from trainer_lib.modules.activation_offload import ActivationOffload


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    importlib.import_module("torch.distributed.fsdp")
    importlib.import_module("transformers.models.llama.modeling_llama")


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=33,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            tie_word_embeddings=True,
        )
    )


def _on_meta() -> Any:
    with torch.device("meta"):
        return _llama()


def _train(accelerator: Accelerator, network: Any) -> tuple[list[Any], dict[str, Any]]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    network, optimizer = accelerator.prepare(network, optimizer)
    network.train()
    tokens = torch.randint(0, 33, (8, 12), generator=torch.Generator().manual_seed(1))
    tokens = tokens.chunk(accelerator.num_processes)[accelerator.process_index]
    values: list[Any] = []
    for _ in range(3):
        loss = network(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        values += [float(accelerator.reduce(loss.detach(), reduction="mean")), float(norm)]
    state = accelerator.strategy.model_state(network)
    accelerator.free_memory()
    return values, state


@pytest.mark.slow
def test_a_language_model_trains_on_shards(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path)

    def train(make: Callable[[bool], Any], plugin: FullyShardedDataParallelPlugin) -> Any:
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        return _train(accelerator, make(accelerator.is_main_process))

    def together() -> list[Any]:
        plugin = FullyShardedDataParallelPlugin
        return [
            train(lambda is_main: _llama(), plugin()),
            train(lambda is_main: _llama(), plugin(activation_checkpointing=True)),
            train(lambda is_main: type(_llama()).from_pretrained(tmp_path), plugin(cpu_ram_efficient_loading=True)),
            train(lambda is_main: _llama() if is_main else _on_meta(), plugin()),
        ]

    numbers, weights = _train(Accelerator(cpu=True), _llama())
    main, other = run_world(together, (), 2, timeout=60)
    for (losses, state), (theirs, nothing) in zip(main, other, strict=True):
        assert losses == pytest.approx(numbers, rel=2e-6)
        assert theirs == losses
        assert nothing == {}
        assert list(state) == list(weights)
        toy.assert_same(list(state.values()), list(weights.values()), rtol=1e-4)


def test_a_language_model_on_meta_starts_as_its_authors_say() -> None:
    def start() -> list[Any]:
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        network: Any = accelerator.prepare(_on_meta())
        names = [type(module).__name__ for module in network.modules() if hasattr(module, "unshard")]
        state = accelerator.strategy.model_state(network)
        return [names, network.model.rotary_emb.inv_freq, {name: float(value.std()) for name, value in state.items()}]

    (names, frequencies, spread), (_, others, _) = run_world(start, (), 2, timeout=60)
    assert names == ["FSDPLlamaForCausalLM", "FSDPLlamaDecoderLayer", "FSDPLlamaDecoderLayer"]
    expected = _llama()
    for tensor in (frequencies, others):
        torch.testing.assert_close(tensor, expected.model.rotary_emb.inv_freq, rtol=0, atol=0)
    for name, value in expected.state_dict().items():
        assert spread[name] == pytest.approx(float(value.std()), rel=0.3, abs=1e-6), name


def _layers_on_the_cpu(offload: bool) -> tuple[int, list[float]]:
    """Return how often a layer hands its inputs to host memory, and the losses."""
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True, activation_checkpointing_offload=offload)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    original, entered = ActivationOffload.run, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        entered[0] += 1
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationOffload, "run", counted)
        values, _ = _train(accelerator, _llama())
    return entered[0], values


@pytest.mark.slow
def test_layers_of_transformers_hand_their_inputs_to_the_cpu() -> None:
    for (kept, losses), (moved, again) in zip(
        run_world(_layers_on_the_cpu, (False,)), run_world(_layers_on_the_cpu, (True,)), strict=True
    ):
        assert (kept, moved) == (0, 6), "two layers, three steps"
        assert again == losses
