"""Train a small GPT, byte by byte, on the sources of Python's standard library.

    python examples/byte_gpt.py
    python examples/byte_gpt.py --output_dir runs --resume auto   # stop it, run it again: it resumes
    trainer-lib launch --cpu --num_processes 2 examples/byte_gpt.py

The model is a plain module that returns its loss. It trains with dropout, accumulated gradients and a cosine schedule,
is evaluated in bits per byte, and writes a few lines at the end.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer_lib import Callback, Run, Trainer, TrainingArguments
from trainer_lib.trainer.metrics.metric_spec import EvaluationOutput, MeanMetric

BYTES = 256


def main() -> None:
    options = parse_options()
    training, validation = read_sources(options.context)
    args = TrainingArguments(
        output_dir=options.output_dir,
        resume=options.resume,
        max_steps=options.max_steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        global_batch_size=16,  # one process accumulates two batches, two processes take one each
        learning_rate=4e-3,
        optimizer_kwargs={"betas": (0.9, 0.95)},
        weight_decay=0.1,
        lr_scheduler="cosine",
        warmup="10%",
        log_every="20 steps",
        eval_every="250 steps",
        save_every=options.save_every if options.output_dir else None,
        limit_eval_batches=16,
    )
    model = ByteGPT(options.context)
    trainer = Trainer(
        model,
        args,
        train_dataset=training,
        eval_dataset=validation,
        metrics=["perplexity", MeanMetric("bits_per_byte", loss_of, finish=lambda mean: mean / math.log(2))],
        callbacks=[Samples(model)],
    )
    result = trainer.fit()

    if trainer.accelerator.is_main_process:
        print(f"\n{result}\n\nWhat it writes:\n")
        print(model.write("def ", length=options.write).decode(errors="replace"))
    trainer.accelerator.end_training()


class Windows(Dataset[dict[str, Tensor]]):
    """A text in pieces: each byte is an input, and the byte after it the target."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return {"tokens": piece[:-1], "targets": piece[1:]}


class ByteGPT(nn.Module):
    """A transformer that predicts the next byte. What reads a byte and what predicts one share their weights.

    Args:
        context: How many bytes it sees.
        width: The size of its vectors.
        depth: How many blocks it has.
        heads: How many places a block looks at together.
        dropout: The share of activations left out in training.
    """

    def __init__(self, context: int, width: int = 128, depth: int = 3, heads: int = 4, dropout: float = 0.02) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.context = context
        self.token = nn.Embedding(BYTES, width)
        self.place = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.token.weight
        for name, weight in self.named_parameters():
            if weight.ndim > 1:  # what adds to the stream of vectors begins small: there are two of it in a block
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth) if name.endswith("out.weight") else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Return the scores of the next bytes, and with targets the loss."""
        values = self.dropout(self.token(tokens) + self.place.weight[: tokens.shape[1]])
        for block in self.blocks:
            values = block(values)
        logits = self.head(self.norm(values))
        if targets is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}

    @torch.no_grad()
    def write(self, start: str, length: int, temperature: float = 0.9) -> bytes:
        """Return `start` and what may come after it."""
        self.eval()
        text = torch.tensor([list(start.encode())], device=self.token.weight.device)
        generator = torch.Generator(text.device).manual_seed(0)
        for _ in range(length):
            scores = self(text[:, -self.context :])["logits"][0, -1]
            following = torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)
            text = torch.cat([text, following[None]], dim=1)
        return bytes(text[0].tolist())


class Block(nn.Module):
    """Looks back, then thinks."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.inner_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        """Return the vectors, with what was found added to them."""
        batch, length, width = values.shape
        parts = self.attention(self.norm(values)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        values = values + F.dropout(self.attention_out(seen.transpose(1, 2).flatten(2)), dropout)
        return values + F.dropout(self.inner_out(F.gelu(self.inner(self.second_norm(values)))), dropout)


class Samples(Callback):
    """Lets the model write a line at each evaluation; the run's report shows them all."""

    def __init__(self, model: ByteGPT) -> None:
        self.model = model

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        """Record what the model writes."""
        mode = self.model.training
        text = self.model.write("def ", length=80).decode(errors="replace")
        self.model.train(mode)
        run.record_event("samples", columns=["written"], rows=[[text]])
        if run.is_main_process:
            print(f"step {run.state.step} writes: {text!r}")


def loss_of(output: EvaluationOutput) -> tuple[Tensor | float, Tensor | float]:
    """Return the loss of a batch as a sum over so many bytes."""
    assert output.loss_sum is not None
    return output.loss_sum, output.weight


def read_sources(context: int) -> tuple[Windows, Windows]:
    """Return the standard library, each tenth module kept aside to evaluate on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_bytes() for file in files]
    kept_aside = b"".join(texts[::10])
    return Windows(b"".join(text for n, text in enumerate(texts) if n % 10), context), Windows(kept_aside, context)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Learn to write Python, byte by byte.")
    parser.add_argument("--output_dir", help="where runs are kept (default: nowhere)")
    parser.add_argument("--resume", default="never", help='"auto": resume the newest run of the folder')
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--save_every", default="250 steps")
    parser.add_argument("--context", type=int, default=64, help="how many bytes it sees")
    parser.add_argument("--write", type=int, default=400, help="how many bytes to write at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
