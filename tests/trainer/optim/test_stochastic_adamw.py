"""AdamW on weights in bfloat16 with stochastic rounding: right on average, equal on ranks, resumed bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, FullyShardedDataParallelPlugin, Trainer, TrainingArguments
from trainer_lib.trainer.optim.low_rank_adamw import GaLoreAdamW
from trainer_lib.trainer.optim.muon_adamw import MuonAdamW
from trainer_lib.trainer.optim.stochastic_adamw import StochasticAdamW, round_stochastically

BF16 = torch.bfloat16
INPUTS = torch.randn(64, 12, generator=torch.Generator().manual_seed(3))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))


def test_rounding_goes_to_a_neighbor_and_is_right_on_average() -> None:
    value = 1.0 + 0.3 * 2**-7  # 2**-7: from 1 to the next number of bfloat16
    rounded = round_stochastically(torch.full((200_000,), value), torch.Generator().manual_seed(0)).float()
    assert rounded.unique().tolist() == [1.0, 1.0 + 2**-7]
    assert rounded.mean().item() == pytest.approx(value, abs=4 * 2**-7 * (0.21 / 200_000) ** 0.5)
    assert (-rounded).mean().item() == pytest.approx(
        round_stochastically(torch.full((200_000,), -value)).float().mean().item(), abs=1e-4
    )
    kept = torch.tensor([0.0, -1.5, 2.0**100, float("inf"), float("-inf")])
    assert torch.equal(round_stochastically(kept).float(), kept)
    assert round_stochastically(torch.tensor([float("nan")])).isnan().all()


def trained(kind: Any, dtype: torch.dtype, steps: int = 400) -> Tensor:
    model = network().to(dtype)
    optimizer = kind(model.parameters(), lr=2e-5, weight_decay=0.01)
    for _ in range(steps):
        nn.functional.cross_entropy(model(INPUTS.to(dtype)).float(), INPUTS[:, :4].argmax(dim=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def test_small_updates_are_not_lost() -> None:
    start = torch.cat([parameter.detach().flatten() for parameter in network().parameters()])
    moved = trained(torch.optim.AdamW, torch.float32) - start
    rounded = start.to(BF16).float()
    ways = [trained(kind, BF16) - rounded for kind in (StochasticAdamW, torch.optim.AdamW)]
    progress = [(way @ moved / moved.square().sum()).item() for way in ways]
    assert progress[0] == pytest.approx(1.0, abs=0.1), "on average as far as in fp32"
    assert progress[1] < 0.5, "plain rounding loses most of the way"


def test_weights_in_fp32_are_those_of_adamw() -> None:
    torch.testing.assert_close(
        trained(StochasticAdamW, torch.float32, 20), trained(torch.optim.AdamW, torch.float32, 20), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ConfigurationError, match=r"betas must be at least 0 and below 1 \(got \(0.9, 1.0\)\)"):
        StochasticAdamW(network().parameters(), betas=(0.9, 1.0))


@pytest.mark.parametrize("kind", [StochasticAdamW, GaLoreAdamW, MuonAdamW])
def test_a_step_computes_the_loss_of_a_closure_with_gradients(kind: Any) -> None:
    models = network(), network()
    optimizers = [kind(model.parameters(), lr=0.1) for model in models]

    def loss_of(model: nn.Module) -> Tensor:
        loss = model(INPUTS).square().mean()
        loss.backward()
        return loss

    loss = optimizers[0].step(lambda: loss_of(models[0]))
    assert torch.equal(loss, loss_of(models[1]))
    assert optimizers[1].step() is None
    for weight, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(weight, other)


def fitted(folder: Path, steps: int, resume: str) -> list[Tensor]:
    model = network()
    args = TrainingArguments(
        output_dir=folder, max_steps=steps, schedule_steps=8, save_every="2 steps", per_device_train_batch_size=8,
        use_cpu=True, progress_bar=False, resume=resume, optimizer="adamw_bf16", mixed_precision="bf16-true",
        learning_rate=1e-4,
    )  # fmt: skip
    data = (INPUTS, INPUTS[:, :4].argmax(dim=1))
    Trainer(model, args, train_dataset=data, loss_fn=nn.functional.cross_entropy).fit()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    expected = fitted(tmp_path / "whole", 8, "never")
    assert expected[0].dtype is BF16
    assert not torch.equal(fitted(tmp_path / "parts", 4, "never")[0], expected[0])
    torch.randn(5)
    for weight, other in zip(fitted(tmp_path / "parts", 8, "extend"), expected, strict=True):
        assert torch.equal(weight, other)


@pytest.mark.slow
def test_replicas_stay_equal_and_shards_train_and_resume(tmp_path: Path) -> None:
    def body(folder: Path) -> list[list[Tensor]]:
        results: list[list[Tensor]] = []
        for plugin in (None, FullyShardedDataParallelPlugin(min_num_params=100)):
            accelerator = Accelerator(cpu=True, mixed_precision="bf16-true", fsdp_plugin=plugin)
            torch.manual_seed(accelerator.process_index + 5)
            model = accelerator.prepare(network())
            optimizer = accelerator.prepare(StochasticAdamW(model.parameters(), lr=1e-3))
            for step in range(20):
                if step == 10:
                    accelerator.save_state(folder / str(plugin is None))
                accelerator.backward(model(INPUTS).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            weights = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
            results.append(weights)
            accelerator.load_state(folder / str(plugin is None))
            for _ in range(10):
                accelerator.backward(model(INPUTS).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                assert torch.equal(getattr(parameter, "full_tensor", lambda p=parameter: p)(), weight)
            accelerator.free_memory()
        return results

    first, second = run_world(body, [tmp_path])
    for weight, other in zip(first[0], second[0], strict=True):
        assert torch.equal(weight, other)
    for weight, shards in zip(first[0], first[1], strict=True):
        torch.testing.assert_close(weight.float(), shards.float(), rtol=2e-2, atol=1e-2)
