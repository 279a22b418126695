"""Big-model inference: a model larger than the memory it is given runs from memory and disk.

    python examples/large_models/big_model_inference.py
    python examples/large_models/big_model_inference.py --memory 4MB

The model is made without memory, a device map says what stays where, and its weights are read when a layer needs them.
Its answers are those of the whole model to the last bit. With a model of yours, leave out what writes the weights.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_lib import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from trainer_lib.device_map.infer import plan_device_map


def main() -> None:
    options = parse_options()
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4
    )
    torch.manual_seed(0)
    whole: Any = LlamaForCausalLM(config).eval()
    folder = Path(options.output_dir) / "weights"
    Accelerator(cpu=True).save_model(whole, folder, max_shard_size="5MB")

    with init_empty_weights():
        model = LlamaForCausalLM(config)
    limits: dict[int | str, int | str] = {"cpu": options.memory}
    print(plan_device_map(model, limits, no_split_module_classes=["LlamaDecoderLayer"]))
    loaded: Any = load_checkpoint_and_dispatch(
        model.eval(),
        str(folder),
        device_map="auto",
        max_memory=limits,
        no_split_module_classes=["LlamaDecoderLayer"],
    )
    prompt = torch.arange(8).reshape(1, 8)
    answer = loaded.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = whole.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    size = sum(parameter.numel() * parameter.element_size() for parameter in whole.parameters())
    print(f"\n{size / 1e6:.1f} MB of weights with {options.memory} of memory: {answer[0, 8:].tolist()}")
    print(f"The whole model says {'the same' if torch.equal(answer, expected) else 'something else'}.")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Run a model that does not fit into memory.")
    parser.add_argument("--memory", default="12MB", help="what the weights may take of the host's memory")
    parser.add_argument("--output_dir", default="runs", help="where the weights are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
