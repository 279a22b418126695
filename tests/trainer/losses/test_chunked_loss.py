"""The loss of causal language models without whole logits: the same numbers, and the memory it takes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import run_world
from trainer_lib import (
    ConfigurationError,
    FullyShardedDataParallelPlugin,
    Trainer,
    TrainingArguments,
    UnsupportedError,
)
from trainer_lib.foundation.errors import MissingPackageError
from trainer_lib.trainer.losses import liger_kernels
from trainer_lib.trainer.losses.chunked_loss import chunk_loss
from trainer_lib.trainer.losses.linear_cross_entropy import linear_cross_entropy

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=61, **sizes, **options))


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=61, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def samples(number: int = 12) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 61, (11,), generator=generator) for _ in range(number)]
    masked = [row.masked_fill(torch.arange(11) < index, -100) for index, row in enumerate(rows)]  # unequal weights
    return [{"input_ids": row, "labels": labels} for row, labels in zip(rows, masked, strict=True)]


def batch() -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in samples()]) for name in ("input_ids", "labels")}


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("items", [None, 77])
def test_loss_and_gradients_are_those_of_whole_logits(make: Any, items: int | None) -> None:
    plain, chunked = make().double(), make().double()
    chunk_loss(chunked, rows=7)
    chunk_loss(chunked, rows=5)  # has no effect
    more = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    expected, outputs = plain(**batch(), **more), chunked(**batch(), **more)
    assert outputs.logits.ndim == 0, "no logits were computed"
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    expected.loss.backward()
    outputs.loss.backward()
    for (name, weight), other in zip(plain.named_parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(other.grad, weight.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_logits_are_there_where_nothing_is_trained() -> None:
    plain, chunked = llama(), llama()
    chunk_loss(chunked, rows=7)
    with torch.no_grad():
        expected, outputs = plain(**batch()), chunked(**batch())
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.loss, expected.loss)
    tokens = batch()["input_ids"][:2, :4]
    assert torch.equal(chunked(tokens).logits, plain(tokens).logits)
    assert torch.equal(
        chunked.generate(tokens, max_new_tokens=3, do_sample=False),
        plain.generate(tokens, max_new_tokens=3, do_sample=False),
    )
    copied = copy.deepcopy(chunked)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert copied(**batch()).loss.item() == pytest.approx(torch.tensor(61.0).log().item())
    assert chunked(**batch()).loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)


def test_a_bias_frozen_weights_and_half_precision() -> None:
    torch.manual_seed(0)
    inputs, layer = torch.randn(9, 8, requires_grad=True), nn.Linear(8, 13)
    targets = torch.tensor([1, -100, 3, 4, 12, 0, -100, 7, 8])
    whole = nn.functional.cross_entropy(layer(inputs), targets, reduction="sum") * 3
    expected = torch.autograd.grad(whole, [inputs, layer.weight, layer.bias])
    loss = linear_cross_entropy(inputs, layer.weight, layer.bias, targets, rows=4) * 3
    found = torch.autograd.grad(loss, [inputs, layer.weight, layer.bias])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    layer.requires_grad_(False)
    frozen = linear_cross_entropy(inputs, layer.weight, layer.bias, targets, rows=4) * 3
    torch.testing.assert_close(torch.autograd.grad(frozen, inputs)[0], expected[0], rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        half = linear_cross_entropy(inputs, layer.weight, layer.bias, targets, rows=4)
        plain = nn.functional.cross_entropy(layer(inputs).float(), targets, reduction="sum")
    assert half.item() == pytest.approx(plain.item(), rel=1e-5)
    gradients = [torch.autograd.grad(value, inputs)[0] for value in (half, plain)]
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)


def fitted(model: Any, **options: Any) -> tuple[list[float], list[Tensor]]:
    args = TrainingArguments(
        max_steps=4, learning_rate=1e-2, use_cpu=True, progress_bar=False, log_every="1 step", shuffle=False, **options
    )
    trainer = Trainer(model, args, train_dataset=samples())
    trainer.fit()
    losses = [entry["loss"] for entry in trainer.state.history if "loss" in entry]
    return losses, [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


def check(found: tuple[list[float], list[Tensor]], expected: tuple[list[float], list[Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for weight, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)


def test_windows_of_unequal_tokens_train_as_with_whole_logits() -> None:
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    expected = fitted(llama(), **options)
    check(fitted(llama(), chunked_cross_entropy=True, **options), expected)
    check(fitted(llama(), chunked_cross_entropy=True, per_device_train_batch_size=6), expected)


@pytest.mark.slow
def test_ranks_with_shards_train_as_one_process() -> None:
    def body() -> list[Any]:
        options = {"chunked_cross_entropy": True, "per_device_train_batch_size": 3}
        plugin = FullyShardedDataParallelPlugin(min_num_params=200)
        return [fitted(llama(), **options), fitted(llama(), fsdp=plugin, **options)]

    expected = fitted(llama(), per_device_train_batch_size=6)
    for found in run_world(body):
        for each in found:
            check(each, expected)


def test_adapters_train_over_a_chunked_loss() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    plain, chunked = (peft.get_peft_model(llama(), config) for _ in range(2))
    chunked.load_state_dict(plain.state_dict())
    chunk_loss(chunked, rows=7)
    for model in (plain, chunked):
        model(**batch()).loss.backward()
    for weight, other in zip(plain.parameters(), chunked.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None)
        if weight.grad is not None:
            torch.testing.assert_close(other.grad, weight.grad, rtol=1e-5, atol=1e-7)


def test_models_and_settings_without_it_are_named() -> None:
    config = transformers.Gemma2Config(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    gemma = transformers.Gemma2ForCausalLM(config)
    chunk_loss(gemma)
    with pytest.raises(UnsupportedError, match=r"Gemma2ForCausalLM: it changes its logits before the loss"):
        gemma(**batch())
    with pytest.raises(UnsupportedError, match=r"needs a causal language model of transformers \(got Linear"):
        chunk_loss(nn.Linear(2, 2))
    other = llama()
    other.lm_head = nn.Sequential(nn.Linear(16, 61))
    with pytest.raises(UnsupportedError, match="that of LlamaForCausalLM is a Sequential"):
        chunk_loss(other)
    with pytest.raises(UnsupportedError, match="does not work with mixed_precision='fp16'"):
        chunk_loss(llama(), "fp16")
    for options, words in (
        ({"compile": True}, "compile, which would make one graph"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16', which scales"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True, which has a loss of that kind"),
    ):
        with pytest.raises(ConfigurationError, match=f"chunked_cross_entropy=True does not work with {words}"):
            TrainingArguments(chunked_cross_entropy=True, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has no effect with a loss_fn"):
        Trainer(llama(), TrainingArguments(chunked_cross_entropy=True), loss_fn=nn.functional.cross_entropy)


def test_ligers_kernels_are_refused_without_their_package_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments(use_liger_kernel=True, max_steps=1, use_cpu=True, progress_bar=False)
    monkeypatch.setattr(liger_kernels, "is_package_available", lambda *names: False)
    with pytest.raises(MissingPackageError, match="pip install liger-kernel"):
        Trainer(llama(), args, train_dataset=samples()).fit()
    monkeypatch.setattr(liger_kernels, "is_package_available", lambda *names: True)
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        liger_kernels.apply_liger_kernels(llama(), "cpu")
    with pytest.raises(UnsupportedError, match=r"needs a model of transformers \(got Linear\)"):
        liger_kernels.apply_liger_kernels(nn.Linear(2, 2), "cuda")
