"""What each option that saves memory saves, and what it costs: `python -m benchmarks.memory_levers`.

A Trainer fits a small llama on the CPU. Memory is the peak of bytes in tensors that an accelerator would hold, counted
at each operation: what an option moves to host memory does not count. The number is the same on each run. Time is CPU
time of steps without the counting.
"""

import argparse
import re
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import machine

PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
STEPS = 2
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "num_attention_heads": 2}
VOCABULARY, LENGTH, BATCH = 2048, 128, 4
MEGABYTE = 1 << 20

NONE = "nothing"
CHECKPOINTS = {"gradient_checkpointing": True}
LEVERS: dict[str, dict[str, Any]] = {
    NONE: {},
    "`chunked_cross_entropy=True`": {"chunked_cross_entropy": True},
    '`gradient_checkpointing_policy="matmul"`': {**CHECKPOINTS, "gradient_checkpointing_policy": "matmul"},
    "`gradient_checkpointing_every=2`": {**CHECKPOINTS, "gradient_checkpointing_every": 2},
    '`gradient_checkpointing_policy="attention"`': {**CHECKPOINTS, "gradient_checkpointing_policy": "attention"},
    "`gradient_checkpointing=True`": CHECKPOINTS,
    "`activation_offload=True`": {"activation_offload": True},
    "`gradient_checkpointing=True`, `activation_offload=True`": {**CHECKPOINTS, "activation_offload": True},
    "`optimizer_in_backward=True`": {"optimizer_in_backward": True},
    "`chunked_cross_entropy=True`, `gradient_checkpointing=True`": {**CHECKPOINTS, "chunked_cross_entropy": True},
    "these two, and `optimizer_in_backward=True`": {
        **CHECKPOINTS,
        "chunked_cross_entropy": True,
        "optimizer_in_backward": True,
    },
    '`optimizer="sgd"` (no states: what states of 8 bits come near to)': {"optimizer": "sgd"},
    '`mixed_precision="bf16-true"`': {"mixed_precision": "bf16-true"},
}


class Effect(NamedTuple):
    """What an option costs."""

    peak: int
    seconds: float


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()
        self.is_on_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.add(value)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count a tensor, unless its memory is counted."""
        storage = tensor.untyped_storage()
        key, size = id(storage), 0 if self.is_on_host else storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_levers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often the time of each is measured (default: 3)")
    parser.add_argument("--publish", action="store_true", help="put the table into docs/memory.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    peaks = {name: peak_of(options) for name, options in LEVERS.items()}
    times: dict[str, list[float]] = {name: [] for name in LEVERS}
    for _ in range(arguments.rounds):
        for name, options in LEVERS.items():
            times[name].append(seconds_of(options))
    table = table_of({name: Effect(peaks[name], median(times[name])) for name in LEVERS})
    print(table)
    if arguments.publish:
        marked = re.compile(r"(<!-- effects -->\n).*(<!-- end of effects -->)", re.DOTALL)
        PAGE.write_text(marked.sub(f"\\1\n{table}\n\n{machine.describe()}.\n\n\\2", PAGE.read_text()))


def table_of(effects: dict[str, Effect]) -> str:
    """Return a table in Markdown."""
    base = effects[NONE]
    lines = ["| option | peak of memory | share of the peak without options | time of a step |", "|---|---|---|---|"]
    for name, effect in effects.items():
        lines.append(
            f"| {name} | {effect.peak / MEGABYTE:.0f} MB | {effect.peak / base.peak:.2f} | "
            f"{effect.seconds / base.seconds:.2f} |"
        )
    return "\n".join(lines)


def peak_of(options: dict[str, Any]) -> int:
    """Return the peak of bytes in tensors."""
    from trainer_lib.modules import activation_offload

    counter, before = LiveBytes(), activation_offload.HostMemory

    class OtherMemory(before):
        """Host memory of an accelerator, which is not its own."""

        def to_host(self, tensor: Tensor) -> Tensor:
            """Return a copy that does not count."""
            return self._copy(tensor, True)

        def to_device(self, tensor: Tensor) -> Tensor:
            """Return a copy that counts."""
            return self._copy(tensor, False)

        def _copy(self, tensor: Tensor, is_on_host: bool) -> Tensor:
            counter.is_on_host = is_on_host
            try:
                return tensor.clone()
            finally:
                counter.is_on_host = False

    activation_offload.HostMemory = OtherMemory
    try:
        run, model = fit(options)
        for tensor in (*model.parameters(), *model.buffers()):
            counter.add(tensor)
        with counter:
            run()
    finally:
        activation_offload.HostMemory = before
    return counter.peak


def seconds_of(options: dict[str, Any]) -> float:
    """Return the CPU time of a step."""
    run, _ = fit(options)
    start = time.process_time()
    run()
    return (time.process_time() - start) / STEPS


def fit(options: dict[str, Any]) -> tuple[Callable[[], None], Any]:
    """Return a function that trains a new model, and the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainer_lib import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **SHAPE))
    tokens = torch.randint(0, VOCABULARY, (BATCH * STEPS, LENGTH))
    given: dict[str, Any] = {
        "max_grad_norm": None,
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "use_cpu": True,
    }
    trainer = Trainer(
        model,
        TrainingArguments(**{**given, **options}, log_every="never", progress_bar=False, hang_timeout=None),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )

    def run() -> None:
        trainer.fit()
        trainer.accelerator.free_memory()

    return run, model


if __name__ == "__main__":
    main()
