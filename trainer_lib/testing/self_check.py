"""Checks of the world that a launch starts: `trainer-lib test` runs them as a script on each process."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib.accelerator import Accelerator
from trainer_lib.collectives.object_collectives import broadcast_object_list
from trainer_lib.collectives.tensor_collectives import broadcast, gather, pad_across_processes, reduce
from trainer_lib.foundation import environment
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin

_BATCH = 4
_WINDOWS = 3  # optimizer steps of the comparison with one process
_STEPS = 2  # micro-batches of an optimizer step
_TOLERANCES = {"no": 1e-5, "fp16": 2e-2, "bf16": 5e-2, "bf16-true": 2e-1}


class CheckFailedError(Exception):
    """A check that found something else than it expected."""


def main() -> None:
    """Run all checks, and print in the main process what each proves.

    Raises:
        CheckFailedError: By the first check that fails.
    """
    accelerator = Accelerator(gradient_accumulation_steps=_STEPS, fsdp_plugin=_plugin())
    count = accelerator.num_processes
    accelerator.print(
        f"{count} process{'' if count == 1 else 'es'}, {accelerator.device.type}, {accelerator.distributed_type}, "
        f"mixed_precision={accelerator.mixed_precision}"
    )
    for subject, check in _CHECKS.items():
        began = time.monotonic()
        try:
            proved = check(accelerator)
        except (CheckFailedError, RuntimeError) as error:
            # It ends this process, and so all: the others may wait for it in a collective.
            raise CheckFailedError(f"{subject} failed on rank {accelerator.process_index}: {error}") from error
        accelerator.print(f"[ok] {subject}: {proved} ({time.monotonic() - began:.1f} s)")
        accelerator.free_memory()
    accelerator.print("All checks passed: this world trains as one process does.")
    accelerator.end_training()


def _plugin() -> FullyShardedDataParallelPlugin | None:
    # The classes that a configuration names are not in the models here.
    return FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap") if environment.uses_sharding() else None


def check_collectives(accelerator: Accelerator) -> str:
    """Compare what each collective gives with what the ranks put in."""
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    own = torch.full((2,), float(rank), device=device)
    ranks = torch.arange(size, dtype=torch.float32, device=device)
    _expect("gather", gather(own), ranks.repeat_interleave(2))
    _expect("reduce", reduce(own, "sum"), torch.full((2,), float(ranks.sum()), device=device))
    _expect("broadcast", broadcast(own.clone(), from_process=size - 1), torch.full((2,), size - 1.0, device=device))
    padded = pad_across_processes(torch.ones(rank + 1, device=device))
    _expect("pad_across_processes", padded, (torch.arange(size, device=device) <= rank).float())
    objects: list[Any] = [{"rank": rank}]
    broadcast_object_list(objects)
    if objects != [{"rank": 0}]:
        raise CheckFailedError(f"broadcast_object_list gave {objects}, expected [{{'rank': 0}}].")
    return f"gather, reduce, broadcast and pad give every rank what all {size} put in"


def check_data_order(accelerator: Accelerator) -> str:
    """Compare the order of two epochs of shuffled data with that of one process."""
    count = _BATCH * accelerator.num_processes * 3
    prepared: Any = accelerator.prepare(_loader(count))
    alone = _loader(count)
    for _ in range(2):
        ranks = [gather(index) for _, _, index in prepared]
        _expect("the order of an epoch", torch.cat(ranks).cpu(), torch.cat([index for _, _, index in alone]))
    return f"each of {count} samples once an epoch, in the order of one process, for 2 epochs"


def check_accumulation(accelerator: Accelerator) -> str:
    """Compare one update after several micro-batches with the update of one process on all of their samples."""
    weights, reference = _train(accelerator, torch.optim.SGD, 1)
    _compare(accelerator, weights, reference)
    return f"the update of {_STEPS} micro-batches a process is that of all their samples at once"


def check_training(accelerator: Accelerator) -> str:
    """Compare a training with AdamW with the same training in one process."""
    weights, reference = _train(accelerator, torch.optim.AdamW, _WINDOWS)
    difference = _compare(accelerator, weights, reference)
    return f"weights after {_WINDOWS} updates with AdamW are those of one process (largest difference {difference:.1e})"


def check_save_and_load(accelerator: Accelerator) -> str:
    """Save, train, load, train the same again, and compare both results."""
    folders: list[Any] = [tempfile.mkdtemp(prefix="trainer_lib_self_check_") if accelerator.is_main_process else None]
    folder = Path(broadcast_object_list(folders)[0])
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    batches = list(_loader(_BATCH * _STEPS))
    try:
        accelerator.save_state(folder / "state")
        _update(accelerator, model, optimizer, batches)
        first = _weights(accelerator, model)
        accelerator.load_state(folder / "state")
        _update(accelerator, model, optimizer, batches)
        for name, weight in _weights(accelerator, model).items():
            _expect(f"{name} after load_state", weight, first[name])
    finally:
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process:
            shutil.rmtree(folder, ignore_errors=True)
    return "an update after load_state is bit for bit the one after save_state"


def check_evaluation(accelerator: Accelerator) -> str:
    """Gather an evaluation whose samples do not divide evenly by the processes."""
    count = _BATCH * accelerator.num_processes * 2 + 3
    loader: Any = accelerator.prepare(DataLoader(TensorDataset(torch.arange(count)), _BATCH))
    gathered = torch.cat([accelerator.gather_for_metrics(index) for (index,) in loader])
    _expect("gather_for_metrics", gathered.cpu(), torch.arange(count))
    return f"gather_for_metrics gives each of {count} samples once, in order, though {count} do not divide evenly"


_CHECKS: dict[str, Callable[[Accelerator], str]] = {
    "Collectives": check_collectives,
    "Data order": check_data_order,
    "Accumulation": check_accumulation,
    "Training": check_training,
    "Save and load": check_save_and_load,
    "Evaluation": check_evaluation,
}


def _train(accelerator: Accelerator, kind: Any, windows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train on the world and in this process alone; return the weights of both."""
    count = _BATCH * accelerator.num_processes * _STEPS * windows
    model, alone = _model(), _model()
    optimizer_alone = kind(alone.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, kind(model.parameters(), lr=0.1), _loader(count))
    for batch in loader:
        _micro_batch(accelerator, model, optimizer, batch)
    for batch in _windows(_loader(count), accelerator.num_processes * _STEPS):
        mse_loss(alone(batch[0]), batch[1]).backward()
        optimizer_alone.step()
        optimizer_alone.zero_grad()
    return _weights(accelerator, model), {name: weight.detach() for name, weight in alone.state_dict().items()}


