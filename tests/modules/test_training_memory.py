"""The memory of a training: its parts against those of a real one, and activations against hand-made counts."""

import pytest
import torch
from torch import nn

from trainer_lib.modules.init_on_device import init_empty_weights
from trainer_lib.modules.training_memory import activation_bytes, training_memory


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in "abc")))


def forward(model: nn.Module) -> torch.Tensor:
    weight = next(model.parameters())
    return model(torch.zeros(3, 8, dtype=weight.dtype, device=weight.device)).sum()


def test_a_training_on_one_device_takes_what_a_real_one_holds() -> None:
    with init_empty_weights():
        empty = make_model()
    memories = {memory.precision: memory for memory in training_memory(empty, forward)}
    assert {memory.strategy for memory in memories.values()} == {"ddp"}
    for precision, dtype in (("no", torch.float32), ("bf16-true", torch.bfloat16)):
        model = make_model().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        forward(model).backward()
        optimizer.step()
        memory = memories[precision]
        assert memory.weights == sum(weight.nbytes for weight in model.parameters())
        assert memory.gradients == sum(weight.grad.nbytes for weight in model.parameters() if weight.grad is not None)
        states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert memory.optimizer == sum(state.nbytes for state in states)
        assert memory.activations == activation_bytes(model, forward)
        assert memory.total == memory.weights + memory.gradients + memory.optimizer + (memory.activations or 0)
    assert memories["bf16"].weights == memories["no"].weights, "weights stay in fp32"
    assert memories["bf16"].activations == memories["bf16-true"].activations


def test_activations_are_what_the_backward_needs() -> None:
    # The input, that of each block's linear layer (the output of the ReLU before is the same tensor), and the last one.
    expected = 4 * (3 * 8 + 3 * 16 + 3 * 3 * 16)
    assert activation_bytes(make_model(), forward) == expected
    assert activation_bytes(make_model().requires_grad_(False), forward) == 0

    def broken(model: nn.Module) -> None:
        raise RuntimeError("no values")

    assert activation_bytes(make_model(), broken) is None
    model = make_model().eval()
    activation_bytes(model, broken)
    assert not model.training


def test_fsdp_holds_shards_two_blocks_and_what_is_in_none() -> None:
    values, block, outside = 8 * 16 + 16 + 3 * (16 * 16 + 16), 16 * 16 + 16, 8 * 16 + 16
    gathered = 2 * block + outside
    memories = {(each.strategy, each.precision): each for each in training_memory(make_model(), forward, 4)}
    sharded = memories["fsdp", "no"]
    assert (sharded.weights, sharded.gradients) == (values + gathered * 4, values), "four bytes, on four devices"
    assert sharded.optimizer == 2 * values
    assert memories["fsdp", "bf16"].weights == values + gathered * 2, "blocks are gathered in bf16"
    offloaded = memories["fsdp_offload", "no"]
    assert (offloaded.weights, offloaded.gradients, offloaded.optimizer) == (gathered * 4, 0, 0)
    assert memories["ddp", "no"].weights == 4 * values


@pytest.mark.parametrize("num_processes", [3, 7])
def test_an_uneven_shard_is_that_of_the_first_rank(num_processes: int) -> None:
    rows = [weight.chunk(num_processes)[0] for weight in make_model().parameters()]
    memories = [each for each in training_memory(make_model(), forward, num_processes) if each.strategy == "fsdp"]
    assert memories[0].gradients == sum(part.nbytes for part in rows)
