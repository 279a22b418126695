"""Tensor, pipeline and context parallelism: four numbers, the same script, the same loss.

    python examples/large_models/parallelism.py
    trainer-lib launch --cpu --num_processes 2 examples/large_models/parallelism.py --tp_size 2
    trainer-lib launch --cpu --num_processes 2 examples/large_models/parallelism.py --pp_size 2
    trainer-lib launch --cpu --num_processes 2 examples/large_models/parallelism.py --cp_size 2
    trainer-lib launch --cpu --num_processes 4 examples/large_models/parallelism.py --tp_size 2 --dp_shard_size 2

A Llama of transformers learns Python's sources byte by byte. All commands print the same losses; the last digit may
differ, since sums are rounded in another order.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_lib import ParallelismConfig, Trainer, TrainingArguments

CONTEXT = 64


def main() -> None:
    options = parse_options()
    mesh = ParallelismConfig(
        dp_shard_size=options.dp_shard_size,
        tp_size=options.tp_size,
        pp_size=options.pp_size,
        cp_size=options.cp_size,
    )
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
            parallelism=mesh,
            max_steps=options.max_steps,
            per_device_train_batch_size=4,  # of one replica
            global_batch_size=16,  # the micro-batches of a window run through the pipeline together
            learning_rate=3e-3,
            log_every="10 steps",
            progress_bar=False,
        ),
        train_dataset=data[64:],
        eval_dataset=data[:64],
    )
    result = trainer.fit()
    trainer.save_model(Path(options.output_dir) / "model")  # the plain model's files, whatever the mesh
    loss = result.metrics["eval_loss"]
    trainer.accelerator.print(f"\nfinal eval_loss {loss:.5f} on {mesh.describe()}")
    trainer.accelerator.end_training()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train one model on any mesh.")
    parser.add_argument("--dp_shard_size", type=int, default=1, help="ranks that share the weights (FSDP2)")
    parser.add_argument("--tp_size", type=int, default=1, help="ranks that split each matrix")
    parser.add_argument("--pp_size", type=int, default=1, help="stages of layers")
    parser.add_argument("--cp_size", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--output_dir", default="runs", help="where runs are kept")
    parser.add_argument("--max_steps", type=int, default=40)
    return parser.parse_args()


if __name__ == "__main__":
    main()
