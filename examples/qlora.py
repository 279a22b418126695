"""QLoRA: a language model of bytes, quantized to 4 bits, learns English by adapters.

    pip install '.[transformers,bitsandbytes]' peft
    python examples/qlora.py

A small Llama first learns Python's sources. Quantized to 4 bits (bitsandbytes, on the CPU too) it is trained on
Python's help texts by LoRA adapters, and writes a sentence before and after. Nothing is downloaded.
"""

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from trainer_lib import Trainer, TrainingArguments

CONTEXT = 96


def main() -> None:
    options = parse_options()
    library = Path(sysconfig.get_path("stdlib"))
    code = windows(b"".join(file.read_bytes() for file in sorted(library.glob("*.py"))))
    english = windows((library / "pydoc_data" / "topics.py").read_bytes())
    unseen, seen = english[:64], english[64:]

    # 1. A base: whoever has a model of their own on the disk starts here with its folder.
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
    )
    base = Path(options.output_dir) / "base"
    pretraining = Trainer(LlamaForCausalLM(config), arguments(options, "base", 3e-3), train_dataset=code)
    pretraining.fit()
    pretraining.save_model(base)

    # 2. The same weights in 4 bits, and adapters over them.
    in_4bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,  # bfloat16 on accelerators
    )
    quantized = prepare_model_for_kbit_training(
        LlamaForCausalLM.from_pretrained(base, quantization_config=in_4bit), use_gradient_checkpointing=False
    )
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(quantized, adapters)
    trainer = Trainer(model, arguments(options, "qlora", 3e-3), train_dataset=seen, eval_dataset=unseen)
    before, wrote = trainer.evaluate()["eval_loss"], write(model)
    result = trainer.fit()
    trainer.save_model(Path(options.output_dir) / "adapters")

    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size = quantized.get_memory_footprint()
    after = result.metrics["eval_loss"]
    trainer.accelerator.print(
        f"\n{result}\n\n{trained / 1e3:.0f} thousand parameters trained over {size / 2**10:.0f} KiB of base\n"
        f"bits a byte of English: {before / math.log(2):.2f} before, {after / math.log(2):.2f} after\n"
        f"before: {wrote!r}\nafter:  {write(model)!r}"
    )
    trainer.accelerator.end_training()


def arguments(options: argparse.Namespace, name: str, learning_rate: float) -> TrainingArguments:
    """Return the arguments of one of the two runs."""
    return TrainingArguments(
        output_dir=options.output_dir,
        run_name=name,
        max_steps=options.max_steps,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=learning_rate,
        warmup="10%",
        eval_every="50 steps" if name == "qlora" else "never",
        progress_bar=False,
    )


def windows(text: bytes) -> list[dict[str, Any]]:
    """Return the text in rows of bytes, which are their own labels."""
    rows = torch.tensor(list(text[: len(text) // CONTEXT * CONTEXT])).view(-1, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in rows[:20_000]]


def write(model: Any) -> str:
    """Return what the model adds to a sentence."""
    start = torch.tensor([list(b"The value of the ")], device=model.device)
    with torch.no_grad():
        text = model.eval().generate(input_ids=start, max_new_tokens=60, do_sample=False, pad_token_id=0)
    return bytes(text[0].tolist()).decode(errors="replace")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train adapters over a model in 4 bits.")
    parser.add_argument("--output_dir", default="runs/qlora", help="where runs, base and adapters are kept")
    parser.add_argument("--max_steps", type=int, default=300, help="updates of the base, and of the adapters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
