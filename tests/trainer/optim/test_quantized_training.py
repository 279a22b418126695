"""Recipes with bitsandbytes on the CPU: adapters over 4-bit weights, trained by 8-bit optimizers, and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_lib import Trainer, TrainingArguments

pytestmark = [
    pytest.mark.slow,  # bitsandbytes takes seconds to import
    pytest.mark.filterwarnings("ignore"),  # of bitsandbytes and peft, as they are imported
]

RANK = 32  # adapters of 32 × 128: bitsandbytes keeps states of less than 4096 values in 32 bits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small model."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def adapted(folder: Path, dora: bool) -> Any:
    """Load the model in 4 bits, with new adapters."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model: Any = LlamaForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    adapters = LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"], use_dora=dora, task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)


def fitted(folder: Path, dora: bool, steps: int, output: Path, resume: str = "never") -> tuple[list[float], Any]:
    ids = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]
    args = TrainingArguments(
        optimizer="paged_adamw_8bit", max_steps=steps, schedule_steps=8, log_every=1, learning_rate=1e-2, use_cpu=True,
        progress_bar=False, output_dir=output, save_every=4, resume=resume,
    )  # fmt: skip
    trainer = Trainer(adapted(folder, dora), args, train_dataset=rows)
    history = trainer.fit().history
    (optimizer,) = trainer.run.optimizers.values()
    kinds = {value.dtype for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)}
    trainer.accelerator.free_memory()
    return [entry["loss"] for entry in history if "loss" in entry], kinds


@pytest.mark.parametrize("dora", [False, True], ids=["QLoRA", "QDoRA"])
def test_adapters_over_4_bits_train_with_8_bit_states_and_resume(dora: bool, saved: Path, tmp_path: Path) -> None:
    whole, kinds = fitted(saved, dora, 8, tmp_path / "whole")
    assert torch.uint8 in kinds, "states of adapters are in 8 bits"
    assert whole[-1] < whole[0] - 0.1
    fitted(saved, dora, 4, tmp_path / "cut")
    resumed, _ = fitted(saved, dora, 8, tmp_path / "cut", resume="extend")
    assert resumed == whole
