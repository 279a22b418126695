"""Exporting a model as a torch.export or ONNX program, which needs neither its code nor this library."""

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer_lib.collectives.agreement import raise_on_all_ranks
from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath
from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError, unknown
from trainer_lib.foundation.imports import require
from trainer_lib.foundation.tensors.batch_fields import as_mapping, label_names_in, split
from trainer_lib.foundation.tensors.pytree import map_tensors, send_to_device, slice_tensors, tensors
from trainer_lib.modules.forwards import unwrap_forward
from trainer_lib.trainer.defaults import prepare_models
from trainer_lib.trainer.evaluation.eval_sets import named_sets
from trainer_lib.trainer.optim.optimizer_modes import weights_in_use
from trainer_lib.trainer.trainer_interface import TrainerInterface

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ENDINGS = {".pt2": "torch", ".onnx": "onnx"}
_ROWS = 2  # a program that is traced with one sample accepts only one sample
_LARGEST_FILE = 1 << 30  # bytes of weights within an ONNX file, which cannot hold more than 2 GB


class _Call(NamedTuple):
    """The arguments of a forward."""

    positional: tuple[Any, ...]
    named: dict[str, Any]


def export(trainer: TrainerInterface, path: AnyPath, format: str | None, example: Any, dynamic: Sequence[int]) -> None:
    """Export the model of a trainer; see `Trainer.export`."""
    write = _WRITERS[_format(path, format)]
    if not isinstance(trainer.model, nn.Module):
        raise ConfigurationError(f"There are {len(trainer.model)} models. Export each by a Trainer of its own.")
    group = trainer.accelerator.group
    prepare_models(trainer)
    with raise_on_all_ranks(group, "export"):
        _check_can_export(trainer.unwrapped_model)
    # The weights on all processes: each puts an average in place.
    with weights_in_use(trainer.run, trainer.events), raise_on_all_ranks(group, "export"):
        if trainer.accelerator.is_main_process:
            call = _call(_first_inputs(trainer) if example is None else example, is_batch_dynamic=0 in dynamic)
            program = _program(_bare_copy(trainer), call, dynamic)
            _put(path, lambda file: write(program, file))


def _format(path: AnyPath, given: str | None) -> str:
    if given is not None and given not in _WRITERS:
        raise ConfigurationError(unknown("format", given, _WRITERS))
    if given is None and path.suffix not in _ENDINGS:
        raise ConfigurationError(
            f"export: {path.name!r} ends in none of {', '.join(_ENDINGS)}, which say the format. Give one of them, or "
            "format=…."
        )
    if given == "torch" and path.suffix != ".pt2":
        raise ConfigurationError(f"export: torch names its programs .pt2, got {path.name!r}.")
    return given or _ENDINGS[path.suffix]


# -- the model and its inputs ----------------------------------------------------------------------------------------


def _check_can_export(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            "export needs a model in Python, and this one is scripted or traced. Save it instead: "
            "trainer.unwrapped_model.save('model.pt')."
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "_local_tensor"):
            raise PreparationError(
                f"{name} is sharded, and an export needs whole weights. Save with save_model(folder), load that into a "
                "new model (load_checkpoint_in_model), and export it with a Trainer without fsdp."
            )


def _bare_copy(trainer: TrainerInterface) -> nn.Module:
    """Return an unwrapped copy of the model, on the CPU and in evaluation mode."""
    prepared = trainer.parts.models.listed[0]
    model: Any = trainer.accelerator.unwrap_model(prepared, keep_torch_compile=False)
    # What a forward left in attributes, such as the weight of `weight_norm`, has a graph, which cannot be copied.
    computed = [tensor for module in model.modules() for tensor in tensors(vars(module)) if not tensor.is_leaf]
    model = copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in computed}).cpu()
    unwrap_forward(model)
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # a decoder's cache must not be an output of the program
    return model.eval().requires_grad_(False)


def _first_inputs(trainer: TrainerInterface) -> Any:
    """Return the inputs of the first batch, without its targets."""
    if trainer.eval_dataset is None and trainer.train_dataset is None:
        raise ConfigurationError("export needs example inputs of the model. Give export(path, example=inputs).")
    with torch.random.fork_rng(devices=[]):  # a loader draws from the generator
        if trainer.eval_dataset is not None:
            first = next(iter(named_sets(trainer, trainer.eval_dataset).values()))
            batch = next(iter(trainer.eval_dataloader(first)))
        else:
            batch = next(iter(trainer.train_dataloader()))
    batch = slice_tensors(batch, slice(_ROWS))
    named, names = as_mapping(batch), trainer.args.label_names
    if named is not None:
        targets = label_names_in(named, names)
        return {name: value for name, value in named.items() if name not in targets}
    return batch if trainer.loss_fn is None else split(batch, names)[0]


def _call(example: Any, is_batch_dynamic: bool) -> _Call:
    inputs = send_to_device(example, torch.device("cpu"))
    if is_batch_dynamic:
        inputs = map_tensors(_in_rows, inputs)
    named = as_mapping(inputs)
    if named is not None:
        return _Call((), dict(named))
    return _Call(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})


def _in_rows(tensor: Tensor) -> Tensor:
    return torch.cat([tensor] * _ROWS) if tensor.ndim and len(tensor) == 1 else tensor


# -- the program -----------------------------------------------------------------------------------------------------


def _program(model: nn.Module, call: _Call, dynamic: Sequence[int]) -> "ExportedProgram":
    """Trace a model.

    Raises:
        UnsupportedError: If it cannot be traced.
    """
    shapes: Any = torch.export.ShapesCollection()
    for tensor in tensors(call):
        # DYNAMIC finds the bounds of a size while tracing, such as those of an embedding of positions.
        shapes[tensor] = {axis: torch.export.Dim.DYNAMIC for axis in dynamic if axis < tensor.ndim}
    try:
        with torch.no_grad():  # so that activation checkpointing is not traced
            return torch.export.export(model, call.positional, call.named, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise UnsupportedError(
            f"torch.export cannot export this {type(model).__name__} for inputs with any sizes in dimensions "
            f"{list(dynamic)}: {_first_line(error)} If these sizes are fixed, give dynamic=()."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _write_torch(program: "ExportedProgram", file: Path) -> None:
    program.example_inputs = None  # samples of the training data, which must not be published
    torch.export.save(program, file)


def _write_onnx(program: "ExportedProgram", file: Path) -> None:
    require("onnx", "export")
    require("onnxscript", "export")
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    try:
        torch.onnx.export(program, f=str(file), verbose=False, external_data=size > _LARGEST_FILE)
    except Exception as error:
        raise UnsupportedError(f"torch.onnx cannot export this model: {_first_line(error)}") from error


_WRITERS: dict[str, Callable[["ExportedProgram", Path], None]] = {"torch": _write_torch, "onnx": _write_onnx}


def _put(path: AnyPath, write: Callable[[Path], None]) -> None:
    """Write files (the program, and possibly its weights) to a temporary folder, then move them to their paths."""
    if not isinstance(path, RemotePath):
        path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=".export-", dir=None if isinstance(path, RemotePath) else path.parent
    ) as here:
        write(Path(here) / path.name)
        for file in sorted(Path(here).iterdir(), key=lambda file: file.name == path.name):
            if isinstance(path, RemotePath):
                path.with_name(file.name).put(file)
            else:
                file.replace(path.with_name(file.name))
