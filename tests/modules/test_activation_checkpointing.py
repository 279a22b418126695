"""Blocks whose activations are computed again: the same numbers, names and random draws, and less that is kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from trainer_lib import ConfigurationError
from trainer_lib.modules.activation_checkpointing import checkpoint_activations, offload_activations
from trainer_lib.options.recompute_policy import selective_contexts


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, inputs: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return self.dropout(torch.tanh(self.inside(inputs))) * scale


class _Stack(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block() for _ in range(blocks)])

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs, scale=0.5)
        return inputs


def _gradients(model: nn.Module) -> list[Any]:
    torch.manual_seed(1)
    model(torch.ones(3, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def _made(blocks: int = 2) -> Any:
    torch.manual_seed(0)
    return _Stack(blocks)


def test_what_is_computed_again_is_the_same() -> None:
    plain, checkpointed = _made(), _made()
    checkpoint_activations(checkpointed)
    torch.testing.assert_close(_gradients(checkpointed), _gradients(plain), rtol=0, atol=0)
    assert [block.calls for block in checkpointed.blocks] == [2, 2]
    assert [block.calls for block in plain.blocks] == [1, 1]
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in checkpointed.named_modules()] == [name for name, _ in plain.named_modules()]


def test_a_forward_without_gradients_computes_once() -> None:
    model = _made()
    checkpoint_activations(model, [model.blocks[1]])
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert [block.calls for block in model.blocks] == [1, 1]
    _gradients(model)
    assert [block.calls for block in model.blocks] == [2, 3], "only the block that was named"


@pytest.mark.parametrize("name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_a_model_that_can_do_it_itself_is_asked(name: str) -> None:
    model = _made()
    asked: list[Any] = []
    model.supports_gradient_checkpointing = True
    setattr(model, name, asked.append)
    checkpoint_activations(model)
    assert asked == [{"use_reentrant": False}]
    _gradients(model)
    assert [block.calls for block in model.blocks] == [1, 1]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="finds no repeated blocks in this Linear"):
        checkpoint_activations(nn.Linear(2, 2))


def test_every_second_block_is_computed_again() -> None:
    plain, checkpointed = _made(5), _made(5)
    checkpoint_activations(checkpointed, every=2)
    torch.testing.assert_close(_gradients(checkpointed), _gradients(plain), rtol=0, atol=0)
    assert [block.calls for block in checkpointed.blocks] == [2, 1, 2, 1, 2]


def test_every_second_layer_of_a_model_of_transformers_is_computed_again() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2
    )

    def gradients(every: int) -> tuple[list[Any], list[int], int]:
        torch.manual_seed(0)
        model, calls, saved = transformers.LlamaForCausalLM(config).train(), [0] * 4, 0
        if every:
            checkpoint_activations(model, every=every)
        for index, layer in enumerate(model.model.layers):

            def count(*_: Any, index: int = index) -> None:
                calls[index] += 1

            layer.mlp.register_forward_pre_hook(count)  # a recomputation ends at the last tensor that it needs

        def keep(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.nbytes
            return tensor

        tokens = torch.arange(8)[None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=tokens, labels=tokens).loss
        kept = saved
        loss.backward()
        return [parameter.grad for parameter in model.parameters()], calls, kept

    plain, every_layer, every_second = gradients(0), gradients(1), gradients(2)
    torch.testing.assert_close(every_second[0], plain[0], rtol=0, atol=0)
    assert (every_layer[1], every_second[1]) == ([2, 2, 2, 2], [2, 1, 2, 1])
    assert every_layer[2] < every_second[2] < plain[2]


def _products(model: nn.Module, **options: Any) -> tuple[list[Any], int, int]:
    """Return the gradients, and how often matrix products with weights ran in the forward and in the backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return func(*args, **(kwargs or {}))

    if options:
        checkpoint_activations(model, **options)
    with Counts() as forward:
        torch.manual_seed(1)
        loss = model(torch.ones(3, 4)).sum()
    with Counts() as backward:
        loss.backward()
    return [parameter.grad for parameter in model.parameters()], forward.products, backward.products


@pytest.mark.parametrize(
    "policy",
    [
        "matmul",
        ["aten.addmm"],
        ["aten::addmm.default"],
        [torch.ops.aten.addmm],
        lambda context, operation, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE
            if operation is torch.ops.aten.addmm.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        ),
    ],
    ids=["matmul", "name", "overload", "operation", "function"],
)
def test_operations_of_a_policy_are_not_computed_again(policy: Any) -> None:
    plain, forward, backward = _products(_made())
    gradients, *counts = _products(_made(), policy=policy)
    torch.testing.assert_close(gradients, plain, rtol=0, atol=0)
    assert counts == [forward, backward]
    assert _products(_made(), policy="attention")[2] > backward


def test_an_attention_that_drops_weights_is_computed_again() -> None:
    with torch.library._scoped_library("trainer_lib_tests", "DEF") as library:
        tags = (torch.Tag.nondeterministic_seeded,)
        library.define("attention(Tensor x, float dropout_p=0.0) -> Tensor", tags=tags)
        library.impl("attention", lambda x, p=0.0: x * torch.rand_like(x) if p else x * 2, "CPU")
        library.impl("attention", _Attention.apply, "AutogradCPU")

        class Dropping(_Block):
            def forward(self, inputs: Tensor, *, scale: float = 1.0) -> Tensor:
                attended = torch.ops.trainer_lib_tests.attention(self.inside(inputs), 0.5)
                return self.dropout(torch.tanh(attended) * scale)

        def gradients(**options: Any) -> list[Any]:
            torch.manual_seed(0)
            model = nn.Sequential(Dropping(), Dropping())
            if options:
                checkpoint_activations(model, **options)
            return _gradients(model)

        kept = gradients(policy=["trainer_lib_tests.attention"])
        torch.testing.assert_close(kept, gradients(), rtol=0, atol=0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float = 0.0) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            output = torch.ops.trainer_lib_tests.attention(x, p)
        ctx.save_for_backward(output / x)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (factor,) = ctx.saved_tensors
        return gradients[0] * factor, None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("matmull", r"policy must be \"matmul\", \"attention\", or operations .* Did you mean 'matmul'\?"),
        (7, "policy must be .* \\(got 7\\)"),
        (["aten.mmm"], "'aten.mmm', which is no operation of torch.* Did you mean 'aten.mm'"),
        ([], "policy has no operations"),
        (["aten.bernoulli"], "'aten.bernoulli', which draws random numbers"),
    ],
)
def test_wrong_policies_are_refused(policy: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        selective_contexts(policy)


def test_offload_goes_with_recomputation_and_without() -> None:
    plain = _gradients(_made(5))
    settings: list[dict[str, Any]] = [{}, {"every": 2}, {"policy": "matmul"}]
    for options in settings:
        model = _made(5)
        checkpoint_activations(model, offload=True, **options)
        torch.testing.assert_close(_gradients(model), plain, rtol=0, atol=0)
    model = _made(5)
    offload_activations(model)
    torch.testing.assert_close(_gradients(model), plain, rtol=0, atol=0)
    assert [block.calls for block in model.blocks] == [1] * 5
    with pytest.raises(ConfigurationError, match="activation_offload=True finds no repeated blocks in this Linear"):
        offload_activations(nn.Linear(2, 2))


def test_a_model_that_switches_all_layers_together_is_refused() -> None:
    model = _made()
    model.supports_gradient_checkpointing = True
    model.activation_checkpointing_enable = lambda options: None
    with pytest.raises(ConfigurationError, match="gradient_checkpointing_every=3 does not work with _Stack"):
        checkpoint_activations(model, every=3)