def _update(accelerator: Accelerator, model: nn.Module, optimizer: Any, batches: list[Any]) -> None:
    for features, targets, index in batches:
        batch = [part.to(accelerator.device) for part in (features, targets, index)]
        _micro_batch(accelerator, model, optimizer, batch)


def _micro_batch(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: Any) -> None:
    features, targets, _ = batch
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(features).float(), targets.float()))
        optimizer.step()
        optimizer.zero_grad()


def _windows(loader: DataLoader[Any], batches: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the batches of one process, several at once."""
    parts = list(loader)
    for start in range(0, len(parts), batches):
        yield tuple(torch.cat(tensors) for tensors in zip(*parts[start : start + batches], strict=True))


def _loader(count: int) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(count, 8, generator=numbers), torch.randn(count, 1, generator=numbers), torch.arange(count)
    )
    return DataLoader(data, _BATCH, shuffle=True, generator=torch.Generator().manual_seed(2))


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """Return the whole weights, on the CPU of every rank that has them."""
    return {name: weight.cpu().clone() for name, weight in accelerator.get_state_dict(model).items()}


def _compare(accelerator: Accelerator, weights: dict[str, Any], reference: dict[str, Any]) -> float:
    """Raise if weights differ by more than the precision explains, and return the largest difference."""
    tolerance = _TOLERANCES[str(accelerator.mixed_precision)]
    differences = [float((weights[name].float() - reference[name]).abs().max()) for name in weights]
    largest = max(differences, default=0.0)  # a rank without whole weights compares nothing
    if largest > tolerance:
        raise CheckFailedError(
            f"weights differ from those of one process by {largest:.1e}, expected {tolerance:.0e} at most."
        )
    return largest


def _expect(what: str, value: torch.Tensor, expected: torch.Tensor) -> None:
    if value.shape != expected.shape or not torch.equal(value, expected):
        raise CheckFailedError(f"{what} gave {value.tolist()}, expected {expected.tolist()}.")


if __name__ == "__main__":
    main()
