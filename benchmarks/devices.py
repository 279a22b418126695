"""The device that a benchmark measures on."""

import argparse

import torch


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")


def wait_for_gpu() -> None:
    """Wait until a GPU that this process uses has computed all that is queued."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
