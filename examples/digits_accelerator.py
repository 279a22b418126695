"""A first training with an `Accelerator`: handwritten digits, on one process or on many.

    python examples/digits_accelerator.py
    trainer-lib launch --cpu --num_processes 2 examples/digits_accelerator.py

Both learn the same: the accuracies agree epoch by epoch, however many processes share the work.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from trainer_lib import Accelerator, DataLoaderConfiguration, set_seed

Loader = DataLoader[tuple[Tensor, ...]]


def main() -> None:
    arguments = parse_arguments()

    # 1. The accelerator finds out where it runs: on which device, alone or as one of several processes.
    #
    # `split_batches` makes the loader's batch size that of all processes together: of each batch of 64, two processes
    # take 32 each, and averaging their gradients gives the gradient of all 64. That is why the number of processes
    # does not change what is learned. Without it each process would read batches of 64, as one update of 128.
    accelerator = Accelerator(
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )

    # 2. The same seed on all processes: the same first weights, the same order of images.
    set_seed(arguments.seed)

    # 3. Plain PyTorch from here on: nothing knows of devices or processes.
    training, validation = make_loaders(arguments.batch_size)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    # The schedule counts updates, of which an epoch has one for each `accumulation` batches (and one for the rest).
    updates = arguments.epochs * -(-len(training) // arguments.accumulation)
    scheduler = OneCycleLR(optimizer, max_lr=arguments.lr, total_steps=updates)
    describe(accelerator, arguments, training)

    # 4. Prepare: the model moves to the device, each process gets its share of the batches, gradients are averaged.
    model, optimizer, training, validation, scheduler = accelerator.prepare(
        model, optimizer, training, validation, scheduler
    )

    # 5. Train, and look after each epoch at what was learned.
    started = time.perf_counter()
    accuracy = 0.0
    for epoch in range(arguments.epochs):
        loss = train(accelerator, model, optimizer, training, scheduler, f"epoch {epoch + 1}")
        accuracy = evaluate(accelerator, model, validation)
        # Once, by the main process; a plain print would come from all of them.
        accelerator.print(f"epoch {epoch + 1:2}: loss {loss:.4f}, accuracy {accuracy:.4f}")
    seconds = time.perf_counter() - started

    images = arguments.epochs * len(training) * arguments.batch_size
    accelerator.print(f"\naccuracy   {accuracy:.2%} on images it has never seen")
    accelerator.print(f"time       {seconds:.1f} s")
    accelerator.print(f"speed      {images / seconds:,.0f} training samples/s, with validation between the epochs")

    # 6. Leave the other processes in good order.
    accelerator.end_training()


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    scheduler: OneCycleLR,
    title: str,
) -> float:
    """Go through the training images once and return the mean loss."""
    model.train()
    # Kept as a tensor, on the device: reading a number each step would make the program wait for it each step.
    total = torch.zeros((), device=accelerator.device)
    for images, labels in progress(accelerator, loader, title):
        # Inside, `backward` collects gradients, and what follows waits for the batch that completes an update.
        with accelerator.accumulate(model):
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)  # instead of loss.backward()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += loss.detach()
    # Each process saw its own half of every batch.
    return float(accelerator.reduce(total, reduction="mean")) / len(loader)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Loader) -> float:
    """Return the share of the validation images that are told right."""
    model.eval()
    right = count = 0
    for images, labels in loader:
        guesses = model(images).argmax(dim=1)
        # From all processes, and without the images that were repeated to make the last batch even.
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        right += int((guesses == labels).sum())
        count += len(labels)
    return right / count


def make_loaders(batch_size: int) -> tuple[Loader, Loader]:
    """Return scikit-learn's 1,797 digits of 8 by 8 pixels, four fifths to train on."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    seen, unseen = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    # drop_last: only full batches can be shared out equally. Shuffling leaves other images out in each epoch.
    training = DataLoader(TensorDataset(images[seen], labels[seen]), batch_size, shuffle=True, drop_last=True)
    return training, DataLoader(TensorDataset(images[unseen], labels[unseen]), batch_size)


def make_model() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def progress(accelerator: Accelerator, loader: Loader, title: str) -> "tqdm[tuple[Tensor, ...]]":
    """Return the loader with a bar: on the main process only, and (`None`) only where somebody watches."""
    return tqdm(loader, desc=title, leave=False, unit="batch", disable=None if accelerator.is_main_process else True)


def describe(accelerator: Accelerator, arguments: argparse.Namespace, training: Loader) -> None:
    """Say what is going to happen."""
    share = arguments.batch_size // accelerator.num_processes
    frequency = "every batch" if arguments.accumulation == 1 else f"every {arguments.accumulation} batches"
    processes = "1 process" if accelerator.num_processes == 1 else f"{accelerator.num_processes} processes"
    accelerator.print(
        "Handwritten digits with trainer_lib: a small convolutional network learns to read them.\n"
        f"{arguments.epochs} x {len(training) * arguments.batch_size:,} images; the accuracy is that on others, "
        "a fifth kept aside.\n"
        f"{processes} on {accelerator.device}, {share} images each of every batch of {arguments.batch_size}, "
        f"an update {frequency}, precision {accelerator.mixed_precision}.\n"
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together (default: 64)")
    parser.add_argument("--accumulation", type=int, default=1, help="batches to an update (default: 1)")
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], help="default: what the launcher says")
    parser.add_argument("--lr", type=float, default=1e-2, help="the highest learning rate (default: 0.01)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
