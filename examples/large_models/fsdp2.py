"""FSDP2: each rank holds a shard of the weights, their gradients and the optimizer's state; the loss stays the same.

    python examples/large_models/fsdp2.py
    trainer-lib launch --cpu --num_processes 2 examples/large_models/fsdp2.py

A Llama of transformers learns Python's sources byte by byte. Each rank prints what it holds of weights and states.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_lib import Callback, FullyShardedDataParallelPlugin, Run, Trainer, TrainingArguments

CONTEXT = 64


class ShardSizes(Callback):
    """Prints how much of the weights and of the optimizer's state each rank holds."""

    def on_fit_end(self, run: Run) -> None:
        """Count the elements of the local shards."""
        weights = sum(local(weight).numel() for weight in run.parameters.values())
        states = [value for state in run.optimizer.state.values() for value in state.values()]
        state = sum(local(value).numel() for value in states if torch.is_tensor(value))
        rank, world = run.accelerator.process_index, run.accelerator.num_processes
        print(
            f"rank {rank} of {world} holds {weights / 1e3:.0f} thousand weights and {state / 1e3:.0f} thousand states"
        )


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main() -> None:
    options = parse_options()
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
    rows = torch.tensor(list(text[: len(text) // CONTEXT * CONTEXT])).view(-1, CONTEXT)
    data = [{"input_ids": row, "labels": row} for row in rows]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            output_dir=options.output_dir,
            # Blocks of transformers' models are sharded one by one; activations are computed again in the backward.
            fsdp=FullyShardedDataParallelPlugin(activation_checkpointing=True),
            max_steps=options.max_steps,
            per_device_train_batch_size=8,
            global_batch_size=16,  # on one rank, and on two
            learning_rate=3e-3,
            log_every="10 steps",
            progress_bar=False,
        ),
        train_dataset=data[64:],
        eval_dataset=data[:64],
        callbacks=[ShardSizes()],
    )
    result = trainer.fit()
    trainer.save_model(Path(options.output_dir) / "model")  # the plain model's files, for from_pretrained
    trainer.accelerator.print(f"\n{result}")
    trainer.accelerator.end_training()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a sharded language model.")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--max_steps", type=int, default=60)
    return parser.parse_args()


if __name__ == "__main__":
    main()
