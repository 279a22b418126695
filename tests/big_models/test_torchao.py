"""Models that torchao quantizes: outputs, saving and loading again, adapters that train over them, errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_lib import Accelerator, ConfigurationError, Trainer, TrainingArguments
from trainer_lib.big_modeling import init_empty_weights, load_checkpoint_and_dispatch
from trainer_lib.foundation.errors import StateError
from trainer_lib.foundation.imports import is_torchao_available
from trainer_lib.utils import TorchAoConfig, load_and_quantize_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torchao's own, as it is imported
    pytest.mark.skipif(not is_torchao_available(), reason="torchao is not installed"),
]
KINDS = ["int8_weight_only", "float8_weight_only"]
INPUTS = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64, bias=False), nn.Linear(64, 4))


def outputs(model: nn.Module) -> Tensor:
    dtype = next(parameter.dtype for parameter in model.parameters())
    with torch.no_grad():
        return model(INPUTS.to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_is_saved_and_loaded_again_with_the_same_outputs(kind: str, tmp_path: Path) -> None:
    config, whole = TorchAoConfig(kind, torch_dtype="fp32"), network()
    Accelerator(cpu=True).save_model(whole, str(tmp_path / "whole"))
    with init_empty_weights():
        empty = network()
    model: Any = load_checkpoint_and_dispatch(empty, tmp_path / "whole", device_map={"": "cpu"}, quantization=config)
    expected = outputs(model)
    assert 0 < (expected - outputs(whole)).abs().max() < 0.05
    assert torch.equal(outputs(load_and_quantize_model(network(), config)), expected)
    assert type(model[2].weight).__name__ in ("Int8Tensor", "Float8Tensor")
    assert type(model[3].weight) is nn.Parameter, "the output layer stays"
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["3.weight", "3.bias"]

    Accelerator(cpu=True).save_model(model, str(tmp_path / "quantized"))
    sizes = [sum(f.stat().st_size for f in (tmp_path / name).iterdir()) for name in ("whole", "quantized")]
    assert sizes[1] < 0.35 * sizes[0]
    with init_empty_weights():
        empty = network()
    again: Any = load_and_quantize_model(empty, config, str(tmp_path / "quantized"))
    assert torch.equal(outputs(again), expected)
    assert list(again.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        again[3].weight.zero_()
    again.load_state_dict(model.state_dict())
    assert torch.equal(outputs(again), expected)

    other = TorchAoConfig(KINDS[1 - KINDS.index(kind)], torch_dtype="fp32")
    with init_empty_weights():
        third = network()
    with pytest.raises(StateError, match=r"weight.qdata is torch.* the weights were quantized in another way"):
        load_checkpoint_and_dispatch(third, tmp_path / "quantized", quantization=other)


@pytest.mark.slow
def test_a_model_of_transformers_generates_and_its_adapters_train_and_resume(tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=61, **sizes)

    def llama() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    llama().save_pretrained(tmp_path / "base")
    with init_empty_weights():
        empty = transformers.LlamaForCausalLM(config)
    base: Any = load_and_quantize_model(empty, TorchAoConfig(torch_dtype="fp32"), str(tmp_path / "base"))
    tokens = torch.arange(12).reshape(2, 6)
    assert base.generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 9)
    torch.testing.assert_close(base(tokens).logits, llama()(tokens).logits, rtol=0, atol=0.05)

    def adapted() -> Any:
        torch.manual_seed(1)
        quantized = load_and_quantize_model(llama(), TorchAoConfig(torch_dtype="fp32"))
        return peft.get_peft_model(quantized, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))

    def fitted(folder: str, steps: int, resume: str) -> tuple[list[float], list[Tensor]]:
        args = TrainingArguments(
            output_dir=tmp_path / folder, max_steps=steps, schedule_steps=6, learning_rate=1e-2, use_cpu=True,
            save_every="3 steps", log_every="1 step", progress_bar=False, per_device_train_batch_size=2, resume=resume,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in torch.arange(48).reshape(8, 6)]
        model = adapted()
        trainer = Trainer(model, args, train_dataset=data)
        trainer.fit()
        losses = [entry["loss"] for entry in trainer.state.history if "loss" in entry]
        return losses, [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]

    losses, weights = fitted("whole", 6, "never")
    assert losses[-1] < losses[0]
    fitted("parts", 3, "never")
    for weight, other in zip(fitted("parts", 6, "extend")[1], weights, strict=True):
        assert torch.equal(weight, other)


def test_what_cannot_be_quantized_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"int4.* For 4 bits, give BnbQuantizationConfig"):
        TorchAoConfig("int4_weight_only")
    with pytest.raises(ConfigurationError, match=r"or a configuration of torchao \(got 8\)"):
        TorchAoConfig(8)
    with pytest.raises(ConfigurationError, match="list of names of modules"):
        TorchAoConfig(modules_to_not_convert="head")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"torch_dtype must be 'fp32', .*\(got 'int8'\)"):
        TorchAoConfig(torch_dtype="int8")
    with init_empty_weights():
        model = network()
    with pytest.raises(ConfigurationError, match="torchao quantizes a model on one device"):
        load_checkpoint_and_dispatch(
            model, tmp_path, device_map={"0": "cpu", "2": "disk", "3": "cpu"}, quantization=TorchAoConfig()
        )
