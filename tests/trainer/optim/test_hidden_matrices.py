"""Muon, GaLore and APOLLO: which matrices they train, and that their numbers are those of the rules by hand."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParameterGroup,
    Trainer,
    TrainingArguments,
    UnsupportedError,
)
from trainer_lib.trainer.optim.hidden_matrices import split_hidden_matrices
from trainer_lib.trainer.optim.low_rank_adamw import APOLLOAdamW, GaLoreAdamW
from trainer_lib.trainer.optim.muon_adamw import MuonAdamW
from trainer_lib.trainer.optim.parameter_groups import group_parameters


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 4))


INPUTS = torch.randn(32, 12, generator=torch.Generator().manual_seed(3))


def trained(model: nn.Module, *optimizers: Any, steps: int = 7) -> list[Tensor]:
    for _ in range(steps):
        model(INPUTS).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_embeddings_outputs_and_vectors_are_no_hidden_matrices() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    groups = group_parameters(model, 0.1, [ParameterGroup("*.mlp.*", learning_rate=0.5)])
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts = split_hidden_matrices(model, groups)
    hidden = [names[parameter] for group in parts if group["hidden_matrices"] for parameter in group["params"]]
    prefix = "transformer.h.0"
    assert hidden == [
        f"{prefix}.attn.c_attn.weight", f"{prefix}.attn.c_proj.weight",
        f"{prefix}.mlp.c_fc.weight", f"{prefix}.mlp.c_proj.weight",
    ]  # fmt: skip
    assert [group["name"] for group in parts if group["hidden_matrices"]] == ["rest, matrices", "*.mlp.*, matrices"]
    assert [group.get("lr") for group in parts if group["hidden_matrices"]] == [None, 0.5]
    assert sum(len(group["params"]) for group in parts) == len(names), "the tied output is the embedding"


def test_a_trainer_gives_muon_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = network()
    other = copy.deepcopy(model)
    args = TrainingArguments(
        optimizer="Muon", learning_rate=1e-2, weight_decay=0.1, max_steps=6, per_device_train_batch_size=32,
        use_cpu=True, progress_bar=False, lr_scheduler="constant", max_grad_norm=None,
    )  # fmt: skip
    Trainer(model, args, train_dataset=(INPUTS, torch.zeros(32, 4)), loss_fn=nn.functional.mse_loss).fit()
    matrices: list[Any] = [other[0].weight, other[2].weight]
    vectors = [layer.bias for layer in other if isinstance(layer, nn.Linear)]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [other[4].weight], "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    expected = trained(other, muon, torch.optim.AdamW(groups, lr=1e-2), steps=6)
    for parameter, by_hand in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), by_hand, rtol=1e-5, atol=1e-6)


def test_states_of_muon_are_loaded_and_copied_into_another_optimizer() -> None:
    whole, parts = network(), network()
    expected = trained(whole, MuonAdamW(whole.parameters(), lr=1e-2), steps=8)
    first = MuonAdamW(parts.parameters(), lr=1e-2)
    trained(parts, first, steps=4)
    second = MuonAdamW(parts.parameters(), lr=0.5)
    second.load_state_dict(first.state_dict())
    for weight, other in zip(trained(parts, second, steps=4), expected, strict=True):
        assert torch.equal(weight, other)


def adam_by_hand(gradient: Tensor, state: dict[str, Any], corrected: bool = True) -> Tensor:
    state["step"] = state.get("step", 0) + 1
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * gradient.square()
    moved = state["m"] / (state["v"].sqrt() + 1e-6)
    return moved * bias(state) if corrected else moved


def bias(state: dict[str, Any]) -> float:
    return math.sqrt(1 - 0.999 ** state["step"]) / (1 - 0.9 ** state["step"])


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_galore_is_adam_on_the_largest_singular_vectors(shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.double))
    expected, state = weight.detach().clone(), dict[str, Any]()
    optimizer = GaLoreAdamW([weight], lr=0.1, weight_decay=0.2, rank=2, update_proj_gap=3, scale=0.5)
    projection = torch.empty(0)
    for step in range(7):
        weight.grad = weight.detach().sin() * (step + 1)
        gradient = expected.sin() * (step + 1)
        if step % 3 == 0:
            left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)
            projection = (right[:2].T if shape[0] > shape[1] else left[:, :2]).double()
        if shape[0] > shape[1]:
            moved = adam_by_hand(gradient @ projection, state) @ projection.T
        else:
            moved = projection @ adam_by_hand(projection.T @ gradient, state)
        expected = (expected - 0.1 * 0.5 * moved) * (1 - 0.1 * 0.2)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-9)
    small = optimizer.state[weight]["exp_avg"]
    assert sorted(small.shape) == [2, max(shape)] or sorted(small.shape) == [2, min(shape)]
    assert small.numel() == 2 * max(shape)


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
def test_apollo_takes_the_rates_of_adam_on_random_projections(scale_type: str) -> None:
    weight = nn.Parameter(torch.randn((6, 4), generator=torch.Generator().manual_seed(1)))
    expected, state, norm = weight.detach().clone(), dict[str, Any](), None
    optimizer = APOLLOAdamW([weight], lr=0.1, rank=2, update_proj_gap=3, scale=4.0, scale_type=scale_type)
    for step in range(7):
        weight.grad = weight.detach().sin() * (step + 1) ** 2
        gradient = expected.sin() * (step + 1) ** 2
        optimizer.step()
        low = gradient @ optimizer.state[weight]["projection"].T
        moved = adam_by_hand(low, state, corrected=False)
        axis = 1 if scale_type == "channel" else (0, 1)
        scaled = gradient * moved.norm(dim=axis, keepdim=True) / (low.norm(dim=axis, keepdim=True) + 1e-8)
        if norm is not None and scaled.norm() > 1.01 * norm:
            scaled = scaled * (1.01 * norm / scaled.norm())
        norm = scaled.norm()
        expected = expected - 0.1 * 2.0 * bias(state) * scaled
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-5)


def test_random_projections_follow_from_position_and_step() -> None:
    def projections() -> list[Tensor]:
        model = network()
        optimizer = APOLLOAdamW(model.parameters(), rank=2, update_proj_gap=2)
        trained(model, optimizer, steps=3)
        return [state["projection"] for state in optimizer.state.values() if "projection" in state]

    first, _, _ = projections()
    torch.randn(3)
    assert torch.equal(projections()[0], first)


@pytest.mark.slow
def test_muon_trains_shards_as_whole_weights_and_galore_says_that_it_does_not() -> None:
    def body() -> tuple[list[Tensor], str]:
        plugin = FullyShardedDataParallelPlugin(min_num_params=100)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = accelerator.prepare(network())
        optimizer = accelerator.prepare(MuonAdamW(model.parameters(), lr=1e-2))
        for _ in range(7):
            accelerator.backward(model(INPUTS).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        weights = [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]
        other = accelerator.prepare(GaLoreAdamW(model.parameters()))
        accelerator.backward(model(INPUTS).square().mean())
        with pytest.raises(UnsupportedError) as refused:
            other.step()
        return weights, str(refused.value)

    model = network()
    expected = trained(model, MuonAdamW(model.parameters(), lr=1e-2))
    for weights, message in run_world(body):
        assert message.startswith("GaLoreAdamW projects whole gradients, and this model's weights are sharded.")
        for weight, whole in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, whole, rtol=1e-2, atol=2e-3)  # Muon computes in bf16
