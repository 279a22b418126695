"""Accumulates gradients of a language model by hand, so that every token counts alike."""

import argparse
import contextlib
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_constant_schedule

from tests.accelerate_scripts.local_data import WORDS, text_pairs, tokenizer
from tests.accelerate_scripts.record import record

ACCUMULATION = 2


def loaders():
    def pad(rows):
        batch = tokenizer().pad(rows, padding="longest", return_tensors="pt")
        labels = torch.where(batch["input_ids"] == tokenizer().pad_token_id, -100, batch["input_ids"])
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}

    texts = [tokenizer()(pair["sentence1"]) for pair in text_pairs(36, 5)]
    texts = [{"input_ids": text["input_ids"], "attention_mask": text["attention_mask"]} for text in texts]
    return DataLoader(texts[:28], batch_size=2, collate_fn=pad), DataLoader(texts[28:], batch_size=4, collate_fn=pad)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=ACCUMULATION)
    set_seed(42)
    train_dataloader, eval_dataloader = loaders()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS) + 2, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    lr_scheduler = get_constant_schedule(optimizer=optimizer)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    remainder = len(train_dataloader) % ACCUMULATION or ACCUMULATION
    updates = math.ceil(len(train_dataloader) / ACCUMULATION)
    for _ in range(2):
        model.train()
        training_iterator = iter(train_dataloader)
        for update in range(updates):
            batches = [next(training_iterator) for _ in range(ACCUMULATION if update != updates - 1 else remainder)]
            local_items = sum((batch["labels"].ne(-100)).sum() for batch in batches)
            num_items_in_batch = accelerator.gather(local_items).sum().item()
            losses = []
            for index, batch in enumerate(batches):
                waits = index < len(batches) - 1 and accelerator.num_processes > 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    outputs = model(**batch, use_cache=False, num_items_in_batch=num_items_in_batch)
                    loss = outputs.loss * ACCUMULATION * accelerator.num_processes
                    accelerator.backward(loss)
                    losses.append(loss.detach())
            record("norm", accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            record("loss", accelerator.gather(sum(losses)).sum() / (accelerator.num_processes * ACCUMULATION))
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch, use_cache=False)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(4)))
        record("metric", torch.cat(losses).mean())
    record("weights", accelerator.get_state_dict(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
