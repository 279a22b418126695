"""Shards a BERT, with groups of parameters by name and a checkpoint after each epoch."""

import argparse
import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch.distributed.fsdp.fully_sharded_data_parallel import FullOptimStateDictConfig, FullStateDictConfig

from tests.accelerate_scripts.local_data import Accuracy, classifier, text_loaders
from tests.accelerate_scripts.record import record


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output_dir", default=".")
    args = parser.parse_args()
    fsdp_plugin = FullyShardedDataParallelPlugin(
        state_dict_config=FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )
    accelerator = Accelerator(cpu=args.cpu, fsdp_plugin=fsdp_plugin)
    metric = Accuracy()
    set_seed(42)
    train_dataloader, eval_dataloader = text_loaders(accelerator, 8)
    model = classifier()
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(part in n for part in no_decay)]},
        {"params": [p for n, p in model.named_parameters() if any(part in n for part in no_decay)]},
    ]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = 0.003, 0.0
    optimizer = torch.optim.AdamW(params=groups, lr=1e-2, weight_decay=2e-4)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for epoch in range(2):
        model.train()
        for batch in train_dataloader:
            batch.to(accelerator.device)
            loss = model(**batch).loss
            record("loss", loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            metric.add_batch(*accelerator.gather_for_metrics((predictions, batch["labels"])))
        record("metric", metric.compute()["accuracy"])
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    record("weights", accelerator.get_state_dict(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
