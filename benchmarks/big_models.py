"""Large models beside Accelerate and by hand: `python -m benchmarks.big_models`.

Weights of a Llama in several safetensors files are loaded and run, with half of the layers on the disk.
Each contestant runs in a process of its own, in turn, with files in the system's cache.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.fresh import peak_memory

ROOT = Path(__file__).parent.parent
HIDDEN = 2048
TOKENS = 64
HOOKED = 300
BY_HAND, OURS, ACCELERATE = "by hand", "trainer_lib", "accelerate"
TITLES = {
    "map": "infer_auto_device_map: a Llama of 70 billion parameters and 100 layers, 8 devices",
    "assign": "load and dispatch to the CPU; by hand: map the files into memory and assign",
    "copy": "load into weights that are there; by hand: read every byte into memory",
    "disk": "forward with half of the layers on the disk; by hand: all of them in memory",
    "hooks": f"forward of {HOOKED} small layers that are all in memory; by hand: without hooks",
}
CONTESTANTS = dict.fromkeys(TITLES, (BY_HAND, OURS, ACCELERATE)) | {"map": (OURS, ACCELERATE)}
WRITERS = {name: (OURS, "transformers") if name in ("assign", "disk") else (OURS,) for name in TITLES}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.big_models", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=10, help="of the Llama; 10 are 2.2 GB (default)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each runs (default: 5)")
    parser.add_argument("--only", nargs="+", choices=TITLES, default=list(TITLES), help="the measurements")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # what a process of its own does
    arguments = parser.parse_args()
    if arguments.measure:
        what, contestant, folder = arguments.measure
        seconds = MEASUREMENTS[what](contestant, Path(folder))
        print(json.dumps([seconds, peak_memory()]))
        return
    folder = Path(tempfile.mkdtemp(prefix="big-models-", dir=arguments.folder))
    try:
        save_model(arguments.layers, folder)
        size = sum(file.stat().st_size for file in (folder / OURS).glob("*.safetensors"))
        print(f"{machine.describe()}; load {os.getloadavg()[0]:.1f}; weights of {size / 1e9:.2f} GB")
        for what in arguments.only:
            for writer in WRITERS[what]:
                print(f"\n{TITLES[what]}" + (f" (files of {writer})" if len(WRITERS[what]) > 1 else ""))
                compare(what, folder / writer, arguments.rounds)
    finally:
        shutil.rmtree(folder)


def compare(what: str, folder: Path, rounds: int) -> None:
    """Run the contestants in turn, and print their medians."""
    results: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS[what]}
    names = list(results)
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            results[name].append(measure(what, name, folder))
    floor = results[names[0]]
    for name, pairs in results.items():
        seconds, memory = (median(column) for column in zip(*pairs, strict=True))
        ratio = median(ours[0] / other[0] for ours, other in zip(pairs, floor, strict=True))
        beside = f"{ratio:6.2f} of {names[0]}" if name != names[0] else ""
        print(f"  {name:12} {seconds * 1000:9.1f} ms   peak {memory / 1e9:5.2f} GB   {beside}", flush=True)


def measure(what: str, contestant: str, folder: Path) -> list[float]:
    """Return seconds and peak memory of one run in a process of its own."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.big_models",
        "--measure",
        what,
        contestant,
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def save_model(layers: int, folder: Path) -> None:
    """Write the weights of a Llama in files of 500 MB, as this library does, and as transformers does."""
    from trainer_lib import Accelerator

    model = llama(layers)
    Accelerator(cpu=True).save_model(model, folder / OURS, max_shard_size="500MB")
    for writer in WRITERS["assign"]:
        model.config.save_pretrained(folder / writer)
    model.save_pretrained(folder / "transformers", max_shard_size="500MB")


def llama(layers: int) -> Any:
    """Return a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=8000,
    )
    return LlamaForCausalLM(config)


def empty(folder: Path) -> Any:
    """Return a model without memory, of the shape that was saved."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    rotary = model.model.rotary_emb  # computed, not saved
    fresh = type(rotary)(model.config)
    model.model.rotary_emb = fresh
    return model.eval()


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that a function takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def by_assignment(model: Any, folder: Path) -> None:
    """Load all files by hand, without a copy."""
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False, assign=True)


def measure_map(contestant: str, folder: Path) -> float:
    """Infer a map."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    del folder
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=8192, intermediate_size=22016, num_hidden_layers=100, num_attention_heads=64,
                num_key_value_heads=8,
            )
        )  # fmt: skip
    memory: dict[int | str, int | str] = {**dict.fromkeys(range(8), "40GB"), "cpu": "100GB"}
    infer = library(contestant).infer_auto_device_map
    classes = ["LlamaDecoderLayer"]
    return timed(lambda: infer(model, memory, no_split_module_classes=classes))


def measure_assign(contestant: str, folder: Path) -> float:
    """Load into an empty model."""
    model = empty(folder)
    if contestant == BY_HAND:
        return timed(lambda: by_assignment(model, folder))
    load = library(contestant).load_checkpoint_and_dispatch
    return timed(lambda: load(model, str(folder), device_map={"": "cpu"}))


def measure_copy(contestant: str, folder: Path) -> float:
    """Load into a model that has weights."""
    if contestant == BY_HAND:
        return timed(lambda: [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))])
    import torch

    model = empty(folder).to_empty(device="cpu")
    for parameter in model.parameters():  # memory that is there
        torch.nn.init.zeros_(parameter)
    load = library(contestant).load_checkpoint_in_model
    return timed(lambda: load(model, str(folder)))


def measure_disk(contestant: str, folder: Path) -> float:
    """Run forward with half of the layers on the disk."""
    import torch

    model = empty(folder)
    layers = model.config.num_hidden_layers
    if contestant == BY_HAND:
        by_assignment(model, folder)
    else:
        device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        device_map |= {f"model.layers.{index}": "cpu" if index < layers // 2 else "disk" for index in range(layers)}
        with tempfile.TemporaryDirectory() as offload:
            load = library(contestant).load_checkpoint_and_dispatch
            model = load(model, str(folder), device_map=device_map, offload_folder=offload)
            return forward_time(model, torch)
    return forward_time(model, torch)


def forward_time(model: Any, torch: Any) -> float:
    """Return the seconds of a forward, the median of five after one."""
    tokens = torch.arange(TOKENS).reshape(1, TOKENS)
    with torch.no_grad():
        model(tokens)
        return median(timed(lambda: model(tokens)) for _ in range(5))


def measure_hooks(contestant: str, folder: Path) -> float:
    """Run forward through many small layers."""
    import torch
    from torch import nn

    del folder
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(HOOKED))).eval()
    if contestant != BY_HAND:
        device_map = {str(index): "cpu" for index in range(HOOKED)}
        model = library(contestant).dispatch_model(model, device_map, force_hooks=True)
    batch = torch.ones(1, 4)
    with torch.no_grad():
        for _ in range(5):
            model(batch)
        return median(timed(lambda: model(batch)) for _ in range(100))


def library(name: str) -> Any:
    """Return a library."""
    import importlib

    return importlib.import_module(name)


MEASUREMENTS: dict[str, Callable[[str, Path], float]] = {
    "map": measure_map,
    "assign": measure_assign,
    "copy": measure_copy,
    "disk": measure_disk,
    "hooks": measure_hooks,
}


if __name__ == "__main__":
    main()
